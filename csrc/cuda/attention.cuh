// What all attention kernels share: how the work is split over blocks, tokens that belong to no sequence, and the
// random bits.
//
// A block owns a tile of rows (queries, or keys where it computes dK and dV) of one head of one sequence and loops over
// the other side of the sequence. Blocks beyond a sequence's end return at once. The last blocks of a grid write zeros
// for tokens that no sequence covers, so every row is written whatever cu_seqlens holds.
#pragma once

#include <float.h>

#include "../attention.h"
#include "common.cuh"
#include "philox.cuh"

namespace fastbert::cuda {

constexpr int kFill = 128;  // tokens that a block of fill_uncovered() looks at
constexpr unsigned kAllLanes = 0xffffffff;

// ---- how the work is split

struct Bounds {
  int start, length;
};

__device__ __forceinline__ int within(int value, int least, int most) { return min(max(value, least), most); }

// First token and length of a sequence, clamped to the existing tokens and to a.longest, whatever cu_seqlens holds.
__device__ __forceinline__ Bounds bounds_of(const Attention& a, int sequence) {
  const int tokens = int(a.tokens), start = within(a.cu_seqlens[sequence], 0, tokens);
  return {start, min(within(a.cu_seqlens[sequence + 1], start, tokens) - start, a.longest)};
}

// Blocks start in the order of the grid. It has the longest sequences first, so that short ones fill the gaps at the
// end. This is done for up to kOrdered sequences, because more are even enough, and only if sequences can differ in
// their number of tiles.
constexpr int kOrdered = 256, kOneTile = 64;

__host__ __device__ __forceinline__ bool is_ordered(const Attention& a) {
  return 1 < a.sequences && a.sequences <= kOrdered && a.longest > kOneTile;
}

// The sequence at place `rank` if the longest come first, and equally long ones in the order of the batch. All lanes of
// a warp call this together. It bisects over lengths: about 10 + 2 ballots for each 32 sequences.
static __device__ int sequence_of_rank(const Attention& a, int rank) {
  constexpr int kGroups = kOrdered / 32;
  int length[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i)
    length[i] = 32 * i + lane() < a.sequences ? bounds_of(a, 32 * i + lane()).length : -1;
  const auto at_least = [&](int least) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
      if (32 * i < a.sequences) count += __popc(__ballot_sync(kAllLanes, length[i] >= least));
    return count;
  };
  int low = 0, high = a.longest;  // the sequence's length is in low .. high
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (at_least(middle) > rank) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  int before = rank - at_least(low + 1), sequence = 0;  // before: earlier ones of the same length
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    if (32 * i >= a.sequences) break;
    const unsigned same = __ballot_sync(kAllLanes, length[i] == low);
    const bool found = same >> lane() & 1 && __popc(same & ((1u << lane()) - 1)) == before;
    if (const unsigned where = __ballot_sync(kAllLanes, found)) sequence = 32 * i + __ffs(where) - 1;
    before -= __popc(same);
  }
  return sequence;
}

// What a block works on: every `parts`-th tile of one head of one sequence, from tile `part` on. The parts of a head
// are neighbours in the grid, because they read the same keys and values through the same cache.
struct Work {
  int part, head, sequence;
};

// If sequences are ordered (is_ordered), `sequence` is a rank in that order.
__device__ __forceinline__ Work place_of(const Attention& a, int parts, int index) {
  const int whole_head = index / parts;
  return {index % parts, whole_head % a.heads, whole_head / a.heads};
}

// All lanes of a warp call this together.
__device__ __forceinline__ Work work_of(const Attention& a, int parts) {
  Work work = place_of(a, parts, int(blockIdx.x));
  if (is_ordered(a)) work.sequence = sequence_of_rank(a, work.sequence);
  return work;
}

// ---- tokens that no sequence covers

// If cu_seqlens is not in ascending order, the bisection may find the wrong sequence; the last comparison is still
// right about the sequence that it found.
__device__ __forceinline__ bool is_covered(const Attention& a, int token) {
  int sequence = 0, end = a.sequences;  // sequence .. end - 1 may hold the token
  while (sequence < end) {
    const int middle = (sequence + end) / 2;
    if (a.cu_seqlens[middle + 1] <= token) {
      sequence = middle + 1;
    } else {
      end = middle;
    }
  }
  if (sequence == a.sequences) return false;
  const Bounds bounds = bounds_of(a, sequence);
  return bounds.start <= token && token - bounds.start < bounds.length;
}

__host__ __device__ __forceinline__ int fill_blocks(const Attention& a) { return int(divide_up(a.tokens, kFill)); }

// Returns whether this block is one of those at the end of the grid that only fill. If so, it has written zeros to the
// uncovered ones among its kFill tokens: rows of x [T, columns] and, unless lse is nullptr, columns of lse [H, T].
template <class T>
__device__ bool fill_uncovered(const Attention& a, T* x, int64_t columns, float* lse) {
  const int index = int(blockIdx.x) - (int(gridDim.x) - fill_blocks(a));
  if (index < 0) return false;
  for (int i = threadIdx.x; i < kFill; i += blockDim.x) {
    const int64_t first = int64_t(index) * kFill + i - lane(), token = first + lane();
    unsigned uncovered = __ballot_sync(kAllLanes, token < a.tokens && !is_covered(a, int(token)));
    for (; uncovered; uncovered &= uncovered - 1) {  // one row by the whole warp: the stores are contiguous
      const int64_t row = first + __ffs(uncovered) - 1;
      for (int64_t column = lane(); column < columns; column += 32) x[row * columns + column] = from_float<T>(0);
      for (int head = lane(); lse && head < a.heads; head += 32) lse[head * a.tokens + row] = 0;
    }
  }
  return true;
}

// ---- what the backward's first kernel passes on to its second

enum Quantity {  // one number per row
  kLse,
  kDelta,
  kInverseSum,  // 1 / sum of exp(score - lse): corrects lse's rounding
  kQuantities
};

// [heads, kQuantities, tokens], padded so that each sequence begins at a multiple of 4 floats, for 16-byte copies.
struct Statistics {
  float* data;
  int64_t stride;  // from one quantity of a head to the next

  __device__ float* of(Quantity quantity, int head, Bounds bounds, int sequence) const {
    return data + (kQuantities * head + quantity) * stride + bounds.start / 4 * 4 + 4 * sequence;
  }
};

inline Statistics statistics_in(float* data, const Attention& a) {
  return {data, a.tokens / 4 * 4 + 4 * (int64_t(a.sequences) + 1)};
}

// ---- dropout: one Philox call serves 16 keys of a block of 64: those in one pair of columns of mma's accumulator

__device__ __forceinline__ Words attention_bits(Key key, int block, int pair, int query, int head, int sequence) {
  return philox(4 * block + pair, query, head, sequence, key);
}

// Byte 2j + low of the call for pair c belongs to key 8j + 2c + low of its block. A key is kept if its byte is at least
// the threshold (1 to 255); the highest bit of the byte in the result says so. Four bytes are compared at once: the
// lower seven bits are subtracted below a guard bit that stops the borrow, and decide where the highest bits are equal.
__device__ __forceinline__ uint32_t at_least(uint32_t bytes, uint32_t threshold) {
  constexpr uint32_t kHighest = 0x80808080u;
  const uint32_t all = threshold * 0x01010101u, lower = (bytes | kHighest) - (all & ~kHighest);
  return (bytes & ~all) | (~(bytes ^ all) & lower);
}

__device__ __forceinline__ Words kept_bytes(Words bits, uint32_t threshold) {
#pragma unroll
  for (int w = 0; w < 4; ++w) bits.word[w] = at_least(bits.word[w], threshold);
  return bits;
}

// The 16 results of a call in one word: bit kept_bit(j, low) is that of byte 2j + low. The lower half of each byte is
// left free.
__device__ __forceinline__ uint32_t kept_of(const Words& bits, uint32_t threshold) {
  uint32_t kept = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w) kept |= (at_least(bits.word[w], threshold) & 0x80808080u) >> w;
  return kept;
}

__device__ __forceinline__ int kept_bit(int j, int low) { return 8 * (j % 2 * 2 + low) + 7 - j / 2; }

// ---- the three sets of kernels: on tensor cores, by warpgroups (attention_wgmma.cu) or by warps (attention_mma.cu),
// and without tensor cores, for everything else (attention_plain.cu)

bool wgmma_takes(const Attention& a);
const char* wgmma_fwd(const Attention& a, void* out, float* lse, void* stream);
const char* wgmma_bwd(const Attention& a, const void* dout, const void* out, const float* lse, void* dqkv, float* room,
                      void* stream);
bool mma_takes(const Attention& a);
const char* mma_fwd(const Attention& a, void* out, float* lse, void* stream);
const char* mma_bwd(const Attention& a, const void* dout, const void* out, const float* lse, void* dqkv, float* room,
                    void* stream);
const char* plain_fwd(const Attention& a, void* out, float* lse, void* stream);
const char* plain_bwd(const Attention& a, const void* dout, const void* out, const float* lse, void* dqkv, float* room,
                      void* stream);

}  // namespace fastbert::cuda
