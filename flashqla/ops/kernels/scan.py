"""States at the ends of segments, from what each segment does to the state that enters it: S <- M S + N, segment after segment.

Reverse, the gradient of the state at the start of segments: dS <- M^T dS + N, from the last segment to the second.

Shapes  states [segments, hv, V, K] fp32: N^T of every segment on entry, on return the state at its end; transitions [segments, hv, K', K] in the
        dtype of k: M^T; forgets [segments, hv] int32: M is 0, or the segment is the first of its sequence;
        reverse: states are those of the gradient, and transitions and forgets what they are forward
Grid    a CTA per sequence, value head and 64 columns of V
Cost    per segment but the last of a sequence 64 KB through L2 and two products of 64x64x128, in series
Source  gated delta rule as an affine map of the state: Gated Delta Networks, arXiv 2412.06464
"""

import tilelang
import tilelang.language as T

from flashqla.ops.kernels.common import CHUNK, HEAD_DIM, HOPPER, MANUAL_ROLES, TILE, WARP, WARP_GROUP

STAGES = 3
STATE_END, LOAD_END = WARP_GROUP, WARP_GROUP + WARP


@tilelang.jit(target=HOPPER, pass_configs=MANUAL_ROLES)
def build_scan(dtype: str, reverse: bool = False):
    """The kernel for transitions in `dtype`."""
    offsets, segments, hv = (T.dynamic(x) for x in ("offsets", "segments", "hv"))

    @T.prim_func
    def segment_scan(
        cu_seqlens: T.Tensor((offsets,), "int32"),
        states: T.Tensor((segments, hv, HEAD_DIM, HEAD_DIM), "float32"),
        transitions: T.Tensor((segments, hv, HEAD_DIM, HEAD_DIM), dtype),
        forgets: T.Tensor((segments, hv), "int32"),
        tokens: T.int32,
        offset_step: T.int32,
        segment_chunks: T.int32,
        sequences: T.int32,
    ):
        with T.Kernel(hv * (HEAD_DIM // TILE), sequences, threads=LOAD_END) as (bx, sequence):
            m_smem = T.alloc_shared((STAGES, HEAD_DIM, HEAD_DIM), dtype)
            ready = T.alloc_barrier([WARP] * STAGES)  # LOAD -> STATE
            free = T.alloc_barrier([WARP_GROUP // WARP] * STAGES)  # STATE -> LOAD
            tx = T.get_thread_binding()
            head = bx // (HEAD_DIM // TILE)
            first_row = bx % (HEAD_DIM // TILE) * TILE
            bos: T.int32 = T.max(T.min(cu_seqlens[sequence * offset_step], tokens), 0)
            eos: T.int32 = T.max(T.min(cu_seqlens[(sequence + 1) * offset_step], tokens), bos)
            first = T.alloc_var("int32")  # segment of this sequence; a variable, or its quotient is computed at every use
            count = T.alloc_var("int32")  # segments that have an end state somebody starts from
            used = T.alloc_var("int32")  # transitions so far
            if not reverse:
                T.pdl_sync()  # until what the summary kernels wrote is there
            T.pdl_trigger()  # by then it is there for the reverse scan too
            first = T.truncdiv(bos, segment_chunks * CHUNK) + sequence
            count = T.truncdiv(eos - bos - 1, segment_chunks * CHUNK)
            used = 0
            if tx < STATE_END:
                S = T.alloc_fragment((TILE, HEAD_DIM), "float32")
                S_in = T.alloc_fragment((TILE, HEAD_DIM), dtype)
                N = T.alloc_fragment((TILE, HEAD_DIM), "float32")
                T.clear(S)
                if count > 0:
                    for v, k in T.Parallel(TILE, HEAD_DIM):
                        S[v, k] = states[first + count if reverse else first, head, first_row + v, k]
                for i in T.unroll(T.max(count - 1, 0), unroll_factor=1):
                    segment = first + count - 1 - i if reverse else first + 1 + i
                    for v, k in T.Parallel(TILE, HEAD_DIM):
                        N[v, k] = states[segment, head, first_row + v, k]  # under way while the product is made
                    if forgets[segment, head] == 0:
                        T.copy(S, S_in)
                        T.barrier_wait(ready[used % STAGES], (used // STAGES) & 1)
                        T.wgmma_gemm(S_in, m_smem[used % STAGES, :, :], S, transpose_B=reverse, clear_accum=True)
                        T.wait_wgmma(0)
                        T.sync_warp()
                        if tx % WARP == 0:
                            T.barrier_arrive(free[used % STAGES])
                        used = used + 1
                        for v, k in T.Parallel(TILE, HEAD_DIM):
                            S[v, k] = S[v, k] + N[v, k]
                            states[segment, head, first_row + v, k] = S[v, k]
                    else:
                        T.copy(N, S)
            else:
                for i in T.unroll(T.max(count - 1, 0), unroll_factor=1):
                    segment = first + count - 1 - i if reverse else first + 1 + i
                    if forgets[segment, head] == 0:
                        T.barrier_wait(free[used % STAGES], ((used // STAGES) & 1) ^ 1)
                        T.tma_copy(transitions[segment, head, :, :], m_smem[used % STAGES, :, :], barrier=ready[used % STAGES])
                        T.barrier_arrive(ready[used % STAGES])
                        used = used + 1
            if reverse:
                T.pdl_sync()  # until the forward scan has ended: whoever waits for this one needs both

    return segment_scan
