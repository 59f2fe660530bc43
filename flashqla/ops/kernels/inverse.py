"""Gated inverse and per-token factors of every 64-token chunk: what the recurrence needs and does not have to wait for.

    M[i, j] = beta[i] * exp(G[i] - G[j]) * <k[i], k[j]>   for j < i, else 0        A = (I + M)^-1 diag(beta), or without beta

Shapes  q, k [T, hk, 128] bf16 or fp16; g, beta [T, hv]  ->  A [T, hv, 64]; records [slots, hv, 6, 64] fp32 (common.py);
        on demand the cumulative gate [T, hv] fp32. Rows past the last sequence become 0 in A, o and the cumulative gate.
Units   g: natural log of the decay, <= 0; G: its inclusive sum inside the chunk
Grid    a CTA per SM, which takes in turns an item, a chunk and key head; an item has a job for each value head that shares <k[i], k[j]>
Cost    per value head 12 KB of HBM, 900 instructions of a warp for the inverse and 400 for all else; per item 16 KB and one 64x64x128 GEMM
Source  Gated Delta Networks, arXiv 2412.06464, chunkwise form

    PRODUCT  one warpgroup: K K^T of every item, with l2norm also the norms of keys and queries
    INVERT   eleven warps, each for itself: job j of the CTA is for warp j % WARPS, whatever item it is of
    LOAD     one warp: keys in by TMA, some turns ahead. To find an item takes it longer than PRODUCT takes to multiply

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

WARPS = 11  # that invert: with the other five warps they share the registers of an SM, 128 a thread. One more would leave each 96
PRODUCT_END = WARP_GROUP
INVERT_END = PRODUCT_END + WARPS * WARP
THREADS = INVERT_END + WARP
KEYS, PRODUCTS = 3, 6  # stages; what shared memory has left for them
BLOCKS = 10 * 16 * 16  # floats of the lower triangle of a product
PIECE = 8  # elements of A and o in 16 bytes
VECTORS = 324  # floats of one head's per-token factors, kVectors in inverse.cuh
FIRST, ROWS, SLOT, HEAD, K_HEAD, BLANK, TURN = range(7)  # of a job, as take_job writes it
JOB = 8  # its integers, and one more for alignment


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
    def take(x, job, places, at, task):
        """What a job of this CTA is, into registers, through a place of this warp in shared memory."""
        T.call_extern(
            "handle", "flashqla::take_job", job, hk, x.group, T.address_of(x.cu_seqlens[0]), x.offset_step, x.sequences, x.tokens,
            T.address_of(places[at, 0]),
        )
        T.call_extern("handle", "flashqla::recall", T.address_of(places[at, 0]), task.data)

    @T.macro
    def load(x, q, k):
        item = T.alloc_local((JOB,), "int32")
        for turn in T.unroll(x.turns, unroll_factor=1):
            s = turn % KEYS
            take(x, turn * x.group, x.items, turn % (2 * KEYS), item)
            if l2norm:
                T.call_extern("handle", f"flashqla::prefetch_rows<{element}>", T.address_of(q[item[FIRST], item[K_HEAD], 0]), q0, item[ROWS])
            T.barrier_wait(x.keys_free[s], ((turn // KEYS) & 1) ^ 1)
            if item[ROWS] > 0:
                for half in T.unroll(2):
                    T.tma_copy(
                        k[item[FIRST]:item[FIRST] + CHUNK, item[K_HEAD], half * TILE:half * TILE + TILE],
                        x.k_smem[s, half * CHUNK:half * CHUNK + CHUNK, :], barrier=x.keys_ready[s],
                    )
            T.barrier_arrive(x.keys_ready[s])

    @T.macro
    def multiply(x, q):
        product = T.alloc_fragment((CHUNK, CHUNK), "float32")
        item = T.alloc_local((JOB,), "int32")
        for turn in T.unroll(x.turns, unroll_factor=1):
            s = turn % KEYS
            p = turn % PRODUCTS
            T.barrier_wait(x.keys_ready[s], (turn // KEYS) & 1)
            T.call_extern("handle", "flashqla::recall", T.address_of(x.items[turn % (2 * KEYS), 0]), item.data)
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

    @T.macro
    def load_gates(x, gates, betas, job):
        """Gate and beta of two tokens into registers of each lane."""
        rows = T.if_then_else(x.has_gate != 0, job[ROWS], 0)
        T.call_extern("handle", "flashqla::two_tokens", gates.data, T.address_of(x.g[0, 0]), job[FIRST], g0, job[HEAD], g1, rows)
        T.call_extern("handle", "flashqla::two_tokens", betas.data, T.address_of(x.beta[0, 0]), job[FIRST], b0, job[HEAD], b1, job[ROWS])

    @T.macro
    def prepare(x, gates, betas, job, p):
        """The factors of this job into shared memory, its record to HBM."""
        T.call_extern(
            "handle", factors, gates.data, betas.data, T.address_of(x.norms[p, 1, 0]), T.address_of(x.norms[p, 0, 0]), T.address_of(x.vectors[x.warp, 0]),
            T.address_of(x.records[job[SLOT], job[HEAD], 0, 0]), T.address_of(x.cumulative[job[FIRST] * x.has_cumulative, job[HEAD]]), hv, job[ROWS],
            x.scale, x.has_cumulative,
        )

    @T.macro
    def blank(x, A, o, job):
        """Zeros for the rows past the last sequence, which belong to the slots past its last chunk."""
        row = job[BLANK]
        if row < x.tokens:
            rows: T.int32 = T.min(x.tokens - row, CHUNK)
            T.call_extern("handle", f"flashqla::zero_pieces<{HEAD_DIM // PIECE}>", T.address_of(o[row, job[HEAD], 0]), hv * (HEAD_DIM // PIECE), rows)
            T.call_extern("handle", f"flashqla::zero_pieces<{CHUNK // PIECE}>", T.address_of(A[row, job[HEAD], 0]), hv * (CHUNK // PIECE), rows)
            if x.has_cumulative != 0:
                for half in T.unroll(2):
                    if half * WARP + x.tx % WARP < rows:
                        x.cumulative[row + half * WARP + x.tx % WARP, job[HEAD]] = 0.0

    def tiles_of(A):
        """The descriptor of 64x64 tiles of A, as `T.tma_copy` would make it: shape, strides in bytes, box, swizzle of 128 bytes."""
        data_type = {"float16": 6, "bfloat16": 9}[dtype]
        return T.create_tma_descriptor(
            data_type, 3, A.data, CHUNK, tokens, hv, 2, T.cast(hv, "int64") * 2 * CHUNK, 2 * CHUNK, CHUNK, CHUNK, 1, 1, 1, 1, 0, 3, 2, 0
        )

    @T.macro
    def wait_for_product(x, job):
        T.barrier_wait(x.product_ready[T.truncmod(job[TURN], WARPS)], T.truncdiv(job[TURN], WARPS) & 1)

    @T.macro
    def invert(x, A, o):
        job = T.alloc_local((JOB,), "int32")
        gates = T.alloc_local((2,), g_dtype)
        betas = T.alloc_local((2,), beta_dtype)
        jobs = T.alloc_var("int32")  # of this warp
        jobs = T.truncdiv(x.turns * x.group - x.warp + WARPS - 1, WARPS)
        if jobs > 0:
            take(x, x.warp, x.jobs, 2 * x.warp, job)
            load_gates(x, gates, betas, job)
        for n in T.unroll(jobs, unroll_factor=1):
            T.call_extern("handle", "flashqla::recall", T.address_of(x.jobs[2 * x.warp + (n & 1), 0]), job.data)
            if l2norm:
                wait_for_product(x, job)
            if job[ROWS] > 0:
                prepare(x, gates, betas, job, T.truncmod(job[TURN], PRODUCTS))
            if n + 1 < jobs:  # what the next job needs comes while this one is inverted
                take(x, (n + 1) * WARPS + x.warp, x.jobs, 2 * x.warp + ((n + 1) & 1), job)
                load_gates(x, gates, betas, job)
            T.sync_warp()  # the factors are there
            T.call_extern("handle", "flashqla::recall", T.address_of(x.jobs[2 * x.warp + (n & 1), 0]), job.data)  # again, or it would wait for that in registers
            p: T.int32 = T.truncmod(job[TURN], PRODUCTS)
            if not l2norm:
                wait_for_product(x, job)
            if job[ROWS] > 0:
                T.tma_store_wait(0, read=True)  # the tile before this one has left
                T.sync_warp()
                T.call_extern(
                    "handle", f"flashqla::gated_inverse<{element}>", T.address_of(x.products[p, 0]), T.address_of(x.vectors[x.warp, 0]),
                    T.address_of(x.a_smem[x.warp, 0, 0]), x.has_beta,
                )
            # Every thread arrives that has read: racecheck does not see what a warp barrier orders.
            T.barrier_arrive(x.product_free[p])
            if job[ROWS] > 0:
                T.fence_proxy_async()
                T.sync_warp()
                if job[ROWS] == CHUNK:
                    T.call_extern("handle", "flashqla::send_tile", tiles_of(A), T.address_of(x.a_smem[x.warp, 0, 0]), job[FIRST], job[HEAD])
                else:
                    T.call_extern(
                        "handle", f"flashqla::store_rows<{element}>", T.address_of(x.a_smem[x.warp, 0, 0]), T.address_of(A[job[FIRST], job[HEAD], 0]), hv * CHUNK, job[ROWS],
                    )
                    T.sync_warp()  # the tile has been read
            blank(x, A, o, job)
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
            items = T.alloc_shared((2 * KEYS, JOB), "int32")  # an item is looked up while the keys of the one KEYS before it still stand there
            job_smem = T.alloc_shared((2 * WARPS, JOB), "int32")  # of a warp, this one and the next
            keys_ready = T.alloc_barrier([WARP] * KEYS)  # TMA, LOAD -> PRODUCT
            keys_free = T.alloc_barrier([WARP_GROUP] * KEYS)  # PRODUCT -> LOAD
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
                a_smem=a_smem, k_smem=k_smem, products=products, norms=norms, vectors=vectors, items=items, jobs=job_smem,
                keys_ready=keys_ready, keys_free=keys_free, product_ready=product_ready, product_free=product_free, tx=tx, warp=(tx - PRODUCT_END) // WARP, turns=turns,
            )
            if tx < PRODUCT_END:
                multiply(x, q)
            elif tx < INVERT_END:
                invert(x, A, o)
            else:
                load(x, q, k)

    return gated_inverse
