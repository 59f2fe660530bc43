"""Gated inverse and per-token factors of every 64-token chunk: what the recurrence needs and does not have to wait for.

    M[i, j] = beta[i] * exp(G[i] - G[j]) * <k[i], k[j]>   for j < i, else 0        A = (I + M)^-1 diag(beta), or without beta

Shapes  q, k [T, hk, 128] bf16 or fp16; g, beta [T, hv]  ->  A [T, hv, 64]; records [slots, hv, 6, 64] fp32 (common.py);
        on demand the cumulative gate [T, hv] fp32. Rows past the last sequence become 0 in A, o and the cumulative gate.
Units   g: natural log of the decay, <= 0; G: its inclusive sum inside the chunk
Grid    as many CTAs as fit on the GPU; each takes one chunk after another, with `heads` value heads of one group, which share <k[i], k[j]>
Cost    per value head 12 KB of HBM, one 64x64x128 GEMM per key head, and about 1000 instructions a warp for two heads: bound by latency
Source  Gated Delta Networks, arXiv 2412.06464, chunkwise form

The inverse is made of 16x16 blocks: those on the diagonal by substitution in fp32, the others, of column c, by
A[i, c] = -A[i, i] * sum over c <= k < i of M[i, k] A[k, c], in TF32.
"""

from types import SimpleNamespace

import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from flashqla.ops.kernels.common import CHUNK, HEAD_DIM, HOPPER, MANUAL_ROLES, RECORD, TILE, WARP, WARP_GROUP, cuda
from flashqla.ops.plan import INVERSE_CTAS  # an SM: as many as shared memory holds, for a chain of short steps is hidden only behind others

BATCH = 4  # value heads whose factors are prepared at once, one warp each
PAIR = 2  # value heads inverted at once, so that four warps share eight columns of blocks evenly
FACTOR = 3840  # floats of one head's M, kFactor in inverse.cuh
VECTORS = 324  # floats of one head's per-token factors, kVectors in inverse.cuh
FIRST, ROWS, SLOT, HEAD = range(4)  # of a task, as take_chunk writes it
CUDA_TYPES = {"bfloat16": "bfloat16_t", "float16": "half_t", "float32": "float"}


@tilelang.jit(target=HOPPER, pass_configs=MANUAL_ROLES)
def build_inverse(dtype: str, g_dtype: str, beta_dtype: str, l2norm: bool):
    """The kernel for q and k in `dtype`. l2norm: with the norms of q and k in the factors."""
    element = CUDA_TYPES[dtype]
    factors = f"flashqla::chunk_factors<{str(l2norm).lower()}, {CUDA_TYPES[g_dtype]}, {CUDA_TYPES[beta_dtype]}>"
    tokens, slots, hk, hv, offsets, gate_rows = (T.dynamic(x) for x in ("tokens", "slots", "hk", "hv", "offsets", "gate_rows"))
    q0, q1, k0, k1, g0, g1, b0, b1 = (T.dynamic(x) for x in ("q0", "q1", "k0", "k1", "g0", "g1", "b0", "b1"))

    @T.macro
    def take(x, turn, task):
        """What this CTA does at a turn: FIRST token of a chunk and its ROWS, its SLOT, and the first HEAD."""
        T.call_extern(
            "handle", "flashqla::take_chunk", turn, x.blocks, x.heads, T.address_of(x.cu_seqlens[0]), x.offset_step, x.sequences, x.tokens, task.data,
        )

    @T.macro
    def load_gates(x, gates, betas, task, batch):
        """Gate and beta of two tokens into registers of each lane, of one head per warp."""
        mine: T.int32 = batch * BATCH + T.get_thread_binding() // WARP
        if mine < x.heads:
            head: T.int32 = task[HEAD] + mine
            T.call_extern(
                "handle", "flashqla::two_tokens", gates.data, T.address_of(x.g[task[FIRST], head]), g0, T.if_then_else(x.has_gate != 0, task[ROWS], 0)
            )
            T.call_extern("handle", "flashqla::two_tokens", betas.data, T.address_of(x.beta[task[FIRST], head]), b0, task[ROWS])

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
        T.sync_threads()

    @T.macro
    def look_ahead(x, k, gates, betas, turn, turns, ahead):
        """What the next chunk needs comes while this one is inverted: gates into registers, keys into L2."""
        tx = T.get_thread_binding()
        k_head = T.alloc_var("int32")
        if turn + 1 < turns:
            take(x, turn + 1, ahead)
            load_gates(x, gates, betas, ahead, 0)
            k_head = T.truncdiv(ahead[HEAD], x.group)
            if tx // 2 < ahead[ROWS]:
                T.call_extern("handle", "flashqla::prefetch", T.address_of(k[ahead[FIRST] + tx // 2, k_head, tx % 2 * TILE]))

    @T.prim_func
    def gated_inverse(
        q: T.StridedTensor((tokens, hk, HEAD_DIM), (q0, q1, 1), dtype),
        k: T.StridedTensor((tokens, hk, HEAD_DIM), (k0, k1, 1), dtype),
        g: T.StridedTensor((tokens, hv), (g0, g1), g_dtype),
        beta: T.StridedTensor((tokens, hv), (b0, b1), beta_dtype),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        A: T.Tensor((tokens, hv, CHUNK), dtype),
        records: T.Tensor((slots, hv, RECORD, CHUNK), "float32"),
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
        with T.Kernel(T.min(most_ctas, slots * blocks), threads=WARP_GROUP) as bx:
            T.import_source(cuda("tiles", "segments", "inverse"))
            a_smem = T.alloc_shared((PAIR, CHUNK, CHUNK), dtype)
            # The keys are needed until their product stands in registers, the factors from then on.
            factor = T.alloc_shared((PAIR * FACTOR,), "float32")
            k_smem = T.view(factor, (2 * PAIR * FACTOR // TILE, TILE), dtype)  # rows 0-63: columns 0-63 of k; rows 64-127: the others
            vectors = T.alloc_shared((BATCH, VECTORS), "float32")
            q_norm = T.alloc_shared((CHUNK,), "float32")
            k_norm = T.alloc_shared((CHUNK,), "float32")
            product = T.alloc_fragment((CHUNK, CHUNK), "float32")
            loaded = T.alloc_barrier(WARP_GROUP)  # TMA -> all
            T.annotate_min_blocks_per_sm(INVERSE_CTAS)
            T.annotate_layout({a_smem: make_swizzled_layout(a_smem)})
            tx = T.get_thread_binding()
            gates, late_gates = T.alloc_local((2,), g_dtype), T.alloc_local((2,), g_dtype)
            betas, late_betas = T.alloc_local((2,), beta_dtype), T.alloc_local((2,), beta_dtype)
            task = T.alloc_local((4,), "int32")
            ahead = T.alloc_local((4,), "int32")
            T.pdl_trigger()  # the next kernel may take its place on an SM as soon as there is one
            # Variables, because a quotient that is let stand is computed again, in 64 bits, wherever it is used.
            turns = T.alloc_var("int32")
            k_head = T.alloc_var("int32")
            turns = T.call_extern("int32", "flashqla::turns", slots * blocks)
            x = SimpleNamespace(
                g=g, beta=beta, records=records, cumulative=cumulative, q_norm=q_norm, k_norm=k_norm, vectors=vectors,
                cu_seqlens=cu_seqlens, offset_step=offset_step, sequences=sequences, tokens=tokens, blocks=blocks, group=group, heads=heads,
                scale=scale, has_gate=has_gate, has_cumulative=has_cumulative,
            )
            take(x, 0, ahead)
            load_gates(x, gates, betas, ahead, 0)

            for turn in T.unroll(turns, unroll_factor=1):
                take(x, turn, task)
                if task[ROWS] > 0:
                    k_head = T.truncdiv(task[HEAD], group)
                    for half in T.unroll(2):
                        T.tma_copy(
                            k[task[FIRST]:task[FIRST] + CHUNK, k_head, half * TILE:half * TILE + TILE], k_smem[half * CHUNK:half * CHUNK + CHUNK, :], barrier=loaded
                        )
                    if not l2norm:
                        prepare(x, gates, betas, task, 0)  # while the keys are under way
                T.barrier_arrive(loaded)
                T.barrier_wait(loaded, turn & 1)
                if task[ROWS] > 0:
                    if task[ROWS] < CHUNK:  # rows of another sequence, or of nobody: anything may stand there
                        if tx < 2 * WARP:
                            T.call_extern("handle", "flashqla::zero_rows", T.address_of(k_smem[tx // WARP * CHUNK, 0]), task[ROWS])
                        T.fence_proxy_async()
                        T.sync_threads()
                    T.wgmma_gemm(k_smem[0:CHUNK, :], k_smem[0:CHUNK, :], product, transpose_B=True, clear_accum=True)
                    T.wgmma_gemm(k_smem[CHUNK:2 * CHUNK, :], k_smem[CHUNK:2 * CHUNK, :], product, transpose_B=True)
                    if l2norm:
                        T.call_extern("handle", f"flashqla::inverse_norms_of_tile<{element}>", T.access_ptr(k_smem[0, 0], "r"), T.address_of(k_norm[0]), task[ROWS])
                        T.call_extern("handle", f"flashqla::inverse_norms<{element}>", T.address_of(q[task[FIRST], k_head, 0]), q0, T.address_of(q_norm[0]), task[ROWS])
                    T.wait_wgmma(0)
                    T.sync_threads()  # norms are there, and the factors may take the place of the keys
                    if l2norm:
                        prepare(x, gates, betas, task, 0)
                look_ahead(x, k, gates, betas, turn, turns, ahead)
                if task[ROWS] > 0:
                    for batch in T.serial(T.ceildiv(heads, BATCH)):
                        if batch > 0:
                            load_gates(x, late_gates, late_betas, task, batch)
                            prepare(x, late_gates, late_betas, task, batch)
                        for pair in T.unroll(T.ceildiv(T.min(heads - batch * BATCH, BATCH), PAIR), unroll_factor=1):
                            head: T.int32 = task[HEAD] + batch * BATCH + pair * PAIR
                            both: T.int32 = T.min(heads - batch * BATCH - pair * PAIR, PAIR)
                            T.call_extern(
                                "handle", f"flashqla::gated_inverse<{element}>", product.data, T.address_of(vectors[pair * PAIR, 0]),
                                T.address_of(factor[0]), T.address_of(a_smem[0, 0, 0]), both, has_beta,
                            )
                            T.fence_proxy_async()
                            T.sync_threads()
                            # Two loops: TileLang draws the election of a storing thread out of a loop, around all that stands in it.
                            if task[ROWS] == CHUNK:
                                for e in T.unroll(both, unroll_factor=1):
                                    if tx < WARP:
                                        T.tma_copy(a_smem[e, :, :], A[task[FIRST]:task[FIRST] + CHUNK, head + e, :])
                            else:
                                for e in T.unroll(both, unroll_factor=1):
                                    for t, j in T.Parallel(CHUNK, CHUNK):
                                        if t < task[ROWS]:
                                            A[task[FIRST] + t, head + e, j] = a_smem[e, t, j]

                # Rows past the last sequence belong to the slots past its last chunk.
                take(x, turn, task)  # again, or it would wait for that in registers
                end: T.int32 = T.max(T.min(cu_seqlens[sequences * offset_step], tokens), 0)
                blank: T.int32 = end + (task[SLOT] - end // CHUNK - sequences) * CHUNK
                if blank >= end:
                    for h in T.serial(heads):
                        for t, d in T.Parallel(CHUNK, HEAD_DIM):
                            if blank + t < tokens:
                                o[blank + t, task[HEAD] + h, d] = 0
                        for t, j in T.Parallel(CHUNK, CHUNK):
                            if blank + t < tokens:
                                A[blank + t, task[HEAD] + h, j] = 0
                        if has_cumulative != 0:
                            if tx < CHUNK:
                                if blank + tx < tokens:
                                    cumulative[blank + tx, task[HEAD] + h] = 0.0
            if tx < WARP:
                T.tma_store_wait(0, read=False)

    return gated_inverse
