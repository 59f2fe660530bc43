"""WIP"""
import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout
from flashqla.ops.kernels.common import *

CTAS_PER_SM = 4  # as many as shared memory holds: the inverse is a chain of short steps, hidden only behind other chunks
BATCH = 4  # value heads whose gates are prepared at once, one warp each
PAIR = 2  # value heads inverted at once
FACTOR = 3840  # floats of one head's factor, kFactor below
VECTORS = 324  # floats of one head's per-token factors, kVectors below

INVERSE_FUNCTIONS = r"""
namespace flashqla {
// The factor M of one head: 16x16 blocks of its lower triangle, row by row, in fp32. Rows of 24 floats: 8-byte reads of 8 rows hit
// different banks.
constexpr int kRow = 24, kBlock = 16 * kRow, kFactor = 10 * kBlock;
__device__ __forceinline__ int block_at(int i, int j) { return (i * (i + 1) / 2 + j) * kBlock; }
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// The tensor cores cut TF32 operands off after 10 bits. Adding half of the last one first rounds to nearest (cvt.rna.tf32 takes four
// instructions); `tf32` also cuts off itself, for values that are used elsewhere too.
__device__ __forceinline__ float operand(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }
__device__ __forceinline__ float tf32(float x) { return __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u); }

// out[t] = 1 / |row t| for the rows of a [64, 128] tile, which stands in shared memory as two swizzled tiles of 64 columns; two threads a
// row. Swizzling permutes within a row of a tile, which a sum does not see. Rows past the sequence may hold anything: they count as 1.
template <typename Element> __device__ __forceinline__ void inverse_norms(const void* tile, float* out, int rows) {
  const int row = threadIdx.x >> 1;
  const uint4* pieces = reinterpret_cast<const uint4*>(static_cast<const char*>(tile) + (threadIdx.x & 1) * 8192 + row * 128);
  float sum = 0.f;
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) {
    const uint4 raw = pieces[piece ^ (row & 7)];
    const Element* values = reinterpret_cast<const Element*>(&raw);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += float(values[e]) * float(values[e]);
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  if ((threadIdx.x & 1) == 0) out[row] = row < rows ? rsqrtf(sum + 1e-6f) : 1.f;
}

// Per-token factors of a head that the inverse needs, vectors of 64 floats. `row`, `col`: base-2 logs whose difference is the decay from
// token j to token i times both inverse key norms. Between different 16-token blocks that is start[i] * stop[j] times the decay of
// the blocks between, every factor at most 1: no exponential per element. `start` includes beta.
enum { kRowLog = 0, kColLog = 64, kBeta = 128, kStart = 192, kStop = 256, kBetween = 320, kVectors = 324 };

// Tokens 2*lane and 2*lane+1 of a strided vector; 0 past `rows`.
template <typename Element> __device__ __forceinline__ float2 two_tokens(const Element* at, long long stride, int rows) {
  const int token = 2 * (threadIdx.x & 31);
  float2 x = make_float2(0.f, 0.f);
  if (token < rows) x.x = float(at[token * stride]);
  if (token + 1 < rows) x.y = float(at[(token + 1) * stride]);
  return x;
}

// One warp turns the log gates and beta of a chunk into its record and vectors; the lane has tokens 2*lane and 2*lane+1.
template <bool kNorm, typename Gate, typename Beta>
__device__ __forceinline__ void chunk_factors(const Gate* g, long long g_stride, const Beta* beta, long long beta_stride, const float* q_norm, const float* k_norm,
                                              float* vectors, float* record, float* cumulative, long long stride, int rows, float scale,
                                              int has_gate, int has_cumulative) {
  const int lane = threadIdx.x & 31;
  const float2 gate = two_tokens(g, g_stride, has_gate ? rows : 0), b = two_tokens(beta, beta_stride, rows);
  // A difference of sums with an infinity in them is not a number; 2^-126 is as good as a full reset.
  const float x = fmaxf(gate.x * kLog2e, -126.f), y = x + fmaxf(gate.y * kLog2e, -126.f);
  float sum = y;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float up = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += up;
  }
  const float c1 = sum, c0 = sum - y + x, total = __shfl_sync(~0u, sum, 31);
  const float end = __shfl_sync(~0u, sum, lane | 7), before = __shfl_sync(~0u, sum, (lane & 24) - 1), start = lane < 8 ? 0.f : before;
  float2 rq = make_float2(1.f, 1.f), rk = rq, lq = make_float2(0.f, 0.f), lk = lq;
  if constexpr (kNorm) {
    rq = *reinterpret_cast<const float2*>(q_norm + 2 * lane);
    rk = *reinterpret_cast<const float2*>(k_norm + 2 * lane);
    lq = make_float2(log2f(rq.x), log2f(rq.y));
    lk = make_float2(log2f(rk.x), log2f(rk.y));
  }
  const float e0 = ex2(c0), e1 = ex2(c1);
  const auto put = [&](float* at, float u, float w) { *reinterpret_cast<float2*>(at + 2 * lane) = make_float2(u, w); };
  put(record, c0 + lq.x, c1 + lq.y);
  put(record + 64, c0 - lk.x, c1 - lk.y);
  put(record + 128, b.x, b.y);
  put(record + 192, b.x * e0 * rk.x, b.y * e1 * rk.y);
  put(record + 256, scale * e0 * rq.x, scale * e1 * rq.y);
  put(record + 320, ex2(total - c0) * rk.x, ex2(total - c1) * rk.y);
  if (lane == 0) record[384] = ex2(total);
  put(vectors + kRowLog, c0 + lk.x, c1 + lk.y);
  put(vectors + kColLog, c0 - lk.x, c1 - lk.y);
  put(vectors + kBeta, b.x, b.y);
  put(vectors + kStart, b.x * ex2(c0 - start) * rk.x, b.y * ex2(c1 - start) * rk.y);
  put(vectors + kStop, ex2(end - c0) * rk.x, ex2(end - c1) * rk.y);
  if ((lane & 7) == 7) vectors[kBetween + (lane >> 3)] = ex2(c1 - start);
  if (has_cumulative) {
    if (2 * lane < rows) cumulative[2 * lane * stride] = c0 * kLn2;
    if (2 * lane + 1 < rows) cumulative[(2 * lane + 1) * stride] = c1 * kLn2;
  }
}

// D += A * B, 16x8x8, TF32. Columns of A and rows of B are both taken in the order 0 2 4 6 1 3 5 7, so that an accumulator is an operand A as it is.
__device__ __forceinline__ void mma8(float* d, const float* a, float2 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[3])),
                 "r"(__float_as_uint(b.x)), "r"(__float_as_uint(b.y)));
}
// D += A * B^T on 16x16 blocks.
__device__ __forceinline__ void mma_block(float* d, const float* a, const float* b) {
  const int lane = threadIdx.x & 31;
  const float* at = b + (lane >> 2) * kRow + 2 * (lane & 3);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int k = 0; k < 2; ++k) mma8(d + 4 * n, a + 4 * k, *reinterpret_cast<const float2*>(at + 8 * n * kRow + 8 * k));
}

// M[i, j] = beta[i] * 2^(row[i] - col[j]) * product[i, j], j < i. This warp holds columns j = 16w..16w+15 of it.
__device__ __forceinline__ void gated_factor(const float* product, const float* vectors, float* factor) {
  const int lane = threadIdx.x & 31, w = warp_of_group(), j = lane >> 2, t = 2 * (lane & 3);
  const float log0 = vectors[kColLog + 16 * w + j], log1 = vectors[kColLog + 16 * w + j + 8];
  float stop0 = vectors[kStop + 16 * w + j], stop1 = vectors[kStop + 16 * w + j + 8];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (c < w) continue;
    float* block = factor + block_at(c, w) + t * kRow + j;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = 16 * c + 8 * half + t;
      const float* at = product + 8 * c + 4 * half;
      float m[4];
      if (c == w) {
        const float2 b = *reinterpret_cast<const float2*>(vectors + kBeta + token), r = *reinterpret_cast<const float2*>(vectors + kRowLog + token);
        m[0] = at[0] * b.x * ex2(r.x - log0);
        m[1] = at[1] * b.y * ex2(r.y - log0);
        m[2] = at[2] * b.x * ex2(r.x - log1);
        m[3] = at[3] * b.y * ex2(r.y - log1);
        if (half == 0) {
          m[0] = j < t ? m[0] : 0.f;
          m[1] = j < t + 1 ? m[1] : 0.f;
          m[2] = m[3] = 0.f;
        } else {
          m[0] = operand(m[0]);
          m[1] = operand(m[1]);
          m[2] = j < t ? m[2] : 0.f;
          m[3] = j < t + 1 ? m[3] : 0.f;
        }
      } else {
        const float2 s = *reinterpret_cast<const float2*>(vectors + kStart + token);
        m[0] = operand(at[0] * s.x * stop0);
        m[1] = operand(at[1] * s.y * stop0);
        m[2] = operand(at[2] * s.x * stop1);
        m[3] = operand(at[3] * s.y * stop1);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) block[(8 * half + (e & 1)) * kRow + 8 * (e >> 1)] = m[e];
    }
    if (c > w) {
      const float between = vectors[kBetween + c];
      stop0 *= between;
      stop1 *= between;
    }
  }
}

// Diagonal blocks w of two heads -> (I + M)^-1 in place. 8x8 blocks by substitution in fp32, a column a lane: powers of M would cancel badly
// where keys are alike. Then X21 = -X22 M21 X11.
__device__ __forceinline__ void invert_diagonal(float* factor) {
  const int lane = threadIdx.x & 31, w = warp_of_group();
  factor += block_at(w, w);
  float x[8];
  float* own = factor + (lane >> 4) * kFactor + ((lane >> 3) & 1) * 8 * (kRow + 1);
  const int n = lane & 7;
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = i == n ? 1.f : 0.f;
#pragma unroll
  for (int i = 1; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 m = *reinterpret_cast<const float4*>(own + i * kRow + j);
      x[i] -= m.x * x[j];
      if (j + 1 < i) x[i] -= m.y * x[j + 1];
      if (j + 2 < i) x[i] -= m.z * x[j + 2];
      if (j + 3 < i) x[i] -= m.w * x[j + 3];
    }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; ++i) own[i * kRow + n] = tf32(x[i]);
  __syncwarp();
  const int row = lane >> 2, t = 2 * (lane & 3);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float* block = factor + e * kFactor;
    float sum[4] = {0.f, 0.f, 0.f, 0.f}, y[4] = {0.f, 0.f, 0.f, 0.f};
    const float x11[4] = {block[t * kRow + row], block[(t + 1) * kRow + row], 0.f, 0.f};
    mma8(sum, x11, *reinterpret_cast<const float2*>(block + (8 + row) * kRow + t));
    const float minus[4] = {operand(-sum[0]), operand(-sum[1]), 0.f, 0.f};
    mma8(y, minus, *reinterpret_cast<const float2*>(block + (8 + row) * kRow + 8 + t));
    __syncwarp();
    block[(8 + t) * kRow + row] = tf32(y[0]);
    block[(9 + t) * kRow + row] = tf32(y[1]);
  }
}

// Block column c of the inverse, X[i] = -X[i,i] * sum over k < i of M[i,k] X[k], to `tile`, swizzled, zeros above the diagonal.
template <typename Element, int c> __device__ __forceinline__ void invert_column(const float* factor, void* tile) {
  const int lane = threadIdx.x & 31;
  float x[4][8];
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int e = 0; e < 8; ++e) x[i][e] = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < c) continue;
    if (i == c) {
      const float* at = factor + block_at(c, c) + 2 * (lane & 3) * kRow + (lane >> 2);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[i][e] = at[(8 * (e >> 2) + (e & 1)) * kRow + 8 * ((e >> 1) & 1)];
    } else {
      float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int k = 0; k < i; ++k)
        if (k >= c) mma_block(sum, x[k], factor + block_at(i, k));
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] = operand(-sum[e]);
      mma_block(x[i], sum, factor + block_at(i, i));
      if (i < 3) {
#pragma unroll
        for (int e = 0; e < 8; ++e) x[i][e] = tf32(x[i][e]);
      }
    }
  }
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(tile));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned p[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      Element pair[2] = {Element(x[i][2 * e]), Element(x[i][2 * e + 1])};
      p[e] = *reinterpret_cast<const unsigned*>(pair);
    }
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(transposed_address(base, i, c)),
                 "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]) : "memory");
  }
}

// (I + M)^-1 of one or two heads into consecutive tiles. Warps share the columns of two heads evenly, long with short.
template <typename Element> __device__ __forceinline__ void gated_inverse(const float* product, const float* vectors, float* factor, void* tiles, int heads) {
#pragma unroll 1
  for (int e = 0; e < heads; ++e) gated_factor(product, vectors + e * kVectors, factor + e * kFactor);
  __syncwarp();
  invert_diagonal(factor);
  __syncthreads();
#pragma unroll 1
  for (int e = 0; e < heads; ++e) {
    const float* of_head = factor + e * kFactor;
    void* tile = static_cast<char*>(tiles) + e * 8192;
    switch (e == 0 ? warp_of_group() : 3 - warp_of_group()) {
      case 0: invert_column<Element, 0>(of_head, tile); break;
      case 1: invert_column<Element, 1>(of_head, tile); break;
      case 2: invert_column<Element, 2>(of_head, tile); break;
      default: invert_column<Element, 3>(of_head, tile);
    }
  }
}
}  // namespace flashqla
"""


@tilelang.jit(target=HOPPER, pass_configs=MANUAL_ROLES)
def build_inverse(dtype: str, g_dtype: str, beta_dtype: str, l2norm: bool):
    cpp = {"bfloat16": "bfloat16_t", "float16": "half_t", "float32": "float"}
    factors = f"flashqla::chunk_factors<{'true' if l2norm else 'false'}, {cpp[g_dtype]}, {cpp[beta_dtype]}>"
    tokens, slots, hk, hv, offsets, out_tokens = (T.dynamic(x) for x in ("tokens", "slots", "hk", "hv", "offsets", "out_tokens"))
    q0, q1, k0, k1, g0, g1, b0, b1 = (T.dynamic(x) for x in ("q0", "q1", "k0", "k1", "g0", "g1", "b0", "b1"))

    @T.prim_func
    def gated_inverse(
        q: T.StridedTensor((tokens, hk, HEAD_DIM), (q0, q1, 1), dtype),
        k: T.StridedTensor((tokens, hk, HEAD_DIM), (k0, k1, 1), dtype),
        g: T.StridedTensor((tokens, hv), (g0, g1), g_dtype),
        beta: T.StridedTensor((tokens, hv), (b0, b1), beta_dtype),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        A: T.Tensor((tokens, hv, CHUNK), dtype),
        records: T.Tensor((slots, hv, RECORD, CHUNK), "float32"),
        cumulative: T.Tensor((out_tokens, hv), "float32"),
        o: T.Tensor((tokens, hv, HEAD_DIM), dtype),
        scale: T.float32,
        sequences: T.int32,
        offset_step: T.int32,
        group: T.int32,
        heads: T.int32,
        has_gate: T.int32,
        has_cumulative: T.int32,
    ):
        # Neighbouring CTAs take the heads of one chunk, which lie side by side in memory.
        with T.Kernel(slots * T.truncdiv(hv, heads), threads=WARP_GROUP) as bx:
            T.import_source(DEVICE_FUNCTIONS + INVERSE_FUNCTIONS)
            a_smem = T.alloc_shared((PAIR, CHUNK, CHUNK), dtype)
            # The keys are needed until their product stands in registers, the factors from then on.
            factor = T.alloc_shared((PAIR * FACTOR,), "float32")
            k_smem = T.view(factor, (2 * PAIR * FACTOR // 64, 64), dtype)  # rows 0-63 hold columns 0-63 of K, rows 64-127 the others
            vectors = T.alloc_shared((BATCH, VECTORS), "float32")
            q_norm = T.alloc_shared((CHUNK,), "float32")
            k_norm = T.alloc_shared((CHUNK,), "float32")
            product = T.alloc_fragment((CHUNK, CHUNK), "float32")
            ready = T.alloc_barrier(WARP_GROUP)
            T.annotate_min_blocks_per_sm(CTAS_PER_SM)
            T.annotate_layout({a_smem: make_swizzled_layout(a_smem)})
            tx = T.get_thread_binding()
            # Variables, because a quotient that is let stand is computed again, in 64 bits, wherever it is used.
            slot = T.alloc_var("int32")
            head_first = T.alloc_var("int32")
            slot = T.truncdiv(bx, T.truncdiv(hv, heads))
            head_first = (bx - slot * T.truncdiv(hv, heads)) * heads
            k_head: T.int32 = T.truncdiv(head_first, group)

            # Slot cu[n] / 64 + n is the first of sequence n: the last sequence that starts at or before this slot owns it.
            low = T.alloc_var("int32")
            high = T.alloc_var("int32")
            low = 0
            high = sequences
            while high - low > 1:
                middle: T.int32 = (low + high) // 2
                if cu_seqlens[middle * offset_step] // CHUNK + middle <= slot:
                    low = middle
                else:
                    high = middle
            bos: T.int32 = T.max(T.min(cu_seqlens[low * offset_step], tokens), 0)
            eos: T.int32 = T.max(T.min(cu_seqlens[(low + 1) * offset_step], tokens), bos)
            first: T.int32 = bos + (slot - bos // CHUNK - low) * CHUNK
            rows: T.int32 = T.min(eos - first, CHUNK)
            end: T.int32 = T.max(T.min(cu_seqlens[sequences * offset_step], tokens), 0)
            T.assume(first >= 0)

            if rows > 0:
                if l2norm:
                    q_smem = T.alloc_shared((CHUNK, HEAD_DIM), dtype)
                    T.annotate_layout({q_smem: make_swizzled_layout(q_smem)})
                    T.tma_copy(q[first:first + CHUNK, k_head, :], q_smem, barrier=ready)
                for half in T.unroll(2):
                    T.tma_copy(k[first:first + CHUNK, k_head, half * 64:half * 64 + 64], k_smem[half * CHUNK:half * CHUNK + CHUNK, :], barrier=ready)
                T.barrier_arrive(ready)
                T.barrier_wait(ready, 0)
                if rows < CHUNK:  # rows of another sequence, or of nobody: anything may stand there
                    if tx < 64:
                        T.call_extern("handle", "flashqla::zero_rows", T.address_of(k_smem[tx // 32 * CHUNK, 0]), rows)
                    T.fence_proxy_async()
                    T.sync_threads()
                T.wgmma_gemm(k_smem[0:CHUNK, :], k_smem[0:CHUNK, :], product, transpose_B=True, clear_accum=True)
                T.wgmma_gemm(k_smem[CHUNK:2 * CHUNK, :], k_smem[CHUNK:2 * CHUNK, :], product, transpose_B=True)
                if l2norm:
                    T.call_extern("handle", f"flashqla::inverse_norms<{cpp[dtype]}>", T.address_of(k_smem[0, 0]), T.address_of(k_norm[0]), rows)
                    T.call_extern("handle", f"flashqla::inverse_norms<{cpp[dtype]}>", T.address_of(q_smem[0, 0]), T.address_of(q_norm[0]), rows)
                T.wait_wgmma(0)
                for batch in T.serial(T.ceildiv(heads, BATCH)):
                    warp = tx // 32
                    mine: T.int32 = batch * BATCH + warp
                    if mine < heads:
                        T.call_extern(
                            "handle", factors,
                            T.address_of(g[first, head_first + mine]), g0, T.address_of(beta[first, head_first + mine]), b0,
                            T.address_of(q_norm[0]), T.address_of(k_norm[0]), T.address_of(vectors[warp, 0]), T.address_of(records[slot, head_first + mine, 0, 0]),
                            T.address_of(cumulative[first * has_cumulative, head_first + mine]), hv, rows, scale, has_gate, has_cumulative,
                        )
                    T.sync_threads()
                    for pair in T.unroll(T.ceildiv(T.min(heads - batch * BATCH, BATCH), PAIR), unroll_factor=1):
                        head: T.int32 = head_first + batch * BATCH + pair * PAIR
                        both: T.int32 = T.min(heads - batch * BATCH - pair * PAIR, PAIR)
                        T.call_extern("handle", f"flashqla::gated_inverse<{cpp[dtype]}>", product.data, T.address_of(vectors[pair * PAIR, 0]),
                                      T.address_of(factor[0]), T.address_of(a_smem[0, 0, 0]), both)
                        T.fence_proxy_async()
                        T.sync_threads()
                        # Two loops: TileLang draws the election of a storing thread out of a loop, around all that stands in it.
                        if rows == CHUNK:
                            for e in T.unroll(both, unroll_factor=1):
                                if tx < 32:
                                    T.tma_copy(a_smem[e, :, :], A[first:first + CHUNK, head + e, :])
                        else:
                            for e in T.unroll(both, unroll_factor=1):
                                for t, j in T.Parallel(CHUNK, CHUNK):
                                    if t < rows:
                                        A[first + t, head + e, j] = a_smem[e, t, j]
                        if tx < 32:
                            T.tma_store_wait(0, read=True)
                        T.sync_threads()
            # Rows past the last sequence belong to the slots past its last chunk.
            blank: T.int32 = end + (slot - end // CHUNK - sequences) * CHUNK
            if blank >= end:
                for h in T.serial(heads):
                    for t, d in T.Parallel(CHUNK, HEAD_DIM):
                        if blank + t < tokens:
                            o[blank + t, head_first + h, d] = 0
                    for t, j in T.Parallel(CHUNK, CHUNK):
                        if blank + t < tokens:
                            A[blank + t, head_first + h, j] = 0
                    if has_cumulative != 0:
                        if tx < CHUNK:
                            if blank + tx < tokens:
                                cumulative[blank + tx, head_first + h] = 0.0

    return gated_inverse
