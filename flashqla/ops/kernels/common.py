"""What every kernel shares: the target, the pass settings, tile sizes and the device functions that TileLang cannot express.

The device functions move 64x64 tiles of 16-bit elements between the 128-byte-swizzled layout of shared memory and the
register layout of a wgmma accumulator, transposed on the way. TileLang would do that with 32 scalar accesses a thread.
"""

HOPPER = {"kind": "cuda", "arch": "sm_90a"}
MANUAL_ROLES = {"tl.disable_warp_specialized": True, "tl.enable_fast_math": True, "tl.disable_thread_storage_sync": True}

CHUNK = 64  # tokens
HEAD_DIM = 128  # K and V
WARP_GROUP = 128  # threads

# One record of per-token factors for a chunk and value head, written by the inverse kernel and read by the forward kernel:
# rows of 64 floats, of which the last one holds one number, the decay of the whole chunk. `inverse.py` defines them.
ROW_LOG, COL_LOG, BETA, BETA_DECAY, OUT_SCALE, KEY_DECAY, CHUNK_DECAY = range(7)
RECORD = 7

# Thread t of a warpgroup holds, of a 64-row accumulator, rows 16*(t/32) + (t%32)/4 + 8*r and columns 8*j + 2*(t%4) + c
# as register 4*j + 2*r + c. Viewed transposed that is what ldmatrix.trans delivers and stmatrix.trans takes.
DEVICE_FUNCTIONS = r"""
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
// Holds a thread back for about `cycles` clock cycles.
__device__ __forceinline__ void delay(int cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
// Zeroes rows first..63 of a tile of 64 rows of 128 bytes, by one warp. Swizzling permutes within rows only.
__device__ __forceinline__ void zero_rows(void* tile, int first) {
  char* bytes = static_cast<char*>(tile);
#pragma unroll 1
  for (int at = first * 128 + (threadIdx.x & 31) * 16; at < 8192; at += 512) *reinterpret_cast<uint4*>(bytes + at) = make_uint4(0, 0, 0, 0);
}
}  // namespace flashqla
"""
