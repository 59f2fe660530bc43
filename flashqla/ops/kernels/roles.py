"""Pieces of the roles of the backward kernels, and their rings of shared memory.

A ring has a barrier for "ready" and one for "free" a stage; step i of a role uses stage i % stages. `x` holds what a role needs of its kernel:
shared memory, barriers, thread index, sizes.
"""

import tilelang.language as T

from flashqla.ops.kernels.common import CHUNK, COL_LOG, ROW_LOG, WARP

QK_STAGES = 3  # of q, k and record: with two, loads are late; four do not fit


@T.macro
def release(x, barrier, stage):
    """This warp has read a stage. One lane arrives for all, after all: an arrival orders the reads of its own thread alone."""
    T.sync_warp()
    if x.tx % WARP == 0:
        T.barrier_arrive(barrier[stage])


@T.macro
def load_v(V, i, x, w):
    """V^T of 64 columns into registers, when it is there."""
    T.barrier_wait(x.va_ready[i % x.stages], (i // x.stages) & 1)
    T.call_extern("handle", "flashqla::load_transposed", V.data, T.access_ptr(x.v_smem[i % x.stages, w, 0, 0], "r"))


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
        T.barrier_wait(x.p_free[i % x.stages], ((i // x.stages) & 1) ^ 1)
        T.copy(P, P_out)
        T.call_extern("handle", "flashqla::store_tile", T.address_of(x.p_smem[i % x.stages, 0, 0]), P_out.data)
        T.fence_proxy_async()
        T.barrier_arrive(x.p_ready[i % x.stages])
    if x.chunks > 0:  # STATE waits for one chunk more than there is
        T.barrier_wait(x.p_free[x.chunks % x.stages], ((x.chunks // x.stages) & 1) ^ 1)
        T.barrier_arrive(x.p_ready[x.chunks % x.stages])
