// Where the warps of STATE work while they invert the chunks of a span; forward.py says when. Needs tiles.cuh and inverse.cuh.
namespace flashqla {
// Four warps share the three stages of q, four those of v. A place has a product, then vectors, then inverse norms of 64 keys and of 64 queries.
constexpr int kPlace = 3 * 16384 / 4, kVectorsAt = 10 * 1024, kKeyNormsAt = kVectorsAt + 4 * kVectors, kQueryNormsAt = kKeyNormsAt + 256;
static_assert(kQueryNormsAt + 256 <= kPlace);

__device__ __forceinline__ float* in_place(void* q, void* v, int warp, int at) {
  return reinterpret_cast<float*>(static_cast<char*>(warp < 4 ? q : v) + (warp & 3) * kPlace + at);
}
__device__ __forceinline__ float* product_of(void* q, void* v, int warp) { return in_place(q, v, warp, 0); }
__device__ __forceinline__ float* vectors_of(void* q, void* v, int warp) { return in_place(q, v, warp, kVectorsAt); }
__device__ __forceinline__ float* key_norms_of(void* q, void* v, int warp) { return in_place(q, v, warp, kKeyNormsAt); }
__device__ __forceinline__ float* query_norms_of(void* q, void* v, int warp) { return in_place(q, v, warp, kQueryNormsAt); }

// The tile of a warp of a warpgroup: of three from `first` on, or the one at `last`.
__device__ __forceinline__ void* tile_of(void* first, void* last) {
  const int warp = warp_of_group();
  return warp < 3 ? static_cast<char*>(first) + warp * 8192 : static_cast<char*>(last);
}

// Inverse norms of 64 rows of 128 in global memory, by one warp.
template <typename Element> __device__ __forceinline__ void inverse_norms_by_warp(const Element* at, long long stride, float* out, int rows) {
  const int first = (threadIdx.x & 31) >> 1;
#pragma unroll 1
  for (int row = first; row < 64; row += 32) {  // two rows at a time: for more, registers would not last
    const float sum = squares_of_row(at, stride, row, rows), other = squares_of_row(at, stride, row + 16, rows);
    put_inverse_norm(sum, out, row, rows);
    put_inverse_norm(other, out, row + 16, rows);
  }
}

// Two tiles side by side on their way to L2, by one warp.
template <typename Map> __device__ __forceinline__ void prefetch_tiles(const Map& map, int token, int head) {
  if (elected())
#pragma unroll
    for (int column = 0; column < 128; column += 64)
      asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(&map), "r"(column), "r"(token), "r"(head) : "memory");
}

// What this thread has written or read, in shared or in global memory, comes before what copy engines do there after the next barrier.
__device__ __forceinline__ void fence_all_proxies() { asm volatile("fence.proxy.async;" ::: "memory"); }
}  // namespace flashqla
