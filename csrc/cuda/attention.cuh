// What the kernels of attention share: who works on what, which tokens nobody works on, and the random bits.
//
// A block owns a tile of rows (queries, or keys where dK and dV are made) of one head of one sequence and walks over
// the sequence's other side. Blocks behind a sequence's end return at once. The first blocks of a grid look for tokens
// that no sequence covers and write their zeros, so every row is written whatever cu_seqlens holds.
#pragma once

#include "../attention.h"
#include "common.cuh"
#include "philox.cuh"

namespace fastbert::cuda {

constexpr int kFill = 128;  // tokens a block that looks for uncovered ones

// ---- places

struct Bounds {
  int start, length;
};

__device__ __forceinline__ int within(int value, int least, int most) { return min(max(value, least), most); }

// First token and length of a sequence: within the tokens and no longer than a.longest, whatever cu_seqlens holds.
__device__ __forceinline__ Bounds bounds_of(const Attention& a, int sequence) {
  const int tokens = int(a.tokens), start = within(a.cu_seqlens[sequence], 0, tokens);
  return {start, min(within(a.cu_seqlens[sequence + 1], start, tokens) - start, a.longest)};
}

// What a block works on: rows of part `part` of one head of one sequence. Parts of a head are neighbours in the grid.
struct Work {
  int part, head, sequence;
};

__host__ __device__ __forceinline__ int fill_blocks(const Attention& a) { return int((a.tokens + kFill - 1) / kFill); }

__device__ __forceinline__ Work work_of(const Attention& a, int parts, int index) {
  const int of_head = index / parts;
  return {index % parts, of_head % a.heads, of_head / a.heads};
}

// ---- tokens that no sequence covers

// The search may err where cu_seqlens is not sorted, the comparison after it cannot.
__device__ __forceinline__ bool is_covered(const Attention& a, int token) {
  int first = 0, last = a.sequences;  // the sequence is the last one that starts at or before the token
  while (first < last) {
    const int middle = (first + last) / 2;
    if (a.cu_seqlens[middle + 1] <= token) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  if (first == a.sequences) return false;
  const Bounds at = bounds_of(a, first);
  return at.start <= token && token - at.start < at.length;
}

// If this block is one of those that fill: zeros in the uncovered rows of x [T, columns] and, unless it is nullptr, of
// lse [H, T]. Returns whether it was.
template <class T>
__device__ bool fill_uncovered(const Attention& a, T* x, int64_t columns, float* lse) {
  if (int(blockIdx.x) >= fill_blocks(a)) return false;
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kFill; i += blockDim.x) {
    const int64_t first = int64_t(blockIdx.x) * kFill + i - lane, token = first + lane;
    unsigned alone = __ballot_sync(0xffffffff, token < a.tokens && !is_covered(a, int(token)));
    for (; alone; alone &= alone - 1) {  // by the warp, so that the stores of a row are neighbours
      const int64_t row = first + __ffs(alone) - 1;
      for (int64_t column = lane; column < columns; column += 32) x[row * columns + column] = from_float<T>(0);
      for (int head = lane; lse && head < a.heads; head += 32) lse[head * a.tokens + row] = 0;
    }
  }
  return true;
}

// ---- what the backward's first pass leaves for its second, a number a row each: lse, delta, and what the weights
// exp(score - lse) have to be multiplied by to have the sum 1, which a large and therefore rounded lse does not give

// Sequences begin at multiples of 4 floats, for 16-byte copies.
struct Statistics {
  float* data;
  int64_t stride;  // from one quantity of a head to the next

  __device__ float* of(int quantity, int head, Bounds at, int sequence) const {
    return data + (3 * head + quantity) * stride + at.start / 4 * 4 + 4 * sequence;
  }
};

inline Statistics statistics_in(float* data, const Attention& a) {
  return {data, a.tokens / 4 * 4 + 4 * (int64_t(a.sequences) + 1)};
}

// ---- dropout: one Philox call has the bytes of 16 keys of a block of 64, those of one column pair of mma's
// accumulator

__device__ __forceinline__ Words attention_bits(Key key, int block, int pair, int query, int head, int sequence) {
  return philox(4 * block + pair, query, head, sequence, key);
}

// Byte 2j + low of the call for pair c is key 8j + 2c + low of its block.
__device__ __forceinline__ bool is_kept(const Words& bits, int j, int low, uint32_t threshold) {
  return (bits.word[j / 2] >> (16 * (j % 2) + 8 * low) & 0xff) >= threshold;
}

// The same of all 16, bit 2j + low.
__device__ __forceinline__ unsigned kept_of(const Words& bits, uint32_t threshold) {
  unsigned kept = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) kept |= unsigned(is_kept(bits, i / 2, i % 2, threshold)) << i;
  return kept;
}

// ---- the two sets of kernels: tensor cores for 16-bit types, and plain ones for what those do not take

bool mma_takes(const Attention& a);
const char* mma_fwd(const Attention& a, void* out, float* lse, void* stream);
const char* mma_bwd(const Attention& a, const void* dout, const void* out, const float* lse, void* dqkv, float* room,
                    void* stream);
const char* plain_fwd(const Attention& a, void* out, float* lse, void* stream);
const char* plain_bwd(const Attention& a, const void* dout, const void* out, const float* lse, void* dqkv, float* room,
                      void* stream);

}  // namespace fastbert::cuda
