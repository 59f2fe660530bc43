"""The two recurrences of the backward pass: what enters every chunk from in front, and what enters its gradient from behind.

    forward   X = K S     W = beta V - beta decay X                   U  = A W       S  <- decay_C S + (decay_C / decay K)^T U
    reverse   X = K dS    W = decay_C / decay X + P^T dO  (dU)        dY = A^T W     dS <- decay_C dS - (beta decay K)^T dY + (scale decay Q)^T dO

Shapes  q, k [T, hk, 128], v (forward) or dO (reverse) [T, hv, 128] bf16 or fp16; A [T, hv, 64] and records of the inverse kernel;
        entering [N, hv, K, V] fp32, bf16 or fp16, leaving the same in fp32, any strides: the initial state (forward), or the gradients of the
        final state and of the initial one (reverse); of a split sequence starts [segments * parts, hv, V, K] fp32: what leaves each segment at the
        end of its last part (forward) or at the front of its first one (reverse)
        ->  states [pairs, hv, V, K]: S that enters each second chunk (forward), or [slots, hv, V, K]: dS of the state that leaves each
        (reverse); y [T, hv, 128]: U, or beta dY, where a small beta counts as 1 (its gradient cannot be had from beta dY)
Grid    a CTA per segment (of segment_chunks chunks; 0: a whole sequence), value head and v_tile columns of V
Cost    per chunk and value head 5 products of 64x64x128 and 66 KB of HBM forward, 9 and 90 KB reverse
Source  Gated Delta Networks, arXiv 2412.06464, chunkwise form; its derivative

The reverse recurrence does the more. Where it has one state warpgroup, that one begins with P^T dO of a chunk before it has ended the one before, and
has nothing between two products that could stand beside one: a chunk takes 2,350 cycles instead of 2,660, and shared memory is busy for two thirds of them.

Either is the other run backwards, and both are the core of the forward kernel: a state warpgroup keeps 64 columns of the state in fp32 registers,
transposed, and feeds everything to wgmma as the operand from registers. Neither needs the other: the forward kernel, which takes less time, starts
while the reverse one runs, and waits for it at its end, so that whoever waits for the forward kernel has both.

In fp16 the reverse recurrence takes the decay of a chunk's first token out of its factors, and multiplies dS with it last: where gates are strong,
scale decay Q and beta decay K have no elements that fp16 could hold, while the first token decides what dS is.

A third kind, the summary, is the reverse recurrence over a part of a segment from 0: it writes what leaves the part to starts, for the scan, and
nothing else. It leaves out what is forgotten in front of it in its segment, where that is all of a part without a word, and the first segment, from
which nothing follows.

    STATE  one or two warpgroups, 64 columns of V each           LOAD   one warp, or two: TMA in, zeros past the end of a sequence
    SCORE  one warpgroup, reverse: P                             STORE  one warp: states and y out
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
    ERROR_DECAY,
    FORGOTTEN,
    GIVEN_BETA,
    HEAD_DIM,
    HOPPER,
    KEY_DECAY,
    KEY_LOG,
    MANUAL_ROLES,
    OUT_SCALE,
    ROW_LOG,
    TILE,
    WARP,
    WARP_GROUP,
    cuda,
)
from flashqla.ops.kernels.roles import (
    OUT_STAGES,
    decay_state,
    first_decay,
    load_v,
    peek,
    prediction_error,
    release,
    scale_columns,
    score,
    wait_unless,
)
from flashqla.ops.kernels.segments import BEHIND, FIRST, FOUND, INDEX, LENGTH, PAIR, SEQUENCE, SLOT, find_segment

HALVES = HEAD_DIM // TILE
QK, VA = range(2)  # of what is loaded
# Registers a thread of STATE, SCORE (reverse only) and the rest, by direction and number of state warpgroups: no more than the CTA starts with.
REGISTERS = {(False, 1): (200, 0, 40), (False, 2): (232, 0, 40), (True, 1): (232, 152, 40), (True, 2): (192, 88, 40)}


@tilelang.jit(target=HOPPER, pass_configs=MANUAL_ROLES)
def build_chain(kind: str, v_tile: int, dtype: str, state_dtype: str):
    """The kernel for tokens in `dtype` and entering states in `state_dtype`; kind is forward, reverse or summary, v_tile is 64 or 128."""
    reverse, summary, leads = kind != "forward", kind == "summary", kind == "reverse"
    groups = v_tile // TILE
    slices = HEAD_DIM // v_tile
    first_apart = reverse and dtype == "float16"  # the decay of a chunk's first token
    state_registers, score_registers, service_registers = REGISTERS[reverse, groups]
    ctas_per_sm = 2 if not reverse and groups == 1 else 1
    STATE_END = groups * WARP_GROUP
    SCORE_END = STATE_END + (WARP_GROUP if reverse else 0)
    LOAD_END = SCORE_END + 2 * WARP
    STORE_END = LOAD_END + WARP
    THREADS = SCORE_END + WARP_GROUP  # registers are handed out to whole warpgroups
    ahead = reverse and groups == 1  # STATE begins with a chunk before it has ended the one before
    # Of q, k and record; and of v and A: what is asked for takes more than a chunk to come, and dO is needed a chunk ahead. More do not fit.
    qk_stages, stages = (4, 3) if ahead else (3, 2)
    QK_READERS = SCORE_END // WARP

    tokens, slots, state_slots, hk, hv, sequences, rows, offsets = (
        T.dynamic(x) for x in ("tokens", "slots", "state_slots", "hk", "hv", "sequences", "rows", "offsets")
    )
    q0, q1, k0, k1, v0, v1 = (T.dynamic(x) for x in ("q0", "q1", "k0", "k1", "v0", "v1"))
    e0, e1, e2, e3, l0, l1, l2, l3, s0, s1, s2, s3 = (T.dynamic(f"{x}{d}") for x in "els" for d in range(4))

    @T.macro
    def read_state(S, x, w):
        if x.is_inner != 0:  # another segment or part is in front of this one (reverse: behind it), or forgotten
            if summary:
                T.clear(S)
            else:
                for v, k in T.Parallel(TILE, HEAD_DIM):
                    S[v, k] = x.starts[x.row, x.head, x.first_column + w * TILE + v, k]
        elif x.has_entering != 0:
            for v, k in T.Parallel(TILE, HEAD_DIM):
                S[v, k] = T.cast(x.entering[x.sequence, x.head, k, x.first_column + w * TILE + v], "float32")
        else:
            T.clear(S)
        if state_dtype != "float32":  # or ptxas keeps the narrow values, widens them in the loop, and serializes its products
            T.warpgroup_fence_operand(S, num_regs=TILE * HEAD_DIM // WARP_GROUP)

    @T.macro
    def write_state(S, x, w):
        if summary:
            if x.chunks >= 0:
                for v, k in T.Parallel(TILE, HEAD_DIM):
                    x.starts[x.row, x.head, x.first_column + w * TILE + v, k] = S[v, k]
        elif T.And(x.is_first, x.has_leaving != 0):
            for v, k in T.Parallel(TILE, HEAD_DIM):
                x.leaving[x.sequence, x.head, k, x.first_column + w * TILE + v] = S[v, k]

    @T.macro
    def hand_out_state(S_in, i, x, w):
        n = i if reverse else i // 2  # states before it
        if T.Or(reverse, (x.chunks_before + i) & 1 == 0):
            T.barrier_wait(x.s_free[0], (n & 1) ^ 1)
            T.call_extern("handle", "flashqla::store_tiles", T.access_ptr(x.s_smem[w, 0, 0, 0], "r"), S_in.data)
            T.barrier_arrive(x.s_ready[0])

    @T.macro
    def hand_out_y(Y, i, x, w):
        T.barrier_wait(x.y_free[0], (i & 1) ^ 1)
        T.call_extern("handle", "flashqla::store_transposed", T.access_ptr(x.y_smem[w, 0, 0], "r"), Y.data)
        T.barrier_arrive(x.y_ready[0])

    @T.macro
    def state_forward(x, w):
        S = T.alloc_fragment((TILE, HEAD_DIM), "float32")
        S_in = T.alloc_fragment((TILE, HEAD_DIM), dtype)
        X = T.alloc_fragment((TILE, CHUNK), "float32")
        V = T.alloc_fragment((TILE, CHUNK), dtype)
        W = T.alloc_fragment((TILE, CHUNK), dtype)
        read_state(S, x, w)
        for i in T.unroll(x.chunks, unroll_factor=1):
            s = i % qk_stages
            T.copy(S, S_in)
            T.barrier_wait(x.qk_ready[s], (i // qk_stages) & 1)
            T.wgmma_gemm(S_in, x.k_smem[s, :, :], X, transpose_B=True, clear_accum=True)
            load_v(V, i, x, w)
            T.wait_wgmma(0)
            prediction_error(W, V, X, i, x)
            T.wgmma_gemm(W, x.a_smem[i % stages, :, :], X, transpose_B=True, clear_accum=True)
            hand_out_state(S_in, i, x, w)
            decay_state(S, i, x)
            T.wait_wgmma(0)
            T.barrier_arrive(x.va_free[i % stages])
            scale_columns(W, X, KEY_DECAY, i, x)
            T.wgmma_gemm(W, x.k_smem[s, :, :], S)
            T.copy(X, V)
            hand_out_y(V, i, x, w)
            T.wait_wgmma(0)
            release(x, x.qk_free, s)

    def chunk_decay(s, x):
        """Decay of a chunk, but for that of its first token if that stays apart."""
        if first_apart:
            return T.exp2(x.record_smem[s, CHUNK_DECAY, 1] - first_decay(x, s))
        return x.record_smem[s, CHUNK_DECAY, 0]

    @T.macro
    def load_query_factors(factor, first, s, x):
        """scale decay of every token, likewise."""
        if first_apart:
            T.copy(x.record_smem[s, ROW_LOG, :], factor)
            for t in T.Parallel(CHUNK):
                factor[t] = T.exp2(factor[t] - first) * x.scale
        else:
            T.copy(x.record_smem[s, OUT_SCALE, :], factor)

    @T.macro
    def load_error_factors(factor, first, s, x):
        """-beta decay of every token, likewise."""
        if first_apart:
            T.copy(x.record_smem[s, KEY_LOG, :], factor)
            for t in T.Parallel(CHUNK):
                factor[t] = -T.exp2(factor[t] - first) * x.record_smem[s, BETA, t]
        else:
            T.copy(x.record_smem[s, ERROR_DECAY, :], factor)

    @T.macro
    def begin_output_part(i, dO, output_part, x, w):
        """P^T dO of chunk i, which nothing in front of it has a part in."""
        T.call_extern("handle", "flashqla::load_transposed", dO.data, T.access_ptr(x.v_smem[i % stages, w, 0, 0], "r"))
        T.wgmma_gemm(dO, x.p_smem[i % OUT_STAGES, :, :], output_part, clear_accum=True)

    @T.macro
    def prepare_gradient(i, dO, dO_in, factor, once, x):
        """What chunk i needs of its own: dO times the factors of queries, and the factors of X."""
        s = i % qk_stages
        load_query_factors(factor, first_decay(x, s) if first_apart else 0.0, s, x)
        T.call_extern("handle", "flashqla::scaled_columns", dO_in.data, dO.data, factor.data, once)
        T.copy(x.record_smem[s, KEY_DECAY, :], factor)

    @T.macro
    def enter_gradient(i, S, S_in, X, decay, once, x, w):
        """X = K dS of chunk i, and beside it what need not wait for X."""
        T.wgmma_gemm(S_in, x.k_smem[i % qk_stages, :, :], X, transpose_B=True, clear_accum=True)
        if not summary:
            hand_out_state(S_in, i, x, w)
        T.call_extern("handle", "flashqla::scale_in_place", S.data, decay, once)
        T.wait_wgmma(0)

    @T.macro
    def state_reverse_alone(x, w):
        """One state warpgroup: P^T dO of a chunk runs beside the end of the one before, Q^T dO under the conversion of dY, and whatever can be
        waited for, read or written beside a product is. SCORE has waited for all of a chunk before it says that P is ready.

        Nothing is under way where the loop turns: wgmma across its back edge would be serialized. It enters one chunk more than there is, on whatever
        stands in shared memory, and without decay.
        """
        S = T.alloc_fragment((TILE, HEAD_DIM), "float32")
        S_in = T.alloc_fragment((TILE, HEAD_DIM), dtype)
        X = T.alloc_fragment((TILE, CHUNK), "float32")
        output_part = T.alloc_fragment((TILE, CHUNK), "float32")
        dO = T.alloc_fragment((TILE, CHUNK), dtype)  # of the chunk to come
        dO_in = T.alloc_fragment((TILE, CHUNK), dtype)
        W = T.alloc_fragment((TILE, CHUNK), dtype)
        Y = T.alloc_fragment((TILE, CHUNK), dtype)
        factor = T.alloc_fragment((CHUNK,), "float32")
        given_beta = T.alloc_fragment((CHUNK,), "float32")
        decay = T.alloc_var("float32")
        once: T.int32 = T.call_extern("int32", "flashqla::once", x.chunks)
        read_state(S, x, w)
        if x.chunks > 0:
            T.copy(S, S_in)
            T.barrier_wait(x.p_ready[0], 0)
            begin_output_part(0, dO, output_part, x, w)
            prepare_gradient(0, dO, dO_in, factor, once, x)
            decay = chunk_decay(0, x)
            enter_gradient(0, S, S_in, X, decay, once, x, w)
            for i in T.unroll(x.chunks, unroll_factor=1):
                s = i % qk_stages
                p = i % stages
                after: T.int32 = i + 1
                release(x, x.p_free, i % OUT_STAGES)
                for v, t in T.Parallel(TILE, CHUNK):
                    W[v, t] = X[v, t] * factor[t] + output_part[v, t]
                first: T.float32 = first_decay(x, s) if first_apart else 0.0
                load_error_factors(factor, first, s, x)
                T.wgmma_gemm(W, x.a_smem[p, :, :], X, clear_accum=True)
                T.wgmma_gemm(dO_in, x.q_smem[s, :, :], S)
                if not summary:
                    T.copy(x.record_smem[s, GIVEN_BETA, :], given_beta)
                is_last: T.int32 = T.if_then_else(after == x.chunks, 1, 0)
                is_there: T.int32 = is_last | peek(x.p_ready[after % OUT_STAGES], (after // OUT_STAGES) & 1)
                if not summary:
                    has_room: T.int32 = peek(x.y_free[0], (i & 1) ^ 1)
                T.wait_wgmma(1)  # dY; Q^T dO goes on
                T.barrier_arrive(x.va_free[p])
                for v, t in T.Parallel(TILE, CHUNK):
                    W[v, t] = X[v, t] * factor[t]
                T.wgmma_gemm(W, x.k_smem[s, :, :], S)
                wait_unless(is_there, x.p_ready[after % OUT_STAGES], (after // OUT_STAGES) & 1)
                begin_output_part(after, dO, output_part, x, w)
                decay = T.if_then_else(is_last != 0, 1.0, chunk_decay(after % qk_stages, x))
                if not summary:
                    for v, t in T.Parallel(TILE, CHUNK):
                        Y[v, t] = X[v, t] * given_beta[t]
                    wait_unless(has_room, x.y_free[0], (i & 1) ^ 1)
                    T.call_extern("handle", "flashqla::store_transposed", T.access_ptr(x.y_smem[w, 0, 0], "r"), Y.data)
                    T.barrier_arrive(x.y_ready[0])
                T.wait_wgmma(2)  # Q^T dO
                prepare_gradient(after, dO, dO_in, factor, once, x)
                T.wait_wgmma(1)  # the update; P^T dO goes on
                release(x, x.qk_free, s)
                if first_apart:
                    T.call_extern("handle", "flashqla::scale_in_place", S.data, T.exp2(first), once)
                T.copy(S, S_in)
                enter_gradient(after, S, S_in, X, decay, once, x, w)
        write_state(S, x, w)

    @T.macro
    def state_reverse_of_two(x, w):
        """One of two state warpgroups: while one converts, the other multiplies. There are no registers for P^T dO apart from K dS."""
        S = T.alloc_fragment((TILE, HEAD_DIM), "float32")
        S_in = T.alloc_fragment((TILE, HEAD_DIM), dtype)
        X = T.alloc_fragment((TILE, CHUNK), "float32")
        dO = T.alloc_fragment((TILE, CHUNK), dtype)
        W = T.alloc_fragment((TILE, CHUNK), dtype)
        factor = T.alloc_fragment((CHUNK,), "float32")
        read_state(S, x, w)
        for i in T.unroll(x.chunks, unroll_factor=1):
            s = i % qk_stages
            p = i % OUT_STAGES
            T.copy(S, S_in)
            T.barrier_wait(x.qk_ready[s], (i // qk_stages) & 1)
            T.wgmma_gemm(S_in, x.k_smem[s, :, :], X, transpose_B=True, clear_accum=True)
            load_v(dO, i, x, w)
            T.barrier_wait(x.p_ready[p], (i // OUT_STAGES) & 1)
            T.copy(x.record_smem[s, KEY_DECAY, :], factor)
            first: T.float32 = first_decay(x, s) if first_apart else 0.0
            T.wait_wgmma(0)
            for v, t in T.Parallel(TILE, CHUNK):
                X[v, t] = X[v, t] * factor[t]
            T.wgmma_gemm(dO, x.p_smem[p, :, :], X)
            T.call_extern("handle", "flashqla::scale_in_place", S.data, chunk_decay(s, x), 1)
            T.wait_wgmma(0)
            T.copy(X, W)
            release(x, x.p_free, p)
            T.wgmma_gemm(W, x.a_smem[i % stages, :, :], X, clear_accum=True)
            load_query_factors(factor, first, s, x)
            for v, t in T.Parallel(TILE, CHUNK):
                dO[v, t] = dO[v, t] * factor[t]
            T.wgmma_gemm(dO, x.q_smem[s, :, :], S)
            if not summary:
                hand_out_state(S_in, i, x, w)
            load_error_factors(factor, first, s, x)
            T.wait_wgmma(1)  # dY; Q^T dO goes on
            T.barrier_arrive(x.va_free[i % stages])
            for v, t in T.Parallel(TILE, CHUNK):
                W[v, t] = X[v, t] * factor[t]
            T.wgmma_gemm(W, x.k_smem[s, :, :], S)
            if not summary:
                T.copy(x.record_smem[s, GIVEN_BETA, :], factor)
                T.wait_wgmma(1)  # Q^T dO; the update goes on
                for v, t in T.Parallel(TILE, CHUNK):
                    dO[v, t] = X[v, t] * factor[t]
                hand_out_y(dO, i, x, w)
            T.wait_wgmma(0)
            release(x, x.qk_free, s)
            if first_apart:
                T.call_extern("handle", "flashqla::scale_in_place", S.data, T.exp2(first), 1)
        write_state(S, x, w)

    @T.macro
    def load_keys(chunk, s, x, ready, stage):
        first = x.bos + chunk * CHUNK
        if reverse:
            T.tma_copy(x.q[first:first + CHUNK, x.k_head, :], x.q_smem[s, :, :], barrier=ready[stage])
        T.tma_copy(x.k[first:first + CHUNK, x.k_head, :], x.k_smem[s, :, :], barrier=ready[stage])
        T.tma_copy(x.records[x.slot + chunk, x.head, :, :], x.record_smem[s, :, :], barrier=ready[stage])

    @T.macro
    def load_values(chunk, p, x, ready, stage):
        first = x.bos + chunk * CHUNK
        for w in T.unroll(groups):
            column = x.first_column + w * TILE
            T.tma_copy(x.v[first:first + CHUNK, x.head, column:column + TILE], x.v_smem[p, w, :, :], barrier=ready[stage])
        T.tma_copy(x.A[first:first + CHUNK, x.head, :], x.a_smem[p, :, :], barrier=ready[stage])

    @T.macro
    def load(x, what):
        """Of every chunk q, k and record (QK), or v and A (VA), or both."""
        for i in T.unroll(x.chunks, unroll_factor=1):
            s = i % qk_stages
            p = i % stages
            chunk = x.chunks - 1 - i if reverse else i
            rows = x.length - chunk * CHUNK
            if QK in what:
                T.barrier_wait(x.qk_free[s], ((i // qk_stages) & 1) ^ 1)
            if VA in what:
                T.barrier_wait(x.va_free[p], ((i // stages) & 1) ^ 1)
            if rows >= CHUNK:
                if QK in what:
                    load_keys(chunk, s, x, x.qk_ready, s)
                if VA in what:
                    load_values(chunk, p, x, x.va_ready, p)
            else:  # the rows past the end belong to another sequence, or to nobody: zeros leave the state alone
                tail = what[0]
                if QK in what:
                    load_keys(chunk, s, x, x.tail_ready, tail)
                if VA in what:
                    load_values(chunk, p, x, x.tail_ready, tail)
                T.barrier_arrive(x.tail_ready[tail])
                T.barrier_wait(x.tail_ready[tail], 0)
                if QK in what:
                    for w in T.unroll(HALVES):
                        if reverse:
                            T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.q_smem[s, 0, w * TILE]), rows)
                        T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.k_smem[s, 0, w * TILE]), rows)
                if VA in what:
                    for w in T.unroll(groups):
                        T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.v_smem[p, w, 0, 0]), rows)
                    T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.a_smem[p, 0, 0]), rows)
                T.fence_proxy_async()
            if QK in what:
                T.barrier_arrive(x.qk_ready[s])
            if VA in what:
                T.barrier_arrive(x.va_ready[p])

    @T.macro
    def store(x, states, y):
        for i in T.unroll(x.chunks, unroll_factor=1):
            chunk = x.chunks - 1 - i if reverse else i
            first = x.bos + chunk * CHUNK
            if T.Or(reverse, (x.chunks_before + i) & 1 == 0):
                n = i if reverse else i // 2  # states before it
                slot = x.slot + chunk if reverse else x.pair + (x.chunks_before + i) // 2
                T.barrier_wait(x.s_ready[0], n & 1)
                T.fence_proxy_async()  # here, for all who wrote: the state warpgroups have no time for it
                for w in T.unroll(groups):
                    row = x.first_column + w * TILE
                    for half in T.unroll(HALVES):
                        T.tma_copy(x.s_smem[w, half, :, :], states[slot, x.head, row:row + TILE, half * TILE:half * TILE + TILE])
                T.tma_store_wait(0, read=True)
                T.barrier_arrive(x.s_free[0])
            T.barrier_wait(x.y_ready[0], i & 1)
            if chunk * CHUNK + CHUNK <= x.length:
                T.fence_proxy_async()
                for w in T.unroll(groups):
                    column = x.first_column + w * TILE
                    T.tma_copy(x.y_smem[w, :, :], y[first:first + CHUNK, x.head, column:column + TILE])
                T.tma_store_wait(0, read=True)
            else:
                for w in T.unroll(groups):
                    for b in T.unroll(CHUNK // 4, unroll_factor=1):
                        for t, v in T.Parallel(4, TILE):
                            if chunk * CHUNK + b * 4 + t < x.length:
                                y[first + b * 4 + t, x.head, x.first_column + w * TILE + v] = x.y_smem[w, b * 4 + t, v]
            T.barrier_arrive(x.y_free[0])
        T.tma_store_wait(0, read=False)

    @T.prim_func
    def gated_delta_chain(
        q: T.StridedTensor((tokens, hk, HEAD_DIM), (q0, q1, 1), dtype),
        k: T.StridedTensor((tokens, hk, HEAD_DIM), (k0, k1, 1), dtype),
        v: T.StridedTensor((tokens, hv, HEAD_DIM), (v0, v1, 1), dtype),
        A: T.Tensor((tokens, hv, CHUNK), dtype),
        records: T.Tensor((slots, hv, BACKWARD_RECORD, CHUNK), "float32"),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        entering: T.StridedTensor((sequences, hv, HEAD_DIM, HEAD_DIM), (e0, e1, e2, e3), state_dtype),
        states: T.Tensor((state_slots, hv, HEAD_DIM, HEAD_DIM), dtype),
        y: T.Tensor((tokens, hv, HEAD_DIM), dtype),
        leaving: T.StridedTensor((sequences, hv, HEAD_DIM, HEAD_DIM), (l0, l1, l2, l3), "float32"),
        starts: T.StridedTensor((rows, hv, HEAD_DIM, HEAD_DIM), (s0, s1, s2, s3), "float32"),
        scale: T.float32,
        group: T.int32,
        offset_step: T.int32,
        segment_chunks: T.int32,
        parts: T.int32,
        has_entering: T.int32,
        has_leaving: T.int32,
    ):
        # Neighbouring CTAs take the heads of one segment or part, which read the same q and k.
        with T.Kernel(hv * slices, rows if summary else T.truncdiv(rows, parts), threads=THREADS) as (bx, by):
            T.import_source(cuda("tiles", "segments", "pairs", "chain"))
            k_smem = T.alloc_shared((qk_stages, CHUNK, HEAD_DIM), dtype)
            record_smem = T.alloc_shared((qk_stages, BACKWARD_RECORD, CHUNK), "float32")
            v_smem = T.alloc_shared((stages, groups, CHUNK, TILE), dtype)
            a_smem = T.alloc_shared((stages, CHUNK, CHUNK), dtype)
            s_smem = T.alloc_shared((groups, HALVES, TILE, TILE), dtype)
            y_smem = T.alloc_shared((groups, CHUNK, TILE), dtype)
            T.annotate_layout({tile: make_swizzled_layout(tile) for tile in (v_smem, s_smem, y_smem)})
            T.annotate_min_blocks_per_sm(ctas_per_sm)
            if reverse:
                q_smem = T.alloc_shared((qk_stages, CHUNK, HEAD_DIM), dtype)
                p_smem = T.alloc_shared((OUT_STAGES, CHUNK, CHUNK), dtype)
                p_ready = T.alloc_barrier([WARP_GROUP] * OUT_STAGES)  # SCORE -> STATE
                p_free = T.alloc_barrier([STATE_END // WARP] * OUT_STAGES)  # STATE -> SCORE
            else:
                q_smem = p_smem = p_ready = p_free = None
            qk_ready = T.alloc_barrier([WARP] * qk_stages)  # LOAD -> STATE, SCORE
            qk_free = T.alloc_barrier([QK_READERS] * qk_stages)  # STATE, SCORE -> LOAD
            va_ready = T.alloc_barrier([WARP] * stages)  # LOAD -> STATE
            # Every thread arrives that has read: racecheck does not see what a warp barrier orders.
            va_free = T.alloc_barrier([STATE_END] * stages)  # STATE -> LOAD
            s_ready = T.alloc_barrier([STATE_END])  # STATE -> STORE
            s_free = T.alloc_barrier([WARP])  # STORE -> STATE
            y_ready = T.alloc_barrier([STATE_END])  # STATE -> STORE
            y_free = T.alloc_barrier([WARP])  # STORE -> STATE
            tail_ready = T.alloc_barrier([WARP] * 2)  # TMA -> LOAD

            tx = T.get_thread_binding()
            head = bx // slices
            k_head: T.int32 = T.truncdiv(head, group)
            found = T.alloc_local((FOUND,), "int32")
            find_segment(found, cu_seqlens, offset_step, sequences, tokens, segment_chunks, T.truncdiv(by, parts) if summary else by)
            sequence, index, first, length, slot = (found[n] for n in (SEQUENCE, INDEX, FIRST, LENGTH, SLOT))
            chunks = T.alloc_var("int32")
            is_inner = T.alloc_var("int32")
            is_inner = T.if_then_else(found[BEHIND] > 0 if reverse else index > 0, 1, 0)
            chunks = T.ceildiv(length, CHUNK)
            before = 0  # chunks of the segment in front of this part
            if summary:
                each, before, end = (T.alloc_var("int32") for _ in range(3))
                each = T.ceildiv(segment_chunks, parts)
                before = T.min(T.truncmod(by, parts) * each, chunks)
                end = T.min(before + each, chunks)
                chunks = -1  # nobody asks for what leaves this part
                if index > 0:
                    chunks = T.call_extern(
                        "int32", "flashqla::forgotten_after", T.address_of(records[slot, head, CHUNK_DECAY, 1]), hv * BACKWARD_RECORD * CHUNK,
                        end, FORGOTTEN,
                    )
                    if T.Or(chunks < end, end * CHUNK < length):
                        is_inner = 1
                    chunks = chunks - before  # negative where it is forgotten in front
            if leads:
                T.pdl_sync()  # until what the kernels before wrote is there
                T.pdl_trigger()  # by then it is there for the forward kernel too
            x = SimpleNamespace(
                q=q, k=k, v=v, A=A, records=records, entering=entering, leaving=leaving, starts=starts,
                q_smem=q_smem, k_smem=k_smem, record_smem=record_smem, v_smem=v_smem, a_smem=a_smem, p_smem=p_smem, s_smem=s_smem, y_smem=y_smem,
                qk_ready=qk_ready, qk_free=qk_free, va_ready=va_ready, va_free=va_free, p_ready=p_ready, p_free=p_free,
                s_ready=s_ready, s_free=s_free, y_ready=y_ready, y_free=y_free, tail_ready=tail_ready,
                tx=tx, sequence=sequence, row=by if summary else (by + 1) * parts if reverse else by * parts - 1, head=head, k_head=k_head,
                first_column=(bx % slices) * v_tile, slot=slot + before, pair=found[PAIR], chunks_before=index * segment_chunks, bos=first + before * CHUNK,
                length=length - before * CHUNK, chunks=chunks, is_first=index == 0, is_inner=is_inner,
                has_entering=has_entering, has_leaving=has_leaving, scale=scale, qk_stages=qk_stages, stages=stages, ahead=ahead,
            )
            if tx < WARP_GROUP:
                T.inc_max_nreg(state_registers)
                if reverse:
                    (state_reverse_alone if groups == 1 else state_reverse_of_two)(x, 0)
                else:
                    state_forward(x, 0)
            elif tx < STATE_END:
                T.inc_max_nreg(state_registers)
                if reverse:
                    state_reverse_of_two(x, 1)
                else:
                    state_forward(x, 1)
            elif tx < SCORE_END:
                if reverse:
                    T.dec_max_nreg(score_registers)
                    score(x, scale, dtype)
            else:
                T.dec_max_nreg(service_registers)
                if tx < SCORE_END + WARP:
                    load(x, (QK,) if groups == 1 else (QK, VA))
                elif tx < LOAD_END:
                    if groups == 1:
                        load(x, (VA,))
                elif tx < STORE_END:
                    if not summary:
                        store(x, states, y)
            if not leads:
                T.pdl_sync()  # until the kernel beside this one has ended: whoever waits for this one needs both

    return gated_delta_chain
