// What the recurrences of the backward pass do by themselves; chain.py says what for. Needs tiles.cuh, pairs.cuh.
namespace flashqla {
// 1, of which the compiler does not know it, from any positive number. What stands in a loop of so many rounds is done there and then; else ptxas puts
// it off until its results are needed, from beside a product to the path behind it.
__device__ __forceinline__ int once(int positive) {
  int rounds = min(positive, 1);
  asm volatile("" : "+r"(rounds));
  return rounds;
}
// A state in registers times a number, there and then.
__device__ __forceinline__ void scale_in_place(float* state, float factor, int rounds) {
#pragma unroll 1
  do {
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("mul.ftz.f32 %0, %0, %1;" : "+f"(state[i]) : "f"(factor));
  } while (--rounds > 0);
}

// ratios[t, u] = scale * 2^(row_log[t] - col_log[u]) of 64x64, there and then.
__device__ __forceinline__ void make_ratios(float* ratios, const float* row_log, const float* col_log, float scale, int rounds) {
  const int lane = threadIdx.x & 31;
  const float* own = row_log + 16 * warp_of_group() + (lane >> 2);
  const float rows[2] = {own[0], own[8]};
#pragma unroll 1
  do {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 col = *reinterpret_cast<const float2*>(col_log + 8 * j + 2 * (lane & 3));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float x;
        asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(rows[e >> 1] - (e & 1 ? col.y : col.x)));
        asm volatile("mul.ftz.f32 %0, %1, %2;" : "=f"(ratios[4 * j + e]) : "f"(x), "f"(scale));
      }
    }
  } while (--rounds > 0);
}

// A barrier asked whether its phase is over, and later waited for if it was not: the answer takes about 50 cycles, for which there is something to do.
template <typename Barrier> __device__ __forceinline__ int peek(Barrier& barrier, int parity) {
  int over;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(over) : "r"(static_cast<unsigned>(__cvta_generic_to_shared(&barrier))), "r"(parity) : "memory");
  return over;
}
template <typename Barrier> __device__ __forceinline__ void wait_unless(int over, Barrier& barrier, int parity) {
  if (!over) barrier.wait(parity);
}

// to[v, t] = tokens_of[v, t] * factors[t], of which this thread has those of its columns. There and then.
template <typename Element> __device__ __forceinline__ void scaled_columns(Element* to, const Element* tokens_of, const float* factors, int rounds) {
#pragma unroll 1
  do {
#pragma unroll
    for (int e = 0; e < 32; e += 2) {
      const float2 x = two_floats<Element>(*reinterpret_cast<const unsigned*>(tokens_of + e));
      float left, right;
      asm volatile("mul.ftz.f32 %0, %1, %2;" : "=f"(left) : "f"(x.x), "f"(factors[e / 4 * 2]));
      asm volatile("mul.ftz.f32 %0, %1, %2;" : "=f"(right) : "f"(x.y), "f"(factors[e / 4 * 2 + 1]));
      *reinterpret_cast<unsigned*>(to + e) = pack<Element>(left, right);
    }
  } while (--rounds > 0);
}
}  // namespace flashqla
