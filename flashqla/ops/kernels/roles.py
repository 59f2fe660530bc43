"""Pieces of the roles of the backward kernels, and their rings of shared memory.

A ring has a barrier for "ready" and one for "free" a stage; step i of a role uses stage i % stages. `x` holds what a role needs of its kernel:
shared memory, barriers, thread index, sizes.
"""

import tilelang.language as T

from flashqla.ops.kernels.common import (
    BETA,
    CHUNK,
    CHUNK_DECAY,
    COL_LOG,
    ERROR_DECAY,
    HEAD_DIM,
    KEY_LOG,
    ROW_LOG,
    TILE,
    WARP,
)

OUT_STAGES = 2  # of P


@T.macro
def release(x, barrier, stage):
    """This warp has read a stage. One lane arrives for all, after all: an arrival orders the reads of its own thread alone."""
    T.sync_warp()
    if x.tx % WARP == 0:
        T.barrier_arrive(barrier[stage])


def peek(barrier, parity):
    """Whether a phase is over, asked some instructions before the answer is needed, by wait_unless."""
    return T.call_extern("int32", "flashqla::peek", barrier, parity)


def wait_unless(is_over, barrier, parity):
    return T.call_extern("handle", "flashqla::wait_unless", is_over, barrier, parity)


@T.macro
def scale_columns(to, tokens_of, row, i, x):
    """to[v, t] = tokens_of[v, t] * record[row, t]"""
    factor = T.alloc_fragment((CHUNK,), "float32")
    T.copy(x.record_smem[i % x.qk_stages, row, :], factor)
    for v, t in T.Parallel(TILE, CHUNK):
        to[v, t] = tokens_of[v, t] * factor[t]


@T.macro
def prediction_error(W, V, X, i, x):
    """W = beta V - beta decay X, X = K S."""
    beta = T.alloc_fragment((CHUNK,), "float32")
    error_decay = T.alloc_fragment((CHUNK,), "float32")
    T.copy(x.record_smem[i % x.qk_stages, BETA, :], beta)
    T.copy(x.record_smem[i % x.qk_stages, ERROR_DECAY, :], error_decay)
    for v, t in T.Parallel(TILE, CHUNK):
        W[v, t] = V[v, t] * beta[t] + X[v, t] * error_decay[t]


@T.macro
def decay_state(S, i, x):
    for v, k in T.Parallel(TILE, HEAD_DIM):
        S[v, k] = S[v, k] * x.record_smem[i % x.qk_stages, CHUNK_DECAY, 0]


@T.macro
def load_v(V, i, x, w):
    """V^T of 64 columns into registers, when it is there."""
    T.barrier_wait(x.va_ready[i % x.stages], (i // x.stages) & 1)
    T.call_extern("handle", "flashqla::load_transposed", V.data, T.access_ptr(x.v_smem[i % x.stages, w, 0, 0], "r"))


def first_decay(x, s):
    """Base-2 log of the decay of the first token of a chunk."""
    return (x.record_smem[s, KEY_LOG, 0] + x.record_smem[s, COL_LOG, 0]) * 0.5


@T.macro
def score(x, scale, dtype):
    """The role SCORE: P = scale * lower(Q K^T) * R of every chunk. If STATE is to be ahead, whoever has waited for P has waited for all of the chunk."""
    P = T.alloc_fragment((CHUNK, CHUNK), "float32")
    P_out = T.alloc_fragment((CHUNK, CHUNK), dtype)
    once: T.int32 = T.call_extern("int32", "flashqla::once", x.chunks)
    for i in T.unroll(x.chunks, unroll_factor=1):
        s = i % x.qk_stages
        p = i % OUT_STAGES
        T.barrier_wait(x.qk_ready[s], (i // x.qk_stages) & 1)
        T.wgmma_gemm(x.q_smem[s, :, :], x.k_smem[s, :, :], P, transpose_B=True, clear_accum=True)
        # Above the diagonal the exponential may overflow: a choice, not a product with 0.
        if x.ahead:  # there are registers for R, which is made beside the product
            R = T.alloc_fragment((CHUNK, CHUNK), "float32")
            T.call_extern(
                "handle", "flashqla::make_ratios", R.data, T.address_of(x.record_smem[s, ROW_LOG, 0]), T.address_of(x.record_smem[s, COL_LOG, 0]), scale, once,
            )
            T.barrier_wait(x.va_ready[i % x.stages], (i // x.stages) & 1)
            T.barrier_wait(x.p_free[p], ((i // OUT_STAGES) & 1) ^ 1)
            T.wait_wgmma(0)
            release(x, x.qk_free, s)
            for t, u in T.Parallel(CHUNK, CHUNK):
                P_out[t, u] = T.if_then_else(u <= t, P[t, u] * R[t, u], 0.0)
        else:
            row = T.alloc_fragment((CHUNK,), "float32")
            col = T.alloc_fragment((CHUNK,), "float32")
            T.copy(x.record_smem[s, ROW_LOG, :], row)
            T.copy(x.record_smem[s, COL_LOG, :], col)
            T.wait_wgmma(0)
            release(x, x.qk_free, s)
            for t, u in T.Parallel(CHUNK, CHUNK):
                P[t, u] = T.if_then_else(u <= t, P[t, u] * (T.exp2(row[t] - col[u]) * scale), 0.0)
            T.barrier_wait(x.p_free[p], ((i // OUT_STAGES) & 1) ^ 1)
            T.copy(P, P_out)
        T.call_extern("handle", "flashqla::store_tile", T.address_of(x.p_smem[p, 0, 0]), P_out.data)
        T.fence_proxy_async()
        T.barrier_arrive(x.p_ready[p])

