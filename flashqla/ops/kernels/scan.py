"""States at the ends of segments, from what each part of a segment does to the state that enters it: S <- M S + N, part after part.

Reverse, the gradient of the state at the start of segments: dS <- M^T dS + N, from the part with the last token to the second segment.

Shapes  states [segments * parts, hv, V, K] fp32: N^T of every part on entry; on return, where a segment ends (reverse: starts), the state there;
        transitions [segments * parts, hv, K', K] in the dtype of k: M^T; forgets [segments * parts, hv] int32: flags, M is not to be used;
        reverse: states are those of the gradient, transitions and forgets what they are forward
Grid    a CTA per sequence, value head and 16 columns of V, with a warpgroup for each 64 of 128 rows of K
Cost    per part, but for the last segment of a sequence (reverse: the first), 40 KB through L2 and two products of 64x16x128, in series
Source  gated delta rule as an affine map of the state: Gated Delta Networks, arXiv 2412.06464

One state after another: what counts is how soon the next product can start. So few columns are one CTA's that the product is short, M is its
operand from shared memory as it lies there, and all that a step reads is fetched some steps ahead. Where M is not used, the state is N, and nothing
is read unless the next part goes on from it.
"""

import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from flashqla.ops.kernels.common import CHUNK, HEAD_DIM, HOPPER, MANUAL_ROLES, WARP, WARP_GROUP, cuda
from flashqla.ops.kernels.segments import GRADIENT_KNOWN, STATE_KNOWN

COLUMNS = 16  # of V
STAGES = 4
BOX = 32  # floats of a row of 128 bytes, the widest that swizzles
STATE_END = 2 * WARP_GROUP
LOAD_END = STATE_END + WARP
STATES_DONE = 8  # a named barrier
SEEN = WARP - 1  # flags of so many steps are read at once, and that of the next one


@tilelang.jit(target=HOPPER, pass_configs=MANUAL_ROLES)
def build_scan(dtype: str, reverse: bool = False):
    """The kernel for transitions in `dtype`."""
    offsets, segments, hv = (T.dynamic(x) for x in ("offsets", "segments", "hv"))
    step, flag = (-1, GRADIENT_KNOWN) if reverse else (1, STATE_KNOWN)

    def read_flags(forgets, hv, head, first, i, count):
        """Of the steps from i on. A flag that is read in its own step is waited for in each. The first part goes on from nothing."""
        known = T.call_extern("uint32", "flashqla::flags_of", T.address_of(forgets[0, head]), hv, first + step * i, step, T.min(count - i, WARP), flag)
        return known | T.if_then_else(i == 0, T.uint32(1), T.uint32(0))

    @T.prim_func
    def segment_scan(
        cu_seqlens: T.Tensor((offsets,), "int32"),
        states: T.Tensor((segments, hv, HEAD_DIM, HEAD_DIM), "float32"),
        transitions: T.Tensor((segments, hv, HEAD_DIM, HEAD_DIM), dtype),
        forgets: T.Tensor((segments, hv), "int32"),
        tokens: T.int32,
        offset_step: T.int32,
        segment_chunks: T.int32,
        parts: T.int32,
        sequences: T.int32,
    ):
        with T.Kernel(hv * (HEAD_DIM // COLUMNS), sequences, threads=LOAD_END) as (bx, sequence):
            T.import_source(cuda("segments"))
            m_smem = T.alloc_shared((STAGES, HEAD_DIM, HEAD_DIM), dtype)
            n_smem = T.alloc_shared((STAGES, HEAD_DIM // BOX, COLUMNS, BOX), "float32")
            s_smem = T.alloc_shared((2, HEAD_DIM, COLUMNS), dtype)
            T.annotate_layout({n_smem: make_swizzled_layout(n_smem)})
            ready = T.alloc_barrier([WARP] * STAGES)  # LOAD -> STATE
            free = T.alloc_barrier([1] * STAGES)  # STATE -> LOAD
            tx = T.get_thread_binding()
            head = bx // (HEAD_DIM // COLUMNS)
            first_row = bx % (HEAD_DIM // COLUMNS) * COLUMNS
            bos: T.int32 = T.max(T.min(cu_seqlens[sequence * offset_step], tokens), 0)
            eos: T.int32 = T.max(T.min(cu_seqlens[(sequence + 1) * offset_step], tokens), bos)
            first = T.alloc_var("int32")  # part of this sequence; a variable, or its quotient is computed at every use
            count = T.alloc_var("int32")  # parts with a state behind them (reverse: in front of them) that somebody starts from
            last = T.alloc_var("int32")  # chunk of this sequence
            used = T.alloc_var("int32")  # stages so far
            parts_left = T.alloc_var("int32")  # of this segment, behind this one (reverse: in front)
            forgotten = T.alloc_var("uint32")  # of the steps from the one that comes first in it, a bit each
            if not reverse:
                T.pdl_sync()  # until what the summary kernels wrote is there
            T.pdl_trigger()  # by then it is there for the reverse scan too
            first = (T.truncdiv(bos, segment_chunks * CHUNK) + sequence) * parts
            last = T.truncdiv(eos - bos - 1, CHUNK)
            count = T.truncdiv(last, segment_chunks) * parts
            if reverse:
                count = count + T.truncdiv(T.truncmod(last, segment_chunks), T.ceildiv(segment_chunks, parts))
                first = first + count  # the first one to come
                count = count - parts + 1
            parts_left = T.truncmod(first, parts) if reverse else parts - 1
            used = 0
            forgotten = T.uint32(0)

            if tx < STATE_END:
                S = T.alloc_fragment((HEAD_DIM, COLUMNS), "float32")
                N = T.alloc_fragment((HEAD_DIM, COLUMNS), "float32")
                for i in T.unroll(T.max(count, 0), unroll_factor=1):
                    part = first + step * i
                    if i % SEEN == 0:
                        forgotten = read_flags(forgets, hv, head, first, i, count)
                    goes_on = (forgotten >> T.cast(i % SEEN, "uint32")) & T.uint32(1) == T.uint32(0)
                    next_goes_on = T.And(i + 1 < count, (forgotten >> T.cast(i % SEEN + 1, "uint32")) & T.uint32(1) == T.uint32(0))
                    if T.Or(goes_on, next_goes_on):
                        s = used % STAGES
                        T.barrier_wait(ready[s], (used // STAGES) & 1)
                        if goes_on:
                            T.wgmma_gemm(
                                m_smem[s, :, :], s_smem[(used + 1) & 1, :, :], S, transpose_A=not reverse, clear_accum=True,
                                policy=T.GemmWarpPolicy.FullRow,
                            )
                            for k, v in T.Parallel(HEAD_DIM, COLUMNS):
                                N[k, v] = n_smem[s, k // BOX, v, k % BOX]  # under way while the product is made
                            T.wait_wgmma(0)
                            for k, v in T.Parallel(HEAD_DIM, COLUMNS):
                                S[k, v] = S[k, v] + N[k, v]
                        else:
                            for k, v in T.Parallel(HEAD_DIM, COLUMNS):
                                S[k, v] = n_smem[s, k // BOX, v, k % BOX]
                        T.copy(S, s_smem[used & 1, :, :])
                        T.fence_proxy_async()
                        T.sync_threads(STATES_DONE, STATE_END)  # the state is there for both warpgroups, and nobody reads this stage any more
                        if tx == 0:
                            T.barrier_arrive(free[s])
                        # Else N is the state, or nobody starts from it.
                        if T.And(goes_on, parts_left == 0):
                            for k, v in T.Parallel(HEAD_DIM, COLUMNS):
                                states[part, head, first_row + v, k] = S[k, v]
                        used = used + 1
                    parts_left = T.if_then_else(parts_left == 0, parts, parts_left) - 1
            else:
                for i in T.unroll(T.max(count, 0), unroll_factor=1):
                    part = first + step * i
                    if i % SEEN == 0:
                        forgotten = read_flags(forgets, hv, head, first, i, count)
                    goes_on = (forgotten >> T.cast(i % SEEN, "uint32")) & T.uint32(1) == T.uint32(0)
                    next_goes_on = T.And(i + 1 < count, (forgotten >> T.cast(i % SEEN + 1, "uint32")) & T.uint32(1) == T.uint32(0))
                    if T.Or(goes_on, next_goes_on):
                        s = used % STAGES
                        T.barrier_wait(free[s], ((used // STAGES) & 1) ^ 1)
                        if goes_on:
                            T.tma_copy(transitions[part, head, :, :], m_smem[s, :, :], barrier=ready[s])
                        for b in T.unroll(HEAD_DIM // BOX):
                            T.tma_copy(states[part, head, first_row:first_row + COLUMNS, b * BOX:b * BOX + BOX], n_smem[s, b, :, :], barrier=ready[s])
                        T.barrier_arrive(ready[s])
                        used = used + 1
            if reverse:
                T.pdl_sync()  # until the forward scan has ended: whoever waits for this one needs both

    return segment_scan
