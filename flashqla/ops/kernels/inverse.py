"""Gated inverse and per-token factors of every 64-token chunk: what the recurrence needs and does not have to wait for.

    M[i, j] = beta[i] * exp(G[i] - G[j]) * <k[i], k[j]>   for j < i, else 0        A = (I + M)^-1 diag(beta), or without beta

Shapes  q, k [T, hk, 128] bf16 or fp16; g, beta [T, hv]  ->  A [T, hv, 64]; records [slots, hv, 6, 64] fp32 (common.py);
        on demand the cumulative gate [T, hv] fp32. Rows past the last sequence become 0 in A, o and the cumulative gate.
Units   g: natural log of the decay, <= 0; G: its inclusive sum inside the chunk
Grid    a CTA per SM, which takes in turns an item, a chunk and key head; an item has a job for each value head that shares <k[i], k[j]>
Cost    per value head 10 KB of HBM, 880 instructions of a warp for the inverse, 190 for its factors and 120 around it; per item 16 KB and one
        64x64x128 GEMM
Source  Gated Delta Networks, arXiv 2412.06464, chunkwise form

    PRODUCT  one warpgroup: K K^T of every item, with l2norm also the norms of keys and queries; before, it brings to L2 what comes first
    LOAD     one warp: keys in by TMA
    FACTORS  three warps, each for itself, half a warp a job: record and factors of job j are for half j % 6
    INVERT   twelve warps, each for itself: job j of the CTA is for warp j % 12, whatever item it is of

To find an item takes longer than to multiply its keys. So a warp of LOAD or FACTORS looks up 32 at once, a turn a lane, and hands on what it found.

The inverse is a long chain of short steps, which only other warps hide, and so is the making of its factors. So roles meet in three rings only: of
keys; of products, whose stage is free when every job of its item has read it; and of jobs, whose factors are there before a warp of INVERT asks for
them. Four products are four jobs at a time where a group is one head; from three heads on they are enough for all twelve warps. A barrier is named
for what it says is ready or free.

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
    HALF_WARP,
    HEAD_DIM,
    HOPPER,
    MANUAL_ROLES,
    OWN,
    RECORD,
    TILE,
    WARP,
    WARP_GROUP,
    cuda,
)

WARPS = 12  # that invert
FACTOR_JOBS = 3 * 2  # that FACTORS has in hand at a time: warps, and halves of each
LOAD_BEGIN = WARP_GROUP
FACTORS_BEGIN = LOAD_BEGIN + WARP
INVERT_BEGIN = 2 * WARP_GROUP
THREADS = INVERT_BEGIN + WARPS * WARP
PRODUCT_REGISTERS, SERVICE_REGISTERS, INVERT_REGISTERS = 80, 88, 104  # a thread, in all what the CTA starts with
KEYS, PRODUCTS, JOBS = 3, 6, 12  # stages; what shared memory has left for them
# A barrier tells a phase by its parity, so nobody may wait for one while the phase before it is not over. Jobs of one stage, and those of one INVERT
# warp, are prepared by the same half of a FACTORS warp, in order; and of two jobs of a stage, an INVERT warp has had the first, or one after it, before
# it asks for the second.
assert JOBS % FACTOR_JOBS == WARPS % FACTOR_JOBS == 0
assert JOBS >= WARPS
BLOCKS = 10 * 16 * 16  # floats of the lower triangle of a product
SIZE = 2  # bytes of an element of k
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of one of g or beta
PIECE = 8  # elements of A and o in 16 bytes
KNOWN = 25  # floats that a lane of FACTORS knows of its tokens, kKnown in inverse.cuh
VECTORS = 324  # floats of one head's per-token factors, kVectors in inverse.cuh
FIRST, ROWS, SLOT, HEAD = range(4)  # of an item, as look_up finds it, with the key head, and of a job, with the value head
ITEM = 4  # its integers
FOUND, BASE = 5, 4  # integers that look_up finds, and which of them says the first turn
NUMBER, TURN, MEMBER = range(3)  # of a job, as a role goes from one to the next
JOB = 3  # its integers
BATCH = WARP  # turns looked up at once


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
    vectors_of = f"flashqla::chunk_vectors<{str(l2norm).lower()}, {CUDA_TYPES[g_dtype]}, {CUDA_TYPES[beta_dtype]}>"
    record_of = f"flashqla::chunk_record<{str(backward).lower()}>"
    tokens, slots, hk, hv, offsets, gate_rows = (T.dynamic(x) for x in ("tokens", "slots", "hk", "hv", "offsets", "gate_rows"))
    q0, q1, k0, k1, g0, g1, b0, b1 = (T.dynamic(x) for x in ("q0", "q1", "k0", "k1", "g0", "g1", "b0", "b1"))

    @T.macro
    def find(x, turn, found, item):
        """The item of a turn, by one warp. found: what it has looked up so far."""
        T.call_extern(
            "handle", "flashqla::find", item.data, found.data, turn, slots * hk, hk, T.address_of(x.cu_seqlens[0]), x.offset_step, x.sequences, x.tokens
        )

    @T.macro
    def load(x, q, k):
        found = T.alloc_local((FOUND,), "int32")
        item = T.alloc_local((ITEM,), "int32")
        found[BASE] = -BATCH
        for turn in T.unroll(x.turns, unroll_factor=1):
            s = turn % KEYS
            find(x, turn, found, item)
            T.barrier_wait(x.keys_free[s], ((turn // KEYS) & 1) ^ 1)
            T.call_extern("handle", "flashqla::hand_on", T.address_of(x.items[s, 0]), item[FIRST], item[ROWS], item[SLOT], item[HEAD])
            if item[ROWS] > 0:
                for half in T.unroll(2):
                    T.tma_copy(
                        k[item[FIRST]:item[FIRST] + CHUNK, item[HEAD], half * TILE:half * TILE + TILE],
                        x.k_smem[s, half * CHUNK:half * CHUNK + CHUNK, :], barrier=x.keys_ready[s],
                    )
            T.barrier_arrive(x.keys_ready[s])
            if l2norm:  # PRODUCT reads queries from global memory
                T.call_extern("handle", "flashqla::prefetch_rows<2>", T.address_of(q[item[FIRST], item[HEAD], 0]), q0 * SIZE, item[ROWS])

    @T.macro
    def fetch_likely(x, k, item):
        """Into L2, what the first item of this CTA is likely to ask for, while others read where sequences start: a warp each for keys, gates and betas."""
        T.call_extern("handle", "flashqla::guess", item.data, slots, hk, x.sequences, x.tokens)
        head = item[HEAD] * x.group
        if x.tx < WARP:
            T.call_extern("handle", "flashqla::prefetch_rows<2>", T.address_of(k[item[FIRST], item[HEAD], 0]), k0 * SIZE, item[ROWS])
        elif x.tx < 2 * WARP:
            T.call_extern("handle", "flashqla::prefetch_rows<1>", T.address_of(x.g[item[FIRST], head]), g0 * BYTES[g_dtype], item[ROWS])
        elif x.tx < 3 * WARP:
            T.call_extern("handle", "flashqla::prefetch_rows<1>", T.address_of(x.beta[item[FIRST], head]), b0 * BYTES[beta_dtype], item[ROWS])

    @T.macro
    def multiply(x, q, k):
        product = T.alloc_fragment((CHUNK, CHUNK), "float32")
        item = T.alloc_local((ITEM,), "int32")
        fetch_likely(x, k, item)
        for turn in T.unroll(x.turns, unroll_factor=1):
            s = turn % KEYS
            p = turn % PRODUCTS
            T.barrier_wait(x.keys_ready[s], (turn // KEYS) & 1)
            T.call_extern("handle", "flashqla::recall", T.address_of(x.items[s, 0]), item.data)
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
                    "handle", f"flashqla::inverse_norms<{element}>", T.address_of(q[item[FIRST], item[HEAD], 0]), q0, T.address_of(x.norms[p, 1, 0]), item[ROWS]
                )
            T.wait_wgmma(0)
            T.fence_proxy_async()  # the keys have been read, and rows of them written: a copy may overtake neither
            T.barrier_arrive(x.keys_free[s])
            T.call_extern("handle", "flashqla::store_product", product.data, T.address_of(x.products[p, 0]))
            T.barrier_arrive(x.product_ready[turn % WARPS])

    @T.macro
    def wait_for_product(x, turn):
        T.barrier_wait(x.product_ready[T.truncmod(turn, WARPS)], T.truncdiv(turn, WARPS) & 1)

    @T.macro
    def load_gates(x, gates, betas, item):
        """Gate and beta of this lane's tokens."""
        rows = T.if_then_else(x.has_gate != 0, item[ROWS], 0)
        T.call_extern("handle", "flashqla::four_tokens", gates.data, T.address_of(x.g[0, 0]), item[FIRST], g0, item[HEAD], g1, rows)
        T.call_extern("handle", "flashqla::four_tokens", betas.data, T.address_of(x.beta[0, 0]), item[FIRST], b0, item[HEAD], b1, item[ROWS])

    @T.macro
    def find_job(x, job, found, item):
        """The item of a job, with the value head, or without rows past the last job."""
        find(x, job[TURN], found, item)
        item[HEAD] = item[HEAD] * x.group + job[MEMBER]
        item[ROWS] = T.if_then_else(job[TURN] < x.turns, item[ROWS], 0)

    @T.macro
    def prepare(x):
        """The factors of jobs into shared memory, their records to HBM."""
        found = T.alloc_local((FOUND,), "int32")
        item, done = (T.alloc_local((ITEM,), "int32") for _ in range(2))
        job = T.alloc_local((JOB,), "int32")
        gates = T.alloc_local((OWN,), g_dtype)
        betas = T.alloc_local((OWN,), beta_dtype)
        known = T.alloc_local((KNOWN,), "float32")
        found[BASE] = -BATCH
        T.call_extern("handle", "flashqla::first_job", job.data, (x.tx - FACTORS_BEGIN) // HALF_WARP, x.group)
        find_job(x, job, found, item)
        load_gates(x, gates, betas, item)
        while T.call_extern("bool", "flashqla::any", job[TURN] < x.turns):
            s: T.int32 = T.truncmod(job[NUMBER], JOBS)
            p: T.int32 = T.truncmod(job[TURN], PRODUCTS)
            if job[TURN] < x.turns:
                if l2norm:
                    wait_for_product(x, job[TURN])
                T.barrier_wait(x.job_free[s], (T.truncdiv(job[NUMBER], JOBS) & 1) ^ 1)
                T.call_extern("handle", "flashqla::hand_on", T.address_of(x.jobs[s, 0]), item[FIRST], item[ROWS], item[SLOT], item[HEAD])
            T.sync_warp()  # its halves make their factors together
            T.call_extern(
                "handle", vectors_of, gates.data, betas.data, T.address_of(x.norms[p, 1, 0]), T.address_of(x.norms[p, 0, 0]), T.address_of(x.vectors[s, 0]),
                known.data, item[ROWS],
            )
            if job[TURN] < x.turns:
                T.barrier_arrive(x.job_ready[s])
                if l2norm:
                    T.barrier_arrive(x.product_free[p])
            for e in T.unroll(ITEM):
                done[e] = item[e]
            T.call_extern("handle", "flashqla::next_job", job.data, FACTOR_JOBS, x.group)
            find_job(x, job, found, item)
            load_gates(x, gates, betas, item)  # come while the record is written, which nobody in this kernel waits for
            T.call_extern(
                "handle", record_of, known.data, T.address_of(x.records[done[SLOT], done[HEAD], 0, 0]),
                T.address_of(x.cumulative[done[FIRST] * x.has_cumulative, done[HEAD]]), hv, done[ROWS], x.scale, x.has_cumulative,
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
    def invert(x, A, o):
        item = T.alloc_local((ITEM,), "int32")
        job = T.alloc_local((JOB,), "int32")
        warp: T.int32 = (x.tx - INVERT_BEGIN) // WARP
        # What is above the diagonal stays as it is.
        T.call_extern("handle", f"flashqla::zero_pieces<{CHUNK // PIECE}>", T.address_of(x.a_smem[warp, 0, 0]), CHUNK // PIECE, CHUNK)
        T.sync_warp()
        T.call_extern("handle", "flashqla::first_job", job.data, warp, x.group)
        while job[TURN] < x.turns:
            s: T.int32 = T.truncmod(job[NUMBER], JOBS)
            p: T.int32 = T.truncmod(job[TURN], PRODUCTS)
            T.barrier_wait(x.job_ready[s], T.truncdiv(job[NUMBER], JOBS) & 1)
            T.call_extern("handle", "flashqla::recall", T.address_of(x.jobs[s, 0]), item.data)
            wait_for_product(x, job[TURN])
            if item[ROWS] > 0:
                T.tma_store_wait(0, read=True)  # the tile before this one has left
                T.sync_warp()
                T.call_extern(
                    "handle", f"flashqla::gated_inverse<{element}>", T.address_of(x.products[p, 0]), T.address_of(x.vectors[s, 0]),
                    T.address_of(x.a_smem[warp, 0, 0]), x.has_beta,
                )
            # Every thread arrives that has read: racecheck does not see what a warp barrier orders.
            T.barrier_arrive(x.product_free[p])
            T.barrier_arrive(x.job_free[s])
            if item[ROWS] > 0:
                T.fence_proxy_async()
                T.sync_warp()
                if item[ROWS] == CHUNK:
                    T.call_extern("handle", "flashqla::send_tile", tiles_of(A), T.address_of(x.a_smem[warp, 0, 0]), item[FIRST], item[HEAD])
                else:
                    T.call_extern(
                        "handle", f"flashqla::store_rows<{element}>", T.address_of(x.a_smem[warp, 0, 0]), T.address_of(A[item[FIRST], item[HEAD], 0]), hv * CHUNK, item[ROWS],
                    )
                    T.sync_warp()  # the tile has been read
            else:
                blank(x, A, o, item[FIRST], item[HEAD])
            T.call_extern("handle", "flashqla::next_job", job.data, WARPS, x.group)
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
            vectors = T.alloc_shared((JOBS, VECTORS), "float32")
            items = T.alloc_shared((KEYS, ITEM), "int32")
            jobs = T.alloc_shared((JOBS, ITEM), "int32")
            keys_ready = T.alloc_barrier([WARP] * KEYS)  # TMA, LOAD -> PRODUCT
            keys_free = T.alloc_barrier([WARP_GROUP] * KEYS)  # PRODUCT -> LOAD
            # More than there are stages: from one job of a warp to the next there may be WARPS products, and a barrier that had come round
            # between them would have the parity of the next before it is there.
            product_ready = T.alloc_barrier([WARP_GROUP] * WARPS)  # PRODUCT -> INVERT, with l2norm FACTORS
            product_free = alloc_barrier([group * (WARP + (HALF_WARP if l2norm else 0))] * PRODUCTS)  # INVERT, with l2norm FACTORS -> PRODUCT
            job_ready = T.alloc_barrier([HALF_WARP] * JOBS)  # FACTORS -> INVERT
            job_free = T.alloc_barrier([WARP] * JOBS)  # INVERT -> FACTORS
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
                a_smem=a_smem, k_smem=k_smem, products=products, norms=norms, vectors=vectors, items=items, jobs=jobs,
                keys_ready=keys_ready, keys_free=keys_free, product_ready=product_ready, product_free=product_free,
                job_ready=job_ready, job_free=job_free, tx=tx, turns=turns,
            )
            if tx < LOAD_BEGIN:
                T.dec_max_nreg(PRODUCT_REGISTERS)
                multiply(x, q, k)
            elif tx < INVERT_BEGIN:
                T.dec_max_nreg(SERVICE_REGISTERS)
                if tx < FACTORS_BEGIN:
                    load(x, q, k)
                else:
                    prepare(x)
            else:
                T.inc_max_nreg(INVERT_REGISTERS)
                invert(x, A, o)

    return gated_inverse
