// Which sequence a slot belongs to, and how far back a state remembers.
namespace flashqla {
// The sequence that owns a slot, where sequence n has its slots from offsets[n] / granule + n on: the last one that starts at or before it.
__device__ __forceinline__ int owner(const int* offsets, int step, int sequences, int granule, int slot) {
  int low = 0, high = sequences;
  while (high - low > 1) {
    const int middle = (low + high) >> 1;
    if (offsets[middle * step] / granule + middle <= slot) low = middle;
    else high = middle;
  }
  return low;
}

// The sequence that comes as `rank`-th when the longest comes first; of more than 32, the one of that index. CTAs start in the order of the grid, and
// a long one that starts last would run when the others have ended. By all lanes of a warp; in every warp the same.
__device__ __forceinline__ int longest_first(const int* offsets, int step, int sequences, int rank) {
  if (sequences > 32) return rank;
  const int lane = threadIdx.x & 31;
  const int length = lane < sequences ? offsets[(lane + 1) * step] - offsets[lane * step] : 0;
  int before = 0;
  for (int n = 0; n < sequences; ++n) {
    const int other = __shfl_sync(~0u, length, n);
    before += other > length || (other == length && n < lane);
  }
  return __ffs(__ballot_sync(~0u, lane < sequences && before == rank)) - 1;
}

// A segment, of chunks_each chunks of a sequence or, if that is 0, a whole sequence, the longest first. In a vector: its
// sequence; which segment of that it is; its first token, its number of tokens, and that of those of the sequence behind it; the slot of its first
// chunk, and that among pairs of chunks. Slots past the last segment of a sequence have no tokens.
__device__ __forceinline__ void find_segment(int* found, const int* offsets, int step, int sequences, int tokens, int chunks_each, int segment) {
  const int size = chunks_each * 64, sequence = size ? owner(offsets, step, sequences, size, segment) : longest_first(offsets, step, sequences, segment);
  const int bos = max(min(offsets[sequence * step], tokens), 0), eos = max(min(offsets[(sequence + 1) * step], tokens), bos);
  const int index = size ? segment - bos / size - sequence : 0;
  const int first = min(bos + index * size, eos), length = size ? min(eos - first, size) : eos - first;
  found[0] = sequence;
  found[1] = index;
  found[2] = first;
  found[3] = length;
  found[4] = eos - first - length;
  found[5] = bos / 64 + sequence + index * chunks_each;
  found[6] = bos / 128 + sequence;
}

// The chunk of a slot: its rows, 0 where a slot has no chunk, and its first token; and of the state that enters it, of which every second one of a
// sequence is stored: the slot of that, and whether it is the state of the chunk in front.
__device__ __forceinline__ void find_chunk(int* found, const int* offsets, int step, int sequences, int tokens, int slot) {
  const int sequence = owner(offsets, step, sequences, 64, slot);
  const int bos = max(min(offsets[sequence * step], tokens), 0), eos = max(min(offsets[(sequence + 1) * step], tokens), bos);
  const int index = slot - bos / 64 - sequence, first = bos + index * 64;
  found[0] = max(min(eos - first, 64), 0);
  found[1] = first;
  found[2] = bos / 128 + sequence + index / 2;
  found[3] = index & 1;
}

// The same in a number: the first token times 128, plus the rows.
__device__ __forceinline__ long long chunk_of(const int* offsets, int step, int sequences, int tokens, int slot) {
  int found[4];
  find_chunk(found, offsets, step, sequences, tokens, slot);
  return (static_cast<long long>(found[1]) << 7) + found[0];
}

// Of up to 32 parts, `step` rows of flags apart, a bit for each that has this flag. By all lanes of a warp.
__device__ __forceinline__ unsigned flags_of(const int* flags, long long stride, int first, int step, int count, int flag) {
  const int lane = threadIdx.x & 31;
  return __ballot_sync(~0u, lane < count && (flags[(first + static_cast<long long>(step) * lane) * stride] & flag) != 0);
}

// The last chunk from which on the decay is below 2^limit, so that a state from before it is forgotten by the end; -1 if there is none.
// decays: base-2 log of the decay of each chunk. By all lanes of a warp; in every warp the same.
__device__ __forceinline__ int forgotten_before(const float* decays, long long stride, int chunks, float limit) {
  const int lane = threadIdx.x & 31;
  float later = 0.f;
  for (int end = chunks; end > 0; end -= 32) {
    const int chunk = end - 1 - lane;
    float sum = chunk >= 0 ? decays[chunk * stride] : 0.f;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float up = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += up;
    }
    const unsigned found = __ballot_sync(~0u, chunk >= 0 && later + sum < limit);
    if (found) return end - __ffs(found);
    later += __shfl_sync(~0u, sum, 31);
  }
  return -1;
}

// The first chunks, as many as it takes for their decay to fall below 2^limit, so that the gradient of a state behind them is forgotten in front;
// all of them if it does not fall that far. decays, lanes: as above.
__device__ __forceinline__ int forgotten_after(const float* decays, long long stride, int chunks, float limit) {
  const int lane = threadIdx.x & 31;
  float earlier = 0.f;
  for (int begin = 0; begin < chunks; begin += 32) {
    const int chunk = begin + lane;
    float sum = chunk < chunks ? decays[chunk * stride] : 0.f;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float up = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += up;
    }
    const unsigned found = __ballot_sync(~0u, chunk < chunks && earlier + sum < limit);
    if (found) return begin + __ffs(found);
    earlier += __shfl_sync(~0u, sum, 31);
  }
  return chunks;
}
}  // namespace flashqla
