"""Pieces of the roles of the backward kernels, and their rings of shared memory.

A ring has a barrier for "ready" and one for "free" a stage; step i of a role uses stage i % stages. `x` holds what a role needs of its kernel:
shared memory, barriers, thread index, sizes.
"""

import tilelang.language as T

from flashqla.ops.kernels.common import BETA, BETA_DECAY, CHUNK, CHUNK_DECAY, COL_LOG, HEAD_DIM, ROW_LOG, TILE, WARP

QK_STAGES = 3  # of q, k and record: with two, loads are late; four do not fit
STAGES = 2  # of all other rings


@T.macro
def release(x, barrier, stage):
    """This warp has read a stage. One lane arrives for all, after all: an arrival orders the reads of its own thread alone."""
    T.sync_warp()
    if x.tx % WARP == 0:
        T.barrier_arrive(barrier[stage])


@T.macro
def scale_columns(to, tokens_of, row, i, x):
    """to[v, t] = tokens_of[v, t] * record[row, t]"""
    factor = T.alloc_fragment((CHUNK,), "float32")
    T.copy(x.record_smem[i % QK_STAGES, row, :], factor)
    for v, t in T.Parallel(TILE, CHUNK):
        to[v, t] = tokens_of[v, t] * factor[t]


@T.macro
def prediction_error(W, V, X, i, x):
    """W = beta V - beta decay X, X = K S."""
    beta = T.alloc_fragment((CHUNK,), "float32")
    beta_decay = T.alloc_fragment((CHUNK,), "float32")
    T.copy(x.record_smem[i % QK_STAGES, BETA, :], beta)
    T.copy(x.record_smem[i % QK_STAGES, BETA_DECAY, :], beta_decay)
    for v, t in T.Parallel(TILE, CHUNK):
        W[v, t] = V[v, t] * beta[t] - X[v, t] * beta_decay[t]


@T.macro
def decay_state(S, i, x):
    for v, k in T.Parallel(TILE, HEAD_DIM):
        S[v, k] = S[v, k] * x.record_smem[i % QK_STAGES, CHUNK_DECAY, 0]


@T.macro
def load_v(V, i, x, w):
    """V^T of 64 columns into registers, when it is there."""
    T.barrier_wait(x.va_ready[i % STAGES], (i // STAGES) & 1)
    T.call_extern("handle", "flashqla::load_transposed", V.data, T.access_ptr(x.v_smem[i % STAGES, w, 0, 0], "r"))


@T.macro
def score(x, scale, dtype):
    """The role SCORE: P = scale * lower(Q K^T) * R of every chunk."""
    P = T.alloc_fragment((CHUNK, CHUNK), "float32")
    P_out = T.alloc_fragment((CHUNK, CHUNK), dtype)
    row = T.alloc_fragment((CHUNK,), "float32")
    col = T.alloc_fragment((CHUNK,), "float32")
    for i in T.unroll(x.chunks, unroll_factor=1):
        s = i % QK_STAGES
        T.barrier_wait(x.qk_ready[s], (i // QK_STAGES) & 1)
        T.wgmma_gemm(x.q_smem[s, :, :], x.k_smem[s, :, :], P, transpose_B=True, clear_accum=True)
        T.copy(x.record_smem[s, ROW_LOG, :], row)
        T.copy(x.record_smem[s, COL_LOG, :], col)
        T.wait_wgmma(0)
        release(x, x.qk_free, s)
        # Above the diagonal the exponential may overflow: a choice, not a product with 0.
        for t, u in T.Parallel(CHUNK, CHUNK):
            P[t, u] = T.if_then_else(u <= t, P[t, u] * (T.exp2(row[t] - col[u]) * scale), 0.0)
        T.barrier_wait(x.p_free[i % STAGES], ((i // STAGES) & 1) ^ 1)
        T.copy(P, P_out)
        T.call_extern("handle", "flashqla::store_tile", T.address_of(x.p_smem[i % STAGES, 0, 0]), P_out.data)
        T.fence_proxy_async()
        T.barrier_arrive(x.p_ready[i % STAGES])
