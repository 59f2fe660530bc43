"""The reverse recurrence of a sequence and all gradients, in clusters: dS passes from the CTAs that make it to those that use it, on the chip."""

from types import SimpleNamespace

import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from flashqla.ops.kernels.common import (
    BACKWARD_RECORD,
    BETA,
    BETA_DECAY,
    CHUNK,
    CHUNK_DECAY,
    COL_LOG,
    CUDA_TYPES,
    HEAD_DIM,
    HOPPER,
    KEY_DECAY,
    KEY_LOG,
    MANUAL_ROLES,
    OUT_SCALE,
    ROW_LOG,
    SMALL_BETA,
    TILE,
    WARP,
    WARP_GROUP,
    cuda,
)
from flashqla.ops.kernels.roles import QK_STAGES, STAGES, decay_state, load_v, release, scale_columns, score
from flashqla.ops.kernels.segments import BEHIND, FIRST, FOUND, INDEX, LENGTH, SEQUENCE, SLOT, find_segment

HALVES = HEAD_DIM // TILE
BOTH = tuple(range(HALVES))  # a loop over it is unrolled while tracing
TOKEN_STAGES = 2
SIZE = 2  # bytes of an element
SUMS = 32 * CHUNK  # floats, see gradients.cuh
QUERY, KEY, WRITTEN, INNER = 0, 512, 1024, 1984  # where sums lie
PARTS = 4 * CHUNK  # of sums of rows, of a half of K
OWN = CHUNK * TILE // WARP_GROUP  # elements of a thread
STATE_END, SCORE_END = 2 * WARP_GROUP, 3 * WARP_GROUP
LOAD_END, SECOND_END, THIRD_END = (SCORE_END + n * WARP for n in (1, 2, 3))
THREADS = SCORE_END + WARP_GROUP  # registers are handed out to whole warpgroups
# Counters of a value head of a segment: gradients of states and of errors that are there, and those that each helper has used.
STATES, ERRORS, USED = 0, 1, 2
COUNTERS = 16
CHAIN_REGISTERS = (192, 88, 40)
GRADIENT_REGISTERS = (144, 144, 80)


@tilelang.jit(target=HOPPER, pass_configs=MANUAL_ROLES)
def build_backward(dtype: str, state_dtype: str, l2norm: bool):
    element = CUDA_TYPES[dtype]
    first_apart = dtype == "float16"  # the decay of a chunk's first token
    tokens, slots, hk, hv, sequences, rows, offsets, rings, runs = (
        T.dynamic(x) for x in ("tokens", "slots", "hk", "hv", "sequences", "rows", "offsets", "rings", "runs")
    )
    q0, q1, k0, k1, v0, v1, d0, d1 = (T.dynamic(x) for x in ("q0", "q1", "k0", "k1", "v0", "v1", "d0", "d1"))
    e0, e1, e2, e3, l0, l1, l2, l3, s0, s1, s2, s3 = (T.dynamic(f"{x}{d}") for x in "els" for d in range(4))

    # ---- the recurrence

    @T.macro
    def read_state(S, x, w):
        if x.is_inner != 0:  # another segment is behind this one
            for v, k in T.Parallel(TILE, HEAD_DIM):
                S[v, k] = x.starts[x.row, x.head, w * TILE + v, k]
        elif x.has_entering != 0:
            for v, k in T.Parallel(TILE, HEAD_DIM):
                S[v, k] = T.cast(x.entering[x.sequence, x.head, k, w * TILE + v], "float32")
        else:
            T.clear(S)
        if state_dtype != "float32":  # or ptxas keeps the narrow values, widens them in the loop, and serializes its products
            T.warpgroup_fence_operand(S, num_regs=TILE * HEAD_DIM // WARP_GROUP)

    @T.macro
    def write_state(S, x, w):
        if T.And(x.is_first, x.has_leaving != 0):
            for v, k in T.Parallel(TILE, HEAD_DIM):
                x.leaving[x.sequence, x.head, k, w * TILE + v] = S[v, k]

    @T.macro
    def decay_gradient(dS, first, s, i, x):
        if first_apart:
            T.call_extern("handle", "flashqla::scale_in_place", dS.data, T.exp2(x.record_smem[s, CHUNK_DECAY, 1] - first))
        else:
            decay_state(dS, i, x)

    @T.macro
    def state(x, w):
        S = T.alloc_fragment((TILE, HEAD_DIM), "float32")
        S_in = T.alloc_fragment((TILE, HEAD_DIM), dtype)
        X = T.alloc_fragment((TILE, CHUNK), "float32")
        dO = T.alloc_fragment((TILE, CHUNK), dtype)
        W = T.alloc_fragment((TILE, CHUNK), dtype)
        factor = T.alloc_fragment((CHUNK,), "float32")
        read_state(S, x, w)
        for i in T.unroll(x.chunks, unroll_factor=1):
            s = i % QK_STAGES
            p = i % STAGES
            T.copy(S, S_in)
            T.barrier_wait(x.qk_ready[s], (i // QK_STAGES) & 1)
            T.wgmma_gemm(S_in, x.k_smem[s, :, :], X, transpose_B=True, clear_accum=True)
            load_v(dO, i, x, w)
            T.barrier_wait(x.p_ready[p], (i // STAGES) & 1)
            T.copy(x.record_smem[s, KEY_DECAY, :], factor)
            first: T.float32 = (x.record_smem[s, KEY_LOG, 0] + x.record_smem[s, COL_LOG, 0]) * 0.5 if first_apart else 0.0
            T.wait_wgmma(0)
            for v, t in T.Parallel(TILE, CHUNK):
                X[v, t] = X[v, t] * factor[t]
            T.wgmma_gemm(dO, x.p_smem[p, :, :], X)
            decay_gradient(S, first, s, i, x)
            T.wait_wgmma(0)
            T.copy(X, W)
            release(x, x.p_free, p)
            T.wgmma_gemm(W, x.a_smem[p, :, :], X, clear_accum=True)
            if first_apart:
                T.copy(x.record_smem[s, ROW_LOG, :], factor)
                for t in T.Parallel(CHUNK):
                    factor[t] = T.exp2(factor[t] - first) * x.scale
                for v, t in T.Parallel(TILE, CHUNK):
                    dO[v, t] = dO[v, t] * factor[t]
            else:
                scale_columns(dO, dO, OUT_SCALE, i, x)
            T.wgmma_gemm(dO, x.q_smem[s, :, :], S)
            T.barrier_wait(x.s_free[0], (i & 1) ^ 1)
            T.call_extern("handle", "flashqla::store_tiles", T.access_ptr(x.s_smem[w, 0, 0, 0], "r"), S_in.data)
            T.fence_proxy_async()
            T.barrier_arrive(x.s_ready[0])
            T.wait_wgmma(1)  # dY; Q^T dO goes on
            T.barrier_arrive(x.va_free[p])
            if first_apart:
                T.copy(x.record_smem[s, KEY_LOG, :], factor)
                for t in T.Parallel(CHUNK):
                    factor[t] = T.exp2(factor[t] - first) * x.record_smem[s, BETA, t]
            else:
                T.copy(x.record_smem[s, BETA_DECAY, :], factor)
            for v, t in T.Parallel(TILE, CHUNK):
                W[v, t] = -X[v, t] * factor[t]
            T.wgmma_gemm(W, x.k_smem[s, :, :], S)
            T.copy(x.record_smem[s, BETA, :], factor)
            T.wait_wgmma(1)  # Q^T dO; the update goes on
            for v, t in T.Parallel(TILE, CHUNK):
                dO[v, t] = X[v, t] * T.if_then_else(T.abs(factor[t]) < SMALL_BETA, 1.0, factor[t])
            T.barrier_wait(x.y_free[0], (i & 1) ^ 1)
            T.call_extern("handle", "flashqla::store_transposed", T.address_of(x.y_smem[w, 0, 0]), dO.data)
            T.fence_proxy_async()
            T.barrier_arrive(x.y_ready[0])
            T.wait_wgmma(0)
            release(x, x.qk_free, s)
            if first_apart:
                T.call_extern("handle", "flashqla::scale_in_place", S.data, T.exp2(first))
        write_state(S, x, w)

    @T.macro
    def load_tiles(chunk, s, p, x, ready, qk_stage, va_stage):
        first = x.bos + chunk * CHUNK
        T.tma_copy(x.q[first:first + CHUNK, x.k_head, :], x.q_smem[s, :, :], barrier=ready[0][qk_stage])
        T.tma_copy(x.k[first:first + CHUNK, x.k_head, :], x.k_smem[s, :, :], barrier=ready[0][qk_stage])
        T.tma_copy(x.records[x.slot + chunk, x.head, :, :], x.record_smem[s, :, :], barrier=ready[0][qk_stage])
        for w in T.unroll(HALVES):
            T.tma_copy(x.do[first:first + CHUNK, x.head, w * TILE:w * TILE + TILE], x.v_smem[p, w, :, :], barrier=ready[1][va_stage])
        T.tma_copy(x.A[first:first + CHUNK, x.head, :], x.a_smem[p, :, :], barrier=ready[1][va_stage])

    @T.macro
    def load_chunks(x):
        for i in T.unroll(x.chunks, unroll_factor=1):
            s = i % QK_STAGES
            p = i % STAGES
            chunk = x.chunks - 1 - i
            rows = x.length - chunk * CHUNK
            T.barrier_wait(x.qk_free[s], ((i // QK_STAGES) & 1) ^ 1)
            T.barrier_wait(x.va_free[p], ((i // STAGES) & 1) ^ 1)
            if rows >= CHUNK:
                load_tiles(chunk, s, p, x, (x.qk_ready, x.va_ready), s, p)
            else:  # the rows past the end belong to another sequence, or to nobody: zeros leave the state alone
                load_tiles(chunk, s, p, x, (x.tail_ready, x.tail_ready), 0, 0)
                T.barrier_arrive(x.tail_ready[0])
                T.barrier_wait(x.tail_ready[0], 0)
                for w in T.unroll(HALVES):
                    T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.q_smem[s, 0, w * TILE]), rows)
                    T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.k_smem[s, 0, w * TILE]), rows)
                    T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.v_smem[p, w, 0, 0]), rows)
                T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.a_smem[p, 0, 0]), rows)
                T.fence_proxy_async()
            T.barrier_arrive(x.qk_ready[s])
            T.barrier_arrive(x.va_ready[p])

    @T.macro
    def send_states(x, ring):
        for i in T.unroll(x.chunks, unroll_factor=1):
            T.barrier_wait(x.s_ready[0], i & 1)
            if i >= x.depth:  # what lies there has been used
                used = i - x.depth
                T.call_extern("handle", "flashqla::await", T.address_of(x.counters[x.run, USED + T.truncmod(used, x.helpers)]), T.truncdiv(used, x.helpers) + 1)
            for w in T.unroll(HALVES):
                for half in T.unroll(HALVES):
                    T.tma_copy(x.s_smem[w, half, :, :], ring[x.run * x.depth + T.truncmod(i, x.depth), w * TILE:w * TILE + TILE, half * TILE:half * TILE + TILE])
            T.tma_store_wait(HALVES * HALVES, read=False)  # the chunk before
            T.sync_warp()
            T.call_extern("handle", "flashqla::publish", T.address_of(x.counters[x.run, STATES]), i)
            T.tma_store_wait(0, read=True)
            T.barrier_arrive(x.s_free[0])
        T.tma_store_wait(0, read=False)
        T.sync_warp()
        T.call_extern("handle", "flashqla::publish", T.address_of(x.counters[x.run, STATES]), x.chunks)

    @T.macro
    def send_y(x, dv):
        for i in T.unroll(x.chunks, unroll_factor=1):
            chunk = x.chunks - 1 - i
            first = x.bos + chunk * CHUNK
            T.barrier_wait(x.y_ready[0], i & 1)
            if chunk * CHUNK + CHUNK <= x.length:
                for w in T.unroll(HALVES):
                    T.tma_copy(x.y_smem[w, :, :], dv[first:first + CHUNK, x.head, w * TILE:w * TILE + TILE])
                T.tma_store_wait(HALVES, read=False)  # the chunk before
                T.sync_warp()
                T.call_extern("handle", "flashqla::publish", T.address_of(x.counters[x.run, ERRORS]), i)
                T.tma_store_wait(0, read=True)
            else:
                for w in T.unroll(HALVES):
                    for b in T.unroll(CHUNK // 4, unroll_factor=1):
                        for t, v in T.Parallel(4, TILE):
                            if chunk * CHUNK + b * 4 + t < x.length:
                                dv[first + b * 4 + t, x.head, w * TILE + v] = x.y_smem[w, b * 4 + t, v]
            T.barrier_arrive(x.y_free[0])
        T.tma_store_wait(0, read=False)
        T.sync_warp()
        T.call_extern("handle", "flashqla::publish", T.address_of(x.counters[x.run, ERRORS]), x.chunks)

    # ---- gradients

    @T.macro
    def columns(x, dq, dk):
        half: T.int32 = T.call_extern("int32", "flashqla::half_of_columns")
        dq_sum = T.alloc_local((OWN,), "float32")
        dk_sum = T.alloc_local((OWN,), "float32")
        product = T.alloc_local((OWN,), "float32")
        uses = T.alloc_var("int32")  # value heads so far
        uses = 0
        for m in T.unroll(x.items, unroll_factor=1):
            T.call_extern("handle", "flashqla::clear", dq_sum.data)
            T.call_extern("handle", "flashqla::clear", dk_sum.data)
            for e in T.unroll(x.group, unroll_factor=1):
                s = uses % TOKEN_STAGES
                T.barrier_wait(x.tokens_ready[s], (uses // TOKEN_STAGES) & 1)
                T.barrier_wait(x.b_s_ready[half], uses & 1)
                T.call_extern("handle", "flashqla::begin_product<8>", product.data, T.access_ptr(x.do_smem[s, 0, 0, 0], "r"), T.access_ptr(x.bs_smem[half, 0, 0, 0], "r"), False)
                T.barrier_wait(x.b_qk_ready[0], m & 1)  # of the first value head, they come later than the states
                T.barrier_wait(x.sums_free[0], (uses & 1) ^ 1)
                T.call_extern("handle", "flashqla::end_product", product.data)
                T.call_extern(
                    "handle", f"flashqla::add_product<{element}>", dq_sum.data, product.data, T.access_ptr(x.bq_smem[half, 0, 0], "r"),
                    T.access_ptr(x.b_record_smem[s, OUT_SCALE, 0], "r"), T.access_ptr(x.sums[QUERY + half * PARTS], "r"),
                )
                T.call_extern("handle", "flashqla::begin_product<8>", product.data, T.access_ptr(x.dy_smem[s, 0, 0, 0], "r"), T.access_ptr(x.bs_smem[half, 0, 0, 0], "r"), False)
                T.barrier_wait(x.ds_ready[half], uses & 1)
                T.call_extern(
                    "handle", "flashqla::put_inner_product", T.access_ptr(x.bs_smem[half, 0, 0, 0], "r"), T.access_ptr(x.ds_smem[half, 0, 0, 0], "r"), T.access_ptr(x.sums[INNER], "r")
                )
                T.call_extern("handle", "flashqla::end_product", product.data)
                # Loads of the inner product may still be under way: nothing has waited for them, and an arrival does not. Unfenced, the copy of
                # the next states overtook them.
                T.fence_proxy_async()
                release(x, x.b_s_free, half)
                T.call_extern(
                    "handle", f"flashqla::add_error_product<{element}>", dk_sum.data, product.data, T.access_ptr(x.bk_smem[half, 0, 0], "r"),
                    T.access_ptr(x.b_record_smem[s, 0, 0], "r"), SMALL_BETA, T.access_ptr(x.sums[KEY + half * PARTS], "r"),
                )
                T.call_extern("handle", "flashqla::begin_product<8>", product.data, T.access_ptr(x.u_smem[s, 0, 0, 0], "r"), T.access_ptr(x.ds_smem[half, 0, 0, 0], "r"), False)
                T.call_extern("handle", "flashqla::end_product", product.data)
                release(x, x.ds_free, half)
                T.call_extern(
                    "handle", f"flashqla::add_product<{element}>", dk_sum.data, product.data, T.access_ptr(x.bk_smem[half, 0, 0], "r"),
                    T.access_ptr(x.b_record_smem[s, KEY_DECAY, 0], "r"), T.access_ptr(x.sums[WRITTEN + half * PARTS], "r"),
                )
                T.barrier_arrive(x.sums_ready[0])
                release(x, x.tokens_free, s)
                T.barrier_wait(x.zx_ready[0], uses & 1)
                T.call_extern("handle", "flashqla::begin_product<4>", dq_sum.data, T.access_ptr(x.z_smem[0, 0], "r"), T.access_ptr(x.bk_smem[half, 0, 0], "r"), True)
                T.call_extern("handle", "flashqla::begin_product<4>", dk_sum.data, T.access_ptr(x.x_smem[0, 0], "r"), T.access_ptr(x.bk_smem[half, 0, 0], "r"), True)
                T.call_extern("handle", "flashqla::begin_product<4, true>", dk_sum.data, T.access_ptr(x.z_smem[0, 0], "r"), T.access_ptr(x.bq_smem[half, 0, 0], "r"), True)
                T.call_extern("handle", "flashqla::end_product", dq_sum.data)
                T.call_extern("handle", "flashqla::end_product", dk_sum.data)
                release(x, x.zx_free, 0)
                uses = uses + 1
            if l2norm:
                T.call_extern(
                    "handle", f"flashqla::take_out_norms<{element}>", dq_sum.data, dk_sum.data, T.access_ptr(x.bq_smem[half, 0, 0], "r"), T.access_ptr(x.bk_smem[half, 0, 0], "r"),
                    T.access_ptr(x.norms[m & 1, 0, 0, 0], "r"), half,
                )
            release(x, x.b_qk_free, 0)
            chunk = x.chunks - 1 - x.j - m * x.helpers
            first = x.bos + chunk * CHUNK
            T.call_extern("handle", f"flashqla::store_rows<{element}>", T.address_of(dq[first, x.k_head, half * TILE]), hk * HEAD_DIM, dq_sum.data, x.length - chunk * CHUNK)
            T.call_extern("handle", f"flashqla::store_rows<{element}>", T.address_of(dk[first, x.k_head, half * TILE]), hk * HEAD_DIM, dk_sum.data, x.length - chunk * CHUNK)

    @T.macro
    def score_gradient(x, scale):
        qk = T.alloc_fragment((CHUNK, CHUNK), "float32")
        kk = T.alloc_fragment((CHUNK, CHUNK), "float32")
        product = T.alloc_fragment((CHUNK, CHUNK), "float32")
        row_sum = T.alloc_local((2,), "float32")
        column_sum = T.alloc_local((8,), "float32")
        beta_sum = T.alloc_local((2,), "float32")
        diagonal = T.alloc_local((2,), "float32")
        uses = T.alloc_var("int32")  # value heads so far
        uses = 0
        T.call_extern("handle", "flashqla::zero_own_rows", T.access_ptr(x.z_smem[0, 0], "r"))
        for m in T.unroll(x.items, unroll_factor=1):
            T.barrier_wait(x.b_qk_ready[0], m & 1)
            for n in BOTH:
                T.wgmma_gemm(x.bq_smem[n, :, :], x.bk_smem[n, :, :], qk, transpose_B=True, clear_accum=n == 0)
            for n in BOTH:
                T.wgmma_gemm(x.bk_smem[n, :, :], x.bk_smem[n, :, :], kk, transpose_B=True, clear_accum=n == 0)
            T.wait_wgmma(0)
            release(x, x.b_qk_free, 0)
            for e in T.unroll(x.group, unroll_factor=1):
                s = uses % TOKEN_STAGES
                T.barrier_wait(x.tokens_ready[s], (uses // TOKEN_STAGES) & 1)
                # One after the other: both at once have no room in registers, and this role has time.
                for h in BOTH:
                    T.wgmma_gemm(x.do_smem[s, h, :, :], x.u_smem[s, h, :, :], product, transpose_B=True, clear_accum=h == 0)
                T.barrier_wait(x.zx_free[0], (uses & 1) ^ 1)
                T.wait_wgmma(0)
                T.call_extern(
                    "handle", f"flashqla::query_scores<{element}>", product.data, qk.data, T.access_ptr(x.b_record_smem[s, 0, 0], "r"), scale,
                    T.access_ptr(x.z_smem[0, 0], "r"), row_sum.data, column_sum.data,
                )
                for_dy: T.int32 = T.call_extern("int32", "flashqla::anew", s)
                for h in BOTH:
                    T.wgmma_gemm(x.dy_smem[for_dy, h, :, :], x.u_smem[for_dy, h, :, :], product, transpose_B=True, clear_accum=h == 0)
                T.wait_wgmma(0)
                T.call_extern(
                    "handle", f"flashqla::key_scores<{element}>", product.data, kk.data, T.access_ptr(x.b_record_smem[s, 0, 0], "r"), SMALL_BETA,
                    T.access_ptr(x.x_smem[0, 0], "r"), row_sum.data, column_sum.data, beta_sum.data, diagonal.data,
                )
                T.fence_proxy_async()
                T.barrier_arrive(x.zx_ready[0])
                release(x, x.tokens_free, s)
                T.barrier_wait(x.sums_free[0], (uses & 1) ^ 1)
                T.call_extern("handle", "flashqla::put_score_sums", row_sum.data, column_sum.data, beta_sum.data, diagonal.data, T.access_ptr(x.sums[0], "r"))
                T.barrier_arrive(x.sums_ready[0])
                uses = uses + 1

    @T.macro
    def load_tokens(x, first, head, e, step, slot, s, ready, stage):
        for h in BOTH:
            column = h * TILE
            T.tma_copy(x.do[first:first + CHUNK, head, column:column + TILE], x.do_smem[s, h, :, :], barrier=ready[stage])
            T.tma_copy(x.u[first:first + CHUNK, head, column:column + TILE], x.u_smem[s, h, :, :], barrier=ready[stage])
        T.call_extern("handle", "flashqla::await", T.address_of(x.counters[x.run + e, ERRORS]), step + 1)
        for h in BOTH:
            column = h * TILE
            T.tma_copy(x.dv[first:first + CHUNK, head, column:column + TILE], x.dy_smem[s, h, :, :], barrier=ready[stage])
        T.tma_copy(x.records[slot, head, :, :], x.b_record_smem[s, :, :], barrier=ready[stage])

    @T.macro
    def load_qk(x, first, ready):
        for n in BOTH:
            column = n * TILE
            T.tma_copy(x.q[first:first + CHUNK, x.k_head, column:column + TILE], x.bq_smem[n, :, :], barrier=ready[0])
            T.tma_copy(x.k[first:first + CHUNK, x.k_head, column:column + TILE], x.bk_smem[n, :, :], barrier=ready[0])

    @T.macro
    def load_items(x, ring):
        tails = T.alloc_var("int32")
        uses = T.alloc_var("int32")
        tails = 0
        uses = 0
        for m in T.unroll(x.items, unroll_factor=1):
            chunk = x.chunks - 1 - x.j - m * x.helpers
            first = x.bos + chunk * CHUNK
            slot = x.slot + chunk
            rows: T.int32 = x.length - chunk * CHUNK
            for e in T.unroll(x.group, unroll_factor=1):
                head = x.head + e
                s = uses % TOKEN_STAGES
                T.barrier_wait(x.tokens_free[s], ((uses // TOKEN_STAGES) & 1) ^ 1)
                if rows >= CHUNK:
                    load_tokens(x, first, head, e, x.j + m * x.helpers, slot, s, x.tokens_ready, s)
                else:  # the rows past the end belong to another sequence, or to nobody
                    load_tokens(x, first, head, e, x.j + m * x.helpers, slot, s, x.tail_ready, 0)
                    T.barrier_arrive(x.tail_ready[0])
                    T.barrier_wait(x.tail_ready[0], tails & 1)
                    tails = tails + 1
                    for h in BOTH:
                        T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.do_smem[s, h, 0, 0]), rows)
                        T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.u_smem[s, h, 0, 0]), rows)
                        T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.dy_smem[s, h, 0, 0]), rows)
                    T.fence_proxy_async()
                T.barrier_arrive(x.tokens_ready[s])
                T.call_extern("handle", "flashqla::prefetch_block", T.address_of(x.states[slot, head, 0, 0]), HEAD_DIM * HEAD_DIM * SIZE)
                for n in BOTH:
                    T.barrier_wait(x.b_s_free[n], (uses & 1) ^ 1)
                    for h in BOTH:
                        T.tma_copy(x.states[slot, head, h * TILE:h * TILE + TILE, n * TILE:n * TILE + TILE], x.bs_smem[n, h, :, :], barrier=x.b_s_ready[n])
                    T.barrier_arrive(x.b_s_ready[n])
                T.call_extern("handle", "flashqla::await", T.address_of(x.counters[x.run + e, STATES]), x.j + m * x.helpers + 1)
                for n in BOTH:
                    T.barrier_wait(x.ds_free[n], (uses & 1) ^ 1)
                    for h in BOTH:
                        T.tma_copy(
                            ring[(x.run + e) * x.depth + T.truncmod(x.j + m * x.helpers, x.depth), h * TILE:h * TILE + TILE, n * TILE:n * TILE + TILE], x.ds_smem[n, h, :, :],
                            barrier=x.ds_ready[n],
                        )
                    T.barrier_arrive(x.ds_ready[n])
                if e == 0:
                    T.barrier_wait(x.b_qk_free[0], (m & 1) ^ 1)
                    if rows >= CHUNK:
                        load_qk(x, first, x.b_qk_ready)
                    else:
                        load_qk(x, first, x.tail_ready)
                        T.barrier_arrive(x.tail_ready[0])
                        T.barrier_wait(x.tail_ready[0], tails & 1)
                        tails = tails + 1
                        for n in BOTH:
                            T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.bq_smem[n, 0, 0]), rows)
                            T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.bk_smem[n, 0, 0]), rows)
                        T.fence_proxy_async()
                    T.barrier_arrive(x.b_qk_ready[0])
                uses = uses + 1

    @T.macro
    def tell_used(x):
        """A dS that is here may be overwritten where it was."""
        uses = T.alloc_var("int32")
        uses = 0
        for m in T.unroll(x.items, unroll_factor=1):
            for e in T.unroll(x.group, unroll_factor=1):
                for n in BOTH:
                    T.barrier_wait(x.ds_ready[n], uses & 1)
                T.call_extern("handle", "flashqla::publish", T.address_of(x.counters[x.run + e, USED + x.j]), m + 1)
                uses = uses + 1

    @T.macro
    def finish(x, v, dq, dk, dv, dg, dbeta):
        factors = T.alloc_local((7,), "float32")
        sums = T.alloc_local((15,), "float32")
        uses = T.alloc_var("int32")  # value heads so far
        uses = 0
        for m in T.unroll(x.items, unroll_factor=1):
            for e in T.unroll(x.group, unroll_factor=1):
                chunk: T.int32 = T.call_extern("int32", "flashqla::anew", x.chunks - 1 - x.j - m * x.helpers)
                head: T.int32 = T.call_extern("int32", "flashqla::anew", x.head + e)
                first = x.bos + chunk * CHUNK
                rows = x.length - chunk * CHUNK
                T.call_extern("handle", "flashqla::read_factors", T.address_of(x.records[x.slot + chunk, head, 0, 0]), factors.data)
                T.barrier_wait(x.sums_ready[0], uses & 1)
                T.call_extern("handle", "flashqla::read_sums", T.access_ptr(x.sums[0], "r"), sums.data)
                T.sync_warp()
                T.barrier_arrive(x.sums_free[0])
                T.call_extern(
                    "handle", f"flashqla::gate_gradients<{element}>", factors.data, sums.data,
                    T.address_of(v[first, head, 0]), v0, T.address_of(dv[first, head, 0]), hv * HEAD_DIM,
                    T.address_of(dg[first, head]), T.address_of(dbeta[first, head]), hv, T.min(rows, CHUNK), SMALL_BETA,
                )
                uses = uses + 1
        T.call_extern(
            "handle", f"flashqla::zero_tail<{element}>", T.address_of(dq[0, 0, 0]), T.address_of(dk[0, 0, 0]), T.address_of(dv[0, 0, 0]),
            T.address_of(dg[0, 0]), T.address_of(dbeta[0, 0]), *x.tail, x.k_head, hk, x.group,
        )

    @T.prim_func
    def gated_delta_backward(
        q: T.StridedTensor((tokens, hk, HEAD_DIM), (q0, q1, 1), dtype),
        k: T.StridedTensor((tokens, hk, HEAD_DIM), (k0, k1, 1), dtype),
        v: T.StridedTensor((tokens, hv, HEAD_DIM), (v0, v1, 1), dtype),
        do: T.StridedTensor((tokens, hv, HEAD_DIM), (d0, d1, 1), dtype),
        A: T.Tensor((tokens, hv, CHUNK), dtype),
        u: T.Tensor((tokens, hv, HEAD_DIM), dtype),
        records: T.Tensor((slots, hv, BACKWARD_RECORD, CHUNK), "float32"),
        states: T.Tensor((slots, hv, HEAD_DIM, HEAD_DIM), dtype),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        entering: T.StridedTensor((sequences, hv, HEAD_DIM, HEAD_DIM), (e0, e1, e2, e3), state_dtype),
        leaving: T.StridedTensor((sequences, hv, HEAD_DIM, HEAD_DIM), (l0, l1, l2, l3), "float32"),
        starts: T.StridedTensor((rows, hv, HEAD_DIM, HEAD_DIM), (s0, s1, s2, s3), "float32"),
        dq: T.Tensor((tokens, hk, HEAD_DIM), dtype),
        dk: T.Tensor((tokens, hk, HEAD_DIM), dtype),
        dv: T.Tensor((tokens, hv, HEAD_DIM), dtype),
        dg: T.Tensor((tokens, hv), "float32"),
        dbeta: T.Tensor((tokens, hv), "float32"),
        ring: T.Tensor((rings, HEAD_DIM, HEAD_DIM), dtype),
        counters: T.Tensor((runs, COUNTERS), "int32"),
        tickets: T.Tensor((1,), "int32"),
        scale: T.float32,
        offset_step: T.int32,
        segment_chunks: T.int32,
        parts: T.int32,
        has_entering: T.int32,
        has_leaving: T.int32,
        helpers: T.int32,
        depth: T.int32,
    ):
        with T.Kernel(T.truncdiv(rows, parts) * (hv + hk * helpers), threads=THREADS):
            T.import_source(
                f"namespace flashqla {{ constexpr bool kBfloat16 = {int(dtype == 'bfloat16')}; }}\n" + cuda("tiles", "records", "segments", "gradients", "flags")
            )
            ticket = T.alloc_shared((4,), "int32")
            # of the recurrence
            q_smem = T.alloc_shared((QK_STAGES, CHUNK, HEAD_DIM), dtype)
            k_smem = T.alloc_shared((QK_STAGES, CHUNK, HEAD_DIM), dtype)
            record_smem = T.alloc_shared((QK_STAGES, BACKWARD_RECORD, CHUNK), "float32")
            v_smem = T.alloc_shared((STAGES, HALVES, CHUNK, TILE), dtype)
            a_smem = T.alloc_shared((STAGES, CHUNK, CHUNK), dtype)
            p_smem = T.alloc_shared((STAGES, CHUNK, CHUNK), dtype)
            s_smem = T.alloc_shared((HALVES, HALVES, TILE, TILE), dtype)  # halves of V, of K
            y_smem = T.alloc_shared((HALVES, CHUNK, TILE), dtype)
            # of gradients
            tile = (TOKEN_STAGES, HALVES, CHUNK, TILE)  # of tokens: halves of V
            do_smem = T.alloc_shared(tile, dtype)
            u_smem = T.alloc_shared(tile, dtype)
            dy_smem = T.alloc_shared(tile, dtype)
            b_record_smem = T.alloc_shared((TOKEN_STAGES, BACKWARD_RECORD, CHUNK), "float32")
            bs_smem = T.alloc_shared((HALVES, HALVES, TILE, TILE), dtype)  # halves of K, of V
            ds_smem = T.alloc_shared((HALVES, HALVES, TILE, TILE), dtype)
            bq_smem = T.alloc_shared((HALVES, CHUNK, TILE), dtype)
            bk_smem = T.alloc_shared((HALVES, CHUNK, TILE), dtype)
            z_smem = T.alloc_shared((CHUNK, CHUNK), dtype)
            x_smem = T.alloc_shared((CHUNK, CHUNK), dtype)
            sums = T.alloc_shared((SUMS,), "float32")
            norms = T.alloc_shared((2, HALVES, CHUNK, 4), "float32") if l2norm else None  # of two items
            tiles = (v_smem, s_smem, y_smem, do_smem, u_smem, dy_smem, bs_smem, ds_smem, bq_smem, bk_smem, z_smem, x_smem)
            T.annotate_layout({smem: make_swizzled_layout(smem) for smem in tiles})
            qk_ready = T.alloc_barrier([WARP] * QK_STAGES)  # LOAD -> STATE, SCORE
            qk_free = T.alloc_barrier([SCORE_END // WARP] * QK_STAGES)  # STATE, SCORE -> LOAD
            va_ready = T.alloc_barrier([WARP] * STAGES)  # LOAD -> STATE
            va_free = T.alloc_barrier([STATE_END] * STAGES)  # STATE -> LOAD
            p_ready = T.alloc_barrier([WARP_GROUP] * STAGES)  # SCORE -> STATE
            p_free = T.alloc_barrier([STATE_END // WARP] * STAGES)  # STATE -> SCORE
            s_ready = T.alloc_barrier([STATE_END])  # STATE -> SEND
            s_free = T.alloc_barrier([WARP])  # SEND -> STATE
            y_ready = T.alloc_barrier([STATE_END])  # STATE -> SEND
            y_free = T.alloc_barrier([WARP])  # SEND -> STATE
            b_qk_ready = T.alloc_barrier([WARP])  # LOAD -> COLUMNS, SCORE
            b_qk_free = T.alloc_barrier([SCORE_END // WARP])  # COLUMNS, SCORE -> LOAD
            tokens_ready = T.alloc_barrier([WARP] * TOKEN_STAGES)  # LOAD -> COLUMNS, SCORE
            tokens_free = T.alloc_barrier([SCORE_END // WARP] * TOKEN_STAGES)  # COLUMNS, SCORE -> LOAD
            b_s_ready = T.alloc_barrier([WARP] * HALVES)  # LOAD -> COLUMNS
            b_s_free = T.alloc_barrier([WARP_GROUP // WARP] * HALVES)  # COLUMNS -> LOAD
            ds_ready = T.alloc_barrier([WARP] * HALVES)  # LOAD -> COLUMNS, TELL
            ds_free = T.alloc_barrier([WARP_GROUP // WARP] * HALVES)  # COLUMNS -> LOAD
            zx_ready = T.alloc_barrier([WARP_GROUP])  # SCORE -> COLUMNS
            zx_free = T.alloc_barrier([STATE_END // WARP])  # COLUMNS -> SCORE
            sums_ready = T.alloc_barrier([SCORE_END])  # COLUMNS, SCORE -> FINISH
            sums_free = T.alloc_barrier([WARP])  # FINISH -> COLUMNS, SCORE
            tail_ready = T.alloc_barrier([WARP])  # TMA -> LOAD

            tx = T.get_thread_binding()
            # CTAs take their work as they come, so that all those before one that waits for another are there, or have been.
            T.pdl_sync()
            # In variables: quotients of names would be computed at every use.
            group, rank, row, k_head, head, run = (T.alloc_var("int32") for _ in range(6))
            rank = T.call_extern("int32", "flashqla::take_ticket", T.address_of(tickets[0]), T.address_of(ticket[0]))
            group = T.truncdiv(hv, hk)
            k_head = T.truncdiv(rank, group + helpers)
            rank = rank - k_head * (group + helpers)
            row = T.truncdiv(k_head, hk)
            k_head = k_head - row * hk
            head = k_head * group + T.if_then_else(rank < group, rank, 0)
            run = row * hv + head
            found = T.alloc_local((FOUND,), "int32")
            find_segment(found, cu_seqlens, offset_step, sequences, tokens, segment_chunks, row)
            sequence, index, first, length, slot = (found[n] for n in (SEQUENCE, INDEX, FIRST, LENGTH, SLOT))
            chunks, items = (T.alloc_var("int32") for _ in range(2))
            chunks = T.ceildiv(length, CHUNK)
            items = T.truncdiv(chunks - (rank - group) + helpers - 1, helpers)
            if rank < group:
                x = SimpleNamespace(
                    q=q, k=k, do=do, A=A, records=records, entering=entering, leaving=leaving, starts=starts, counters=counters,
                    q_smem=q_smem, k_smem=k_smem, record_smem=record_smem, v_smem=v_smem, a_smem=a_smem, p_smem=p_smem, s_smem=s_smem, y_smem=y_smem,
                    qk_ready=qk_ready, qk_free=qk_free, va_ready=va_ready, va_free=va_free, p_ready=p_ready, p_free=p_free,
                    s_ready=s_ready, s_free=s_free, y_ready=y_ready, y_free=y_free, tail_ready=tail_ready,
                    tx=tx, sequence=sequence, row=(row + 1) * parts, head=head, k_head=k_head, run=run, helpers=helpers, depth=depth,
                    slot=slot, bos=first, length=length, chunks=chunks, is_first=index == 0, is_inner=T.if_then_else(found[BEHIND] > 0, 1, 0),
                    has_entering=has_entering, has_leaving=has_leaving, scale=scale,
                )
                if tx < WARP_GROUP:
                    T.inc_max_nreg(CHAIN_REGISTERS[0])
                    state(x, 0)
                elif tx < STATE_END:
                    T.inc_max_nreg(CHAIN_REGISTERS[0])
                    state(x, 1)
                elif tx < SCORE_END:
                    T.dec_max_nreg(CHAIN_REGISTERS[1])
                    score(x, scale, dtype)
                else:
                    T.dec_max_nreg(CHAIN_REGISTERS[2])
                    if tx < LOAD_END:
                        load_chunks(x)
                    elif tx < SECOND_END:
                        send_states(x, ring)
                    elif tx < THIRD_END:
                        send_y(x, dv)
            if rank >= group:
                y = SimpleNamespace(
                    q=q, k=k, do=do, u=u, records=records, states=states, dv=dv, counters=counters,
                    do_smem=do_smem, u_smem=u_smem, dy_smem=dy_smem, b_record_smem=b_record_smem, bs_smem=bs_smem, ds_smem=ds_smem,
                    bq_smem=bq_smem, bk_smem=bk_smem, z_smem=z_smem, x_smem=x_smem, sums=sums, norms=norms,
                    b_qk_ready=b_qk_ready, b_qk_free=b_qk_free, tokens_ready=tokens_ready, tokens_free=tokens_free, b_s_ready=b_s_ready, b_s_free=b_s_free, ds_ready=ds_ready, ds_free=ds_free,
                    zx_ready=zx_ready, zx_free=zx_free, sums_ready=sums_ready, sums_free=sums_free, tail_ready=tail_ready,
                    tx=tx, k_head=k_head, j=rank - group, items=items, group=group, helpers=helpers, depth=depth, run=run, head=head,
                    slot=slot, bos=first, length=length, chunks=chunks,
                    tail=(T.address_of(cu_seqlens[sequences * offset_step]), tokens, row * helpers + rank - group, T.truncdiv(rows, parts) * helpers),
                )
                if tx < STATE_END:
                    T.inc_max_nreg(GRADIENT_REGISTERS[0])
                    columns(y, dq, dk)
                elif tx < SCORE_END:
                    T.inc_max_nreg(GRADIENT_REGISTERS[1])
                    score_gradient(y, scale)
                else:
                    T.dec_max_nreg(GRADIENT_REGISTERS[2])
                    if tx < LOAD_END:
                        load_items(y, ring)
                    elif tx < SECOND_END:
                        finish(y, v, dq, dk, dv, dg, dbeta)
                    elif tx < THIRD_END:
                        tell_used(y)

    return gated_delta_backward
