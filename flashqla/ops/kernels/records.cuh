// The record of a chunk and value head, by half a warp; common.py says what it holds. Of the sixteen lanes each has four tokens that follow each other.
namespace flashqla {
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;
__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// A beta of which the gradient does not come from what was scaled by it. What dY is handed out with, and what is left of beta beside that.
__device__ __forceinline__ bool is_small(float beta) { return fabsf(beta) < 1.f / 1024.f; }
__device__ __forceinline__ float given_beta(float beta) { return is_small(beta) ? 1.f : beta; }
__device__ __forceinline__ float other_beta(float beta) { return is_small(beta) ? beta : 1.f; }

__device__ __forceinline__ int own_token() { return 4 * (threadIdx.x & 15); }
// This lane's tokens of a head, the chunk's being from `first` on, 0 past `rows`; as they are, so that nothing has to wait for them yet.
template <typename Element> __device__ __forceinline__ void four_tokens(Element* out, const Element* at, int first, int stride, int head, int head_stride, int rows) {
  at += static_cast<long long>(first + own_token()) * stride + static_cast<long long>(head) * head_stride;
#pragma unroll
  for (int e = 0; e < 4; ++e) out[e] = own_token() + e < rows ? at[static_cast<long long>(e) * stride] : Element(0.f);
}
// f of each of this lane's tokens to its place.
template <typename Function> __device__ __forceinline__ void put_four(float* at, Function f) {
  *reinterpret_cast<float4*>(at + own_token()) = make_float4(f(0), f(1), f(2), f(3));
}

// sum: cumulative log gate in base 2, total: that of the last token; rq, rk: inverse norms, lq, lk: their logs in base 2. kBackward: with the rows of
// the backward pass.
template <bool kBackward>
__device__ __forceinline__ void put_record(float* record, const float* sum, float total, const float* beta, const float* rq, const float* rk, const float* lq,
                                           const float* lk, float scale) {
  float decay[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) decay[e] = ex2(sum[e]);
  put_four(record, [&](int e) { return sum[e] + lq[e]; });
  put_four(record + 64, [&](int e) { return sum[e] - lk[e]; });
  put_four(record + 128, [&](int e) { return kBackward ? given_beta(beta[e]) : decay[e] * rk[e]; });
  put_four(record + 192, [&](int e) { return scale * decay[e] * rq[e]; });
  put_four(record + 256, [&](int e) { return ex2(total - sum[e]) * rk[e]; });
  if (own_token() == 0) *reinterpret_cast<float2*>(record + 320) = make_float2(ex2(total), total);
  if constexpr (kBackward) {
    put_four(record + 384, [&](int e) { return beta[e]; });
    put_four(record + 448, [&](int e) { return -beta[e] * decay[e] * rk[e]; });
    put_four(record + 512, [&](int e) { return sum[e] + lk[e]; });
  }
}

// The record of keys that are normalised already, from the cumulative gate (natural log), for the backward pass. By all lanes of a warp, of which
// either half has a record of its own; none where there are no rows.
template <typename Beta>
__device__ __forceinline__ void record_of_sums(const float* cumulative, const Beta* betas, float* record, int rows, float scale) {
  const float lowest = -126.f * 64.f;  // what a chunk of resets sums to, see chunk_vectors
  const int last = max(rows - 1, 0), half = threadIdx.x & 16;
  const float one[4] = {1.f, 1.f, 1.f, 1.f}, zero[4] = {};
  float sum[4], beta[4];
  float total = 0.f;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    sum[e] = fmaxf(cumulative[e] * kLog2e, lowest), beta[e] = float(betas[e]);
    const float there = __shfl_sync(~0u, sum[e], half + last / 4);
    if (last % 4 == e) total = there;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (own_token() + e >= rows) sum[e] = total;
  if (rows > 0) put_record<true>(record, sum, total, beta, one, one, zero, zero, scale);
}
}  // namespace flashqla
