"""The recurrence over the chunks of a sequence, with the outputs: one pass, the state in registers from first chunk to last.

    W  = V - (decay K) S                 U = A W             P = scale * lower(Q K^T) * R
    O  = scale decay Q S + P U           S <- decay_C S + (decay_C / decay K)^T U

Shapes  q, k [T, hk, 128], v, o [T, hv, 128] bf16 or fp16; A [T, hv, 64] and records [slots, hv, 6, 64] fp32 of the inverse kernel;
        initial_state [N, hv, K, V] fp32, bf16 or fp16, final_state the same in fp32, any strides; on demand h [chunks, hv, K, V],
        the state that enters each chunk; of a split sequence states [segments, hv, V, K] fp32, at the end of each segment
Grid    a CTA per segment (of segment_chunks chunks; 0: a whole sequence), value head and v_tile columns of V
Cost    per chunk and value head 9 products of 64x64x128 (P once per CTA) and 48 KB of HBM
Source  Gated Delta Networks, arXiv 2412.06464, chunkwise form

Everything is transposed: a state warpgroup keeps S^T [64 columns of V, 128] in fp32 registers and feeds it, W^T and U^T to wgmma as the
operand from registers; only K, Q, A and P pass through shared memory.

    STATE  one or two warpgroups, 64 columns of V each           LOAD   one warp: TMA in, zeros past the end of a sequence
    SCORE  one warpgroup: P, or Z                               STORE  one warp: o out

Two state warpgroups share a CTA whose SCORE warpgroup has time left: it makes Z = P A, and the output P U = Z W waits for U no more.

A barrier is named for what it says is ready or free: in (q, k, v, A and record), p (P or Z), o.

Where every value head has its own keys and there is a CTA for every SM, this kernel does the work of the inverse kernel too: apart, both would
wait for HBM, and keys and A would pass it twice. It goes over its chunks in spans of eight, and over a span in two phases: side by side, each is
slowed down by the other.

    INVERT  LOAD brings keys, SCORE multiplies them, and each of the eight warps of STATE inverts one chunk, with its state waiting in registers:
            as inverse.py does, but in the shared memory of q, v, A, P and o. A and record go to a place of the CTA in L2.
    WALK    the recurrence, as above, over the chunks of the span, A and record from there

LOAD has the keys of the next span on their way to L2 during WALK, and q and v of this one during INVERT, so that HBM is always busy. Nothing is
under way from one phase to the other but keys: a warp inverts when the last output has been stored, and WALK begins when inverse_ready says that
all have. BLANK, one more warp, writes zeros into the rows of o past the last sequence.
"""

from types import SimpleNamespace

import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from flashqla.ops.kernels.common import (
    CHUNK,
    CHUNK_DECAY,
    COL_LOG,
    CUDA_TYPES,
    DECAY,
    HEAD_DIM,
    HOPPER,
    KEY_DECAY,
    MANUAL_ROLES,
    OUT_SCALE,
    PIECE,
    RECORD,
    ROW_LOG,
    TILE,
    WARP,
    WARP_GROUP,
    cuda,
    tiles_of,
)
from flashqla.ops.plan import SPAN

STAGES = 3  # of what is loaded; with two, loads are late, four do not fit
OUT_STAGES = 2  # of what is made
# Registers a thread of STATE, SCORE and the rest, by number of state warpgroups. In all 65536: two state warpgroups leave little to the others.
REGISTERS = {1: (232, 152, 40), 2: (192, 96, 32)}
AHEAD = 4  # chunks whose q and v are on their way to L2 while a span is inverted; HBM brings no more in that time


@tilelang.jit(target=HOPPER, pass_configs=MANUAL_ROLES)
def build_forward(v_tile: int, dtype: str, state_dtype: str, output_h: bool, g_dtype: str = "", beta_dtype: str = "", l2norm: bool = False):
    """The kernel for q, k and v in `dtype` and initial states in `state_dtype`; v_tile is 64 or 128.

    g_dtype: of gates, if this kernel is to invert as well. Then v_tile is 128, every value head has its own keys, sequences are whole, and A and
    records have SPAN places for each CTA. beta_dtype, l2norm, and of the arguments g, beta and has_gate are for that alone.
    """
    inverts = g_dtype != ""
    groups = v_tile // TILE
    slices = HEAD_DIM // v_tile
    state_registers, score_registers, service_registers = REGISTERS[groups]
    STATE_END = groups * WARP_GROUP
    SCORE_END = STATE_END + WARP_GROUP
    LOAD_END = SCORE_END + WARP
    STORE_END = LOAD_END + WARP
    BLANK_END = STORE_END + WARP
    THREADS = SCORE_END + WARP_GROUP  # registers are handed out to whole warpgroups
    element = CUDA_TYPES[dtype]
    factors = f"flashqla::chunk_factors<{str(l2norm).lower()}, false, {CUDA_TYPES.get(g_dtype)}, {CUDA_TYPES.get(beta_dtype)}>"
    once = "evict_first" if inverts else None  # of what must not push A and keys of a span out of L2

    tokens, rows_of_A, slots, hk, hv, sequences, segments, offsets, h_chunks = (
        T.dynamic(x) for x in ("tokens", "rows_of_A", "slots", "hk", "hv", "sequences", "segments", "offsets", "h_chunks")
    )
    q0, q1, k0, k1, v0, v1, g0, g1, b0, b1 = (T.dynamic(f"{x}{d}") for x in "qkvgb" for d in range(2))
    i0, i1, i2, i3, f0, f1, f2, f3, h0, h1, h2, h3, s0, s1, s2, s3 = (T.dynamic(f"{x}{d}") for x in "ifhs" for d in range(4))

    @T.macro
    def release_p(x, i):
        """This warp has read P of chunk i. One lane arrives for all, after all: an arrival orders the reads of its own thread alone."""
        T.sync_warp()
        if x.tx % WARP == 0:
            T.barrier_arrive(x.p_free[i % OUT_STAGES])

    @T.macro
    def read_state(S, x, w):
        if not inverts and x.index > 0:
            for v, k in T.Parallel(TILE, HEAD_DIM):
                S[v, k] = x.states[x.segment - 1, x.head, x.first_column + w * TILE + v, k]
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
            T.call_extern(
                "handle", "flashqla::store_state", T.address_of(x.final_state[x.ended, x.head, 0, x.first_column + w * TILE]), f2, f3, S.data
            )

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
        # Said to be read: a write would make TileLang put a fence before the next product. The one that is needed stands in publish_o.
        T.call_extern("handle", "flashqla::store_transposed", T.access_ptr(x.o_smem[i % OUT_STAGES, w, 0, 0], "r"), O_out.data)

    @T.macro
    def publish_o(i, x):
        T.fence_proxy_async()
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

    def work_of(x, what, j):
        """Where in shared memory warp j of STATE has its product, its factors, or norms; see spans.cuh."""
        return T.call_extern("handle", f"flashqla::{what}_of", T.address_of(x.q_smem[0, 0, 0]), T.address_of(x.v_smem[0, 0, 0, 0]), j)

    def tile_of(x, w):
        """Where this warp has its tile: of the first four, where o was; of the others, where A and P were."""
        first, last = (x.o_smem[0, 0, 0, 0], x.o_smem[1, 1, 0, 0]) if w == 0 else (x.a_smem[0, 0, 0], x.p_smem[0, 0, 0])
        return T.call_extern("handle", "flashqla::tile_of", T.address_of(first), T.address_of(last))

    @T.macro
    def invert(x, first, w):
        """A and record of one chunk of a span by each warp of STATE."""
        gates = T.alloc_local((2,), g_dtype)
        betas = T.alloc_local((2,), beta_dtype)
        warp: T.int32 = x.tx // WARP
        row: T.int32 = x.bos + (first + warp) * CHUNK
        rows: T.int32 = T.min(x.length - (first + warp) * CHUNK, CHUNK)
        place: T.int32 = x.slot + warp
        if rows > 0:
            T.call_extern(
                "handle", "flashqla::two_tokens", gates.data, T.address_of(x.g[0, 0]), row, g0, x.head, g1,
                T.if_then_else(x.has_gate != 0, rows, 0),
            )
            T.call_extern("handle", "flashqla::two_tokens", betas.data, T.address_of(x.beta[0, 0]), row, b0, x.head, b1, rows)
            # Until the last output has been stored: then all that was loaded has been read, too.
            T.barrier_wait(x.o_free[(first + OUT_STAGES - 1) % OUT_STAGES], (((first + OUT_STAGES - 1) // OUT_STAGES) & 1) ^ 1)
            if l2norm:
                norms = f"flashqla::inverse_norms_by_warp<{element}>"
                T.call_extern("handle", norms, T.address_of(x.k[row, x.k_head, 0]), k0, work_of(x, "key_norms", warp), rows)
                T.call_extern("handle", norms, T.address_of(x.q[row, x.k_head, 0]), q0, work_of(x, "query_norms", warp), rows)
                T.sync_warp()
            T.call_extern(
                "handle", factors, gates.data, betas.data, work_of(x, "query_norms", warp), work_of(x, "key_norms", warp),
                work_of(x, "vectors", warp), T.address_of(x.records[place, x.head, 0, 0]), T.address_of(x.records[0, 0, 0, 0]), 0, rows,
                x.scale, 0,
            )
            T.sync_warp()  # the factors are there
            T.barrier_wait(x.product_ready[warp], (first // SPAN) & 1)
            T.call_extern(
                "handle", f"flashqla::gated_inverse<{element}>", work_of(x, "product", warp), work_of(x, "vectors", warp), tile_of(x, w), 1,
            )
            T.fence_proxy_async()
            T.sync_warp()
            T.call_extern("handle", "flashqla::send_tile", tiles_of(x.A), tile_of(x, w), place * CHUNK, x.head)
            T.tma_store_wait(0, read=False)
        # What was written here, in shared memory and in L2, is for copy engines to replace or to read.
        T.call_extern("handle", "flashqla::fence_all_proxies")
        T.barrier_arrive(x.inverse_ready[0])

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
        if not inverts and x.chunks > 0:
            T.barrier_wait(x.in_ready[0], 0)
        for i in T.unroll(x.chunks, unroll_factor=1):
            if inverts and i % SPAN == 0:
                if i > 0:
                    publish_o(i - 1, x)
                invert(x, i, w)
                T.barrier_wait(x.in_ready[s], turn)
            round_state(S, S_in, i, x, w)
            T.wgmma_gemm(S_in, x.k_smem[s, :, :], X, transpose_B=True, clear_accum=True)
            T.wgmma_gemm(S_in, x.q_smem[s, :, :], O, transpose_B=True, clear_accum=True)
            if (i % SPAN if inverts else i) > 0:
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
            if inverts:  # the first chunk of a span is waited for where that begins; here the other parity lets pass
                T.barrier_wait(x.in_ready[s], T.if_then_else((i + 1) % SPAN == 0, turn ^ 1, turn))
            else:
                T.barrier_wait(x.in_ready[s], turn)  # after the last chunk LOAD says so for nothing
            T.wait_wgmma(0)
            T.barrier_arrive(x.in_free[last])
        if x.chunks > 0:
            publish_o(x.chunks - 1, x)
        write_state(S, x, w)

    @T.macro
    def put_product(product, j, i, x):
        T.barrier_arrive(x.keys_free[i % STAGES])
        T.call_extern("handle", "flashqla::store_product", product.data, work_of(x, "product", j))
        T.barrier_arrive(x.product_ready[j])

    @T.macro
    def multiply_keys(one, other, first, x):
        """K K^T of the chunks of a span, each to the place of the warp that will invert it.

        Two at a time, so that one is stored while the other is made. If one is left, the other is of whatever stands there, and goes nowhere.
        """
        # Until the last chunk has been read, and so all before it.
        T.barrier_wait(x.in_free[(first + STAGES - 1) % STAGES], (((first + STAGES - 1) // STAGES) & 1) ^ 1)
        for pair in T.unroll(T.ceildiv(T.min(x.chunks - first, SPAN), 2), unroll_factor=1):
            j = 2 * pair
            i = first + j
            T.barrier_wait(x.keys_ready[i % STAGES], (i // STAGES) & 1)
            T.wgmma_gemm(x.k_smem[i % STAGES, :, :], x.k_smem[i % STAGES, :, :], one, transpose_B=True, clear_accum=True)
            if i + 1 < x.chunks:
                T.barrier_wait(x.keys_ready[(i + 1) % STAGES], ((i + 1) // STAGES) & 1)
            T.wgmma_gemm(x.k_smem[(i + 1) % STAGES, :, :], x.k_smem[(i + 1) % STAGES, :, :], other, transpose_B=True, clear_accum=True)
            T.wait_wgmma(1)
            put_product(one, j, i, x)
            T.wait_wgmma(0)
            if i + 1 < x.chunks:
                put_product(other, j + 1, i + 1, x)

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
            if inverts and i % SPAN == 0:
                multiply_keys(P, R, i, x)
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
    def load_chunk(i, x, ready, stage):
        s = i % STAGES
        first = x.bos + i * CHUNK
        place = x.slot + i % SPAN if inverts else x.slot + i  # of A and record
        row = place * CHUNK if inverts else first
        T.tma_copy(x.k[first:first + CHUNK, x.k_head, :], x.k_smem[s, :, :], barrier=ready[stage], eviction_policy=once)
        T.tma_copy(x.q[first:first + CHUNK, x.k_head, :], x.q_smem[s, :, :], barrier=ready[stage], eviction_policy=once)
        T.tma_copy(x.records[place, x.head, :, :], x.record_smem[s, :, :], barrier=ready[stage])
        T.tma_copy(x.A[row:row + CHUNK, x.head, :], x.a_smem[s, :, :], barrier=ready[stage])
        for w in T.unroll(groups):
            column = x.first_column + w * TILE
            T.tma_copy(x.v[first:first + CHUNK, x.head, column:column + TILE], x.v_smem[s, w, :, :], barrier=ready[stage], eviction_policy=once)

    @T.macro
    def load_keys(first, x):
        """The keys of a span whose first chunk is `first`, each to the stage that its chunk will have."""
        for j in T.unroll(T.min(x.chunks - first, SPAN), unroll_factor=1):
            i = first + j
            s = i % STAGES
            rows = x.length - i * CHUNK
            T.barrier_wait(x.keys_free[s], ((i // STAGES) & 1) ^ 1)
            if j < STAGES:  # from a chunk of the span before
                T.barrier_wait(x.in_free[s], ((i // STAGES) & 1) ^ 1)
            row = x.bos + i * CHUNK
            if rows >= CHUNK:
                T.tma_copy(x.k[row:row + CHUNK, x.k_head, :], x.k_smem[s, :, :], barrier=x.keys_ready[s])
            else:
                T.tma_copy(x.k[row:row + CHUNK, x.k_head, :], x.k_smem[s, :, :], barrier=x.tail_ready[0])
                T.barrier_arrive(x.tail_ready[0])
                T.barrier_wait(x.tail_ready[0], 0)
                for w in T.unroll(HEAD_DIM // TILE):
                    T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.k_smem[s, 0, w * TILE]), rows)
                T.fence_proxy_async()
            T.barrier_arrive(x.keys_ready[s])
            if j < AHEAD:
                T.call_extern("handle", "flashqla::prefetch_tiles", tiles_of(x.q), row, x.k_head)
                T.call_extern("handle", "flashqla::prefetch_tiles", tiles_of(x.v), row, x.head)

    @T.macro
    def load(x):
        for i in T.unroll(x.chunks, unroll_factor=1):
            s = i % STAGES
            rows = x.length - i * CHUNK
            if inverts:
                if i % SPAN == 0:
                    load_keys(i, x)
                    T.barrier_wait(x.inverse_ready[0], (i // SPAN) & 1)
                if i + SPAN < x.chunks:
                    T.call_extern("handle", "flashqla::prefetch_tiles", tiles_of(x.k), x.bos + (i + SPAN) * CHUNK, x.k_head)
            T.barrier_wait(x.in_free[s], ((i // STAGES) & 1) ^ 1)
            if rows >= CHUNK:
                load_chunk(i, x, x.in_ready, s)
                T.barrier_arrive(x.in_ready[s])
            else:  # the rows past the end belong to another sequence, or to nobody: zeros leave state and output alone
                load_chunk(i, x, x.tail_ready, 0)
                T.barrier_arrive(x.tail_ready[0])
                T.barrier_wait(x.tail_ready[0], int(inverts))  # the second time there is a tail, if there were keys of it
                for w in T.unroll(HEAD_DIM // TILE):
                    T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.k_smem[s, 0, w * TILE]), rows)
                for w in T.unroll(groups):
                    T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.v_smem[s, w, 0, 0]), rows)
                T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.a_smem[s, 0, 0]), rows)
                T.fence_proxy_async()
                T.barrier_arrive(x.in_ready[s])
        # STATE waits for one chunk more than there is, unless a span ends with the last one.
        if not inverts or x.chunks % SPAN != 0:
            T.barrier_wait(x.in_free[x.chunks % STAGES], ((x.chunks // STAGES) & 1) ^ 1)
            T.barrier_arrive(x.in_ready[x.chunks % STAGES])

    @T.macro
    def store(x, o):
        for i in T.unroll(x.chunks, unroll_factor=1):
            p = i % OUT_STAGES
            first = x.bos + i * CHUNK
            T.barrier_wait(x.o_ready[p], (i // OUT_STAGES) & 1)
            if i * CHUNK + CHUNK <= x.length:
                for w in T.unroll(groups):
                    column = x.first_column + w * TILE
                    T.tma_copy(x.o_smem[p, w, :, :], o[first:first + CHUNK, x.head, column:column + TILE], eviction_policy=once)
                T.tma_store_wait(0, read=True)
            else:
                for w in T.unroll(groups):
                    for b in T.unroll(CHUNK // 4, unroll_factor=1):
                        for t, v in T.Parallel(4, TILE):
                            if i * CHUNK + b * 4 + t < x.length:
                                o[first + b * 4 + t, x.head, x.first_column + w * TILE + v] = x.o_smem[p, w, b * 4 + t, v]
            T.barrier_arrive(x.o_free[p])
        T.tma_store_wait(0, read=False)

    @T.macro
    def blank(x, o, sequences, end):
        """Zeros for the rows of o past the last sequence, shared out among the CTAs of a head."""
        for r in T.serial(T.ceildiv(T.max(x.tokens - end - x.sequence * CHUNK, 0), sequences * CHUNK)):
            row: T.int32 = end + (x.sequence + r * sequences) * CHUNK
            T.call_extern(
                "handle", f"flashqla::zero_pieces<{HEAD_DIM // PIECE}>", T.address_of(o[row, x.head, 0]), hv * (HEAD_DIM // PIECE), T.min(x.tokens - row, CHUNK)
            )

    @T.prim_func
    def gated_delta_forward(
        q: T.StridedTensor((tokens, hk, HEAD_DIM), (q0, q1, 1), dtype),
        k: T.StridedTensor((tokens, hk, HEAD_DIM), (k0, k1, 1), dtype),
        v: T.StridedTensor((tokens, hv, HEAD_DIM), (v0, v1, 1), dtype),
        A: T.Tensor((rows_of_A, hv, CHUNK), dtype),
        records: T.Tensor((slots, hv, RECORD, CHUNK), "float32"),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        initial_state: T.StridedTensor((sequences, hv, HEAD_DIM, HEAD_DIM), (i0, i1, i2, i3), state_dtype),
        o: T.Tensor((tokens, hv, HEAD_DIM), dtype),
        final_state: T.StridedTensor((sequences, hv, HEAD_DIM, HEAD_DIM), (f0, f1, f2, f3), "float32"),
        h: T.StridedTensor((h_chunks, hv, HEAD_DIM, HEAD_DIM), (h0, h1, h2, h3), dtype),
        states: T.StridedTensor((segments, hv, HEAD_DIM, HEAD_DIM), (s0, s1, s2, s3), "float32"),
        g: T.StridedTensor((tokens, hv), (g0, g1), g_dtype or "float32"),
        beta: T.StridedTensor((tokens, hv), (b0, b1), beta_dtype or "float32"),
        scale: T.float32,
        group: T.int32,
        offset_step: T.int32,
        segment_chunks: T.int32,
        has_initial_state: T.int32,
        has_final_state: T.int32,
        has_gate: T.int32,
    ):
        # Neighbouring CTAs take the heads of one segment, which read the same q and k.
        with T.Kernel(hv * slices, segments, threads=THREADS) as (bx, segment):
            T.import_source(cuda("tiles", "segments", *("records", "inverse", "spans") * inverts))
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
            if inverts:
                keys_ready = T.alloc_barrier([WARP] * STAGES)  # LOAD -> SCORE
                keys_free = T.alloc_barrier([WARP_GROUP] * STAGES)  # SCORE -> LOAD
                product_ready = T.alloc_barrier([WARP_GROUP] * SPAN)  # SCORE -> a warp of STATE
                inverse_ready = T.alloc_barrier([STATE_END])  # STATE -> LOAD: A and records are there, shared memory is free

            tx = T.get_thread_binding()
            head = bx // slices
            k_head = head if inverts else T.truncdiv(head, group)
            # Variables, or their quotients are computed at every use.
            sequence = T.alloc_var("int32")
            index = T.alloc_var("int32")  # of the segment in its sequence
            sequence = segment
            index = 0
            if not inverts and segment_chunks > 0:
                sequence = T.call_extern(
                    "int32", "flashqla::owner", T.address_of(cu_seqlens[0]), offset_step, sequences, segment_chunks * CHUNK, segment
                )
            bos: T.int32 = T.max(T.min(cu_seqlens[sequence * offset_step], tokens), 0)
            eos: T.int32 = T.max(T.min(cu_seqlens[(sequence + 1) * offset_step], tokens), bos)
            if not inverts and segment_chunks > 0:
                index = segment - T.truncdiv(bos, segment_chunks * CHUNK) - sequence
            first = T.alloc_var("int32")
            length = T.alloc_var("int32")
            first = bos if inverts else T.min(bos + index * segment_chunks * CHUNK, eos)
            length = eos - first
            if not inverts and segment_chunks > 0:
                length = T.min(length, segment_chunks * CHUNK)
            chunks: T.int32 = T.ceildiv(length, CHUNK)
            first_chunk = T.alloc_var("int32")  # of this segment in h
            first_chunk = 0 if inverts else index * segment_chunks
            if output_h:
                for n in T.serial(sequence):
                    first_chunk += T.ceildiv(cu_seqlens[(n + 1) * offset_step] - cu_seqlens[n * offset_step], CHUNK)
            ended = T.alloc_var("int32")  # the sequence whose final state is due, or -1
            ended = -1
            # Slots past the last segment of a sequence have neither an end nor chunks.
            if T.And(has_final_state != 0, T.And(first + length == eos, T.Or(length > 0, index == 0))):
                ended = sequence
            T.pdl_sync()  # until what the kernels before wrote is there
            x = SimpleNamespace(
                q=q, k=k, v=v, A=A, records=records, initial_state=initial_state, final_state=final_state, h=h, states=states,
                q_smem=q_smem, k_smem=k_smem, record_smem=record_smem, v_smem=v_smem, a_smem=a_smem, p_smem=p_smem, o_smem=o_smem,
                in_ready=in_ready, in_free=in_free, p_ready=p_ready, p_free=p_free, o_ready=o_ready, o_free=o_free, tail_ready=tail_ready,
                tx=tx, sequence=sequence, segment=segment, index=index, head=head, k_head=k_head, first_column=(bx % slices) * v_tile,
                slot=segment * SPAN if inverts else bos // CHUNK + sequence + index * segment_chunks, bos=first, length=length, chunks=chunks, first_chunk=first_chunk,
                ended=ended, has_initial_state=has_initial_state,
            )
            if inverts:
                x = SimpleNamespace(
                    **vars(x), g=g, beta=beta, scale=scale, has_gate=has_gate, tokens=tokens,
                    keys_ready=keys_ready, keys_free=keys_free, product_ready=product_ready, inverse_ready=inverse_ready,
                )
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
                elif inverts and tx < BLANK_END:
                    blank(x, o, sequences, T.max(T.min(cu_seqlens[sequences * offset_step], tokens), 0))

    return gated_delta_forward
