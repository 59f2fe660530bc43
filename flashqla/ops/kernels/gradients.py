"""Gradients of a chunk, once the states that enter and leave it are known: all of them but dV and that of the initial state.

    dP = dO U^T      Z = scale * lower(dP) * R      dM = -strict_lower(dY U^T)      X = beta * dM * R      E = -beta decay dY
    dQ = sum of the group: scale decay dO S^T + Z K
    dK = sum of the group: E S^T + (X + X^T) K + Z^T Q + decay_C / decay U dS^T
    dbeta = dY . U / beta;   dG from q . (scale decay dO S^T), k . (E S^T), k . (decay_C / decay U dS^T), <S, dS>, and
            sums of rows minus sums of columns of P * dP + M * dM;   dg = reverse cumulative sum of dG

Shapes  q, k [T, hk, 128], v, do, U, dv [T, hv, 128], states [pairs, hv, V, K], dstates [slots, hv, V, K] in bf16 or fp16; records
        [slots, hv, 9, 64] fp32
        ->  dq, dk [T, hk, 128]; dg, dbeta [T, hv] fp32; rows of dv with a small beta (chain.py) in place
Grid    persistent CTAs; an item is a chunk and a key head, whose value heads follow each other
Cost    per chunk and value head 12 products of 64x64x128 and 98 KB of HBM, and per key head 2 products and 64 KB: bound by HBM
Source  differentiation of the chunkwise form, as in reference/backward.py

Of the states that enter the chunks of a sequence the first, third, .. are there. The next one follows from such a state and from U and K of its
chunk, which another CTA reads at about the same time, so that they come from L2: S' = decay_C S + (decay_C / decay U)^T K.

dq and dk stay in fp32 registers over the value heads of the group, which come in a fixed order: no partial sums in memory, no atomics.

    COLUMNS  two warpgroups, 64 columns of K each: dQ, dK, <S, dS>    LOAD    one warp: TMA in, zeros past the end of a sequence
    SCORE    one warpgroup: Z, X and their sums                       FINISH  one warp: dg, dbeta from the sums of the others

Halves of K, not dQ and dK, so that both warpgroups have as much to do: of the products three before Z and X, and three with them. They run the
same instructions, with the half in a register: two copies of them do not fit in the caches of instructions, and warps waited a fourth of their time.
X and X^T are one operand, as X is zero on and above its diagonal.

A barrier is named for what it says is ready or free: qk, tokens (dO, U, dY, record of a value head), s and ds (a half of K of
S and dS), zx, sums.
"""

from types import SimpleNamespace

import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from flashqla.ops.kernels.common import (
    BACKWARD_RECORD,
    CHUNK,
    CUDA_TYPES,
    HEAD_DIM,
    HOPPER,
    KEY_DECAY,
    MANUAL_ROLES,
    OUT_SCALE,
    TILE,
    WARP,
    WARP_GROUP,
    cuda,
)
from flashqla.ops.kernels.roles import release

HALVES = HEAD_DIM // TILE
BOTH = tuple(range(HALVES))  # a loop over it is unrolled while tracing
TOKEN_STAGES = 2
SIZE = 2  # bytes of an element
SUMS = 32 * CHUNK  # floats, see gradients.cuh
QUERY, KEY, WRITTEN, INNER = 0, 512, 1024, 1984  # where sums lie
PARTS = 4 * CHUNK  # of sums of rows, of a half of K
OWN = CHUNK * TILE // WARP_GROUP  # elements of a thread
# What LOAD tells the others of an item: its tokens, the first of them, the key head, whether the state to come is that of the chunk in front.
ROWS, FIRST, HEAD, AHEAD, WORK = 0, 1, 2, 3, 4
WORKS = 4  # items, so that LOAD, which is no more than two value heads ahead, leaves alone those that are still to be stored
COLUMNS_END, SCORE_END = 2 * WARP_GROUP, 3 * WARP_GROUP
LOAD_END, FINISH_END = SCORE_END + WARP, SCORE_END + 2 * WARP
THREADS = SCORE_END + WARP_GROUP  # registers are handed out to whole warpgroups
COLUMNS_REGISTERS, SCORE_REGISTERS, SERVICE_REGISTERS = 144, 144, 80  # a thread, in all what the CTA starts with


@tilelang.jit(target=HOPPER, pass_configs=MANUAL_ROLES)
def build_gradients(dtype: str, l2norm: bool):
    """The kernel for tokens in `dtype`. l2norm: q and k are normalised by the op, with the norms in the records."""
    element = CUDA_TYPES[dtype]
    tokens, slots, pairs, hk, hv, offsets = (T.dynamic(x) for x in ("tokens", "slots", "pairs", "hk", "hv", "offsets"))
    q0, q1, k0, k1, v0, v1, d0, d1 = (T.dynamic(x) for x in ("q0", "q1", "k0", "k1", "v0", "v1", "d0", "d1"))

    @T.macro
    def columns(x, dq, dk):
        half: T.int32 = T.call_extern("int32", "flashqla::half_of_columns")
        dq_sum = T.alloc_local((OWN,), "float32")
        dk_sum = T.alloc_local((OWN,), "float32")
        product = T.alloc_local((OWN,), "float32")
        count = T.alloc_var("int32")  # stages of tokens so far
        heads = T.alloc_var("int32")  # value heads so far
        done = T.alloc_var("int32")  # items so far
        group = T.alloc_var("int32")
        rows = T.alloc_var("int32")
        group = T.truncdiv(hv, hk)
        count = 0
        heads = 0
        done = 0
        T.barrier_wait(x.tokens_ready[0], 0)
        rows = x.work[0, ROWS]
        while rows > 0:
            T.call_extern("handle", "flashqla::clear", dq_sum.data)
            T.call_extern("handle", "flashqla::clear", dk_sum.data)
            for _ in T.unroll(group, unroll_factor=1):
                T.barrier_wait(x.tokens_ready[count % TOKEN_STAGES], (count // TOKEN_STAGES) & 1)
                T.barrier_wait(x.s_ready[half], heads & 1)
                if x.work[done % WORKS, AHEAD] != 0:
                    # Of the other half of K too, as this is done by halves of V; waited for here alone, its barrier could be a round behind.
                    T.call_extern("handle", "flashqla::meet")
                    T.barrier_wait(x.s_ready[1 - half], heads & 1)
                    before = count % TOKEN_STAGES
                    T.call_extern(
                        "handle", f"flashqla::advance_state<{element}>", T.access_ptr(x.s_smem[0, 0, 0, 0], "r"), T.access_ptr(x.do_smem[before, 0, 0, 0], "r"),
                        T.access_ptr(x.u_smem[before, 0, 0, 0], "r"), T.access_ptr(x.record_smem[before, 0, 0], "r"), half,
                    )
                    T.fence_proxy_async()
                    release(x, x.tokens_free, before)
                    T.call_extern("handle", "flashqla::meet")
                    count = count + 1
                    T.barrier_wait(x.tokens_ready[count % TOKEN_STAGES], (count // TOKEN_STAGES) & 1)
                s = count % TOKEN_STAGES
                T.call_extern("handle", "flashqla::begin_product<8>", product.data, T.access_ptr(x.do_smem[s, 0, 0, 0], "r"), T.access_ptr(x.s_smem[half, 0, 0, 0], "r"), False)
                T.barrier_wait(x.qk_ready[0], done & 1)  # of the first value head, they come later than the states
                T.barrier_wait(x.sums_free[0], (heads & 1) ^ 1)
                T.call_extern("handle", "flashqla::end_product", product.data)
                T.call_extern(
                    "handle", f"flashqla::add_product<{element}>", dq_sum.data, product.data, T.access_ptr(x.q_smem[half, 0, 0], "r"),
                    T.access_ptr(x.record_smem[s, OUT_SCALE, 0], "r"), T.access_ptr(x.sums[QUERY + half * PARTS], "r"),
                )
                T.call_extern("handle", "flashqla::begin_product<8>", product.data, T.access_ptr(x.dy_smem[s, 0, 0, 0], "r"), T.access_ptr(x.s_smem[half, 0, 0, 0], "r"), False)
                T.barrier_wait(x.ds_ready[half], heads & 1)
                T.call_extern(
                    "handle", "flashqla::put_inner_product", T.access_ptr(x.s_smem[half, 0, 0, 0], "r"), T.access_ptr(x.ds_smem[half, 0, 0, 0], "r"), T.access_ptr(x.sums[INNER], "r")
                )
                T.call_extern("handle", "flashqla::end_product", product.data)
                # Loads of the inner product may still be under way: nothing has waited for them, and an arrival does not. Unfenced, the copy of
                # the next states overtook them.
                T.fence_proxy_async()
                release(x, x.s_free, half)
                T.call_extern(
                    "handle", f"flashqla::add_error_product<{element}>", dk_sum.data, product.data, T.access_ptr(x.k_smem[half, 0, 0], "r"),
                    T.access_ptr(x.record_smem[s, 0, 0], "r"), T.access_ptr(x.sums[KEY + half * PARTS], "r"),
                )
                T.call_extern("handle", "flashqla::begin_product<8>", product.data, T.access_ptr(x.u_smem[s, 0, 0, 0], "r"), T.access_ptr(x.ds_smem[half, 0, 0, 0], "r"), False)
                T.call_extern("handle", "flashqla::end_product", product.data)
                release(x, x.ds_free, half)
                T.call_extern(
                    "handle", f"flashqla::add_product<{element}>", dk_sum.data, product.data, T.access_ptr(x.k_smem[half, 0, 0], "r"),
                    T.access_ptr(x.record_smem[s, KEY_DECAY, 0], "r"), T.access_ptr(x.sums[WRITTEN + half * PARTS], "r"),
                )
                T.barrier_arrive(x.sums_ready[0])
                release(x, x.tokens_free, s)
                T.barrier_wait(x.zx_ready[0], heads & 1)
                T.call_extern("handle", "flashqla::begin_product<4>", dq_sum.data, T.access_ptr(x.z_smem[0, 0], "r"), T.access_ptr(x.k_smem[half, 0, 0], "r"), True)
                T.call_extern("handle", "flashqla::begin_product<4>", dk_sum.data, T.access_ptr(x.x_smem[0, 0], "r"), T.access_ptr(x.k_smem[half, 0, 0], "r"), True)
                T.call_extern("handle", "flashqla::begin_product<4, true>", dk_sum.data, T.access_ptr(x.z_smem[0, 0], "r"), T.access_ptr(x.q_smem[half, 0, 0], "r"), True)
                T.call_extern("handle", "flashqla::end_product", dq_sum.data)
                T.call_extern("handle", "flashqla::end_product", dk_sum.data)
                release(x, x.zx_free, 0)
                count = count + 1
                heads = heads + 1
            if l2norm:
                T.call_extern(
                    "handle", f"flashqla::take_out_norms<{element}>", dq_sum.data, dk_sum.data, T.access_ptr(x.q_smem[half, 0, 0], "r"), T.access_ptr(x.k_smem[half, 0, 0], "r"),
                    T.access_ptr(x.norms[done & 1, 0, 0, 0], "r"), half,
                )
            release(x, x.qk_free, 0)
            w = done % WORKS
            T.call_extern("handle", f"flashqla::store_rows<{element}>", T.address_of(dq[x.work[w, FIRST], x.work[w, HEAD], half * TILE]), hk * HEAD_DIM, dq_sum.data, x.work[w, ROWS])
            T.call_extern("handle", f"flashqla::store_rows<{element}>", T.address_of(dk[x.work[w, FIRST], x.work[w, HEAD], half * TILE]), hk * HEAD_DIM, dk_sum.data, x.work[w, ROWS])
            done = done + 1
            T.barrier_wait(x.tokens_ready[count % TOKEN_STAGES], (count // TOKEN_STAGES) & 1)
            rows = x.work[done % WORKS, ROWS]

    @T.macro
    def score_gradient(x, scale):
        qk = T.alloc_fragment((CHUNK, CHUNK), "float32")
        kk = T.alloc_fragment((CHUNK, CHUNK), "float32")
        product = T.alloc_fragment((CHUNK, CHUNK), "float32")
        row_sum = T.alloc_local((2,), "float32")
        column_sum = T.alloc_local((8,), "float32")
        beta_sum = T.alloc_local((2,), "float32")
        diagonal = T.alloc_local((2,), "float32")
        count = T.alloc_var("int32")  # stages of tokens so far
        heads = T.alloc_var("int32")  # value heads so far
        done = T.alloc_var("int32")  # items so far
        group = T.alloc_var("int32")
        rows = T.alloc_var("int32")
        group = T.truncdiv(hv, hk)
        count = 0
        heads = 0
        done = 0
        T.call_extern("handle", "flashqla::zero_own_rows", T.access_ptr(x.z_smem[0, 0], "r"))
        T.barrier_wait(x.tokens_ready[0], 0)
        rows = x.work[0, ROWS]
        while rows > 0:
            T.barrier_wait(x.qk_ready[0], done & 1)
            for n in BOTH:
                T.wgmma_gemm(x.q_smem[n, :, :], x.k_smem[n, :, :], qk, transpose_B=True, clear_accum=n == 0)
            for n in BOTH:
                T.wgmma_gemm(x.k_smem[n, :, :], x.k_smem[n, :, :], kk, transpose_B=True, clear_accum=n == 0)
            T.wait_wgmma(0)
            release(x, x.qk_free, 0)
            for _ in T.unroll(group, unroll_factor=1):
                if x.work[done % WORKS, AHEAD] != 0:  # for COLUMNS
                    T.barrier_wait(x.tokens_ready[count % TOKEN_STAGES], (count // TOKEN_STAGES) & 1)
                    release(x, x.tokens_free, count % TOKEN_STAGES)
                    count = count + 1
                s = count % TOKEN_STAGES
                T.barrier_wait(x.tokens_ready[s], (count // TOKEN_STAGES) & 1)
                # One after the other: both at once have no room in registers, and this role has time.
                for h in BOTH:
                    T.wgmma_gemm(x.do_smem[s, h, :, :], x.u_smem[s, h, :, :], product, transpose_B=True, clear_accum=h == 0)
                T.barrier_wait(x.zx_free[0], (heads & 1) ^ 1)
                T.wait_wgmma(0)
                T.call_extern(
                    "handle", f"flashqla::query_scores<{element}>", product.data, qk.data, T.access_ptr(x.record_smem[s, 0, 0], "r"), scale,
                    T.access_ptr(x.z_smem[0, 0], "r"), row_sum.data, column_sum.data,
                )
                for_dy: T.int32 = T.call_extern("int32", "flashqla::anew", s)
                for h in BOTH:
                    T.wgmma_gemm(x.dy_smem[for_dy, h, :, :], x.u_smem[for_dy, h, :, :], product, transpose_B=True, clear_accum=h == 0)
                T.wait_wgmma(0)
                T.call_extern(
                    "handle", f"flashqla::key_scores<{element}>", product.data, kk.data, T.access_ptr(x.record_smem[s, 0, 0], "r"),
                    T.access_ptr(x.x_smem[0, 0], "r"), row_sum.data, column_sum.data, beta_sum.data, diagonal.data,
                )
                T.fence_proxy_async()
                T.barrier_arrive(x.zx_ready[0])
                release(x, x.tokens_free, s)
                T.barrier_wait(x.sums_free[0], (heads & 1) ^ 1)
                T.call_extern("handle", "flashqla::put_score_sums", row_sum.data, column_sum.data, beta_sum.data, diagonal.data, T.access_ptr(x.sums[0], "r"))
                T.barrier_arrive(x.sums_ready[0])
                count = count + 1
                heads = heads + 1
            done = done + 1
            T.barrier_wait(x.tokens_ready[count % TOKEN_STAGES], (count // TOKEN_STAGES) & 1)
            rows = x.work[done % WORKS, ROWS]

    @T.macro
    def load_tokens(x, first, head, slot, s, ready, stage):
        for h in BOTH:
            column = h * TILE
            T.tma_copy(x.do[first:first + CHUNK, head, column:column + TILE], x.do_smem[s, h, :, :], barrier=ready[stage])
            T.tma_copy(x.u[first:first + CHUNK, head, column:column + TILE], x.u_smem[s, h, :, :], barrier=ready[stage])
            T.tma_copy(x.dv[first:first + CHUNK, head, column:column + TILE], x.dy_smem[s, h, :, :], barrier=ready[stage])
        T.tma_copy(x.records[slot, head, :, :], x.record_smem[s, :, :], barrier=ready[stage])

    @T.macro
    def load_write(x, first, head, k_head, slot, s):
        for h in BOTH:
            column = h * TILE
            T.tma_copy(x.u[first:first + CHUNK, head, column:column + TILE], x.do_smem[s, h, :, :], barrier=x.tokens_ready[s])
            T.tma_copy(x.k[first:first + CHUNK, k_head, column:column + TILE], x.u_smem[s, h, :, :], barrier=x.tokens_ready[s])
        T.tma_copy(x.records[slot, head, :, :], x.record_smem[s, :, :], barrier=x.tokens_ready[s])

    @T.macro
    def load_state(states, slot, head, heads, smem, ready, free):
        for n in BOTH:
            T.barrier_wait(free[n], (heads & 1) ^ 1)
            for h in BOTH:
                T.tma_copy(states[slot, head, h * TILE:h * TILE + TILE, n * TILE:n * TILE + TILE], smem[n, h, :, :], barrier=ready[n])
            T.barrier_arrive(ready[n])

    @T.macro
    def load_qk(x, first, k_head, ready):
        for n in BOTH:
            column = n * TILE
            T.tma_copy(x.q[first:first + CHUNK, k_head, column:column + TILE], x.q_smem[n, :, :], barrier=ready[0])
            T.tma_copy(x.k[first:first + CHUNK, k_head, column:column + TILE], x.k_smem[n, :, :], barrier=ready[0])

    @T.macro
    def load(x):
        item = T.alloc_var("int32")
        slot = T.alloc_var("int32")
        found = T.alloc_local((4,), "int32")
        count = T.alloc_var("int32")  # stages of tokens so far
        heads = T.alloc_var("int32")  # value heads so far
        done = T.alloc_var("int32")  # items so far
        tails = T.alloc_var("int32")
        group = T.alloc_var("int32")
        item = x.first_item
        group = T.truncdiv(hv, hk)
        count = 0
        heads = 0
        done = 0
        tails = 0
        while item < slots * hk:
            slot = T.truncdiv(item, hk)
            k_head: T.int32 = item - slot * hk
            T.call_extern("handle", "flashqla::find_chunk", found.data, *x.of_chunk, slot)
            rows: T.int32 = found[0]
            first: T.int32 = found[1]
            pair: T.int32 = found[2]
            ahead: T.int32 = found[3]
            if rows > 0:
                for e in T.unroll(group, unroll_factor=1):
                    head = k_head * group + e
                    # In the order in which shared memory becomes free and is needed: a state that has to be advanced comes before the tokens.
                    for step in T.unroll(ahead + 1, unroll_factor=1):
                        s = count % TOKEN_STAGES
                        T.barrier_wait(x.tokens_free[s], ((count // TOKEN_STAGES) & 1) ^ 1)
                        if T.And(e == 0, step == 0):
                            T.call_extern("handle", "flashqla::put_work", T.access_ptr(x.work[done % WORKS, 0], "r"), rows, first, k_head, ahead)
                        if step < ahead:  # by a whole chunk: U lies as dO, k as U
                            load_write(x, first - CHUNK, head, k_head, slot - 1, s)
                        elif rows == CHUNK:
                            load_tokens(x, first, head, slot, s, x.tokens_ready, s)
                        else:  # the rows past the end belong to another sequence, or to nobody
                            load_tokens(x, first, head, slot, s, x.tail_ready, 0)
                            T.barrier_arrive(x.tail_ready[0])
                            T.barrier_wait(x.tail_ready[0], tails & 1)
                            tails = tails + 1
                            for h in BOTH:
                                T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.do_smem[s, h, 0, 0]), rows)
                                T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.u_smem[s, h, 0, 0]), rows)
                                T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.dy_smem[s, h, 0, 0]), rows)
                            T.fence_proxy_async()
                        T.barrier_arrive(x.tokens_ready[s])
                        count = count + 1
                        if step == 0:  # while shared memory is taken
                            for of_states in (x.states[pair, head, 0, 0], x.dstates[slot, head, 0, 0]):
                                T.call_extern("handle", "flashqla::prefetch_block", T.address_of(of_states), HEAD_DIM * HEAD_DIM * SIZE)
                            if e == 0:
                                T.call_extern("handle", "flashqla::prefetch_rows<2>", T.address_of(x.q[first, k_head, 0]), q0 * SIZE, rows)
                                T.call_extern("handle", "flashqla::prefetch_rows<2>", T.address_of(x.k[first, k_head, 0]), k0 * SIZE, rows)
                            load_state(x.states, pair, head, heads, x.s_smem, x.s_ready, x.s_free)
                            load_state(x.dstates, slot, head, heads, x.ds_smem, x.ds_ready, x.ds_free)
                    if e == 0:
                        T.barrier_wait(x.qk_free[0], (done & 1) ^ 1)
                        if rows == CHUNK:
                            load_qk(x, first, k_head, x.qk_ready)
                        else:
                            load_qk(x, first, k_head, x.tail_ready)
                            T.barrier_arrive(x.tail_ready[0])
                            T.barrier_wait(x.tail_ready[0], tails & 1)
                            tails = tails + 1
                            for n in BOTH:
                                T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.q_smem[n, 0, 0]), rows)
                                T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.k_smem[n, 0, 0]), rows)
                            T.fence_proxy_async()
                        T.barrier_arrive(x.qk_ready[0])
                    heads = heads + 1
                done = done + 1
            item = item + x.ctas
        T.barrier_wait(x.tokens_free[count % TOKEN_STAGES], ((count // TOKEN_STAGES) & 1) ^ 1)
        T.call_extern("handle", "flashqla::put_work", T.access_ptr(x.work[done % WORKS, 0], "r"), 0, 0, 0, 0)
        T.barrier_arrive(x.tokens_ready[count % TOKEN_STAGES])

    @T.macro
    def finish(x, v, dq, dk, dg, dbeta):
        factors = T.alloc_local((7,), "float32")
        sums = T.alloc_local((15,), "float32")
        item = T.alloc_var("int32")
        slot = T.alloc_var("int32")
        count = T.alloc_var("int32")  # value heads so far
        group = T.alloc_var("int32")
        item = x.first_item
        group = T.truncdiv(hv, hk)
        count = 0
        while item < slots * hk:
            slot = T.truncdiv(item, hk)
            chunk: T.int64 = T.call_extern("int64", "flashqla::chunk_of", *x.of_chunk, slot)
            rows: T.int32 = T.cast(chunk & 127, "int32")
            if rows > 0:
                for e in T.unroll(group, unroll_factor=1):
                    first: T.int32 = T.call_extern("int32", "flashqla::anew", T.cast(chunk >> 7, "int32"))
                    head: T.int32 = T.call_extern("int32", "flashqla::anew", (item - slot * hk) * group + e)
                    T.call_extern("handle", "flashqla::read_factors", T.address_of(x.records[slot, head, 0, 0]), factors.data)
                    T.barrier_wait(x.sums_ready[0], count & 1)
                    T.call_extern("handle", "flashqla::read_sums", T.access_ptr(x.sums[0], "r"), sums.data)
                    T.sync_warp()
                    T.barrier_arrive(x.sums_free[0])
                    T.call_extern(
                        "handle", f"flashqla::gate_gradients<{element}>", factors.data, sums.data,
                        T.address_of(v[first, head, 0]), v0, T.address_of(x.dv[first, head, 0]), hv * HEAD_DIM,
                        T.address_of(dg[first, head]), T.address_of(dbeta[first, head]), hv, rows,
                    )
                    count = count + 1
            else:
                T.call_extern(
                    "handle", f"flashqla::zero_tail<{element}>", T.address_of(dq[0, 0, 0]), T.address_of(dk[0, 0, 0]), T.address_of(x.dv[0, 0, 0]),
                    T.address_of(dg[0, 0]), T.address_of(dbeta[0, 0]), *x.of_chunk, slot, item - slot * hk, hk, group,
                )
            item = item + x.ctas

    @T.prim_func
    def chunk_gradients(
        q: T.StridedTensor((tokens, hk, HEAD_DIM), (q0, q1, 1), dtype),
        k: T.StridedTensor((tokens, hk, HEAD_DIM), (k0, k1, 1), dtype),
        v: T.StridedTensor((tokens, hv, HEAD_DIM), (v0, v1, 1), dtype),
        do: T.StridedTensor((tokens, hv, HEAD_DIM), (d0, d1, 1), dtype),
        u: T.Tensor((tokens, hv, HEAD_DIM), dtype),
        records: T.Tensor((slots, hv, BACKWARD_RECORD, CHUNK), "float32"),
        states: T.Tensor((pairs, hv, HEAD_DIM, HEAD_DIM), dtype),
        dstates: T.Tensor((slots, hv, HEAD_DIM, HEAD_DIM), dtype),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        dq: T.Tensor((tokens, hk, HEAD_DIM), dtype),
        dk: T.Tensor((tokens, hk, HEAD_DIM), dtype),
        dv: T.Tensor((tokens, hv, HEAD_DIM), dtype),
        dg: T.Tensor((tokens, hv), "float32"),
        dbeta: T.Tensor((tokens, hv), "float32"),
        scale: T.float32,
        sequences: T.int32,
        offset_step: T.int32,
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=THREADS) as bx:
            T.import_source(f"namespace flashqla {{ constexpr bool kBfloat16 = {int(dtype == 'bfloat16')}; }}\n" + cuda("tiles", "records", "segments", "pairs", "gradients"))
            tile = (TOKEN_STAGES, HALVES, CHUNK, TILE)  # of tokens: halves of V
            do_smem = T.alloc_shared(tile, dtype)
            u_smem = T.alloc_shared(tile, dtype)
            dy_smem = T.alloc_shared(tile, dtype)
            record_smem = T.alloc_shared((TOKEN_STAGES, BACKWARD_RECORD, CHUNK), "float32")
            s_smem = T.alloc_shared((HALVES, HALVES, TILE, TILE), dtype)  # halves of K, of V
            ds_smem = T.alloc_shared((HALVES, HALVES, TILE, TILE), dtype)
            q_smem = T.alloc_shared((HALVES, CHUNK, TILE), dtype)
            k_smem = T.alloc_shared((HALVES, CHUNK, TILE), dtype)
            z_smem = T.alloc_shared((CHUNK, CHUNK), dtype)
            x_smem = T.alloc_shared((CHUNK, CHUNK), dtype)
            sums = T.alloc_shared((SUMS,), "float32")
            work = T.alloc_shared((WORKS, WORK), "int32")
            norms = T.alloc_shared((2, HALVES, CHUNK, 4), "float32") if l2norm else None  # of two items
            tiles = (do_smem, u_smem, dy_smem, s_smem, ds_smem, q_smem, k_smem, z_smem, x_smem)
            T.annotate_layout({smem: make_swizzled_layout(smem) for smem in tiles})
            qk_ready = T.alloc_barrier([WARP])  # LOAD -> COLUMNS, SCORE
            qk_free = T.alloc_barrier([SCORE_END // WARP])  # COLUMNS, SCORE -> LOAD
            tokens_ready = T.alloc_barrier([WARP] * TOKEN_STAGES)  # LOAD -> COLUMNS, SCORE
            tokens_free = T.alloc_barrier([SCORE_END // WARP] * TOKEN_STAGES)  # COLUMNS, SCORE -> LOAD
            s_ready = T.alloc_barrier([WARP] * HALVES)  # LOAD -> COLUMNS
            s_free = T.alloc_barrier([WARP_GROUP // WARP] * HALVES)  # COLUMNS -> LOAD
            ds_ready = T.alloc_barrier([WARP] * HALVES)  # LOAD -> COLUMNS
            ds_free = T.alloc_barrier([WARP_GROUP // WARP] * HALVES)  # COLUMNS -> LOAD
            zx_ready = T.alloc_barrier([WARP_GROUP])  # SCORE -> COLUMNS
            zx_free = T.alloc_barrier([COLUMNS_END // WARP])  # COLUMNS -> SCORE
            sums_ready = T.alloc_barrier([SCORE_END])  # COLUMNS, SCORE -> FINISH
            sums_free = T.alloc_barrier([WARP])  # FINISH -> COLUMNS, SCORE
            tail_ready = T.alloc_barrier([WARP])  # TMA -> LOAD

            tx = T.get_thread_binding()
            T.pdl_sync()  # until the recurrences have ended
            x = SimpleNamespace(
                q=q, k=k, do=do, u=u, dv=dv, records=records, states=states, dstates=dstates,
                do_smem=do_smem, u_smem=u_smem, dy_smem=dy_smem, record_smem=record_smem, s_smem=s_smem, ds_smem=ds_smem,
                q_smem=q_smem, k_smem=k_smem, z_smem=z_smem, x_smem=x_smem, sums=sums, work=work, norms=norms,
                qk_ready=qk_ready, qk_free=qk_free, tokens_ready=tokens_ready, tokens_free=tokens_free, s_ready=s_ready, s_free=s_free, ds_ready=ds_ready, ds_free=ds_free,
                zx_ready=zx_ready, zx_free=zx_free, sums_ready=sums_ready, sums_free=sums_free, tail_ready=tail_ready,
                tx=tx, first_item=bx, ctas=ctas,
                of_chunk=(T.address_of(cu_seqlens[0]), offset_step, sequences, tokens),
            )
            if tx < COLUMNS_END:
                T.inc_max_nreg(COLUMNS_REGISTERS)
                columns(x, dq, dk)
            elif tx < SCORE_END:
                T.inc_max_nreg(SCORE_REGISTERS)
                score_gradient(x, scale)
            else:
                T.dec_max_nreg(SERVICE_REGISTERS)
                if tx < LOAD_END:
                    load(x)
                elif tx < FINISH_END:
                    finish(x, v, dq, dk, dg, dbeta)

    return chunk_gradients
