"""The recurrence over the chunks of a sequence, with the outputs: one pass, the state in registers from first chunk to last.

    W  = V - (decay K) S                 U = A W             P = scale * lower(Q K^T) * R
    O  = scale decay Q S + P U           S <- decay_C S + (decay_C / decay K)^T U

Shapes  q, k [T, hk, 128], v, o [T, hv, 128] bf16 or fp16; A [T, hv, 64] and records [slots, hv, 6, 64] fp32 of the inverse kernel;
        initial_state [N, hv, K, V] fp32, bf16 or fp16, final_state the same in fp32, any strides; on demand h [chunks, hv, K, V],
        the state that enters each chunk; of a split sequence states [segments * parts, hv, V, K] fp32, at the end of each segment
Grid    a CTA per segment (of segment_chunks chunks; 0: a whole sequence), value head and v_tile columns of V
Cost    per chunk and value head 9 products of 64x64x128 (P once per CTA) and 48 KB of HBM
Source  Gated Delta Networks, arXiv 2412.06464, chunkwise form

Everything is transposed: a state warpgroup keeps S^T [64 columns of V, 128] in fp32 registers and feeds it, W^T and U^T to wgmma as the
operand from registers; only K, Q, A and P pass through shared memory.

    STATE  one or two warpgroups, 64 columns of V each           LOAD   one warp: TMA in, zeros past the end of a sequence; q, k and v of
                                                                        the first chunks while the kernels in front still run
    SCORE  one warpgroup: P, or Z                               STORE  one warp: o out

Two state warpgroups share a CTA whose SCORE warpgroup has time left: it makes Z = P A, and the output P U = Z W waits for U no more.

A barrier is named for what it says is ready or free: in (q, k, v, A and record), p (P or Z), o.
"""

from types import SimpleNamespace

import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from flashqla.ops.kernels.common import (
    CHUNK,
    CHUNK_DECAY,
    COL_LOG,
    DECAY,
    HEAD_DIM,
    HOPPER,
    KEY_DECAY,
    MANUAL_ROLES,
    OUT_SCALE,
    RECORD,
    ROW_LOG,
    TILE,
    WARP,
    WARP_GROUP,
    cuda,
)
from flashqla.ops.kernels.segments import BEHIND, FIRST, FOUND, INDEX, LENGTH, SEQUENCE, SLOT, find_segment

STAGES = 3  # of what is loaded; with two, loads are late, four do not fit
OUT_STAGES = 2  # of what is made
# Registers a thread of STATE, SCORE and the rest, by number of state warpgroups. In all 65536: two state warpgroups leave little to the others.
REGISTERS = {1: (232, 152, 40), 2: (192, 96, 32)}


@tilelang.jit(target=HOPPER, pass_configs=MANUAL_ROLES)
def build_forward(v_tile: int, dtype: str, state_dtype: str, output_h: bool):
    """The kernel for q, k and v in `dtype` and initial states in `state_dtype`; v_tile is 64 or 128."""
    groups = v_tile // TILE
    slices = HEAD_DIM // v_tile
    state_registers, score_registers, service_registers = REGISTERS[groups]
    STATE_END = groups * WARP_GROUP
    SCORE_END = STATE_END + WARP_GROUP
    LOAD_END = SCORE_END + WARP
    STORE_END = LOAD_END + WARP
    THREADS = SCORE_END + WARP_GROUP  # registers are handed out to whole warpgroups

    tokens, slots, hk, hv, sequences, rows, offsets, h_chunks = (
        T.dynamic(x) for x in ("tokens", "slots", "hk", "hv", "sequences", "rows", "offsets", "h_chunks")
    )
    q0, q1, k0, k1, v0, v1 = (T.dynamic(x) for x in ("q0", "q1", "k0", "k1", "v0", "v1"))
    i0, i1, i2, i3, f0, f1, f2, f3, h0, h1, h2, h3, s0, s1, s2, s3 = (T.dynamic(f"{x}{d}") for x in "ifhs" for d in range(4))

    @T.macro
    def release_p(x, i):
        """This warp has read P of chunk i. One lane arrives for all, after all: an arrival orders the reads of its own thread alone."""
        T.sync_warp()
        if x.tx % WARP == 0:
            T.barrier_arrive(x.p_free[i % OUT_STAGES])

    @T.macro
    def read_state(S, x, w):
        if x.index > 0:
            for v, k in T.Parallel(TILE, HEAD_DIM):
                S[v, k] = x.states[x.segment * x.parts - 1, x.head, x.first_column + w * TILE + v, k]
        elif x.has_initial_state != 0:
            for v, k in T.Parallel(TILE, HEAD_DIM):
                S[v, k] = T.cast(x.initial_state[x.sequence, x.head, k, x.first_column + w * TILE + v], "float32")
        else:
            T.clear(S)
        if state_dtype != "float32":  # or ptxas keeps the narrow values, widens them in the loop, and serializes its products
            T.warpgroup_fence_operand(S, num_regs=TILE * HEAD_DIM // WARP_GROUP)

    @T.macro
    def write_state(S, x, w):
        if x.ended >= 0:
            for v, k in T.Parallel(TILE, HEAD_DIM):
                x.final_state[x.ended, x.head, k, x.first_column + w * TILE + v] = S[v, k]

    @T.macro
    def round_state(S, S_in, i, x, w):
        """The state as an operand; also to h, where it is asked for and chunk i is one."""
        T.copy(S, S_in)
        if output_h:
            if i < x.chunks:
                T.call_extern(
                    "handle", "flashqla::store_state", T.address_of(x.h[x.first_chunk + i, x.head, 0, x.first_column + w * TILE]), h2, h3, S_in.data,
                )

    @T.macro
    def load_factor(factor, row, s, x):
        T.copy(x.record_smem[s, row, :], factor)

    @T.macro
    def prediction_error(W, V, X, decay):
        """W = V - decay X, X = K S."""
        for v, t in T.Parallel(TILE, CHUNK):
            W[v, t] = V[v, t] - X[v, t] * decay[t]

    @T.macro
    def scale_columns(to, tokens_of, factor):
        for v, t in T.Parallel(TILE, CHUNK):
            to[v, t] = tokens_of[v, t] * factor[t]

    @T.macro
    def decay_state(S, s, x):
        for v, k in T.Parallel(TILE, HEAD_DIM):
            S[v, k] = S[v, k] * x.record_smem[s, CHUNK_DECAY, 0]

    @T.macro
    def load_v(V, s, x, w):
        T.call_extern("handle", "flashqla::load_transposed", V.data, T.access_ptr(x.v_smem[s, w, 0, 0], "r"))

    @T.macro
    def put_o(O, i, x, w):
        O_out = T.alloc_fragment((TILE, CHUNK), dtype)
        T.copy(O, O_out)
        # Said to be read: a write would make TileLang put a fence before the next product. The one that is needed stands in STORE.
        T.call_extern("handle", "flashqla::store_transposed", T.access_ptr(x.o_smem[i % OUT_STAGES, w, 0, 0], "r"), O_out.data)

    @T.macro
    def publish_o(i, x):
        T.barrier_arrive(x.o_ready[i % OUT_STAGES])

    @T.macro
    def enter(i, leaving, s, last, turn, S, S_in, X, O, V, x, w):
        """Start chunk i, in stage s, with X = K S; while that runs, finish the output of the chunk before, in stage `last`, whose P U is under
        way when `leaving`. `turn`: parity of the times that stage s was filled.

        Nothing is under way afterwards. That is where the loop turns: wgmma across its back edge would be serialized.
        """
        if leaving:
            T.wait_wgmma(1)  # the state; P U goes on
        round_state(S, S_in, i, x, w)
        T.barrier_wait(x.in_ready[s], turn)
        T.wgmma_gemm(S_in, x.k_smem[s, :, :], X, transpose_B=True, clear_accum=True)
        if leaving:
            T.barrier_wait(x.o_free[(i - 1) % OUT_STAGES], (((i - 1) // OUT_STAGES) & 1) ^ 1)
            T.wait_wgmma(1)  # P U; K S goes on
            T.barrier_arrive(x.in_free[last])
            release_p(x, i - 1)
            put_o(O, i - 1, x, w)
            publish_o(i - 1, x)
        load_v(V, s, x, w)
        T.wait_wgmma(0)

    @T.macro
    def state_alone(x, w):
        """One state warpgroup: Q S and P U run beside conversions, off the path from state to state.

        It enters one chunk more than there is, on whatever stands in shared memory, to move the last output out.
        """
        S = T.alloc_fragment((TILE, HEAD_DIM), "float32")
        S_in = T.alloc_fragment((TILE, HEAD_DIM), dtype)
        X = T.alloc_fragment((TILE, CHUNK), "float32")
        O = T.alloc_fragment((TILE, CHUNK), "float32")
        V = T.alloc_fragment((TILE, CHUNK), dtype)
        W = T.alloc_fragment((TILE, CHUNK), dtype)
        U = T.alloc_fragment((TILE, CHUNK), dtype)
        decay = T.alloc_fragment((CHUNK,), "float32")
        out_scale = T.alloc_fragment((CHUNK,), "float32")
        key_decay = T.alloc_fragment((CHUNK,), "float32")
        s = T.alloc_var("int32")  # a stage, and its parity; the next one
        turn = T.alloc_var("int32")
        last = T.alloc_var("int32")
        s = 0
        turn = 0
        read_state(S, x, w)
        if x.chunks > 0:
            enter(0, False, s, s, turn, S, S_in, X, O, V, x, w)
            for i in T.unroll(x.chunks, unroll_factor=1):
                load_factor(decay, DECAY, s, x)
                prediction_error(W, V, X, decay)
                T.wgmma_gemm(W, x.a_smem[s, :, :], X, transpose_B=True, clear_accum=True)
                T.wgmma_gemm(S_in, x.q_smem[s, :, :], O, transpose_B=True, clear_accum=True)
                load_factor(key_decay, KEY_DECAY, s, x)
                decay_state(S, s, x)
                T.wait_wgmma(1)  # U; Q S goes on
                T.copy(X, U)
                scale_columns(W, X, key_decay)
                T.wgmma_gemm(W, x.k_smem[s, :, :], S)
                load_factor(out_scale, OUT_SCALE, s, x)
                T.barrier_wait(x.p_ready[i % OUT_STAGES], (i // OUT_STAGES) & 1)
                T.wait_wgmma(1)  # Q S; the update goes on
                scale_columns(O, O, out_scale)
                T.wgmma_gemm(U, x.p_smem[i % OUT_STAGES, :, :], O, transpose_B=True)
                last = s
                s = T.if_then_else(last == STAGES - 1, 0, last + 1)
                turn = T.if_then_else(last == STAGES - 1, turn ^ 1, turn)
                enter(i + 1, True, s, last, turn, S, S_in, X, O, V, x, w)
        write_state(S, x, w)

    @T.macro
    def state_of_two(x, w):
        """One of two state warpgroups, in 192 registers. While one converts, the other multiplies.

        Whatever can be waited for, read or written beside a product is: barriers and the last output beside K S and Q S.
        """
        S = T.alloc_fragment((TILE, HEAD_DIM), "float32")
        S_in = T.alloc_fragment((TILE, HEAD_DIM), dtype)
        X = T.alloc_fragment((TILE, CHUNK), "float32")
        O = T.alloc_fragment((TILE, CHUNK), "float32")
        V = T.alloc_fragment((TILE, CHUNK), dtype)
        W = T.alloc_fragment((TILE, CHUNK), dtype)
        U = T.alloc_fragment((TILE, CHUNK), dtype)
        decay = T.alloc_fragment((CHUNK,), "float32")
        out_scale = T.alloc_fragment((CHUNK,), "float32")
        key_decay = T.alloc_fragment((CHUNK,), "float32")
        s = T.alloc_var("int32")  # a stage, and the parity of the times it was filled
        turn = T.alloc_var("int32")
        last = T.alloc_var("int32")
        s = 0
        turn = 0
        read_state(S, x, w)
        if x.chunks > 0:
            T.barrier_wait(x.in_ready[0], 0)
        for i in T.unroll(x.chunks, unroll_factor=1):
            round_state(S, S_in, i, x, w)
            T.wgmma_gemm(S_in, x.k_smem[s, :, :], X, transpose_B=True, clear_accum=True)
            T.wgmma_gemm(S_in, x.q_smem[s, :, :], O, transpose_B=True, clear_accum=True)
            if i > 0:
                publish_o(i - 1, x)
            load_v(V, s, x, w)
            T.barrier_wait(x.p_ready[i % OUT_STAGES], (i // OUT_STAGES) & 1)
            T.barrier_wait(x.o_free[i % OUT_STAGES], ((i // OUT_STAGES) & 1) ^ 1)
            T.wait_wgmma(0)
            load_factor(decay, DECAY, s, x)
            load_factor(out_scale, OUT_SCALE, s, x)
            prediction_error(W, V, X, decay)
            T.wgmma_gemm(W, x.a_smem[s, :, :], X, transpose_B=True, clear_accum=True)
            scale_columns(O, O, out_scale)
            T.wgmma_gemm(W, x.p_smem[i % OUT_STAGES, :, :], O, transpose_B=True)
            load_factor(key_decay, KEY_DECAY, s, x)
            decay_state(S, s, x)
            T.wait_wgmma(1)  # U; Z W goes on
            scale_columns(U, X, key_decay)
            T.wgmma_gemm(U, x.k_smem[s, :, :], S)
            last = s
            s = T.if_then_else(last == STAGES - 1, 0, last + 1)
            turn = T.if_then_else(last == STAGES - 1, turn ^ 1, turn)
            T.wait_wgmma(1)  # Z W; the update goes on
            release_p(x, i)
            put_o(O, i, x, w)
            T.barrier_wait(x.in_ready[s], turn)  # after the last chunk LOAD says so for nothing
            T.wait_wgmma(0)
            T.barrier_arrive(x.in_free[last])
        if x.chunks > 0:
            publish_o(x.chunks - 1, x)
        write_state(S, x, w)

    @T.macro
    def score(x, scale):
        P = T.alloc_fragment((CHUNK, CHUNK), "float32")
        R = T.alloc_fragment((CHUNK, CHUNK), "float32")
        P_in = T.alloc_fragment((CHUNK, CHUNK), dtype)
        P_out = T.alloc_fragment((CHUNK, CHUNK), dtype)
        row = T.alloc_fragment((CHUNK,), "float32")
        col = T.alloc_fragment((CHUNK,), "float32")
        s = T.alloc_var("int32")
        turn = T.alloc_var("int32")
        s = 0
        turn = 0
        for i in T.unroll(x.chunks, unroll_factor=1):
            T.barrier_wait(x.in_ready[s], turn)
            T.wgmma_gemm(x.q_smem[s, :, :], x.k_smem[s, :, :], P, transpose_B=True, clear_accum=True)
            load_factor(row, ROW_LOG, s, x)
            load_factor(col, COL_LOG, s, x)
            for t, u in T.Parallel(CHUNK, CHUNK):  # above the diagonal the exponential may overflow
                R[t, u] = T.if_then_else(u <= t, T.exp2(row[t] - col[u]), 0.0) * scale
            T.wait_wgmma(0)
            if groups == 2:
                for t, u in T.Parallel(CHUNK, CHUNK):
                    P_in[t, u] = P[t, u] * R[t, u]
                T.wgmma_gemm(P_in, x.a_smem[s, :, :], P, clear_accum=True)
                T.wait_wgmma(0)
                T.copy(P, P_out)
            else:
                for t, u in T.Parallel(CHUNK, CHUNK):
                    P_out[t, u] = P[t, u] * R[t, u]
            T.barrier_arrive(x.in_free[s])
            T.barrier_wait(x.p_free[i % OUT_STAGES], ((i // OUT_STAGES) & 1) ^ 1)
            T.call_extern("handle", "flashqla::store_tile", T.address_of(x.p_smem[i % OUT_STAGES, 0, 0]), P_out.data)
            T.fence_proxy_async()
            T.barrier_arrive(x.p_ready[i % OUT_STAGES])
            turn = T.if_then_else(s == STAGES - 1, turn ^ 1, turn)
            s = T.if_then_else(s == STAGES - 1, 0, s + 1)

    @T.macro
    def load_tokens(i, x, ready, stage):
        """Of chunk i what was given."""
        s = i % STAGES
        first = x.bos + i * CHUNK
        T.tma_copy(x.k[first:first + CHUNK, x.k_head, :], x.k_smem[s, :, :], barrier=ready[stage])
        T.tma_copy(x.q[first:first + CHUNK, x.k_head, :], x.q_smem[s, :, :], barrier=ready[stage])
        for w in T.unroll(groups):
            column = x.first_column + w * TILE
            T.tma_copy(x.v[first:first + CHUNK, x.head, column:column + TILE], x.v_smem[s, w, :, :], barrier=ready[stage])

    @T.macro
    def load_made(i, x, ready, stage):
        """Of chunk i what the inverse kernel wrote."""
        s = i % STAGES
        first = x.bos + i * CHUNK
        T.tma_copy(x.records[x.slot + i, x.head, :, :], x.record_smem[s, :, :], barrier=ready[stage])
        T.tma_copy(x.A[first:first + CHUNK, x.head, :], x.a_smem[s, :, :], barrier=ready[stage])

    @T.macro
    def load(x):
        for i in T.unroll(x.early, unroll_factor=1):
            load_made(i, x, x.in_ready, i)
            T.barrier_arrive(x.in_ready[i])
        for n in T.unroll(x.chunks - x.early, unroll_factor=1):
            i = x.early + n
            s = i % STAGES
            rows = x.length - i * CHUNK
            T.barrier_wait(x.in_free[s], ((i // STAGES) & 1) ^ 1)
            if rows >= CHUNK:
                load_tokens(i, x, x.in_ready, s)
                load_made(i, x, x.in_ready, s)
                T.barrier_arrive(x.in_ready[s])
            else:  # the rows past the end belong to another sequence, or to nobody: zeros leave state and output alone
                load_tokens(i, x, x.tail_ready, 0)
                load_made(i, x, x.tail_ready, 0)
                T.barrier_arrive(x.tail_ready[0])
                T.barrier_wait(x.tail_ready[0], 0)
                for w in T.unroll(HEAD_DIM // TILE):
                    T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.k_smem[s, 0, w * TILE]), rows)
                for w in T.unroll(groups):
                    T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.v_smem[s, w, 0, 0]), rows)
                T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.a_smem[s, 0, 0]), rows)
                T.fence_proxy_async()
                T.barrier_arrive(x.in_ready[s])
        # STATE waits for one chunk more than there is.
        T.barrier_wait(x.in_free[x.chunks % STAGES], ((x.chunks // STAGES) & 1) ^ 1)
        T.barrier_arrive(x.in_ready[x.chunks % STAGES])

    @T.macro
    def store(x, o):
        for i in T.unroll(x.chunks, unroll_factor=1):
            p = i % OUT_STAGES
            first = x.bos + i * CHUNK
            T.barrier_wait(x.o_ready[p], (i // OUT_STAGES) & 1)
            if i * CHUNK + CHUNK <= x.length:
                T.fence_proxy_async()  # here, for all who wrote: the state warpgroups have no time for it
                for w in T.unroll(groups):
                    column = x.first_column + w * TILE
                    T.tma_copy(x.o_smem[p, w, :, :], o[first:first + CHUNK, x.head, column:column + TILE])
                T.tma_store_wait(0, read=True)
            else:
                for w in T.unroll(groups):
                    for b in T.unroll(CHUNK // 4, unroll_factor=1):
                        for t, v in T.Parallel(4, TILE):
                            if i * CHUNK + b * 4 + t < x.length:
                                o[first + b * 4 + t, x.head, x.first_column + w * TILE + v] = x.o_smem[p, w, b * 4 + t, v]
            T.barrier_arrive(x.o_free[p])
        T.tma_store_wait(0, read=False)

    @T.prim_func
    def gated_delta_forward(
        q: T.StridedTensor((tokens, hk, HEAD_DIM), (q0, q1, 1), dtype),
        k: T.StridedTensor((tokens, hk, HEAD_DIM), (k0, k1, 1), dtype),
        v: T.StridedTensor((tokens, hv, HEAD_DIM), (v0, v1, 1), dtype),
        A: T.Tensor((tokens, hv, CHUNK), dtype),
        records: T.Tensor((slots, hv, RECORD, CHUNK), "float32"),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        initial_state: T.StridedTensor((sequences, hv, HEAD_DIM, HEAD_DIM), (i0, i1, i2, i3), state_dtype),
        o: T.Tensor((tokens, hv, HEAD_DIM), dtype),
        final_state: T.StridedTensor((sequences, hv, HEAD_DIM, HEAD_DIM), (f0, f1, f2, f3), "float32"),
        h: T.StridedTensor((h_chunks, hv, HEAD_DIM, HEAD_DIM), (h0, h1, h2, h3), dtype),
        states: T.StridedTensor((rows, hv, HEAD_DIM, HEAD_DIM), (s0, s1, s2, s3), "float32"),
        scale: T.float32,
        group: T.int32,
        offset_step: T.int32,
        segment_chunks: T.int32,
        parts: T.int32,
        has_initial_state: T.int32,
        has_final_state: T.int32,
    ):
        # Neighbouring CTAs take the heads of one segment, which read the same q and k.
        with T.Kernel(hv * slices, T.truncdiv(rows, parts), threads=THREADS) as (bx, segment):
            T.import_source(cuda("tiles", "segments"))
            q_smem = T.alloc_shared((STAGES, CHUNK, HEAD_DIM), dtype)
            k_smem = T.alloc_shared((STAGES, CHUNK, HEAD_DIM), dtype)
            v_smem = T.alloc_shared((STAGES, groups, CHUNK, TILE), dtype)
            a_smem = T.alloc_shared((STAGES, CHUNK, CHUNK), dtype)
            record_smem = T.alloc_shared((STAGES, RECORD, CHUNK), "float32")
            p_smem = T.alloc_shared((OUT_STAGES, CHUNK, CHUNK), dtype)
            o_smem = T.alloc_shared((OUT_STAGES, groups, CHUNK, TILE), dtype)
            T.annotate_layout({v_smem: make_swizzled_layout(v_smem), o_smem: make_swizzled_layout(o_smem)})
            in_ready = T.alloc_barrier([WARP] * STAGES)  # LOAD -> STATE, SCORE
            # Every thread arrives that has read: racecheck does not see what a warp barrier orders.
            in_free = T.alloc_barrier([SCORE_END] * STAGES)  # STATE, SCORE -> LOAD
            p_ready = T.alloc_barrier([WARP_GROUP] * OUT_STAGES)  # SCORE -> STATE
            p_free = T.alloc_barrier([STATE_END // WARP] * OUT_STAGES)  # STATE -> SCORE
            o_ready = T.alloc_barrier([STATE_END] * OUT_STAGES)  # STATE -> STORE
            o_free = T.alloc_barrier([WARP] * OUT_STAGES)  # STORE -> STATE
            tail_ready = T.alloc_barrier([WARP])  # TMA -> LOAD

            tx = T.get_thread_binding()
            head = bx // slices
            k_head: T.int32 = T.truncdiv(head, group)
            found = T.alloc_local((FOUND,), "int32")
            find_segment(found, cu_seqlens, offset_step, sequences, tokens, segment_chunks, segment)
            sequence, index, first, length = (found[n] for n in (SEQUENCE, INDEX, FIRST, LENGTH))
            first_chunk = T.alloc_var("int32")  # of this segment in h
            first_chunk = index * segment_chunks
            if output_h:
                for n in T.serial(sequence):
                    first_chunk += T.ceildiv(cu_seqlens[(n + 1) * offset_step] - cu_seqlens[n * offset_step], CHUNK)
            ended = T.alloc_var("int32")  # the sequence whose final state is due, or -1
            ended = -1
            # Slots past the last segment of a sequence have neither an end nor chunks.
            if T.And(has_final_state != 0, T.And(found[BEHIND] == 0, T.Or(length > 0, index == 0))):
                ended = sequence
            early = T.alloc_var("int32")  # chunks whose tokens may be loaded at once
            early = T.min(T.truncdiv(length, CHUNK), STAGES)
            x = SimpleNamespace(
                q=q, k=k, v=v, A=A, records=records, initial_state=initial_state, final_state=final_state, h=h, states=states,
                q_smem=q_smem, k_smem=k_smem, record_smem=record_smem, v_smem=v_smem, a_smem=a_smem, p_smem=p_smem, o_smem=o_smem,
                in_ready=in_ready, in_free=in_free, p_ready=p_ready, p_free=p_free, o_ready=o_ready, o_free=o_free, tail_ready=tail_ready,
                tx=tx, sequence=sequence, segment=segment, parts=parts, index=index, head=head, k_head=k_head, first_column=(bx % slices) * v_tile,
                slot=found[SLOT], bos=first, length=length, chunks=T.ceildiv(length, CHUNK), first_chunk=first_chunk,
                ended=ended, has_initial_state=has_initial_state, early=early,
            )
            if tx >= SCORE_END:
                if tx < LOAD_END:  # what no kernel before writes
                    for i in T.unroll(early, unroll_factor=1):
                        load_tokens(i, x, in_ready, i)
            T.pdl_sync()  # until what the kernels before wrote is there
            if tx < WARP_GROUP:
                T.inc_max_nreg(state_registers)
                if groups == 1:
                    state_alone(x, 0)
                else:
                    state_of_two(x, 0)
            elif tx < STATE_END:
                T.inc_max_nreg(state_registers)
                state_of_two(x, 1)
            elif tx < SCORE_END:
                T.dec_max_nreg(score_registers)
                score(x, scale)
            else:
                T.dec_max_nreg(service_registers)
                if tx < LOAD_END:
                    load(x)
                elif tx < STORE_END:
                    store(x, o)

    return gated_delta_forward
