"""Gated inverse and per-token factors of every 64-token chunk: what the recurrence needs and does not have to wait for.

    M[i, j] = beta[i] * exp(G[i] - G[j]) * <k[i], k[j]>   for j < i, else 0        A = (I + M)^-1 diag(beta), or without beta

Shapes  q, k [T, hk, 128] bf16 or fp16; g, beta [T, hv]  ->  A [T, hv, 64]; records [slots, hv, 6, 64] fp32 (common.py);
        on demand the cumulative gate [T, hv] fp32. Rows past the last sequence become 0 in A, o and the cumulative gate.
Units   g: natural log of the decay, <= 0; G: its inclusive sum inside the chunk
Grid    a CTA per SM, which takes in turns an item, a chunk and key head; an item has a job for each value head that shares <k[i], k[j]>
Cost    per value head 12 KB of HBM, 850 instructions of a warp for the inverse and 250 for all else; per item 16 KB and one 64x64x128 GEMM
Source  Gated Delta Networks, arXiv 2412.06464, chunkwise form

    PRODUCT  one warpgroup: keys in by TMA, some turns ahead; K K^T of every item, with l2norm also the norms of keys and queries
    INVERT   twelve warps, each for itself: job j of the CTA is for warp j % WARPS, whatever item it is of

To find an item takes longer than to multiply its keys. So a warp looks up a batch of them, a turn a lane, long before anybody asks for one.

The inverse is a long chain of short steps, which only other warps hide. So no warp waits for another but through the ring of products, whose
stage is free when every job of its item has read it. Where a group is one head, six products keep half of the warps inverting while the others
load and store: keys come no faster than that. A barrier is named for what it says is ready or free.

The inverse is made of 16x16 blocks: those on the diagonal by substitution in fp32, the others, of column c, by
A[i, c] = -A[i, i] * sum over c <= k < i of M[i, k] A[k, c], in TF32. Only M on the diagonal goes through shared memory.
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
    MANUAL_ROLES,
    RECORD,
    TILE,
    WARP,
    WARP_GROUP,
    cuda,
)

WARPS = 12  # that invert: with those of PRODUCT they share the registers of an SM, 128 a thread. One more would leave each 96
PRODUCT_END = WARP_GROUP
THREADS = PRODUCT_END + WARPS * WARP
KEYS, PRODUCTS = 3, 6  # stages; what shared memory has left for them
BLOCKS = 10 * 16 * 16  # floats of the lower triangle of a product
PIECE = 8  # elements of A and o in 16 bytes
VECTORS = 324  # floats of one head's per-token factors, kVectors in inverse.cuh
FIRST, ROWS, SLOT, K_HEAD = range(4)  # of an item, as look_up writes it
ITEM = 4  # its integers
BATCH = WARP  # turns looked up at once, in job 0 of the turn that is BATCH before the first of them
# Items stand in a ring, batch upon batch. Who has seen a product ready, sees what was written in all jobs PRODUCTS turns before it and back.
#   ready  INVERT asks for its next job before it waits for the product of this one. It has seen that of the job before, from which there are at most
#          2 * WARPS turns to the next: 2 * WARPS + PRODUCTS <= BATCH. PRODUCT asks only KEYS turns ahead.
#   free   Who looks up in turn t has seen a product at most WARPS turns old, so the jobs of turn t - WARPS - PRODUCTS are done. The last place it
#          takes was that of turn t + 2 * BATCH - 1 - RING. Three batches would do, but are no power of two.
RING = 4 * BATCH


def alloc_barrier(counts):
    """As TileLang's, with counts that are known at run time."""
    barrier = T.sblock_alloc_buffer((len(counts),), "uint64", scope="shared.barrier")
    T.sblock_attr({"barrier_init": {barrier.data: counts}})
    return barrier


@tilelang.jit(target=HOPPER, pass_configs=MANUAL_ROLES)
def build_inverse(dtype: str, g_dtype: str, beta_dtype: str, l2norm: bool, backward: bool = False):
    """The kernel for q and k in `dtype`. l2norm: with the norms of q and k in the factors. backward: with the rows of records that only that pass needs."""
    record = BACKWARD_RECORD if backward else RECORD
    element = CUDA_TYPES[dtype]
    factors = f"flashqla::chunk_factors<{str(l2norm).lower()}, {str(backward).lower()}, {CUDA_TYPES[g_dtype]}, {CUDA_TYPES[beta_dtype]}>"
    tokens, slots, hk, hv, offsets, gate_rows = (T.dynamic(x) for x in ("tokens", "slots", "hk", "hv", "offsets", "gate_rows"))
    q0, q1, k0, k1, g0, g1, b0, b1 = (T.dynamic(x) for x in ("q0", "q1", "k0", "k1", "g0", "g1", "b0", "b1"))

    @T.macro
    def look_up(x, turn):
        """The batch of items from a turn on, by one warp."""
        T.call_extern(
            "handle", "flashqla::look_up", turn, slots * hk, hk, T.address_of(x.cu_seqlens[0]), x.offset_step, x.sequences, x.tokens,
            T.address_of(x.items[turn % RING, 0]),
        )

    @T.macro
    def recall(x, turn, item):
        T.call_extern("handle", "flashqla::recall", T.address_of(x.items[turn % RING, 0]), item.data)

    @T.macro
    def load_keys(x, q, k, turn, item):
        """The keys of a turn, by one warp."""
        if turn < x.turns:
            recall(x, turn, item)
            T.barrier_wait(x.keys_free[turn % KEYS], ((turn // KEYS) & 1) ^ 1)
            if item[ROWS] > 0:
                for half in T.unroll(2):
                    T.tma_copy(
                        k[item[FIRST]:item[FIRST] + CHUNK, item[K_HEAD], half * TILE:half * TILE + TILE],
                        x.k_smem[turn % KEYS, half * CHUNK:half * CHUNK + CHUNK, :], barrier=x.keys_ready[turn % KEYS],
                    )
            T.barrier_arrive(x.keys_ready[turn % KEYS])
            if l2norm:
                T.call_extern("handle", f"flashqla::prefetch_rows<{element}>", T.address_of(q[item[FIRST], item[K_HEAD], 0]), q0, item[ROWS])

    @T.macro
    def multiply(x, q, k):
        product = T.alloc_fragment((CHUNK, CHUNK), "float32")
        item = T.alloc_local((ITEM,), "int32")
        if x.tx < WARP:
            for turn in T.unroll(KEYS, unroll_factor=1):
                load_keys(x, q, k, turn, item)
        for turn in T.unroll(x.turns, unroll_factor=1):
            s = turn % KEYS
            p = turn % PRODUCTS
            T.barrier_wait(x.keys_ready[s], (turn // KEYS) & 1)
            recall(x, turn, item)
            # The product under no condition: ptxas takes one that rests on an item for one that may divide a warp, and puts products in series.
            if item[ROWS] < CHUNK:  # rows of another sequence, or of nobody: anything may stand there
                if x.tx < 2 * WARP:
                    T.call_extern("handle", "flashqla::zero_rows", T.address_of(x.k_smem[s, x.tx // WARP * CHUNK, 0]), item[ROWS])
                T.fence_proxy_async()
                T.sync_threads(8, WARP_GROUP)
            T.wgmma_gemm(x.k_smem[s, 0:CHUNK, :], x.k_smem[s, 0:CHUNK, :], product, transpose_B=True, clear_accum=True)
            T.wgmma_gemm(x.k_smem[s, CHUNK:2 * CHUNK, :], x.k_smem[s, CHUNK:2 * CHUNK, :], product, transpose_B=True)
            T.barrier_wait(x.product_free[p], ((turn // PRODUCTS) & 1) ^ 1)
            if l2norm:
                T.call_extern(
                    "handle", f"flashqla::inverse_norms_of_tile<{element}>", T.access_ptr(x.k_smem[s, 0, 0], "r"), T.address_of(x.norms[p, 0, 0]), item[ROWS]
                )
                T.call_extern(
                    "handle", f"flashqla::inverse_norms<{element}>", T.address_of(q[item[FIRST], item[K_HEAD], 0]), q0, T.address_of(x.norms[p, 1, 0]), item[ROWS]
                )
            T.wait_wgmma(0)
            T.fence_proxy_async()  # the keys have been read, and rows of them written: a copy may overtake neither
            T.barrier_arrive(x.keys_free[s])
            T.call_extern("handle", "flashqla::store_product", product.data, T.address_of(x.products[p, 0]))
            T.barrier_arrive(x.product_ready[turn % WARPS])
            if x.tx < WARP:
                load_keys(x, q, k, turn + KEYS, item)

    @T.macro
    def load_gates(x, gates, betas, item, head):
        """Gate and beta of two tokens into registers of each lane."""
        rows = T.if_then_else(x.has_gate != 0, item[ROWS], 0)
        T.call_extern("handle", "flashqla::two_tokens", gates.data, T.address_of(x.g[0, 0]), item[FIRST], g0, head, g1, rows)
        T.call_extern("handle", "flashqla::two_tokens", betas.data, T.address_of(x.beta[0, 0]), item[FIRST], b0, head, b1, item[ROWS])

    @T.macro
    def prepare(x, gates, betas, item, head, p):
        """The factors of this job into shared memory, its record to HBM."""
        T.call_extern(
            "handle", factors, gates.data, betas.data, T.address_of(x.norms[p, 1, 0]), T.address_of(x.norms[p, 0, 0]), T.address_of(x.vectors[x.warp, 0]),
            T.address_of(x.records[item[SLOT], head, 0, 0]), T.address_of(x.cumulative[item[FIRST] * x.has_cumulative, head]), hv, item[ROWS],
            x.scale, x.has_cumulative,
        )

    @T.macro
    def blank(x, A, o, row, head):
        """Zeros for the rows past the last sequence, which belong to the slots past its last chunk."""
        if row < x.tokens:
            rows: T.int32 = T.min(x.tokens - row, CHUNK)
            T.call_extern("handle", f"flashqla::zero_pieces<{HEAD_DIM // PIECE}>", T.address_of(o[row, head, 0]), hv * (HEAD_DIM // PIECE), rows)
            T.call_extern("handle", f"flashqla::zero_pieces<{CHUNK // PIECE}>", T.address_of(A[row, head, 0]), hv * (CHUNK // PIECE), rows)
            if x.has_cumulative != 0:
                for half in T.unroll(2):
                    if half * WARP + x.tx % WARP < rows:
                        x.cumulative[row + half * WARP + x.tx % WARP, head] = 0.0

    def tiles_of(A):
        """The descriptor of 64x64 tiles of A, as `T.tma_copy` would make it: shape, strides in bytes, box, swizzle of 128 bytes."""
        data_type = {"float16": 6, "bfloat16": 9}[dtype]
        return T.create_tma_descriptor(
            data_type, 3, A.data, CHUNK, tokens, hv, 2, T.cast(hv, "int64") * 2 * CHUNK, 2 * CHUNK, CHUNK, CHUNK, 1, 1, 1, 1, 0, 3, 2, 0
        )

    @T.macro
    def wait_for_product(x, turn):
        T.barrier_wait(x.product_ready[T.truncmod(turn, WARPS)], T.truncdiv(turn, WARPS) & 1)

    @T.macro
    def invert(x, A, o):
        item = T.alloc_local((ITEM,), "int32")
        gates = T.alloc_local((2,), g_dtype)
        betas = T.alloc_local((2,), beta_dtype)
        # A job is a member of the group of its turn. From one of this warp to the next there are WARPS jobs.
        turn, member, next_turn, next_member, more_turns, more_members, head = (T.alloc_var("int32") for _ in range(7))
        turn = T.truncdiv(x.warp, x.group)
        member = T.truncmod(x.warp, x.group)
        more_turns = T.truncdiv(WARPS, x.group)
        more_members = T.truncmod(WARPS, x.group)
        if turn < x.turns:
            recall(x, turn, item)
            load_gates(x, gates, betas, item, item[K_HEAD] * x.group + member)
        while turn < x.turns:
            if member == 0 and turn % BATCH == 0 and turn + BATCH < x.turns:
                look_up(x, turn + BATCH)
            recall(x, turn, item)
            head = item[K_HEAD] * x.group + member
            if l2norm:
                wait_for_product(x, turn)
            if item[ROWS] > 0:
                prepare(x, gates, betas, item, head, T.truncmod(turn, PRODUCTS))
            next_turn = turn + more_turns
            next_member = member + more_members
            if next_member >= x.group:
                next_turn += 1
                next_member -= x.group
            if next_turn < x.turns:  # what the next job needs comes while this one is inverted
                recall(x, next_turn, item)
                load_gates(x, gates, betas, item, item[K_HEAD] * x.group + next_member)
            T.sync_warp()  # the factors are there
            recall(x, turn, item)  # again, or it would wait for that in registers
            p: T.int32 = T.truncmod(turn, PRODUCTS)
            if not l2norm:
                wait_for_product(x, turn)
            if item[ROWS] > 0:
                T.tma_store_wait(0, read=True)  # the tile before this one has left
                T.sync_warp()
                T.call_extern(
                    "handle", f"flashqla::gated_inverse<{element}>", T.address_of(x.products[p, 0]), T.address_of(x.vectors[x.warp, 0]),
                    T.address_of(x.a_smem[x.warp, 0, 0]), x.has_beta,
                )
            # Every thread arrives that has read: racecheck does not see what a warp barrier orders.
            T.barrier_arrive(x.product_free[p])
            if item[ROWS] > 0:
                T.fence_proxy_async()
                T.sync_warp()
                if item[ROWS] == CHUNK:
                    T.call_extern("handle", "flashqla::send_tile", tiles_of(A), T.address_of(x.a_smem[x.warp, 0, 0]), item[FIRST], head)
                else:
                    T.call_extern(
                        "handle", f"flashqla::store_rows<{element}>", T.address_of(x.a_smem[x.warp, 0, 0]), T.address_of(A[item[FIRST], head, 0]), hv * CHUNK, item[ROWS],
                    )
                    T.sync_warp()  # the tile has been read
            else:
                blank(x, A, o, item[FIRST], head)
            turn = next_turn
            member = next_member
        T.tma_store_wait(0, read=False)

    @T.prim_func
    def gated_inverse(
        q: T.StridedTensor((tokens, hk, HEAD_DIM), (q0, q1, 1), dtype),
        k: T.StridedTensor((tokens, hk, HEAD_DIM), (k0, k1, 1), dtype),
        g: T.StridedTensor((tokens, hv), (g0, g1), g_dtype),
        beta: T.StridedTensor((tokens, hv), (b0, b1), beta_dtype),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        A: T.Tensor((tokens, hv, CHUNK), dtype),
        records: T.Tensor((slots, hv, record, CHUNK), "float32"),
        cumulative: T.Tensor((gate_rows, hv), "float32"),
        o: T.Tensor((tokens, hv, HEAD_DIM), dtype),
        scale: T.float32,
        sequences: T.int32,
        offset_step: T.int32,
        group: T.int32,
        most_ctas: T.int32,
        has_gate: T.int32,
        has_cumulative: T.int32,
        has_beta: T.int32,
    ):
        # Neighbouring CTAs take the heads of one chunk, which lie side by side in memory.
        with T.Kernel(T.min(most_ctas, slots * hk), threads=THREADS):
            T.import_source(cuda("tiles", "segments", "records", "inverse"))
            a_smem = T.alloc_shared((WARPS, CHUNK, CHUNK), dtype)
            k_smem = T.alloc_shared((KEYS, 2 * CHUNK, TILE), dtype)  # rows 0-63: columns 0-63 of k; rows 64-127: the others
            products = T.alloc_shared((PRODUCTS, BLOCKS), "float32")
            norms = T.alloc_shared((PRODUCTS, 2, CHUNK), "float32")  # inverse norms of keys, of queries
            vectors = T.alloc_shared((WARPS, VECTORS), "float32")
            items = T.alloc_shared((RING, ITEM), "int32")
            keys_ready = T.alloc_barrier([WARP] * KEYS)  # TMA, first warp of PRODUCT -> PRODUCT
            keys_free = T.alloc_barrier([WARP_GROUP] * KEYS)  # PRODUCT -> its first warp
            # More than there are stages: from one job of a warp to the next there may be WARPS products, and a barrier that had come round
            # between them would have the parity of the next before it is there.
            product_ready = T.alloc_barrier([WARP_GROUP] * WARPS)  # PRODUCT -> INVERT
            product_free = alloc_barrier([group * WARP] * PRODUCTS)  # INVERT -> PRODUCT
            T.annotate_min_blocks_per_sm(1)
            T.annotate_layout({a_smem: make_swizzled_layout(a_smem)})  # and its alignment
            tx = T.get_thread_binding()
            T.pdl_trigger()  # the next kernel may take its place on an SM as soon as there is one
            # A variable, because a quotient that is let stand is computed again, in 64 bits, wherever it is used.
            turns = T.alloc_var("int32")
            turns = T.call_extern("int32", "flashqla::turns", slots * hk)
            x = SimpleNamespace(
                g=g, beta=beta, records=records, cumulative=cumulative, cu_seqlens=cu_seqlens, offset_step=offset_step, sequences=sequences,
                tokens=tokens, group=group, scale=scale, has_gate=has_gate, has_cumulative=has_cumulative, has_beta=has_beta,
                a_smem=a_smem, k_smem=k_smem, products=products, norms=norms, vectors=vectors, items=items,
                keys_ready=keys_ready, keys_free=keys_free, product_ready=product_ready, product_free=product_free, tx=tx, warp=(tx - PRODUCT_END) // WARP, turns=turns,
            )
            if tx < WARP:
                look_up(x, 0)
            T.sync_threads()  # the first batch is there
            if tx < PRODUCT_END:
                multiply(x, q, k)
            else:
                invert(x, A, o)

    return gated_inverse
