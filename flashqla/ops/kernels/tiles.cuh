// Tiles of 64x64 elements of 16 bits between shared memory, swizzled as TMA and wgmma do it, and the registers of a wgmma accumulator,
// as they are or transposed: what TileLang would do with 32 scalar accesses a thread.
//
// Thread t of a warpgroup holds, of 64 rows, rows 16*(t/32) + (t%32)/4 + 8*r and columns 8*j + 2*(t%4) + c as element 4*j + 2*r + c.
// Read the other way round, that is what ldmatrix.trans delivers and stmatrix.trans takes.
namespace flashqla {
// Address of 16-byte piece `piece` of row `row` in a tile of 128-byte rows, swizzled as TMA and wgmma do it.
__device__ __forceinline__ unsigned swizzled(unsigned tile, int row, int piece) {
  return tile + row * 128 + ((piece ^ (row & 7)) << 4);
}
// Where this lane's row lies of the 16x16 block that stands, transposed, at rows 16*row and columns 16*column of a tile.
__device__ __forceinline__ unsigned transposed_address(unsigned tile, int row, int column) {
  const int lane = threadIdx.x & 31;
  return swizzled(tile, 16 * row + (lane >> 4) * 8 + (lane & 7), 2 * column + ((lane >> 3) & 1));
}
__device__ __forceinline__ int warp_of_group() { return (threadIdx.x >> 5) & 3; }
// fragment[v, t] = tile[t, v], 64x64 elements of 16 bits.
template <typename Element> __device__ __forceinline__ void load_transposed(Element* fragment, const void* tile) {
  unsigned* registers = reinterpret_cast<unsigned*>(fragment);
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(tile));
#pragma unroll
  for (int pair = 0; pair < 4; ++pair)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(registers[4 * pair]), "=r"(registers[4 * pair + 1]), "=r"(registers[4 * pair + 2]), "=r"(registers[4 * pair + 3])
                 : "r"(transposed_address(base, pair, warp_of_group())) : "memory");
}
// tile[t, v] = fragment[v, t]
template <typename Element> __device__ __forceinline__ void store_transposed(void* tile, Element* fragment) {
  const unsigned* registers = reinterpret_cast<const unsigned*>(fragment);
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(tile));
#pragma unroll
  for (int pair = 0; pair < 4; ++pair)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(transposed_address(base, pair, warp_of_group())),
                 "r"(registers[4 * pair]), "r"(registers[4 * pair + 1]), "r"(registers[4 * pair + 2]), "r"(registers[4 * pair + 3]) : "memory");
}
// tile[i, j] = fragment[i, j]
template <typename Element> __device__ __forceinline__ void store_tile(void* tile, Element* fragment) {
  const unsigned* registers = reinterpret_cast<const unsigned*>(fragment);
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  const int lane = threadIdx.x & 31, warp = warp_of_group();
#pragma unroll
  for (int pair = 0; pair < 4; ++pair)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(swizzled(base, 16 * warp + (lane & 15), 2 * pair + (lane >> 4))),
                 "r"(registers[4 * pair]), "r"(registers[4 * pair + 1]), "r"(registers[4 * pair + 2]), "r"(registers[4 * pair + 3]) : "memory");
}
// Two tiles side by side: tiles[h][i, j] = fragment[i, 64 h + j]
template <typename Element> __device__ __forceinline__ void store_tiles(void* tiles, Element* fragment) {
  store_tile(tiles, fragment);
  store_tile(static_cast<char*>(tiles) + 8192, fragment + 32);
}
// state[k, v] = fragment[v, k], 64 of v and 128 of k, with any strides. One running address: were each computed from its indices, the
// compiler would keep many of them in registers throughout the loop over chunks, and spill others.
template <typename Element> __device__ __forceinline__ void store_state(Element* state, long long k_stride, long long v_stride, const Element* fragment) {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));  // volatile, or what follows from it waits in registers from chunk to chunk
  Element* at = state + 2 * (lane & 3) * k_stride + (16 * warp_of_group() + (lane >> 2)) * v_stride;
#pragma unroll
  for (int j = 0; j < 16; ++j, at += 8 * k_stride)
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) at[c * k_stride + 8 * r * v_stride] = fragment[4 * j + 2 * r + c];
}
// Zeroes rows first..63 of a tile of 64 rows of 128 bytes, by one warp. Swizzling permutes within rows only.
__device__ __forceinline__ void zero_rows(void* tile, int first) {
  char* bytes = static_cast<char*>(tile);
#pragma unroll 1
  for (int at = first * 128 + (threadIdx.x & 31) * 16; at < 8192; at += 512) *reinterpret_cast<uint4*>(bytes + at) = make_uint4(0, 0, 0, 0);
}

// Brings rows of kLines * 128 bytes into L2, by a warp: what is to be copied as soon as there is room for it.
template <int kLines> __device__ __forceinline__ void prefetch_rows(const void* rows, long long stride, int count) {
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < kLines * count; i += 32)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(rows) + i / kLines * stride + i % kLines * 128));
}
// The same for bytes in a row, by one lane.
__device__ __forceinline__ void prefetch_block(const void* block, int bytes) {
  if ((threadIdx.x & 31) == 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(block), "r"(bytes));
}
}  // namespace flashqla
