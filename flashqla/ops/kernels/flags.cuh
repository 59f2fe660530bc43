// Counters in global memory by which CTAs of a kernel tell each other how far they are; each has one that writes it.
namespace flashqla {
// For a warp, whose lanes have met: what it has seen written, by whichever way, is there for whoever sees the count.
__device__ __forceinline__ void publish(int* counter, int count) {
  if ((threadIdx.x & 31) == 0) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(counter), "r"(count) : "memory");
  }
}
// Waits, by a warp, until the count is reached; what comes after it, copies too, comes after what was published.
__device__ __forceinline__ void await(const int* counter, int count) {
  if ((threadIdx.x & 31) == 0) {
    int now;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    while (now < count);
  }
  __syncwarp();
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// The number of CTAs that were here before.
__device__ __forceinline__ int take_ticket(int* counter, int* place) {
  if (threadIdx.x == 0) *place = atomicAdd(counter, 1);
  __syncthreads();
  return *place;
}
}  // namespace flashqla
