// The record of a chunk and value head, by one warp; common.py says what it holds. The lane has tokens 2*lane and 2*lane+1.
namespace flashqla {
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;
__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// Tokens first + 2*lane and first + 2*lane + 1 of a head, 0 past `rows`; as they are, so that nothing has to wait for them yet.
template <typename Element> __device__ __forceinline__ void two_tokens(Element* out, const Element* at, int first, int stride, int head, int head_stride, int rows) {
  const int token = 2 * (threadIdx.x & 31);
  at += static_cast<long long>(first + token) * stride + static_cast<long long>(head) * head_stride;
  out[0] = token < rows ? at[0] : Element(0.f);
  out[1] = token + 1 < rows ? at[stride] : Element(0.f);
}
__device__ __forceinline__ void put_two(float* at, float x, float y) { *reinterpret_cast<float2*>(at + 2 * (threadIdx.x & 31)) = make_float2(x, y); }

// sum: cumulative log gate in base 2, total: that of the last token; rq, rk: inverse norms, lq, lk: their logs in base 2. kBackward: with the rows of
// the backward pass.
template <bool kBackward>
__device__ __forceinline__ void put_record(float* record, float2 sum, float total, float2 beta, float2 rq, float2 rk, float2 lq, float2 lk, float scale) {
  const float e0 = ex2(sum.x), e1 = ex2(sum.y);
  put_two(record, sum.x + lq.x, sum.y + lq.y);
  put_two(record + 64, sum.x - lk.x, sum.y - lk.y);
  put_two(record + 128, e0 * rk.x, e1 * rk.y);
  put_two(record + 192, scale * e0 * rq.x, scale * e1 * rq.y);
  put_two(record + 256, ex2(total - sum.x) * rk.x, ex2(total - sum.y) * rk.y);
  if ((threadIdx.x & 31) == 0) put_two(record + 320, ex2(total), total);
  if constexpr (kBackward) {
    put_two(record + 384, beta.x, beta.y);
    put_two(record + 448, beta.x * e0 * rk.x, beta.y * e1 * rk.y);
    put_two(record + 512, sum.x + lk.x, sum.y + lk.y);
  }
}

// The record of keys that are normalised already, from the cumulative gate (natural log), for the backward pass.
template <typename Beta>
__device__ __forceinline__ void record_of_sums(const float* cumulative, const Beta* betas, float* record, int rows, float scale) {
  const float lowest = -126.f * 64.f;  // what a chunk of resets sums to, see chunk_factors
  float2 sum = make_float2(fmaxf(cumulative[0] * kLog2e, lowest), fmaxf(cumulative[1] * kLog2e, lowest));
  const int last = rows - 1, token = 2 * (threadIdx.x & 31);
  const float even = __shfl_sync(~0u, sum.x, last >> 1), odd = __shfl_sync(~0u, sum.y, last >> 1), total = last & 1 ? odd : even;
  if (token >= rows) sum.x = total;
  if (token + 1 >= rows) sum.y = total;
  const float2 one = make_float2(1.f, 1.f), zero = make_float2(0.f, 0.f);
  put_record<true>(record, sum, total, make_float2(float(betas[0]), float(betas[1])), one, one, zero, zero, scale);
}
}  // namespace flashqla
