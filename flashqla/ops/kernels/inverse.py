"""Gated inverse and per-token factors of every 64-token chunk: what the recurrence needs and does not have to wait for.

    M[i, j] = beta[i] * exp(G[i] - G[j]) * <k[i], k[j]>   for j < i, else 0        A = (I + M)^-1 diag(beta), or without beta

Shapes  q, k [T, hk, 128] bf16 or fp16; g, beta [T, hv]  ->  A [T, hv, 64]; records [slots, hv, 6, 64] fp32 (common.py);
        on demand the cumulative gate [T, hv] fp32. Rows past the last sequence become 0 in A, o and the cumulative gate.
Units   g: natural log of the decay, <= 0; G: its inclusive sum inside the chunk
Grid    as many CTAs as fit on the GPU; each takes one chunk after another, with `heads` value heads of one group, which share <k[i], k[j]>
Cost    per value head 12 KB of HBM, 900 instructions of a warp for the inverse and 500 for all else; per chunk and key head one 64x64x128 GEMM
Source  Gated Delta Networks, arXiv 2412.06464, chunkwise form

One warp inverts a head, or two where there are not four. The inverse is made of 16x16 blocks: those on the diagonal by substitution in fp32, the
others, of column c, by A[i, c] = -A[i, i] * sum over c <= k < i of M[i, k] A[k, c], in TF32. Only M on the diagonal goes through shared memory.
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
from flashqla.ops.plan import INVERSE_CTAS

BATCH = 4  # value heads at once: one warp each, or two where there are not more heads
VECTORS = 324  # floats of one head's per-token factors, kVectors in inverse.cuh
PIECE = 8  # elements of A and o in 16 bytes
FIRST, ROWS, SLOT, HEAD, K_HEAD, BLANK = range(6)  # of a task, as take_chunk writes it
TASK = 8  # its integers, and two more for alignment


@tilelang.jit(target=HOPPER, pass_configs=MANUAL_ROLES)
def build_inverse(dtype: str, g_dtype: str, beta_dtype: str, l2norm: bool, backward: bool = False):
    """The kernel for q and k in `dtype`. l2norm: with the norms of q and k in the factors. backward: with the rows of records that only that pass needs."""
    record = BACKWARD_RECORD if backward else RECORD
    element = CUDA_TYPES[dtype]
    factors = f"flashqla::chunk_factors<{str(l2norm).lower()}, {str(backward).lower()}, {CUDA_TYPES[g_dtype]}, {CUDA_TYPES[beta_dtype]}>"
    tokens, slots, hk, hv, offsets, gate_rows = (T.dynamic(x) for x in ("tokens", "slots", "hk", "hv", "offsets", "gate_rows"))
    q0, q1, k0, k1, g0, g1, b0, b1 = (T.dynamic(x) for x in ("q0", "q1", "k0", "k1", "g0", "g1", "b0", "b1"))

    @T.macro
    def take(x, turn):
        """What this CTA does at a turn, by one warp."""
        if T.get_thread_binding() < WARP:
            T.call_extern(
                "handle", "flashqla::take_chunk", turn, x.blocks, x.heads, x.group, T.address_of(x.cu_seqlens[0]), x.offset_step, x.sequences, x.tokens,
                T.address_of(x.tasks[turn & 1, 0]),
            )

    @T.macro
    def recall(x, turn, task):
        """What was taken for a turn, into registers."""
        T.call_extern("handle", "flashqla::recall", T.address_of(x.tasks[turn & 1, 0]), task.data)

    @T.macro
    def load_gates(x, gates, betas, task, batch):
        """Gate and beta of two tokens into registers of each lane, of one head per warp."""
        mine: T.int32 = batch * BATCH + T.get_thread_binding() // WARP
        if mine < x.heads:
            head: T.int32 = task[HEAD] + mine
            rows = T.if_then_else(x.has_gate != 0, task[ROWS], 0)
            T.call_extern("handle", "flashqla::two_tokens", gates.data, T.address_of(x.g[0, 0]), task[FIRST], g0, head, g1, rows)
            T.call_extern("handle", "flashqla::two_tokens", betas.data, T.address_of(x.beta[0, 0]), task[FIRST], b0, head, b1, task[ROWS])

    @T.macro
    def prepare(x, gates, betas, task, batch):
        """One warp a head: its factors into shared memory, its record to HBM."""
        warp = T.get_thread_binding() // WARP
        mine: T.int32 = batch * BATCH + warp
        if mine < x.heads:
            head: T.int32 = task[HEAD] + mine
            T.call_extern(
                "handle", factors, gates.data, betas.data, T.address_of(x.q_norm[0]), T.address_of(x.k_norm[0]),
                T.address_of(x.vectors[warp, 0]), T.address_of(x.records[task[SLOT], head, 0, 0]),
                T.address_of(x.cumulative[task[FIRST] * x.has_cumulative, head]), hv, task[ROWS], x.scale, x.has_cumulative,
            )

    @T.macro
    def blank(x, A, o, task):
        """Zeros for the rows past the last sequence, which belong to the slots past its last chunk."""
        tx = T.get_thread_binding()
        row = task[BLANK]
        if row < x.tokens:
            rows: T.int32 = T.min(x.tokens - row, CHUNK)
            T.call_extern("handle", "flashqla::zero_pieces", T.address_of(o[row, task[HEAD], 0]), hv * HEAD_DIM // PIECE, x.heads * HEAD_DIM // PIECE, rows)
            T.call_extern("handle", "flashqla::zero_pieces", T.address_of(A[row, task[HEAD], 0]), hv * CHUNK // PIECE, x.heads * CHUNK // PIECE, rows)
            if x.has_cumulative != 0:
                if tx < rows:
                    for h in T.serial(x.heads):
                        x.cumulative[row + tx, task[HEAD] + h] = 0.0

    @T.macro
    def look_ahead(x, k, gates, betas, task):
        """What the next chunk needs comes while this one is inverted: gates into registers, keys into L2."""
        tx = T.get_thread_binding()
        load_gates(x, gates, betas, task, 0)
        if tx // 2 < task[ROWS]:
            T.call_extern("handle", "flashqla::prefetch", T.address_of(k[task[FIRST] + tx // 2, task[K_HEAD], tx % 2 * TILE]))

    @T.macro
    def send_by(warp, A, a_smem, task, first, e):
        tx = T.get_thread_binding()
        if tx >= warp * WARP and tx < warp * WARP + WARP:
            T.tma_copy(a_smem[e, :, :], A[task[FIRST]:task[FIRST] + CHUNK, first + e, :])

    def send(*arguments):
        """Tile e, of head first + e, to HBM, by one thread of this warp. Warp by warp, or TileLang elects one thread of all."""
        for warp in range(WARP_GROUP // WARP):
            send_by(warp, *arguments)

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
        heads: T.int32,
        blocks: T.int32,
        most_ctas: T.int32,
        has_gate: T.int32,
        has_cumulative: T.int32,
        has_beta: T.int32,
    ):
        # Neighbouring CTAs take the heads of one chunk, which lie side by side in memory.
        with T.Kernel(T.min(most_ctas, slots * blocks), threads=WARP_GROUP):
            T.import_source(cuda("tiles", "segments", "records", "inverse"))
            a_smem = T.alloc_shared((BATCH, CHUNK, CHUNK), dtype)
            # The keys are needed until their product stands in registers; then it takes their place.
            product_smem = T.alloc_shared((CHUNK * CHUNK,), "float32")
            k_smem = T.view(product_smem, (2 * CHUNK, TILE), dtype)  # rows 0-63: columns 0-63 of k; rows 64-127: the others
            vectors = T.alloc_shared((BATCH, VECTORS), "float32")
            q_norm = T.alloc_shared((CHUNK,), "float32")
            k_norm = T.alloc_shared((CHUNK,), "float32")
            tasks = T.alloc_shared((2, TASK), "int32")  # of this turn and the next
            product = T.alloc_fragment((CHUNK, CHUNK), "float32")
            loaded = T.alloc_barrier(WARP_GROUP)  # TMA -> all
            T.annotate_min_blocks_per_sm(INVERSE_CTAS)  # as many as shared memory holds: a chain of short steps is hidden only behind others
            T.annotate_layout({a_smem: make_swizzled_layout(a_smem)})
            tx = T.get_thread_binding()
            gates, late_gates = T.alloc_local((2,), g_dtype), T.alloc_local((2,), g_dtype)
            betas, late_betas = T.alloc_local((2,), beta_dtype), T.alloc_local((2,), beta_dtype)
            task = T.alloc_local((TASK,), "int32")
            ahead = T.alloc_local((TASK,), "int32")
            T.pdl_trigger()  # the next kernel may take its place on an SM as soon as there is one
            # A variable, because a quotient that is let stand is computed again, in 64 bits, wherever it is used.
            turns = T.alloc_var("int32")
            turns = T.call_extern("int32", "flashqla::turns", slots * blocks)
            x = SimpleNamespace(
                g=g, beta=beta, records=records, cumulative=cumulative, q_norm=q_norm, k_norm=k_norm, vectors=vectors, tasks=tasks,
                cu_seqlens=cu_seqlens, offset_step=offset_step, sequences=sequences, tokens=tokens, blocks=blocks, group=group, heads=heads,
                scale=scale, has_gate=has_gate, has_cumulative=has_cumulative,
            )
            take(x, 0)
            T.sync_threads()
            recall(x, 0, ahead)
            load_gates(x, gates, betas, ahead, 0)

            for turn in T.unroll(turns, unroll_factor=1):
                recall(x, turn, task)
                if task[ROWS] > 0:
                    for half in T.unroll(2):
                        T.tma_copy(
                            k[task[FIRST]:task[FIRST] + CHUNK, task[K_HEAD], half * TILE:half * TILE + TILE], k_smem[half * CHUNK:half * CHUNK + CHUNK, :], barrier=loaded
                        )
                    if not l2norm:
                        prepare(x, gates, betas, task, 0)
                # While the keys are under way:
                blank(x, A, o, task)
                if turn + 1 < turns:
                    take(x, turn + 1)
                T.barrier_arrive(loaded)
                T.barrier_wait(loaded, turn & 1)
                # The product under no condition: ptxas takes one that rests on a task for one that may divide a warp, and puts products in series.
                if task[ROWS] < CHUNK:  # rows of another sequence, or of nobody: anything may stand there
                    if tx < 2 * WARP:
                        T.call_extern("handle", "flashqla::zero_rows", T.address_of(k_smem[tx // WARP * CHUNK, 0]), task[ROWS])
                    T.fence_proxy_async()
                    T.sync_threads()
                T.wgmma_gemm(k_smem[0:CHUNK, :], k_smem[0:CHUNK, :], product, transpose_B=True, clear_accum=True)
                T.wgmma_gemm(k_smem[CHUNK:2 * CHUNK, :], k_smem[CHUNK:2 * CHUNK, :], product, transpose_B=True)
                if l2norm:
                    T.call_extern("handle", f"flashqla::inverse_norms_of_tile<{element}>", T.access_ptr(k_smem[0, 0], "r"), T.address_of(k_norm[0]), task[ROWS])
                    T.call_extern("handle", f"flashqla::inverse_norms<{element}>", T.address_of(q[task[FIRST], task[K_HEAD], 0]), q0, T.address_of(q_norm[0]), task[ROWS])
                T.wait_wgmma(0)
                T.sync_threads()  # the keys are done with, and the norms there
                T.call_extern("handle", "flashqla::store_product", product.data, T.address_of(product_smem[0]))
                if l2norm:
                    if task[ROWS] > 0:
                        prepare(x, gates, betas, task, 0)
                if turn + 1 < turns:
                    recall(x, turn + 1, ahead)
                    look_ahead(x, k, gates, betas, ahead)
                recall(x, turn, task)  # again, or it would wait for that in registers
                if task[ROWS] > 0:
                    for batch in T.serial(T.ceildiv(heads, BATCH)):
                        if batch > 0:
                            load_gates(x, late_gates, late_betas, task, batch)
                            T.sync_threads()  # the factors before these are done with
                            prepare(x, late_gates, late_betas, task, batch)
                        T.tma_store_wait(0, read=True)  # the tiles before these have left
                        T.sync_threads()
                        first: T.int32 = task[HEAD] + batch * BATCH
                        count: T.int32 = T.min(heads - batch * BATCH, BATCH)
                        e: T.int32 = T.call_extern("int32", "flashqla::head_of_warp", count)
                        if e < count:
                            T.call_extern(
                                "handle", f"flashqla::gated_inverse<{element}>", T.address_of(product_smem[0]), T.address_of(vectors[e, 0]),
                                T.address_of(a_smem[e, 0, 0]), count, has_beta,
                            )
                            T.fence_proxy_async()
                            T.call_extern("handle", "flashqla::join_head", count)
                            if T.call_extern("bool", "flashqla::first_of_head", count):
                                if task[ROWS] == CHUNK:
                                    send(A, a_smem, task, first, e)
                                else:
                                    T.call_extern(
                                        "handle", f"flashqla::store_rows<{element}>", T.address_of(a_smem[e, 0, 0]), T.address_of(A[task[FIRST], first + e, 0]),
                                        hv * CHUNK, task[ROWS],
                                    )
                T.fence_proxy_async()
                T.sync_threads()  # keys may take the place of their product
            T.tma_store_wait(0, read=False)

    return gated_inverse
