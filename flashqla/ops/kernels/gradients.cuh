// Products of the warpgroups COLUMNS of the gradients kernel, and what all of its roles do with accumulators; gradients.py says what it computes.
// Needs tiles.cuh, records.cuh, pairs.cuh.
//
// An accumulator of 64x64 is held as tiles.cuh says: this thread has rows row_of(0) and row_of(1), of each 16 columns.
#include <tl_templates/cuda/intrin.h>
#include <tl_templates/cuda/instruction/wgmma.h>

namespace flashqla {
__device__ __forceinline__ int row_of(int r) { return 16 * warp_of_group() + ((threadIdx.x & 31) >> 2) + 8 * r; }
__device__ __forceinline__ float sum_of_four(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
// The same number, of which the compiler does not know it. What is computed from it is computed where it is used: kept from one use to the next, the
// addresses and descriptors of tiles take registers that are not there.
__device__ __forceinline__ int anew(int x) { asm volatile("" : "+r"(x)); return x; }

// Where this thread's columns 0.. of row row_of(0) of a swizzled tile lie.
__device__ __forceinline__ unsigned own_row(const void* tile) {
  return anew(swizzled(static_cast<unsigned>(__cvta_generic_to_shared(tile)), row_of(0), 0) + (threadIdx.x & 3) * 4);
}
// Columns 8j + 2(t%4) and the next of row row_of(r), from own_row. Rows 8 apart are swizzled alike.
template <typename Element> __device__ __forceinline__ float2 two_columns(unsigned row, int r, int j) {
  unsigned raw;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(raw) : "r"((row ^ (j << 4)) + r * 1024) : "memory");
  return two_floats<Element>(raw);
}

// The sums of a chunk and value head that pass from role to role: 64 sums of rows, of the first three in parts, four of a row side by side for each
// half of K; `kCols` sums of columns over the 16 rows of each of four warps, no more than up to the diagonal; `kInner` 64 parts of one number.
enum { kQuery = 0, kKey = 512, kWritten = 1024, kRow = 1536, kBetaRow = 1600, kDiagonal = 1664, kCols = 1728, kInner = 1984 };
// Rows of a record, as in common.py.
enum { kRowLog = 0, kColLog = 64, kKeyDecay = 256, kChunkDecay = 320, kBeta = 384, kKeyLog = 512 };

__device__ __forceinline__ void put_work(int* work, int rows, int first, int head, int ahead) {
  if ((threadIdx.x & 31) == 0) *reinterpret_cast<int4*>(work) = make_int4(rows, first, head, ahead);
}
// Which 64 columns of K this warpgroup has: of the whole warp, so that what follows from it is computed once for it.
__device__ __forceinline__ int half_of_columns() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 7), 0); }
// Products of a warpgroup: what TileLang would write for two warpgroups with the columns of a product between them, but for descriptors: it derives
// them from the thread index, in registers of each thread. `half` of what follows is the same number for the whole warp.
//
// A tile has rows of 128 bytes, swizzled, so that 8 of them are 1024 bytes; what is wider lies as tiles one behind the other.
__device__ __forceinline__ unsigned descriptor(const void* tile) { return anew(static_cast<unsigned>(__cvta_generic_to_shared(tile)) >> 4); }
__device__ __forceinline__ unsigned long long with_strides(unsigned descriptor) { return 0x4000004000000000ull | descriptor; }
// kBfloat16 is defined in front of this.
constexpr tl::DataType kOperand = kBfloat16 ? tl::DataType::kBFloat16 : tl::DataType::kFloat16;

__device__ __forceinline__ void clear(float* d) {
#pragma unroll
  for (int e = 0; e < 32; ++e) d[e] = 0.f;
}

// Begins d = a b, or d += a b: a of 64 rows and 16 * kSteps columns, or its transpose, b of 16 * kSteps rows and 64 columns.
template <int kSteps, bool kTransposed = false> __device__ __forceinline__ void begin_product(float* d, const void* a, const void* b, bool add) {
  const unsigned left = descriptor(a) | (kTransposed ? 0 : 1 << 16), right = descriptor(b);
  tl::warpgroup_fence_operand(d, 32);
  tl::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    tl::wgmma_ss<kOperand, kOperand, tl::DataType::kFloat32, 64, 64, 16, kTransposed, true>(
        with_strides(left + (kTransposed ? k * 2048 : k / 4 * 8192 + k % 4 * 32) / 16), with_strides(right + k * 2048 / 16),
        reinterpret_cast<unsigned*>(d), add || k > 0);
  tl::warpgroup_commit_batch();
  tl::warpgroup_fence_operand(d, 32);
}
__device__ __forceinline__ void end_product(float* d) {
  tl::wait_wgmma<0>();
  tl::warpgroup_fence_operand(d, 32);
}

// Four 8x8 blocks of a tile as an accumulator holds 16 rows and columns: addresses are those of store_tile, 32 bytes apart but for the swizzle.
__device__ __forceinline__ unsigned own_blocks(const void* tile) {
  const int lane = threadIdx.x & 31;
  return anew(swizzled(static_cast<unsigned>(__cvta_generic_to_shared(tile)), 16 * warp_of_group() + (lane & 15), lane >> 4));
}
__device__ __forceinline__ void load_blocks(unsigned* words, unsigned blocks, int pair) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(blocks ^ (pair << 5)) : "memory");
}
__device__ __forceinline__ void store_blocks(unsigned blocks, int pair, const unsigned* words) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(blocks ^ (pair << 5)), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}
__device__ __forceinline__ void store_transposed_blocks(unsigned address, const unsigned* words) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

// Factors of a token each, for the columns of a tile of 64x64 in registers, as load_transposed leaves it.
template <typename Element> __device__ __forceinline__ void scale_columns(Element* tile, const float* factors) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 factor = *reinterpret_cast<const float2*>(factors + 8 * j + 2 * (threadIdx.x & 3));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Element* at = tile + 4 * j + 2 * r;
      const float2 x = two_floats<Element>(*reinterpret_cast<const unsigned*>(at));
      at[0] = Element(x.x * factor.x);
      at[1] = Element(x.y * factor.y);
    }
  }
}
// S that enters a chunk, in place of the one that enters the chunk in front, from U and K of that one: decay_C S + (decay_C / decay U)^T K, rounded
// as it would be stored. Each of two warpgroups makes 64 columns of V of it; then they meet.
template <typename Element>
__device__ __forceinline__ void advance_state(void* s, const void* u, const void* k, const float* record, int half) {
  Element operand[32];
  load_transposed(operand, static_cast<const char*>(u) + half * 8192);
  scale_columns(operand, record + kKeyDecay);
  unsigned* words = reinterpret_cast<unsigned*>(operand);
  const float kept = record[kChunkDecay];
#pragma unroll 1
  for (int columns = 0; columns < 2; ++columns) {
    float product[32];
    const unsigned right = descriptor(k) + columns * 8192 / 16;
    tl::warpgroup_fence_operand(words, 16);
    tl::warpgroup_fence_operand(product, 32);
    tl::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      tl::wgmma_rs<kOperand, kOperand, tl::DataType::kFloat32, 64, 64, 16, false, true>(words + 4 * step, with_strides(right + step * 2048 / 16),
                                                                                     reinterpret_cast<unsigned*>(product), step > 0);
    tl::warpgroup_commit_batch();
    tl::wait_wgmma<0>();
    tl::warpgroup_fence_operand(product, 32);
    tl::warpgroup_fence_operand(words, 16);
    const unsigned blocks = own_blocks(static_cast<char*>(s) + columns * 16384 + half * 8192);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      unsigned own[4];
      load_blocks(own, blocks, pair);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = two_floats<Element>(own[i]);
        const float* p = product + 8 * pair + 2 * i;
        own[i] = pack<Element>(kept * x.x + p[0], kept * x.y + p[1]);
      }
      store_blocks(blocks, pair, own);
    }
  }
}
__device__ __forceinline__ void meet() { asm volatile("bar.sync 9, 256;" ::: "memory"); }

// sum[i, :] += factor[i] * product[i, :], and out[i] = of_out[i] * (product[i, :] . tile[i, :]), in four parts side by side.
template <typename Element>
__device__ __forceinline__ void add_rows(float* sum, const float* product, const void* tile, const float* factor, const float* of_out, float* out) {
  const unsigned blocks = own_blocks(tile);
  float dots[2] = {0.f, 0.f};
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    unsigned words[4];
    load_blocks(words, blocks, pair);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = two_floats<Element>(words[i]);
      const int r = i & 1, e = 8 * pair + 2 * i;
      sum[e] += factor[r] * product[e];
      sum[e + 1] += factor[r] * product[e + 1];
      dots[r] = fmaf(product[e + 1], x.y, fmaf(product[e], x.x, dots[r]));
    }
  }
  out += anew(threadIdx.x & 31) + 64 * warp_of_group();  // 4 * row_of(0) + threadIdx.x % 4
  out[0] = dots[0] * of_out[0];
  out[32] = dots[1] * of_out[1];
}
template <typename Element>
__device__ __forceinline__ void add_product(float* sum, const float* product, const void* tile, const float* factors, float* out) {
  const float factor[2] = {factors[row_of(0)], factors[row_of(1)]};
  add_rows<Element>(sum, product, tile, factor, factor, out);
}
// The product dY S^T makes E S^T.
template <typename Element>
__device__ __forceinline__ void add_error_product(float* sum, const float* product, const void* tile, const float* record, float* out) {
  float factor[2];
  const float one[2] = {1.f, 1.f};
#pragma unroll
  for (int r = 0; r < 2; ++r) factor[r] = -other_beta(record[kBeta + row_of(r)]) * ex2(record[kKeyLog + row_of(r)]);
  add_rows<Element>(sum, product, tile, factor, one, out);
}

// sum += rows of (a, b) times columns of (c, d), of which rows 8.. are zero.
__device__ __forceinline__ void add_diagonal(float* sum, unsigned a, unsigned b, unsigned c, unsigned d) {
  if constexpr (kBfloat16)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%5}, {%7,%8}, {%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a), "r"(0), "r"(b), "r"(c), "r"(d));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%5}, {%7,%8}, {%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a), "r"(0), "r"(b), "r"(c), "r"(d));
}

// The inner product of two tiles of 128 rows of 128 bytes, in eight parts of each warp; elements correspond, whatever the swizzle. Of a product of
// tensor cores with the words of a lane as row and column lane / 4 the diagonal is what is wanted: an instruction for 4 pairs of words of a warp.
__device__ __forceinline__ void put_inner_product(const void* x, const void* y, float* out) {
  const int lane = threadIdx.x & 31;
  float sum[2][4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = (i * 128 + (threadIdx.x & 127)) * 16;
    const uint4 a = *reinterpret_cast<const uint4*>(static_cast<const char*>(x) + at), b = *reinterpret_cast<const uint4*>(static_cast<const char*>(y) + at);
    add_diagonal(sum[0], a.x, a.y, b.x, b.y);
    add_diagonal(sum[1], a.z, a.w, b.z, b.w);
  }
  const int row = lane >> 2;
  if ((lane & 3) == row >> 1) out[8 * (threadIdx.x >> 5) + row] = row & 1 ? sum[0][1] + sum[1][1] : sum[0][0] + sum[1][0];
}

// The transpose of an 8x8 block, of which a lane has two elements; and two sums.
__device__ __forceinline__ unsigned transposed(unsigned x) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ unsigned add_two(unsigned x, unsigned y) {
  unsigned sum;
  if constexpr (kBfloat16) asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
  else asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
  return sum;
}

// What SCORE does with a product of 64x64, of which it needs what is not above the diagonal. Warps have 16 rows each, so that of their four blocks of
// 16x16 those up to the diagonal one count. Of P * dP + M * dM below the diagonal it gathers sums of rows and, for its own rows, of columns.
struct Position {  // in a block, for r = 0, j = 0
  int warp = warp_of_group(), row = (threadIdx.x & 31) >> 2, column = 2 * (threadIdx.x & 3);
};
// x[r][j][c] = 2^(row_log[r] - col_log[..]) * factor[r] * x[r][j][c]
__device__ __forceinline__ void times_ratios(float* x, const float* row_log, const float* col_log, const float* factor) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float2 log = *reinterpret_cast<const float2*>(col_log + 8 * j);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      x[4 * j + 2 * r] *= ex2(row_log[r] - log.x) * factor[r];
      x[4 * j + 2 * r + 1] *= ex2(row_log[r] - log.y) * factor[r];
    }
  }
}
// Zeroes what lies above the diagonal of a block on it, and with kDiagonal what lies on it. A choice, not a product: above, the exponential may
// overflow.
template <bool kOnDiagonal> __device__ __forceinline__ void keep_below(float* x, const Position& at) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    x[4 + c] = 0.f;
#pragma unroll
    for (int r = 0; r < 2; ++r) x[6 * r + c] = at.column + c < at.row + !kOnDiagonal ? x[6 * r + c] : 0.f;
  }
}
// Sums of columns of a block, x[j][c], over lanes 16 apart: a lane is left with those of j = lane / 16.
__device__ __forceinline__ void halve_columns(float* out, const float* x) {
  const bool right = threadIdx.x & 16;
#pragma unroll
  for (int c = 0; c < 2; ++c) out[c] = (right ? x[2 + c] : x[c]) + __shfl_xor_sync(~0u, right ? x[c] : x[2 + c], 16);
}
// From dP = dO U^T: Z = scale * dP * R. Blocks above the diagonal are zero in Z from the start.
template <typename Element>
__device__ __forceinline__ void query_scores(const float* dp, const float* qk, const float* record, float scale, void* z, float* row_sum, float* column_sum) {
  const Position at;
  float columns[16] = {};
  const float row_log[2] = {record[kRowLog + row_of(0)], record[kRowLog + row_of(1)]}, factor[2] = {scale, scale};
#pragma unroll
  for (int r = 0; r < 2; ++r) row_sum[r] = 0.f;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    if (pair > at.warp) break;
    float p[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) p[i] = dp[8 * pair + i];
    times_ratios(p, row_log, record + kColLog + 16 * pair + at.column, factor);
    if (pair == at.warp) keep_below<false>(p, at);
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack<Element>(p[2 * i], p[2 * i + 1]);
    store_blocks(own_blocks(z), pair, words);
    if (pair == at.warp) keep_below<true>(p, at);  // a product of a token with itself is in both sums, and in no gradient of a gate
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float both = p[i] * qk[8 * pair + i];
      row_sum[i >> 1 & 1] += both;
      columns[4 * pair + (i >> 2 << 1 | (i & 1))] += both;
    }
  }
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) halve_columns(column_sum + 2 * pair, columns + 4 * pair);
}
// From dY U^T (with beta in dY or not, as `other_beta` tells): X = dM * R * beta, as X + X^T. `diagonal` is what the product
// has on its diagonal.
template <typename Element>
__device__ __forceinline__ void key_scores(const float* du, const float* kk, const float* record, void* x, float* row_sum, float* column_sum,
                                           float* beta_sum, float* diagonal) {
  const Position at;
  float columns[16] = {};
  float row_log[2], beta[2];
  const float factor[2] = {-1.f, -1.f};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_log[r] = record[kKeyLog + row_of(r)];
    beta[r] = other_beta(record[kBeta + row_of(r)]);
    beta_sum[r] = 0.f;
  }
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    if (pair > at.warp) break;
    float u[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) u[i] = du[8 * pair + i];
    if (pair == at.warp) {
#pragma unroll
      for (int r = 0; r < 2; ++r) diagonal[r] = at.row & 1 ? u[6 * r + 1] : u[6 * r];
    }
    times_ratios(u, row_log, record + kColLog + 16 * pair + at.column, factor);
    if (pair == at.warp) keep_below<true>(u, at);
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack<Element>(u[2 * i] * beta[i & 1], u[2 * i + 1] * beta[i & 1]);
    if (pair == at.warp) {
      words[0] = add_two(words[0], transposed(words[0]));
      words[3] = add_two(words[3], transposed(words[3]));
      words[2] = transposed(words[1]);
    } else {
      store_transposed_blocks(transposed_address(static_cast<unsigned>(__cvta_generic_to_shared(x)), pair, at.warp), words);
    }
    store_blocks(own_blocks(x), pair, words);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i >> 1 & 1;
      const float of_beta = u[i] * kk[8 * pair + i], both = of_beta * beta[r];
      beta_sum[r] += of_beta;
      row_sum[r] += both;
      columns[4 * pair + (i >> 2 << 1 | (i & 1))] += both;
    }
  }
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    float more[2];
    halve_columns(more, columns + 4 * pair);
    column_sum[2 * pair] += more[0];
    column_sum[2 * pair + 1] += more[1];
  }
}
__device__ __forceinline__ void put_score_sums(float* row_sum, float* column_sum, float* beta_sum, const float* diagonal, float* sums) {
  const int lane = threadIdx.x & 31;
  const bool odd = lane & 8;
  float* to = sums + kCols + 64 * warp_of_group() + (lane >> 4) * 8 + (lane >> 3 & 1) + 2 * (lane & 3);
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {  // over the other lanes with the same columns
    const float* x = column_sum + 2 * pair;
    float sum = (odd ? x[1] : x[0]) + __shfl_xor_sync(~0u, odd ? x[0] : x[1], 8);
    sum += __shfl_xor_sync(~0u, sum, 4);
    if ((lane & 4) == 0) to[16 * pair] = sum;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_sum[r] = sum_of_four(row_sum[r]);
    beta_sum[r] = sum_of_four(beta_sum[r]);
    if ((lane & 3) == 0) {
      sums[kRow + row_of(r)] = row_sum[r];
      sums[kBetaRow + row_of(r)] = beta_sum[r];
    }
    if ((lane & 3) == lane >> 3) sums[kDiagonal + row_of(r)] = diagonal[r];
  }
}

// This warp's 16 rows.
__device__ __forceinline__ void zero_own_rows(void* tile) {
  uint4* own = reinterpret_cast<uint4*>(tile) + 128 * warp_of_group() + (threadIdx.x & 31);
#pragma unroll
  for (int i = 0; i < 4; ++i) own[32 * i] = make_uint4(0, 0, 0, 0);
  __syncwarp();
}

// Gradients of q and k from those of q / |q| and k / |k| times 1 / |q| and 1 / |k|, which is what products with norms in their factors give: takes
// out the part along q and k. By two warpgroups, with 64 columns each; `norms` is where they meet, and free again after the next meeting elsewhere.
template <typename Element> __device__ __forceinline__ void take_out_norms(float* dq, float* dk, const void* q, const void* k, float* norms, int half) {
  float4* meeting = reinterpret_cast<float4*>(norms);
  const unsigned q_row = own_row(q), k_row = own_row(k);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sums[4] = {0.f, 0.f, 0.f, 0.f};  // dq . q, q . q, dk . k, k . k
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 x = two_columns<Element>(q_row, r, j), y = two_columns<Element>(k_row, r, j);
      const int e = 4 * j + 2 * r;
      sums[0] += dq[e] * x.x + dq[e + 1] * x.y;
      sums[1] += x.x * x.x + x.y * x.y;
      sums[2] += dk[e] * y.x + dk[e + 1] * y.y;
      sums[3] += y.x * y.x + y.y * y.y;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = sum_of_four(sums[i]);
    if ((threadIdx.x & 3) == 0) meeting[64 * half + row_of(r)] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  }
  asm volatile("bar.sync 8, 256;" ::: "memory");
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float4 left = meeting[row_of(r)], right = meeting[64 + row_of(r)];
    const float of_q = (left.x + right.x) / (left.y + right.y + 1e-6f), of_k = (left.z + right.z) / (left.w + right.w + 1e-6f);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 x = two_columns<Element>(q_row, r, j), y = two_columns<Element>(k_row, r, j);
      const int e = 4 * j + 2 * r;
      dq[e] -= of_q * x.x;
      dq[e + 1] -= of_q * x.y;
      dk[e] -= of_k * y.x;
      dk[e + 1] -= of_k * y.y;
    }
  }
}

// out[i, :] of the first `rows` rows, 64 columns. Lanes side by side trade columns, so that a row gets whole sectors of 32 bytes.
template <typename Element> __device__ __forceinline__ void store_rows(Element* out, long long stride, const float* d, int rows) {
  const int lane = anew(threadIdx.x & 31), odd = lane & 1;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = anew(row_of(r));
    Element* at = out + row * stride + 8 * odd + 2 * (lane & 2);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      unsigned own[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const Element pair[2] = {Element(d[4 * (j + c) + 2 * r]), Element(d[4 * (j + c) + 2 * r + 1])};
        own[c] = *reinterpret_cast<const unsigned*>(pair);
      }
      const unsigned other = __shfl_xor_sync(~0u, odd ? own[0] : own[1], 1);
      if (row < rows) *reinterpret_cast<uint2*>(at + 8 * j) = odd ? make_uint2(other, own[1]) : make_uint2(own[0], other);
    }
  }
}

__device__ __forceinline__ float2 two(const float* x) { return *reinterpret_cast<const float2*>(x + 2 * (threadIdx.x & 31)); }
// Of rows in four parts for each half.
__device__ __forceinline__ float2 two_in_parts(const float* x) {
  float out[2] = {0.f, 0.f};
#pragma unroll
  for (int c = 0; c < 2; ++c)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 part = *reinterpret_cast<const float4*>(x + 256 * half + 8 * (threadIdx.x & 31) + 4 * c);
      out[c] += (part.x + part.y) + (part.z + part.w);
    }
  return make_float2(out[0], out[1]);
}
template <typename Element> __device__ __forceinline__ void four(const Element* at, float* out) {
  const uint2 raw = *reinterpret_cast<const uint2*>(at + 4 * (threadIdx.x & 31));
  const Element* values = reinterpret_cast<const Element*>(&raw);
#pragma unroll
  for (int e = 0; e < 4; ++e) out[e] = float(values[e]);
}

// What a warp needs for the gradients of gate and beta of a chunk and value head; the lane has tokens 2*lane and 2*lane+1.
struct Factors {
  float2 beta, key_log, col_log;
  float chunk_decay;
};
struct Sums {
  float2 query, key, written, row, column, diagonal, of_beta;
  float inner;
};
__device__ __forceinline__ void read_factors(const float* record, float* out) {
  const Factors found = {two(record + kBeta), two(record + kKeyLog), two(record + kColLog), record[kChunkDecay]};
  memcpy(out, &found, sizeof found);
}
__device__ __forceinline__ void read_sums(const float* sums, float* out) {
  const int lane = threadIdx.x & 31;
  float2 column = make_float2(0.f, 0.f);
#pragma unroll
  for (int warp = 0; warp < 4; ++warp) {
    const float2 more = two(sums + kCols + 64 * warp);
    if (warp >= lane >> 3) column = make_float2(column.x + more.x, column.y + more.y);
  }
  const float2 parts = two(sums + kInner);
  const Sums found = {two_in_parts(sums + kQuery), two_in_parts(sums + kKey), two_in_parts(sums + kWritten), two(sums + kRow), column,
                      two(sums + kDiagonal), two(sums + kBetaRow), parts.x + parts.y};
  memcpy(out, &found, sizeof found);
}

// Gradients of gate and beta, by that warp. Rows of dV whose beta is small come without it: they get it here.
template <typename Element>
__device__ __forceinline__ void gate_gradients(const float* factors, const float* of_roles, const Element* v, long long v_stride, Element* dv, long long dv_stride,
                                               float* dg, float* dbeta, long long stride, int rows) {
  const int lane = threadIdx.x & 31;
  Factors of;
  Sums sums;
  memcpy(&of, factors, sizeof of);
  memcpy(&sums, of_roles, sizeof sums);
  const float2 beta = of.beta, key_log = of.key_log, col_log = of.col_log, query = sums.query, key = sums.key, written = sums.written;
  const float2 row = sums.row, column = sums.column, diagonal = sums.diagonal, of_beta = sums.of_beta;
  const float2 decay = make_float2(ex2(key_log.x), ex2(key_log.y));
  float inner = sums.inner;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) inner += __shfl_xor_sync(~0u, inner, d);
  inner *= of.chunk_decay;

  // What token i has its gate for: everything that tokens from i on read of what was before i. What tokens before i wrote reaches the end.
  const float2 read = make_float2(query.x - other_beta(beta.x) * decay.x * key.x + row.x - column.x,
                                  query.y - other_beta(beta.y) * decay.y * key.y + row.y - column.y);
  float from = read.x + read.y, until = written.x + written.y;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float down = __shfl_down_sync(~0u, from, d), up = __shfl_up_sync(~0u, until, d);
    if (lane + d < 32) from += down;
    if (lane >= d) until += up;
  }
  // Sums of other lanes, not of all less one's own: under a strong gate what is left would be rounding.
  const float down = __shfl_down_sync(~0u, from, 1), up = __shfl_up_sync(~0u, until, 1);
  const float after = lane < 31 ? down : 0.f, before = lane ? up : 0.f;
  const float first = from + before + inner, second = after + read.y + before + written.x + inner;
  // A gate below 2^-100 passes nothing on; what is left of its gradient is rounding.
  const float2 log = make_float2(0.5f * (key_log.x + col_log.x), 0.5f * (key_log.y + col_log.y));
  const float log_before = __shfl_up_sync(~0u, log.y, 1), last = lane ? log_before : 0.f;
  const int token = 2 * lane;
  if (token < rows) dg[token * stride] = log.x - last < -100.f ? 0.f : first;
  if (token + 1 < rows) dg[(token + 1) * stride] = log.y - log.x < -100.f ? 0.f : second;

#pragma unroll 1
  for (int c = 0; c < 2; ++c) {
    const float b = c ? beta.y : beta.x;
    const bool is_row = token + c < rows;
    float gradient = (c ? diagonal.y : diagonal.x) / (b * b);
    unsigned rest = __ballot_sync(~0u, is_row && is_small(b));
    while (rest) {
      const int owner = __ffs(rest) - 1;
      rest &= rest - 1;
      float value[4], error[4], dot = 0.f;
      Element* at = dv + (2 * owner + c) * dv_stride;
      four(v + (2 * owner + c) * v_stride, value);
      four(at, error);
      const float scaled = __shfl_sync(~0u, b, owner);
      Element out[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dot += value[e] * error[e];
        out[e] = Element(scaled * error[e]);
      }
      *reinterpret_cast<uint2*>(at + 4 * lane) = *reinterpret_cast<const uint2*>(out);
#pragma unroll
      for (int d = 16; d > 0; d /= 2) dot += __shfl_xor_sync(~0u, dot, d);
      if (lane == owner) gradient = dot - (c ? decay.y * key.y : decay.x * key.x) + (c ? of_beta.y : of_beta.x);
    }
    if (is_row) dbeta[(token + c) * stride] = gradient;
  }
}

// Gradients of tokens past the last sequence, of which the slots past the last chunk have 64 each; by a warp.
template <typename Element>
__device__ __forceinline__ void zero_tail(Element* dq, Element* dk, Element* dv, float* dg, float* dbeta, const int* offsets, int step, int sequences,
                                          int tokens, int slot, int k_head, int hk, int group) {
  const int end = max(min(offsets[sequences * step], tokens), 0), first = end + (slot - end / 64 - sequences) * 64;
  if (first < end) return;
  const int lane = threadIdx.x & 31, hv = hk * group;
  const auto zero = [&](Element* row) { *reinterpret_cast<uint2*>(row + 4 * lane) = make_uint2(0, 0); };
#pragma unroll 1
  for (long long token = first; token < min(first + 64, tokens); ++token) {
    zero(dq + (token * hk + k_head) * 128);
    zero(dk + (token * hk + k_head) * 128);
#pragma unroll 1
    for (int head = k_head * group; head < (k_head + 1) * group; ++head) {
      zero(dv + (token * hv + head) * 128);
      if (lane == 0) dg[token * hv + head] = dbeta[token * hv + head] = 0.f;
    }
  }
}
}  // namespace flashqla
