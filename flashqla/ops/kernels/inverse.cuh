// The gated inverse of a chunk and the per-token factors of its record; inverse.py says what they are. Needs tiles.cuh, segments.cuh and records.cuh.
//
// Of a lane, g is lane / 4 and t is lane % 4. Blocks of 16x16 floats are in registers in one of two ways, 8 floats a lane:
//   rows     element 4*k + 2*n + c is [8*n + g, 8*k + 2*t + c]: operand B of D = A B^T, and what a wgmma accumulator has of 16 columns
//   columns  element 4*n + 2*m + c is [8*n + 2*t + c, 8*m + g]: operand A of it, its result, and what stmatrix.trans takes
namespace flashqla {
// K K^T: 16x16 blocks of its lower triangle, row by row, each as the two vectors of four floats that every lane has of its rows.
constexpr int kBlock = 256;
__device__ __forceinline__ int block_at(int i, int j) { return (i * (i + 1) / 2 + j) * kBlock; }
// What a head keeps of its diagonal blocks until it has its tile: of each, two 8x8 blocks on the diagonal and the one below them. Eight floats more
// than a block, and 24 more than three, so that rows of four of them lie on different banks. All stand at the end of the tile, in order: a row of
// blocks of the tile may be written when that row of the diagonal is done with.
constexpr int kSmall = 72, kBelow = 2 * kSmall, kDiagonal = 240, kTileRow = 32, kDiagonals = 64 * kTileRow - 4 * kDiagonal;
static_assert(kDiagonals >= 32 * kTileRow && kDiagonals + 2 * kDiagonal >= 48 * kTileRow);

// The tensor cores cut TF32 operands off after 10 bits. Adding half of the last one first rounds to nearest (cvt.rna.tf32 takes four instructions).
__device__ __forceinline__ float operand(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }
__device__ __forceinline__ float minus_operand(float x) { return __uint_as_float(__float_as_uint(x) + 0x80001000u); }

// Work is dealt out to CTAs in turns; an item is a slot and a key head, and has a job for each value head of its group.
__device__ __forceinline__ int turns(int items) { return (items - 1 - int(blockIdx.x)) / int(gridDim.x) + 1; }

// The items of 32 turns of this CTA, a turn a lane, in its registers: first token and tokens, at most 64, of the chunk in a slot; the slot; the key
// head; and the first of the turns. In a slot that no chunk has there are no tokens, and the first is that of the rows that belong to the slot because
// they are past the last sequence, `tokens` or more if there are none. Past the last turn it is anything. The last item comes first: what recurrences
// begin with is then still in L2.
__device__ __forceinline__ void look_up(int* found, int turn, int items, int key_heads, const int* offsets, int step, int sequences, int tokens) {
  const int item = max(items - 1 - (turn + int(threadIdx.x & 31)) * int(gridDim.x) - int(blockIdx.x), 0);
  const int slot = unsigned(item) / unsigned(key_heads), key_head = item - slot * key_heads;
  const int n = owner(offsets, step, sequences, 64, slot);
  const int bos = max(min(offsets[n * step], tokens), 0), eos = max(min(offsets[(n + 1) * step], tokens), bos);
  int first = max(bos + (slot - bos / 64 - n) * 64, 0);
  const int rows = max(min(eos - first, 64), 0);
  if (rows == 0) {
    const int end = max(min(offsets[sequences * step], tokens), 0), row = end + (slot - end / 64 - sequences) * 64;
    first = row >= end ? row : tokens;
  }
  found[0] = first, found[1] = rows, found[2] = slot, found[3] = key_head, found[4] = turn;
}
// The item of a turn, by all lanes of a warp. Its halves may ask for turns of their own, the first half for the earlier one, or the same, before which
// nobody asks again.
__device__ __forceinline__ void find(int* item, int* found, int turn, int items, int key_heads, const int* offsets, int step, int sequences, int tokens) {
  if (__any_sync(~0u, turn - found[4] >= 32)) look_up(found, __shfl_sync(~0u, turn, 0), items, key_heads, offsets, step, sequences, tokens);
#pragma unroll
  for (int e = 0; e < 4; ++e) item[e] = __shfl_sync(~0u, found[e], turn - found[4]);
}

// Where the first item of this CTA is likely to be, before anybody has read where sequences start: its first token, its rows and its key head, if
// sequences are of the same length. Tokens that are there, in any case.
__device__ __forceinline__ void guess(int* item, int slots, int key_heads, int sequences, int tokens) {
  const int number = slots * key_heads - 1 - int(blockIdx.x), slot = number / key_heads, sequence = static_cast<long long>(slot) * sequences / slots;
  item[0] = max(min((slot - sequence) * 64, tokens - 64), 0), item[1] = min(tokens, 64), item[3] = number - slot * key_heads;
}

__device__ __forceinline__ bool any(bool x) { return __any_sync(~0u, x); }
// A job of this CTA: its number, its turn, and which member of the group it is of.
__device__ __forceinline__ void first_job(int* job, int number, int group) { job[0] = number, job[1] = number / group, job[2] = number % group; }
__device__ __forceinline__ void next_job(int* job, int step, int group) {
  job[0] += step, job[1] += step / group, job[2] += step % group;
  if (job[2] >= group) job[1] += 1, job[2] -= group;
}
// An item or a job from one role to another: four numbers by one lane of each half of a warp, read by all.
__device__ __forceinline__ void hand_on(void* place, int first, int rows, int slot, int head) {
  if ((threadIdx.x & 15) == 0) *static_cast<int4*>(place) = make_int4(first, rows, slot, head);
}
__device__ __forceinline__ void recall(const void* place, int* item) {
  const int4 all = *static_cast<const int4*>(place);
  item[0] = all.x, item[1] = all.y, item[2] = all.z, item[3] = all.w;
}

// Zeroes the first pieces of 16 bytes of some rows, which start `stride` pieces apart, by one warp.
template <int kPieces> __device__ __forceinline__ void zero_pieces(void* out, long long stride, int rows) {
#pragma unroll 1
  for (int at = threadIdx.x & 31; at < rows * kPieces; at += 32) static_cast<uint4*>(out)[at / kPieces * stride + at % kPieces] = make_uint4(0, 0, 0, 0);
}

template <typename Element> __device__ __forceinline__ float squares(uint4 raw) {
  const Element* values = reinterpret_cast<const Element*>(&raw);
  float sum = 0.f;
#pragma unroll
  for (int e = 0; e < 8; ++e) sum += float(values[e]) * float(values[e]);
  return sum;
}
// out[t] = 1 / |row t| from the sums of two threads a row. Rows past the sequence may hold anything: they count as 1.
__device__ __forceinline__ void put_inverse_norm(float sum, float* out, int rows) {
  const int row = threadIdx.x >> 1;
  sum += __shfl_xor_sync(~0u, sum, 1);
  if ((threadIdx.x & 1) == 0) out[row] = row < rows ? rsqrtf(sum + 1e-6f) : 1.f;
}
// Of the rows of a [64, 128] tile, which stands in shared memory as two swizzled tiles of 64 columns. Swizzling permutes within a row of a
// tile, which a sum does not see.
template <typename Element> __device__ __forceinline__ void inverse_norms_of_tile(const void* tile, float* out, int rows) {
  const int row = threadIdx.x >> 1;
  const uint4* pieces = reinterpret_cast<const uint4*>(static_cast<const char*>(tile) + (threadIdx.x & 1) * 8192 + row * 128);
  float sum = 0.f;
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) sum += squares<Element>(pieces[piece ^ (row & 7)]);
  put_inverse_norm(sum, out, rows);
}
// Of 64 rows of 128 in global memory.
template <typename Element> __device__ __forceinline__ void inverse_norms(const Element* at, long long stride, float* out, int rows) {
  const int row = threadIdx.x >> 1;
  const uint4* pieces = reinterpret_cast<const uint4*>(at + row * stride + (threadIdx.x & 1) * 64);
  float sum = 0.f;
  if (row < rows) {
#pragma unroll
    for (int piece = 0; piece < 8; ++piece) sum += squares<Element>(pieces[piece]);
  }
  put_inverse_norm(sum, out, rows);
}

// Per-token factors of a head that the inverse needs, vectors of 64 floats. `row`, `col`: base-2 logs whose difference is the decay from
// token j to token i of a 16-token block times both inverse key norms. Between different blocks that is start[i] * stop[j] times the decay of
// the blocks between, every factor at most 1: no exponential per element. `start` includes beta.
enum { kRowLog = 0, kColLog = 64, kBeta = 128, kStart = 192, kStop = 256, kBetween = 320, kVectors = 324 };

// What a lane knows of its tokens: the cumulative log gate in base 2, beta, inverse norms of queries and keys and their logs, four each; and the log
// gate of the chunk.
enum { kSum = 0, kOwnBeta = 4, kQueryNorm = 8, kKeyNorm = 12, kQueryLog = 16, kKeyLog = 20, kTotal = 24, kKnown = 25 };

// Half a warp turns the log gates and beta of a chunk into its vectors. By all lanes of a warp; a half without rows writes nothing.
template <bool kNorm, typename Gate, typename Beta>
__device__ __forceinline__ void chunk_vectors(const Gate* gates, const Beta* betas, const float* q_norm, const float* k_norm, float* vectors, float* known, int rows) {
  const int lane = threadIdx.x & 31, block = (lane >> 2) & 3, token = own_token();
  float* sum = known + kSum;
  float* beta = known + kOwnBeta;
  float* rk = known + kKeyNorm;
  float* lk = known + kKeyLog;
  float in_block[4];
  float own = 0.f;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    beta[e] = float(betas[e]);
    // A difference of sums with an infinity in them is not a number; 2^-126 is as good as a full reset.
    own += fmaxf(float(gates[e]) * kLog2e, -126.f);
    in_block[e] = own;
  }
  float until = own;  // this lane's last token, inside its block of 16
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
    const float up = __shfl_up_sync(~0u, until, d);
    if ((lane & 3) >= d) until += up;
  }
  const float end = __shfl_sync(~0u, until, lane | 3);
  float start = 0.f, total = 0.f;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (block == b) start = total;
    total += __shfl_sync(~0u, until, (lane & 16) + 4 * b + 3);
  }
  known[kTotal] = total;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    in_block[e] = e == 3 ? until : in_block[e] + (until - own);  // the last token of a block has exactly its sum
    sum[e] = start + in_block[e];
    known[kQueryNorm + e] = kNorm ? q_norm[token + e] : 1.f;
    rk[e] = kNorm ? k_norm[token + e] : 1.f;
    known[kQueryLog + e] = kNorm ? log2f(known[kQueryNorm + e]) : 0.f;
    lk[e] = kNorm ? log2f(rk[e]) : 0.f;
  }
  if (rows == 0) return;
  put_four(vectors + kRowLog, [&](int e) { return in_block[e] + lk[e]; });
  put_four(vectors + kColLog, [&](int e) { return in_block[e] - lk[e]; });
  put_four(vectors + kBeta, [&](int e) { return beta[e]; });
  put_four(vectors + kStart, [&](int e) { return beta[e] * ex2(in_block[e]) * rk[e]; });
  put_four(vectors + kStop, [&](int e) { return ex2(end - in_block[e]) * rk[e]; });
  if ((lane & 3) == 3) vectors[kBetween + block] = ex2(end);
}
// And into its record, and on demand its cumulative gate.
template <bool kBackward>
__device__ __forceinline__ void chunk_record(const float* known, float* record, float* cumulative, long long stride, int rows, float scale, int has_cumulative) {
  if (rows == 0) return;
  put_record<kBackward>(record, known + kSum, known[kTotal], known + kOwnBeta, known + kQueryNorm, known + kKeyNorm, known + kQueryLog, known + kKeyLog, scale);
  if (has_cumulative) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (own_token() + e < rows) cumulative[(own_token() + e) * stride] = known[kSum + e] * kLn2;
  }
}

// D += A * B, 16x8x8, TF32. Columns of A and rows of B are both taken in the order 0 2 4 6 1 3 5 7, so that an accumulator is an operand A as it is.
__device__ __forceinline__ void mma8(float* d, const float* a, float2 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[3])),
                 "r"(__float_as_uint(b.x)), "r"(__float_as_uint(b.y)));
}
// D += B A on 16x16 blocks, B by rows, A and D by columns: D^T += A^T B^T for the tensor cores. kLower: B is 0 above its diagonal.
template <bool kLower> __device__ __forceinline__ void multiply(float* d, const float* b, const float* a) {
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int n = kLower ? k : 0; n < 2; ++n) mma8(d + 4 * n, a + 4 * k, make_float2(b[4 * k + 2 * n], b[4 * k + 2 * n + 1]));
}

// K K^T from a wgmma accumulator. It is symmetric: a warp holds a row of blocks of it as well as a column.
__device__ __forceinline__ void store_product(const float* accumulator, float* product) {
  const int w = warp_of_group();
  float4* at = reinterpret_cast<float4*>(product + block_at(w, 0)) + (threadIdx.x & 31);
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) {
    const float* from = accumulator + 4 * piece;
    if (piece / 2 <= w) at[piece * 32] = make_float4(from[0], from[1], from[2], from[3]);
  }
}
// Rows of a block of it.
__device__ __forceinline__ void load_rows(float* rows, const float* block) {
  const float4* at = reinterpret_cast<const float4*>(block) + (threadIdx.x & 31);
  const float4 left = at[0], right = at[32];
  const float all[8] = {left.x, left.y, left.z, left.w, right.x, right.y, right.z, right.w};
#pragma unroll
  for (int e = 0; e < 8; ++e) rows[e] = all[e];
}

// Element [i, n] of an inverse 8x8 block in shared memory: columns of eight floats, in an order and with halves in places that let a warp
// store columns, four floats a lane, and read both operands without bank conflicts.
__device__ __forceinline__ int place(int i, int n) { return 8 * (n ^ (n >> 2)) + (i ^ (n & 4)); }
// X[2t + c, g] of it: this lane's part of its columns.
__device__ __forceinline__ float2* columns_of(float* small) {
  const int lane = threadIdx.x & 31;
  return reinterpret_cast<float2*>(small + place(2 * (lane & 3), lane >> 2));
}
// X[g, 2t + c] of it, this lane's part of its rows, as an operand.
__device__ __forceinline__ float2 rows_of(const float* small) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  return make_float2(operand(small[place(g, 2 * t)]), operand(small[place(g, 2 * t + 1)]));
}

// M[i, j] = beta[i] * 2^(row[i] - col[j]) * product[i, j], j < i, in diagonal block d, by rows, zeros on and above the diagonal, but for the 8x8
// block above it, which nobody reads.
__device__ __forceinline__ void gate_diagonal(float* m, const float* product, const float* vectors, int d) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = 2 * (lane & 3);
  load_rows(m, product + block_at(d, d));
  const float* at = vectors + 16 * d;
  const float row[2] = {at[kRowLog + g], at[kRowLog + g + 8]}, beta[2] = {at[kBeta + g], at[kBeta + g + 8]};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float2 col = *reinterpret_cast<const float2*>(at + kColLog + 8 * k + t);
#pragma unroll
    for (int n = k; n < 2; ++n) {
      float* e = m + 4 * k + 2 * n;
      e[0] = e[0] * beta[n] * ex2(row[n] - col.x);
      e[1] = e[1] * beta[n] * ex2(row[n] - col.y);
      if (k == n) {
        e[0] = t < g ? e[0] : 0.f;
        e[1] = t + 1 < g ? e[1] : 0.f;
      }
    }
  }
}

// (I + M)^-1 of the 8x8 blocks on the diagonal, in place: by substitution in fp32, a column a lane, as powers of M
// would cancel badly where keys are alike. By rows before, by columns after.
__device__ __forceinline__ void substitute(float* diagonal) {
  constexpr int kPairs = 2;  // a lane has a column of two diagonal blocks, the other half of the warp of two more
  const int lane = threadIdx.x & 31, n = lane & 7;
  float* own = diagonal + (lane >> 4) * kDiagonal + ((lane >> 3) & 1) * kSmall;
  float x[kPairs][8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) x[pair][i] = i == n ? 1.f : 0.f;
#pragma unroll
  for (int i = 1; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < i; j += 4)
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const float4 m = *reinterpret_cast<const float4*>(own + pair * 2 * kDiagonal + 8 * i + j);
        float* y = x[pair];
        y[i] -= m.x * y[j];
        if (j + 1 < i) y[i] -= m.y * y[j + 1];
        if (j + 2 < i) y[i] -= m.z * y[j + 2];
        if (j + 3 < i) y[i] -= m.w * y[j + 3];
      }
  __syncwarp();
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair)
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float* y = x[pair] + i;
      *reinterpret_cast<float4*>(own + pair * 2 * kDiagonal + place(i, n)) = make_float4(y[0], y[1], y[2], y[3]);
    }
}

// X21 = -X22 M21 X11 of a diagonal block, this lane's part of its columns, from its two 8x8 blocks on the diagonal.
__device__ __forceinline__ float2 invert_below(float* diagonal, const float* m21) {
  const float2 x11 = *columns_of(diagonal);
  const float a[4] = {operand(x11.x), operand(x11.y), 0.f, 0.f};
  float sum[4] = {0.f, 0.f, 0.f, 0.f}, y[4] = {0.f, 0.f, 0.f, 0.f};
  mma8(sum, a, make_float2(operand(m21[0]), operand(m21[1])));
  const float minus[4] = {minus_operand(sum[0]), minus_operand(sum[1]), 0.f, 0.f};
  mma8(y, minus, rows_of(diagonal + kSmall));
  return make_float2(y[0], y[1]);
}

// The diagonal blocks of (I + M)^-1. What goes to shared memory goes there at once: the compiler moves no load over it.
__device__ __forceinline__ void invert_diagonal(const float* product, const float* vectors, float* diagonals) {
  const int lane = threadIdx.x & 31;
  float m[4][8];
#pragma unroll
  for (int d = 0; d < 4; ++d) gate_diagonal(m[d], product, vectors, d);
#pragma unroll
  for (int d = 0; d < 4; ++d)
#pragma unroll
    for (int n = 0; n < 2; ++n) *reinterpret_cast<float2*>(diagonals + d * kDiagonal + n * kSmall + 2 * lane) = make_float2(m[d][6 * n], m[d][6 * n + 1]);
  __syncwarp();
  substitute(diagonals);
  __syncwarp();
  float2 x21[4];
#pragma unroll
  for (int d = 0; d < 4; ++d) x21[d] = invert_below(diagonals + d * kDiagonal, m[d] + 2);
#pragma unroll
  for (int d = 0; d < 4; ++d) *columns_of(diagonals + d * kDiagonal + kBelow) = x21[d];
}
// A block on the diagonal of the inverse, with its columns scaled, by columns.
__device__ __forceinline__ void load_inverse_columns(float* x, float* diagonal, const float* scale) {
  const float2 x11 = *columns_of(diagonal), x22 = *columns_of(diagonal + kSmall), x21 = *columns_of(diagonal + kBelow);
  const float all[8] = {x11.x * scale[0], x11.y * scale[0], 0.f, 0.f, x21.x * scale[0], x21.y * scale[0], x22.x * scale[1], x22.y * scale[1]};
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] = all[e];
}
// Such a block by rows, not scaled, as an operand.
__device__ __forceinline__ void load_inverse_rows(float* x, const float* diagonal) {
  const float2 x11 = rows_of(diagonal), x22 = rows_of(diagonal + kSmall), x21 = rows_of(diagonal + kBelow);
  const float all[8] = {x11.x, x11.y, x21.x, x21.y, 0.f, 0.f, x22.x, x22.y};
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] = all[e];
}

// Rows of M[i, k], k < i, as an operand.
__device__ __forceinline__ void gated_rows(float* m, const float* product, const float* vectors, int i, int k) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = 2 * (lane & 3);
  load_rows(m, product + block_at(i, k));
  float start[2] = {vectors[kStart + 16 * i + g], vectors[kStart + 16 * i + g + 8]};
#pragma unroll
  for (int between = k + 1; between < i; ++between) {
    start[0] *= vectors[kBetween + between];
    start[1] *= vectors[kBetween + between];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 stop = *reinterpret_cast<const float2*>(vectors + kStop + 16 * k + 8 * half + t);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float* at = m + 4 * half + 2 * n;
      at[0] = operand(at[0] * start[n] * stop.x);
      at[1] = operand(at[1] * start[n] * stop.y);
    }
  }
}

// A block by columns to block (i, c) of a swizzled tile.
template <typename Element> __device__ __forceinline__ void store_block(const float* x, void* tile, int i, int c) {
  unsigned p[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    Element pair[2] = {Element(x[2 * e]), Element(x[2 * e + 1])};
    p[e] = *reinterpret_cast<const unsigned*>(pair);
  }
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(transposed_address(base, i, c)),
               "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]) : "memory");
}

// (I + M)^-1 to its tile, X[i] = -X[i,i] * sum over k < i of M[i,k] X[k], by one warp. Blocks above the diagonal are zeros that the tile had before.
// With has_beta the blocks on the diagonal are scaled with beta of their columns, and with them all below. Row by row, so that each block of M is
// made once, and the sums of a row do not wait for each other.
template <typename Element> __device__ __forceinline__ void gated_inverse(const float* product, const float* vectors, void* tile, int has_beta) {
  const int g = (threadIdx.x & 31) >> 2;
  float* diagonals = static_cast<float*>(tile) + kDiagonals;
  invert_diagonal(product, vectors, diagonals);
  float x[4][4][8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float row[4][8] = {}, sum[4][8] = {};
#pragma unroll
    for (int k = 0; k < i; ++k) {
      float m[8];
      gated_rows(m, product, vectors, i, k);
#pragma unroll
      for (int c = 0; c <= k; ++c) multiply<false>(sum[c], m, x[k][c]);
    }
    if (i > 0) {
      float inverse[8];
      load_inverse_rows(inverse, diagonals + i * kDiagonal);
#pragma unroll
      for (int c = 0; c < i; ++c) {
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[c][e] = minus_operand(sum[c][e]);
        multiply<true>(row[c], inverse, sum[c]);
      }
    }
    const float* beta = vectors + kBeta + 16 * i + g;
    const float scale[2] = {has_beta ? beta[0] : 1.f, has_beta ? beta[8] : 1.f};
    load_inverse_columns(row[i], diagonals + i * kDiagonal, scale);
    __syncwarp();  // all lanes have come this far: the tile may take the place of what they have read
    // In row 2 diagonals stood above the diagonal; in row 3 nothing is above it.
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c <= i || i == 2) store_block<Element>(row[c], tile, i, c);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[i][c][e] = operand(row[c][e]);
    }
  }
}

// A whole tile to global memory, by one thread of a warp. TileLang's copy knows threads by constants only: it would take one piece of code for each warp.
template <typename Map> __device__ __forceinline__ void send_tile(const Map& map, const void* tile, int token, int head) {
  const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  unsigned chosen;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(chosen));
  if (chosen) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];"
                 ::"l"(&map), "r"(0), "r"(token), "r"(head), "r"(from) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}
// The first rows of a tile of 64 columns to global memory, by one warp.
template <typename Element> __device__ __forceinline__ void store_rows(const void* tile, Element* out, long long stride, int rows) {
  const int piece = threadIdx.x & 7;
#pragma unroll 1
  for (int row = (threadIdx.x & 31) >> 3; row < rows; row += 4)
    reinterpret_cast<uint4*>(out + row * stride)[piece] = static_cast<const uint4*>(tile)[8 * row + (piece ^ (row & 7))];
}
}  // namespace flashqla
