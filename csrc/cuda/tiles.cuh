// Tiles of matrices in shared memory.
//
// Tiles are stored in chunks of 16 bytes. swizzle() permutes the chunks of a row, so that neither copies nor ldmatrix
// have bank conflicts.
#pragma once

#include "mma.cuh"

namespace fastbert::cuda {

struct alignas(16) Chunk {  // 8 elements
  uint32_t word[4];
};

// Index of a row's chunk in a tile whose rows have kWidth elements.
template <int kWidth>
__device__ __forceinline__ int swizzle(int row, int chunk) {
  constexpr int kChunks = kWidth / 8, kRowsOfBanks = kChunks < 8 ? 8 / kChunks : 1,
                kMask = kChunks < 8 ? kChunks - 1 : 7;
  return row * kChunks + (chunk ^ (row / kRowsOfBanks & kMask));
}

// `count` rows of a matrix, `stride` elements apart.
template <class T>
struct Rows {
  const T* first;
  int64_t stride;
  int count;
};

// The synchronous copy for sm_75: every `step`-th row from `row` on, up to kRows, has been copied when it returns. Two
// rows are loaded before the first is stored, so that one wait serves both.
template <int kRows, class T>
__device__ __forceinline__ void copy_now(Chunk* to, int chunks, const T* source, int64_t stride, int row, int rows,
                                         int step) {
  constexpr int kTogether = 2;
  for (; row < kRows; row += kTogether * step, to += kTogether * chunks, source += kTogether * stride) {
    Chunk chunk[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      chunk[i] = row + i * step < rows ? *reinterpret_cast<const Chunk*>(source + i * stride) : Chunk{};
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (row + i * step < kRows) to[i * chunks] = chunk[i];
  }
}

// Starts to copy kRows rows, from `row` on, to a tile, with zeros after the last row and beyond D. A thread copies the
// same chunk of several rows; these are a multiple of 8 apart, so the swizzle puts the chunk into the same place in all
// of them.
template <int kRows, int kWidth, class T>
__device__ __forceinline__ void copy(Chunk* tile, const Rows<T>& from, int row, int D) {
  constexpr int kChunks = kWidth / 8;
  const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks, step = blockDim.x / kChunks;
  const int rows = chunk * 8 < D ? min(from.count - row, kRows) : 0;
  Chunk* to = tile + swizzle<kWidth>(first, chunk);
  const T* source = from.first + (row + first) * from.stride + chunk * 8;
  if (is_turing()) {
    copy_now<kRows>(to, step * kChunks, source, step * from.stride, first, rows, step);
  } else {
    for (int r = first; r < kRows; r += step, to += step * kChunks, source += step * from.stride)
      ptx::cp_async16(to, r < rows ? source : from.first, r < rows ? 16 : 0);
  }
}

// Starts to copy the first kRows rows to a tile that one warp uses, with zeros after the last row and beyond D.
template <int kRows, int kWidth, class T>
__device__ __forceinline__ void copy_by_warp(Chunk* tile, const Rows<T>& from, int D) {
  constexpr int kChunks = kWidth / 8, kCount = kRows * kChunks / 32, kTogether = kCount < 4 ? kCount : 4;
#pragma unroll
  for (int first = 0; first < kCount; first += kTogether) {
    Chunk chunk[kTogether];  // for sm_75, as in copy_now
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int place = (first + i) * 32 + lane(), row = place / kChunks, column = place % kChunks * 8;
      const bool inside = row < from.count && column < D;
      const T* const source = inside ? from.first + row * from.stride + column : from.first;
      if (is_turing()) {
        chunk[i] = inside ? *reinterpret_cast<const Chunk*>(source) : Chunk{};
      } else {
        ptx::cp_async16(tile + swizzle<kWidth>(row, column / 8), source, inside ? 16 : 0);
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int place = (first + i) * 32 + lane();
      if (is_turing()) tile[swizzle<kWidth>(place / kChunks, place % kChunks)] = chunk[i];
    }
  }
}

}  // namespace fastbert::cuda
