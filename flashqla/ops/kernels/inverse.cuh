// The gated inverse of a chunk and the per-token factors of its record; inverse.py says what they are. Needs tiles.cuh and segments.cuh.
namespace flashqla {
// The factor M of one head: 16x16 blocks of its lower triangle, row by row, in fp32. Rows of 24 floats: 8-byte reads of 8 rows hit
// different banks.
constexpr int kRow = 24, kBlock = 16 * kRow, kFactor = 10 * kBlock;
__device__ __forceinline__ int block_at(int i, int j) { return (i * (i + 1) / 2 + j) * kBlock; }
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

// The tensor cores cut TF32 operands off after 10 bits. Adding half of the last one first rounds to nearest (cvt.rna.tf32 takes four
// instructions); `tf32` also cuts off itself, for values that are used elsewhere too.
__device__ __forceinline__ float operand(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }
__device__ __forceinline__ float tf32(float x) { return __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u); }

// Work is dealt out to CTAs in turns; an item is a slot and a block of heads.
__device__ __forceinline__ int turns(int items) { return (items - 1 - int(blockIdx.x)) / int(gridDim.x) + 1; }

// The task of this CTA at a turn: first token and tokens, at most 64, of the chunk in a slot, none in a slot that no chunk has; slot; head.
__device__ __forceinline__ void take_chunk(int turn, int blocks, int heads, const int* offsets, int step, int sequences, int tokens, int* task) {
  const int item = turn * int(gridDim.x) + int(blockIdx.x), slot = item / blocks;
  const int n = owner(offsets, step, sequences, 64, slot);
  const int bos = max(min(offsets[n * step], tokens), 0), eos = max(min(offsets[(n + 1) * step], tokens), bos);
  task[0] = max(bos + (slot - bos / 64 - n) * 64, 0);
  task[1] = min(eos - task[0], 64);
  task[2] = slot;
  task[3] = (item - slot * blocks) * heads;
}

__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

template <typename Element> __device__ __forceinline__ float squares(uint4 raw) {
  const Element* values = reinterpret_cast<const Element*>(&raw);
  float sum = 0.f;
#pragma unroll
  for (int e = 0; e < 8; ++e) sum += float(values[e]) * float(values[e]);
  return sum;
}
// out[t] = 1 / |row t| from the sums of two threads a row. Rows past the sequence may hold anything: they count as 1.
__device__ __forceinline__ void put_inverse_norm(float sum, float* out, int rows) {
  const int row = threadIdx.x >> 1;
  sum += __shfl_xor_sync(~0u, sum, 1);
  if ((threadIdx.x & 1) == 0) out[row] = row < rows ? rsqrtf(sum + 1e-6f) : 1.f;
}
// Of the rows of a [64, 128] tile, which stands in shared memory as two swizzled tiles of 64 columns. Swizzling permutes within a row of a
// tile, which a sum does not see.
template <typename Element> __device__ __forceinline__ void inverse_norms_of_tile(const void* tile, float* out, int rows) {
  const int row = threadIdx.x >> 1;
  const uint4* pieces = reinterpret_cast<const uint4*>(static_cast<const char*>(tile) + (threadIdx.x & 1) * 8192 + row * 128);
  float sum = 0.f;
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) sum += squares<Element>(pieces[piece ^ (row & 7)]);
  put_inverse_norm(sum, out, rows);
}
// Of 64 rows of 128 in global memory.
template <typename Element> __device__ __forceinline__ void inverse_norms(const Element* at, long long stride, float* out, int rows) {
  const int row = threadIdx.x >> 1;
  const uint4* pieces = reinterpret_cast<const uint4*>(at + row * stride + (threadIdx.x & 1) * 64);
  float sum = 0.f;
  if (row < rows) {
#pragma unroll
    for (int piece = 0; piece < 8; ++piece) sum += squares<Element>(pieces[piece]);
  }
  put_inverse_norm(sum, out, rows);
}

// Per-token factors of a head that the inverse needs, vectors of 64 floats. `row`, `col`: base-2 logs whose difference is the decay from
// token j to token i times both inverse key norms. Between different 16-token blocks that is start[i] * stop[j] times the decay of
// the blocks between, every factor at most 1: no exponential per element. `start` includes beta.
enum { kRowLog = 0, kColLog = 64, kBeta = 128, kStart = 192, kStop = 256, kBetween = 320, kVectors = 324 };

// Tokens 2*lane and 2*lane+1 of a strided vector, 0 past `rows`; as they are, so that nothing has to wait for them yet.
template <typename Element> __device__ __forceinline__ void two_tokens(Element* out, const Element* at, long long stride, int rows) {
  const int token = 2 * (threadIdx.x & 31);
  out[0] = token < rows ? at[token * stride] : Element(0.f);
  out[1] = token + 1 < rows ? at[(token + 1) * stride] : Element(0.f);
}

// One warp turns the log gates and beta of a chunk into its record and vectors; the lane has tokens 2*lane and 2*lane+1.
template <bool kNorm, typename Gate, typename Beta>
__device__ __forceinline__ void chunk_factors(const Gate* gates, const Beta* betas, const float* q_norm, const float* k_norm, float* vectors, float* record,
                                              float* cumulative, long long stride, int rows, float scale, int has_cumulative) {
  const int lane = threadIdx.x & 31;
  const float2 gate = make_float2(float(gates[0]), float(gates[1])), b = make_float2(float(betas[0]), float(betas[1]));
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
  put(record + 128, e0 * rk.x, e1 * rk.y);
  put(record + 192, scale * e0 * rq.x, scale * e1 * rq.y);
  put(record + 256, ex2(total - c0) * rk.x, ex2(total - c1) * rk.y);
  if (lane == 0) put(record + 320, ex2(total), total);
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

// Block column c of the inverse, X[i] = -X[i,i] * sum over k < i of M[i,k] X[k], times beta of its columns, to `tile`, swizzled, zeros above
// the diagonal.
template <typename Element, int c> __device__ __forceinline__ void invert_column(const float* factor, const float* beta, void* tile) {
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
  const float beta0 = beta ? beta[16 * c + (lane >> 2)] : 1.f, beta1 = beta ? beta[16 * c + (lane >> 2) + 8] : 1.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned p[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float b = e & 1 ? beta1 : beta0;
      Element pair[2] = {Element(x[i][2 * e] * b), Element(x[i][2 * e + 1] * b)};
      p[e] = *reinterpret_cast<const unsigned*>(pair);
    }
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(transposed_address(base, i, c)),
                 "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]) : "memory");
  }
}

// (I + M)^-1, with has_beta times diag(beta), of one or two heads into consecutive tiles. Warps share the columns of two heads evenly, long with short.
template <typename Element> __device__ __forceinline__ void gated_inverse(const float* product, const float* vectors, float* factor, void* tiles, int heads, int has_beta) {
#pragma unroll 1
  for (int e = 0; e < heads; ++e) gated_factor(product, vectors + e * kVectors, factor + e * kFactor);
  __syncwarp();
  invert_diagonal(factor);
  if (warp_of_group() == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the tiles before these are on their way
  __syncthreads();
#pragma unroll 1
  for (int e = 0; e < heads; ++e) {
    const float* of_head = factor + e * kFactor;
    const float* beta = has_beta ? vectors + e * kVectors + kBeta : nullptr;
    void* tile = static_cast<char*>(tiles) + e * 8192;
    switch (e == 0 ? warp_of_group() : 3 - warp_of_group()) {
      case 0: invert_column<Element, 0>(of_head, beta, tile); break;
      case 1: invert_column<Element, 1>(of_head, beta, tile); break;
      case 2: invert_column<Element, 2>(of_head, beta, tile); break;
      default: invert_column<Element, 3>(of_head, beta, tile);
    }
  }
}
}  // namespace flashqla
