// Attention on ordinary multiply-adds, for attention_plain.cu and relative_attention.cu: tiles of rows in shared memory
// as floats, and what a warp computes with them. This is in a separate namespace, because attention_tiles.cuh has types
// of the same names.
#pragma once

#include "attention.cuh"

namespace fastbert::cuda::plain {

constexpr int kWarps = 8, kRows = 4, kBlock = kWarps * kRows, kThreads = 32 * kWarps;
constexpr int kColumns = kAttentionLargest / 32;  // per lane, at most

// Rows of one head of one sequence. The block reads them into shared memory kBlock at a time, with zeros after the last
// row.
template <class T>
struct Rows {
  const T* first;
  int64_t stride;
  int count, D;

  // Lanes read the same column of neighbouring rows; an odd row length puts these into different banks.
  __device__ static int padded(int D) { return D | 1; }

  __device__ void read(float* tile, int row) const {
    for (int i = threadIdx.x; i < kBlock * D; i += kThreads) {
      const int r = i / D, column = i % D;
      tile[r * padded(D) + column] = row + r < count ? to_float(first[(row + r) * stride + column]) : 0;
    }
  }
};

// dots[r] = the dot product of the warp's row r and the lane's row of the tile.
__device__ __forceinline__ void dot(float (&dots)[kRows], const float* rows, const float* tile, int D) {
  const int stride = D | 1;
#pragma unroll
  for (int r = 0; r < kRows; ++r) dots[r] = 0;
  for (int column = 0; column < D; ++column) {
    const float x = tile[lane() * stride + column];
#pragma unroll
    for (int r = 0; r < kRows; ++r) dots[r] = fmaf(rows[r * stride + column], x, dots[r]);
  }
}

using Sums = float[kRows][kColumns];  // lane l has columns l, l + 32, ...

// sums[r] += the weights of row r times the rows of the tile; lane l holds the weights for row l of the tile.
__device__ __forceinline__ void add(Sums& sums, const float (&weights)[kRows], const float* tile, int D) {
  for (int other = 0; other < kBlock; ++other) {
    float weight[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) weight[r] = __shfl_sync(kAllLanes, weights[r], other);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (lane() + 32 * i >= D) break;
      const float x = tile[other * (D | 1) + lane() + 32 * i];
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r][i] = fmaf(weight[r], x, sums[r][i]);
    }
  }
}

template <class T>
__device__ __forceinline__ void store(const float (&sums)[kColumns], float factor, T* x, int D) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (lane() + 32 * i < D) x[lane() + 32 * i] = from_float<T>(sums[i] * factor);
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}

__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
  return x;
}

// Whether dropout keeps the weight of one query and key.
__device__ __forceinline__ bool keeps(const Attention& a, Key site, int query, int key, const Work& work) {
  const Words bits = attention_bits(site, key / 64, key % 8 / 2, query, work.head, work.sequence);
  return kept_of(bits, a.drop.threshold) >> kept_bit(key % 64 / 8, key % 2) & 1;
}

// The head that a block works on, and the rows of it that are the block's.
template <class T>
struct Head {
  Bounds bounds;
  int D, first, row;  // first: the block's first row; row: the warp's first row within the block
  int64_t columns;    // H D
  Rows<T> q, k, v;

  __device__ Head(const Attention& a, const Work& work)
      : bounds(bounds_of(a, work.sequence)),
        D(a.D),
        first(work.part * kBlock),
        row(int(threadIdx.x) / 32 * kRows),
        columns(int64_t(a.heads) * a.D) {
    const T* const start = static_cast<const T*>(a.qkv) + 3 * columns * bounds.start + work.head * D;
    q = {start, 3 * columns, bounds.length, D}, k = {start + columns, 3 * columns, bounds.length, D};
    v = {start + 2 * columns, 3 * columns, bounds.length, D};
  }
  // The rows of this head in a tensor [T, H, D].
  __device__ Rows<T> of(const T* x, const Work& work) const {
    return {x + bounds.start * columns + work.head * D, columns, bounds.length, D};
  }
};

// Returns the lane's weight for its score, relative to the row's largest score so far. When that grows, the row's sums
// are rescaled. total: the sum of the lane's weights.
__device__ __forceinline__ float weight_of(float score, float& largest, float& total, float (&sums)[kColumns]) {
  const float maximum = fmaxf(largest, largest_of_warp(score)), shrink = expf(largest - maximum);
  const float weight = expf(score - maximum);
  largest = maximum;
  total = total * shrink + weight;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sums[i] *= shrink;
  return weight;
}

// ---- what kernels begin and end with

// The output and lse of the warp's rows, from their weighted sums.
template <class T>
__device__ __forceinline__ void store_out(const Attention& a, const Head<T>& head, const Work& work, const Sums& sums,
                                          const float (&largest)[kRows], const float (&total)[kRows], T* out,
                                          float* lse) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = head.first + head.row + r;
    const float weights = sum_of_warp(total[r]);
    if (row >= head.bounds.length) continue;
    store(sums[r], a.drop.keep_scale / weights, out + (head.bounds.start + row) * head.columns + work.head * a.D, a.D);
    if (lane() == 0) lse[work.head * a.tokens + head.bounds.start + row] = largest[r] + logf(weights);
  }
}

// offset: the lse of the warp's rows; delta: the sums of their output times its gradient, which is in shared memory.
template <class T>
__device__ __forceinline__ void row_statistics(const Attention& a, const Head<T>& head, const Work& work, const T* out,
                                               const float* douts, const float* lse, float (&offset)[kRows],
                                               float (&delta)[kRows]) {
  const Rows<T> outs = head.of(out, work);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = head.first + head.row + r;
    const bool inside = row < head.bounds.length;
    offset[r] = inside ? lse[work.head * a.tokens + head.bounds.start + row] : 0;
    float sum = 0;
    if (inside)
      for (int i = lane(); i < a.D; i += 32)
        sum = fmaf(to_float(outs.first[row * head.columns + i]), douts[(head.row + r) * (a.D | 1) + i], sum);
    delta[r] = sum_of_warp(sum);
  }
}

template <class T>
__device__ __forceinline__ void store_dq(const Attention& a, const Head<T>& head, const Work& work, const Sums& dq,
                                         const float (&total)[kRows], const float (&offset)[kRows],
                                         const float (&delta)[kRows], const Statistics& statistics, T* dqkv) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = head.first + head.row + r;
    const float inverse = 1 / sum_of_warp(total[r]);
    if (row >= head.bounds.length) continue;
    store(dq[r], inverse * a.scale, dqkv + 3 * head.columns * (head.bounds.start + row) + work.head * a.D, a.D);
    if (lane() == 0) {
      statistics.of(kLse, work.head, head.bounds, work.sequence)[row] = offset[r];
      statistics.of(kDelta, work.head, head.bounds, work.sequence)[row] = delta[r];
      statistics.of(kInverseSum, work.head, head.bounds, work.sequence)[row] = inverse;
    }
  }
}

template <class T>
__device__ __forceinline__ void store_dk_dv(const Attention& a, const Head<T>& head, const Work& work, const Sums& dk,
                                            const Sums& dv, T* dqkv) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = head.first + head.row + r;
    if (row >= head.bounds.length) continue;
    T* const place = dqkv + 3 * head.columns * (head.bounds.start + row) + head.columns + work.head * a.D;
    store(dk[r], a.scale, place, a.D);
    store(dv[r], 1, place + head.columns, a.D);
  }
}

// The lane's query and its statistics, for kernels whose rows are not queries.
struct QueryRow {
  int place;  // within the sequence
  bool inside;
  float lse, delta, inverse;

  __device__ QueryRow(const Statistics& statistics, Bounds bounds, const Work& work, int query)
      : place(query), inside(query < bounds.length) {
    const auto of = [&](Quantity quantity) {
      return inside ? statistics.of(quantity, work.head, bounds, work.sequence)[query] : 0;
    };
    lse = of(kLse), delta = of(kDelta), inverse = of(kInverseSum);
  }
  __device__ __forceinline__ float weight(float score) const {
    return inside ? expf(__fsub_rn(score, lse)) * inverse : 0;
  }
};

// ---- launching

// other_blocks: the number of blocks at the end of the grid, after those that compute. tiles: how many tiles of kBlock
// rows are in shared memory.
template <class... Params, class... Args>
const char* run(const Attention& a, int64_t other_blocks, int tiles, void* stream, void (*kernel)(Params...),
                Args... args) {
  const int parts = int(divide_up(a.longest, kBlock));
  const int64_t blocks = other_blocks + int64_t(parts) * a.heads * a.sequences;
  if (blocks == 0) return nullptr;
  if (blocks > INT32_MAX) return "too many heads and sequences for one launch";
  const int bytes = tiles * kBlock * (a.D | 1) * int(sizeof(float));
  if (bytes > shared_memory_limit()) return "this GPU has too little shared memory for heads of this size";
  return launch(kernel, dim3(blocks), dim3(kThreads), bytes, stream, a, args..., parts);
}

}  // namespace fastbert::cuda::plain
