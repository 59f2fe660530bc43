"""What each part of a segment does to the state that enters it, S -> M S + N, so that segments can run side by side.

    X = K S      U = A (V - decay X)      S <- decay_C S + (decay_C / decay K)^T U
    N: from S = 0 (the first part of a sequence: from the initial state);   M: from S = 1 with V = 0

Shapes  k [T, hk, 128], v [T, hv, 128] bf16 or fp16; A [T, hv, 64] and records of the inverse kernel; initial_state [N, hv, K, V]
        ->  states [segments * parts, hv, V, K] fp32 (N^T), transitions [segments * parts, hv, K', K] in the dtype of k (M^T),
        forgets [segments * parts, hv] int32, flags: a scan takes N alone
Grid    a CTA per part, value head and kind (M or N), with a warpgroup for each 64 of 128 rows
Cost    per chunk and CTA 5 products of 64x64x128 and 42 KB through L2
Source  affine in the state, as the recurrence is: Gated Delta Networks, arXiv 2412.06464

A head whose gate forgets has S -> N: then M is not made, and N starts where what came before no longer matters at the end of the segment. That is
decided here, from the gate itself; parts in front of that are left out. The first part of a sequence needs no M either, and the last segment
nothing. So few CTAs have much to do: parts of a segment let more of them share it, and cost the scan a step each.

Backward, M is made where either direction needs it. The gradient of a state starts behind the last token of a sequence, and goes to the second
segment: the last one needs M of all parts but the last, the first one of none. What is forgotten counts from the front of a segment.
"""

from types import SimpleNamespace

import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from flashqla.ops.kernels.common import (
    BACKWARD_RECORD,
    BETA,
    CHUNK,
    CHUNK_DECAY,
    DECAY,
    ERROR_DECAY,
    FORGOTTEN,
    HEAD_DIM,
    HOPPER,
    KEY_DECAY,
    MANUAL_ROLES,
    RECORD,
    TILE,
    WARP,
    WARP_GROUP,
    cuda,
)
from flashqla.ops.kernels.segments import (
    BEHIND,
    FIRST,
    FOUND,
    GRADIENT_KNOWN,
    INDEX,
    LENGTH,
    SEQUENCE,
    SLOT,
    STATE_KNOWN,
    find_segment,
)

STAGES = 3
HALVES = HEAD_DIM // TILE
KINDS = 2  # M, N
STATE_END = HALVES * WARP_GROUP
LOAD_END = STATE_END + WARP
THREADS = STATE_END + WARP_GROUP  # registers are handed out to whole warpgroups
STATE_REGISTERS, LOAD_REGISTERS = 232, 40


@tilelang.jit(target=HOPPER, pass_configs=MANUAL_ROLES)
def build_summary(dtype: str, state_dtype: str, backward: bool = False):
    """The kernel for k and v in `dtype` and initial states in `state_dtype`.

    backward: for records of that pass, and an A without beta; M is for gradients of states, too.
    """
    record = BACKWARD_RECORD if backward else RECORD
    tokens, slots, hk, hv, sequences, offsets, rows = (T.dynamic(x) for x in ("tokens", "slots", "hk", "hv", "sequences", "offsets", "rows"))
    k0, k1, v0, v1, i0, i1, i2, i3 = (T.dynamic(x) for x in ("k0", "k1", "v0", "v1", "i0", "i1", "i2", "i3"))

    @T.macro
    def run(x, w, initial_state, states, transitions):
        first_row = w * TILE
        S = T.alloc_fragment((TILE, HEAD_DIM), "float32")
        S_in = T.alloc_fragment((TILE, HEAD_DIM), dtype)
        X = T.alloc_fragment((TILE, CHUNK), "float32")
        V = T.alloc_fragment((TILE, CHUNK), dtype)
        W = T.alloc_fragment((TILE, CHUNK), dtype)
        decay = T.alloc_fragment((CHUNK,), "float32")
        key_decay = T.alloc_fragment((CHUNK,), "float32")
        T.clear(S)
        if x.is_transition:
            for v, k in T.Parallel(TILE, HEAD_DIM):
                S[v, k] = T.if_then_else(first_row + v == k, 1.0, 0.0)
        elif x.from_initial:
            for v, k in T.Parallel(TILE, HEAD_DIM):
                S[v, k] = T.cast(initial_state[x.sequence, x.head, k, first_row + v], "float32")
        if state_dtype != "float32":  # or ptxas keeps the narrow values, widens them in the loop, and serializes its products
            T.warpgroup_fence_operand(S, num_regs=TILE * HEAD_DIM // WARP_GROUP)
        for i in T.unroll(x.count, unroll_factor=1):
            s = i % STAGES
            T.copy(S, S_in)
            T.barrier_wait(x.ready[s], (i // STAGES) & 1)
            T.wgmma_gemm(S_in, x.k_smem[s, :, :], X, transpose_B=True, clear_accum=True)
            T.call_extern("handle", "flashqla::load_transposed", V.data, T.access_ptr(x.v_smem[s, w, 0, 0], "r"))
            T.wait_wgmma(0)
            if backward:  # A is without beta
                beta = T.alloc_fragment((CHUNK,), "float32")
                T.copy(x.record_smem[s, BETA, :], beta)
                T.copy(x.record_smem[s, ERROR_DECAY, :], decay)
                for v, t in T.Parallel(TILE, CHUNK):
                    W[v, t] = V[v, t] * beta[t] + X[v, t] * decay[t]
            else:
                T.copy(x.record_smem[s, DECAY, :], decay)
                for v, t in T.Parallel(TILE, CHUNK):
                    W[v, t] = V[v, t] - X[v, t] * decay[t]
            T.wgmma_gemm(W, x.a_smem[s, :, :], X, transpose_B=True, clear_accum=True)
            for v, k in T.Parallel(TILE, HEAD_DIM):
                S[v, k] = S[v, k] * x.record_smem[s, CHUNK_DECAY, 0]
            T.copy(x.record_smem[s, KEY_DECAY, :], key_decay)
            T.wait_wgmma(0)
            for v, t in T.Parallel(TILE, CHUNK):
                W[v, t] = X[v, t] * key_decay[t]
            T.wgmma_gemm(W, x.k_smem[s, :, :], S)
            T.wait_wgmma(0)
            T.sync_warp()
            if x.tx % WARP == 0:
                T.barrier_arrive(x.free[s])
        if x.is_transition:
            for v, k in T.Parallel(TILE, HEAD_DIM):
                transitions[x.row, x.head, first_row + v, k] = S[v, k]
        else:
            for v, k in T.Parallel(TILE, HEAD_DIM):
                states[x.row, x.head, first_row + v, k] = S[v, k]

    @T.macro
    def load(x, k, v, A, records):
        for i in T.unroll(x.count, unroll_factor=1):
            s = i % STAGES
            first = x.bos + i * CHUNK
            T.barrier_wait(x.free[s], ((i // STAGES) & 1) ^ 1)
            T.tma_copy(k[first:first + CHUNK, x.k_head, :], x.k_smem[s, :, :], barrier=x.ready[s])
            if not x.is_transition:
                for w in T.unroll(HALVES):
                    T.tma_copy(v[first:first + CHUNK, x.head, w * TILE:w * TILE + TILE], x.v_smem[s, w, :, :], barrier=x.ready[s])
            T.tma_copy(A[first:first + CHUNK, x.head, :], x.a_smem[s, :, :], barrier=x.ready[s])
            T.tma_copy(records[x.slot + i, x.head, :, :], x.record_smem[s, :, :], barrier=x.ready[s])
            T.barrier_arrive(x.ready[s])

    def forgotten_before(records, slot, head, chunks):
        decays = T.address_of(records[slot, head, CHUNK_DECAY, 1])
        return T.call_extern("int32", "flashqla::forgotten_before", decays, hv * record * CHUNK, chunks, FORGOTTEN)

    def forgotten_after(records, slot, head, chunks):
        decays = T.address_of(records[slot, head, CHUNK_DECAY, 1])
        return T.call_extern("int32", "flashqla::forgotten_after", decays, hv * record * CHUNK, chunks, FORGOTTEN)

    @T.prim_func
    def segment_summary(
        k: T.StridedTensor((tokens, hk, HEAD_DIM), (k0, k1, 1), dtype),
        v: T.StridedTensor((tokens, hv, HEAD_DIM), (v0, v1, 1), dtype),
        A: T.Tensor((tokens, hv, CHUNK), dtype),
        records: T.Tensor((slots, hv, record, CHUNK), "float32"),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        initial_state: T.StridedTensor((sequences, hv, HEAD_DIM, HEAD_DIM), (i0, i1, i2, i3), state_dtype),
        states: T.Tensor((rows, hv, HEAD_DIM, HEAD_DIM), "float32"),
        transitions: T.Tensor((rows, hv, HEAD_DIM, HEAD_DIM), dtype),
        forgets: T.Tensor((rows, hv), "int32"),
        group: T.int32,
        offset_step: T.int32,
        segment_chunks: T.int32,
        parts: T.int32,
        has_initial_state: T.int32,
    ):
        with T.Kernel(hv, rows, KINDS, threads=THREADS) as (head, row, kind):
            T.import_source(cuda("tiles", "segments"))
            k_smem = T.alloc_shared((STAGES, CHUNK, HEAD_DIM), dtype)
            v_smem = T.alloc_shared((STAGES, HALVES, CHUNK, TILE), dtype)
            a_smem = T.alloc_shared((STAGES, CHUNK, CHUNK), dtype)
            record_smem = T.alloc_shared((STAGES, record, CHUNK), "float32")
            T.annotate_layout({v_smem: make_swizzled_layout(v_smem)})
            ready = T.alloc_barrier([WARP] * STAGES)  # LOAD -> STATE
            free = T.alloc_barrier([STATE_END // WARP] * STAGES)  # STATE -> LOAD
            tx = T.get_thread_binding()
            is_transition = kind == 0
            found = T.alloc_local((FOUND,), "int32")
            find_segment(found, cu_seqlens, offset_step, sequences, tokens, segment_chunks, T.truncdiv(row, parts))
            sequence, index, first, slot = (found[n] for n in (SEQUENCE, INDEX, FIRST, SLOT))
            # Variables, because a quotient that is let stand is computed again, in 64 bits, wherever it is used.
            part, each, before, chunks, behind, start, known, skip = (T.alloc_var("int32") for _ in range(8))
            part = T.truncmod(row, parts)
            each = T.ceildiv(segment_chunks, parts)
            before = T.min(part * each, segment_chunks)  # chunks of the segment in front of this part
            chunks = T.min(each, segment_chunks - before)
            behind = found[BEHIND]  # tokens of the sequence
            if backward:
                behind = behind + T.max(found[LENGTH] - (before + chunks) * CHUNK, 0)
            T.pdl_sync()  # until what the inverse kernel wrote is there
            T.pdl_trigger()
            if behind > 0:  # of whole chunks, and not the last one
                # By the end of the segment, not of this part: of parts that forget together the scan multiplies none, but starts in the one where
                # what matters begins, which is the same for all of them. Nobody asks for what is in front of that, and nothing is written there.
                start = segment_chunks  # of the last segment nobody asks for N
                if found[BEHIND] > 0:
                    start = forgotten_before(records, slot + before, head, segment_chunks - before)
                # The first part of a sequence starts from a state that is known: nothing is left to multiply.
                known = T.if_then_else(T.Or(start >= 0, index + part == 0), STATE_KNOWN, 0)
                skip = before + T.max(start, 0)
                if backward:
                    if is_transition:  # M is whole
                        skip = before
                    gradient_end = T.alloc_var("int32")
                    gradient_end = 0  # chunks of the segment up to which a gradient that enters behind this part matters
                    if index > 0:
                        gradient_end = forgotten_after(records, slot, head, before + chunks)
                    if gradient_end < before + chunks:
                        known = known + GRADIENT_KNOWN
                else:
                    known = known + GRADIENT_KNOWN
                if kind == 1:
                    if tx == 0:
                        forgets[row, head] = known
                x = SimpleNamespace(
                    k_smem=k_smem, v_smem=v_smem, a_smem=a_smem, record_smem=record_smem, ready=ready, free=free, tx=tx,
                    sequence=sequence, row=row, head=head, k_head=T.truncdiv(head, group),
                    bos=first + skip * CHUNK, slot=slot + skip, count=before + chunks - skip, is_transition=is_transition,
                    from_initial=T.And(T.And(index + part == 0, start <= 0), has_initial_state != 0),
                )
                if is_transition:  # V = 0
                    for stage, half, t, column in T.Parallel(STAGES, HALVES, CHUNK, TILE):
                        v_smem[stage, half, t, column] = 0
                    T.sync_threads()
                if T.if_then_else(is_transition, known != STATE_KNOWN + GRADIENT_KNOWN, start < chunks):
                    if tx < WARP_GROUP:
                        T.inc_max_nreg(STATE_REGISTERS)
                        run(x, 0, initial_state, states, transitions)
                    elif tx < STATE_END:
                        T.inc_max_nreg(STATE_REGISTERS)
                        run(x, 1, initial_state, states, transitions)
                    else:
                        T.dec_max_nreg(LOAD_REGISTERS)
                        if tx < LOAD_END:
                            load(x, k, v, A, records)

    return segment_summary
