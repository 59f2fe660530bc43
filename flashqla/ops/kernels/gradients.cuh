// What the gradients kernel does with accumulators between its products; gradients.py says what it computes. Needs tiles.cuh, records.cuh.
//
// An accumulator of 64x64 is held as tiles.cuh says: this thread has rows row_of(0) and row_of(1), of each 16 columns.
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
// Two elements of 16 bits, the first one in the low half. A bf16 is the high half of a float: written as a conversion, it takes one more instruction.
// kBfloat16 is defined in front of this.
template <typename Element> __device__ __forceinline__ float2 two_floats(unsigned raw) {
  if constexpr (kBfloat16) return make_float2(__uint_as_float(raw << 16), __uint_as_float(raw & 0xffff0000u));
  const Element* values = reinterpret_cast<const Element*>(&raw);
  return make_float2(float(values[0]), float(values[1]));
}
// Columns 8j + 2(t%4) and the next of row row_of(r), from own_row. Rows 8 apart are swizzled alike.
template <typename Element> __device__ __forceinline__ float2 two_columns(unsigned row, int r, int j) {
  unsigned raw;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(raw) : "r"((row ^ (j << 4)) + r * 1024) : "memory");
  return two_floats<Element>(raw);
}

// The sums of a chunk and value head that pass from role to role: vectors of 64 floats, of the first three one for each half of K, `kCols` four
// of them, `kInner` eight numbers.
enum { kQuery = 0, kKey = 128, kWritten = 256, kRow = 384, kBetaRow = 448, kDiagonal = 512, kCols = 576, kInner = 832 };
// Rows of a record, as in common.py.
enum { kRowLog = 0, kColLog = 64, kOutScale = 192, kKeyDecay = 256, kChunkDecay = 320, kBeta = 384, kKeyLog = 512 };

// What is left of beta beside the gradient of V, which a beta that is not small is part of already.
__device__ __forceinline__ float other_beta(float beta, float small) { return fabsf(beta) < small ? beta : 1.f; }

__device__ __forceinline__ void put_work(int* work, int rows, int first, int head, int ahead) {
  if ((threadIdx.x & 31) == 0) *reinterpret_cast<int4*>(work) = make_int4(rows, first, head, ahead);
}
__device__ __forceinline__ void meet(int barrier) { asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory"); }

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
// tile = decay * tile + product
template <typename Element> __device__ __forceinline__ void add_to_state(void* tile, const float* product, const float* decay) {
  const unsigned row = own_row(tile);
  const float kept = decay[0];
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 x = two_columns<Element>(row, r, j);
      const Element sum[2] = {Element(kept * x.x + product[4 * j + 2 * r]), Element(kept * x.y + product[4 * j + 2 * r + 1])};
      asm volatile("st.shared.b32 [%0], %1;" ::"r"((row ^ (j << 4)) + r * 1024), "r"(*reinterpret_cast<const unsigned*>(sum)) : "memory");
    }
}

// Brings rows of 256 bytes into L2, by a warp: what is to be copied as soon as there is room for it.
__device__ __forceinline__ void prefetch_rows(const void* rows, long long stride, int count) {
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < 2 * count; i += 32)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(rows) + (i >> 1) * stride + (i & 1) * 128));
}

// The same for bytes in a row, by one lane.
__device__ __forceinline__ void prefetch_block(const void* block, int bytes) {
  if ((threadIdx.x & 31) == 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(block), "r"(bytes));
}

// sum[i, :] += factor[i] * product[i, :], and dots[i] = product[i, :] . tile[i, :]
template <typename Element>
__device__ __forceinline__ void add_rows(float* sum, const float* product, const void* tile, float factor0, float factor1, float* dots) {
  const unsigned row = own_row(tile);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    dots[r] = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 x = two_columns<Element>(row, r, j);
      const float* p = product + 4 * j + 2 * r;
      const float factor = r ? factor1 : factor0;
      sum[4 * j + 2 * r] += factor * p[0];
      sum[4 * j + 2 * r + 1] += factor * p[1];
      dots[r] = fmaf(p[1], x.y, fmaf(p[0], x.x, dots[r]));
    }
  }
}
template <typename Element>
__device__ __forceinline__ void add_product(float* sum, const float* product, const void* tile, const float* factor, float* dots) {
  add_rows<Element>(sum, product, tile, factor[row_of(0)], factor[row_of(1)], dots);
}
// The product dY S^T makes E S^T.
template <typename Element>
__device__ __forceinline__ void add_error_product(float* sum, const float* product, const void* tile, const float* record, float small, float* dots) {
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) factor[r] = -other_beta(record[kBeta + row_of(r)], small) * ex2(record[kKeyLog + row_of(r)]);
  add_rows<Element>(sum, product, tile, factor[0], factor[1], dots);
}
// out[i] = dots[i] * factor[i], of a row whose columns four lanes share; factor may be absent.
__device__ __forceinline__ void put_dots(float* out, const float* dots, const float* factor) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = sum_of_four(dots[r]);
    const int row = anew(row_of(r));
    if ((threadIdx.x & 3) == 0) out[row] = factor ? sum * factor[row] : sum;
  }
}

// This thread's part of the inner product of two tiles of 128 rows of 128 bytes; elements correspond, whatever the swizzle.
template <typename Element> __device__ __forceinline__ void add_inner_product(float* sum, const void* x, const void* y) {
  float low = 0.f, high = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = (i * 128 + (threadIdx.x & 127)) * 16;
    const uint4 a = *reinterpret_cast<const uint4*>(static_cast<const char*>(x) + at), b = *reinterpret_cast<const uint4*>(static_cast<const char*>(y) + at);
    const unsigned *u = reinterpret_cast<const unsigned*>(&a), *v = reinterpret_cast<const unsigned*>(&b);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 left = two_floats<Element>(u[e]), right = two_floats<Element>(v[e]);
      low = fmaf(left.x, right.x, low);
      high = fmaf(left.y, right.y, high);
    }
  }
  sum[0] += low + high;
}
__device__ __forceinline__ void put_inner_product(float* sums, float sum) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if ((threadIdx.x & 31) == 0) sums[warp_of_group()] = sum;
}

// From dP = dO U^T and dY U^T (with beta in dY or not, as `other_beta` tells): Z = scale * dP * R and X = dM * R * beta, as operands; and of
// P * dP + M * dM, below the diagonal, the sums of rows and, for this warp's rows, of columns.
template <typename Element>
__device__ __forceinline__ void score_gradients(const float* qk, const float* kk, const float* dp, const float* du, const float* record, float small,
                                                float scale, Element* z, Element* x, float* sums) {
  const int lane = threadIdx.x & 31, warp = warp_of_group();
  float row_log[2], key_log[2], beta[2], row_sum[2] = {0.f, 0.f}, beta_sum[2] = {0.f, 0.f};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_log[r] = record[kRowLog + row_of(r)];
    key_log[r] = record[kKeyLog + row_of(r)];
    beta[r] = other_beta(record[kBeta + row_of(r)], small);
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int column = 8 * j + 2 * (lane & 3);
    float column_sum[2] = {0.f, 0.f};
    if (8 * j < 16 * warp + 16) {
      const float2 log = *reinterpret_cast<const float2*>(record + kColLog + column);
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int e = 4 * j + 2 * r + c, i = row_of(r);
          const bool below = column + c < i, kept = column + c <= i;
          const float col_log = c ? log.y : log.x;
          // Above the diagonal the exponential may overflow: a choice, not a product with 0.
          const float dscore = kept ? dp[e] * (ex2(row_log[r] - col_log) * scale) : 0.f;
          const float dfactor = below ? -du[e] * ex2(key_log[r] - col_log) : 0.f;
          z[e] = Element(dscore);
          x[e] = Element(dfactor * beta[r]);
          const float of_beta = dfactor * kk[e];
          const float both = below ? dscore * qk[e] + of_beta * beta[r] : 0.f;
          beta_sum[r] += of_beta;
          row_sum[r] += both;
          column_sum[c] += both;
          if (column + c == i) sums[kDiagonal + i] = du[e];
        }
    } else {
#pragma unroll
      for (int e = 4 * j; e < 4 * j + 4; ++e) z[e] = x[e] = Element(0.f);
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) column_sum[c] += __shfl_xor_sync(~0u, column_sum[c], d);
    }
    if (lane < 4) *reinterpret_cast<float2*>(sums + kCols + 64 * warp + column) = make_float2(column_sum[0], column_sum[1]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_sum[r] = sum_of_four(row_sum[r]);
    beta_sum[r] = sum_of_four(beta_sum[r]);
    if ((lane & 3) == 0) {
      sums[kRow + row_of(r)] = row_sum[r];
      sums[kBetaRow + row_of(r)] = beta_sum[r];
    }
  }
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
__device__ __forceinline__ float2 two_halves(const float* x) {
  const float2 left = two(x), right = two(x + 64);
  return make_float2(left.x + right.x, left.y + right.y);
}
template <typename Element> __device__ __forceinline__ void four(const Element* at, float* out) {
  const uint2 raw = *reinterpret_cast<const uint2*>(at + 4 * (threadIdx.x & 31));
  const Element* values = reinterpret_cast<const Element*>(&raw);
#pragma unroll
  for (int e = 0; e < 4; ++e) out[e] = float(values[e]);
}

// Gradients of gate and beta of a chunk and value head, by one warp; the lane has tokens 2*lane and 2*lane+1. Rows of dV whose beta is
// small come without it: they get it here.
template <typename Element>
__device__ __forceinline__ void gate_gradients(const float* sums, const float* record, const Element* v, long long v_stride, Element* dv,
                                               long long dv_stride, float* dg, float* dbeta, long long stride, int rows, float small) {
  const int lane = threadIdx.x & 31;
  const float2 query = two_halves(sums + kQuery), key = two_halves(sums + kKey), written = two_halves(sums + kWritten), row = two(sums + kRow);
  float2 column = two(sums + kCols);
#pragma unroll
  for (int warp = 1; warp < 4; ++warp) {
    const float2 more = two(sums + kCols + 64 * warp);
    column.x += more.x;
    column.y += more.y;
  }
  const float2 beta = two(record + kBeta), key_log = two(record + kKeyLog), col_log = two(record + kColLog);
  const float2 decay = make_float2(ex2(key_log.x), ex2(key_log.y));
  float inner = 0.f;
#pragma unroll
  for (int warp = 0; warp < 8; ++warp) inner += sums[kInner + warp];
  inner *= record[kChunkDecay];

  // What token i has its gate for: everything that tokens from i on read of what was before i. What tokens before i wrote reaches the end.
  const float2 read = make_float2(query.x - other_beta(beta.x, small) * decay.x * key.x + row.x - column.x,
                                  query.y - other_beta(beta.y, small) * decay.y * key.y + row.y - column.y);
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

  const float2 diagonal = two(sums + kDiagonal), of_beta = two(sums + kBetaRow);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float b = c ? beta.y : beta.x;
    const bool is_row = token + c < rows, is_small = fabsf(b) < small;
    float gradient = (c ? diagonal.y : diagonal.x) / (b * b);
    unsigned rest = __ballot_sync(~0u, is_row && is_small);
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
  for (long long token = first; token < min(first + 64, tokens); ++token) {
    zero(dq + (token * hk + k_head) * 128);
    zero(dk + (token * hk + k_head) * 128);
    for (int head = k_head * group; head < (k_head + 1) * group; ++head) {
      zero(dv + (token * hv + head) * 128);
      if (lane == 0) dg[token * hv + head] = dbeta[token * hv + head] = 0.f;
    }
  }
}
}  // namespace flashqla
