// Tiles of Q, K, V and dO in shared memory, and the products of their fragments on tensor cores.
#pragma once

#include "attention.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"

namespace fastbert::cuda {

constexpr int kTile = 64;     // rows of the streamed side per step; keys of a block of dropout bits
constexpr int kRotating = 3;  // tiles in shared memory if not all fit; 2 if not even 3 fit

// Who multiplies: each warp by itself, or, on Hopper, the four warps of a warpgroup together, which must then take the
// same branches.
struct ByWarp {
  static constexpr bool kIsGroup = false;
  static constexpr int kWarps = 1;
};
struct ByWarpgroup {
  static constexpr bool kIsGroup = true;
  static constexpr int kWarps = 4;
};

// ---- the streamed side, in tiles of kTile rows: K and V, or, for dK and dV, Q and dO with the rows' statistics

template <class By, int kWidth, class T>
struct Stream {
  static constexpr int kMatrix = kTile * kWidth / 8;           // chunks of a tile of one matrix
  static constexpr int kStatistics = kQuantities * kTile / 4;  // chunks of a tile's statistics

  Chunk* shared;
  Rows<T> k_or_q, v_or_do;
  const float* statistics[kQuantities];  // of the streamed rows; nullptr if these are K and V
  int D, slots, tiles, ahead;            // slots: tiles that fit into shared memory; ahead: tiles copied in advance

  __device__ Stream(Chunk* shared_, Rows<T> k_or_q_, Rows<T> v_or_do_, int D_, int slots_)
      : shared(shared_), k_or_q(k_or_q_), v_or_do(v_or_do_), statistics{}, D(D_), slots(slots_) {
    tiles = (k_or_q.count + kTile - 1) / kTile;
    ahead = stays() ? kRotating - 1 : slots - 1;
  }

  __host__ __device__ static constexpr int chunks(bool with_statistics) {
    return 2 * kMatrix + with_statistics * kStatistics;
  }
  __device__ bool stays() const { return tiles <= slots; }
  __device__ const Chunk* k_or_q_tile(int tile) const { return slot(tile); }
  __device__ const Chunk* v_or_do_tile(int tile) const { return slot(tile) + kMatrix; }
  // [kQuantities][kTile]
  __device__ const float* statistics_tile(int tile) const {
    return reinterpret_cast<const float*>(statistics_slot(tile));
  }

  // Starts to copy a tile. Beyond the last tile it commits an empty group, because next() waits by counting groups.
  __device__ void start(int tile) {
    if (tile < tiles) {
      copy<kTile, kWidth>(slot(tile), k_or_q, tile * kTile, D);
      copy<kTile, kWidth>(slot(tile) + kMatrix, v_or_do, tile * kTile, D);
      if (statistics[kLse]) copy_statistics(tile);
    }
    commit_copies();
  }

  // Call this after starting to copy the block's own rows. They arrive together with the first tile. If all tiles have
  // `arrived` already, for earlier rows of the block, this function waits for the block's own rows.
  __device__ void begin(bool arrived) {
    if (arrived) {
      commit_copies();
      wait_for_copies<0>();
      __syncthreads();
    } else {
      for (int tile = 0; tile < ahead; ++tile) start(tile);
    }
  }

  // Waits for a tile, then starts to copy the tile `ahead` places later, into a slot that no warp reads any more.
  __device__ void next(int tile) {
    if (ahead > 1) {
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    start(tile + ahead);
  }

 private:
  // wgmma needs tiles at multiples of 1024 bytes, so for warpgroups the statistics lie after all the tiles. place()
  // avoids a division there; this takes more registers, which the other kernels do not have.
  __device__ int place(int tile) const {
    if constexpr (By::kIsGroup) return stays() ? tile : slots == kRotating ? tile % kRotating : tile % 2;
    return tile % slots;
  }
  __device__ Chunk* slot(int tile) const { return shared + place(tile) * chunks(!By::kIsGroup && statistics[kLse]); }
  __device__ Chunk* statistics_slot(int tile) const {
    if constexpr (By::kIsGroup) return shared + slots * 2 * kMatrix + place(tile) * kStatistics;
    return slot(tile) + 2 * kMatrix;
  }

  __device__ void copy_statistics(int tile) {
    for (int i = threadIdx.x; i < kStatistics; i += blockDim.x) {
      const int row = i * 4 % kTile, rows_left = k_or_q.count - tile * kTile - row;
      const float* const source = i * 4 < kTile       ? statistics[kLse]
                                  : i * 4 < 2 * kTile ? statistics[kDelta]
                                                      : statistics[kInverseSum];
      const int floats = within(rows_left, 0, 4);
      Chunk* const to = statistics_slot(tile) + i;
      if (is_turing()) {
        Chunk chunk{};
        for (int j = 0; j < floats; ++j) chunk.word[j] = __float_as_uint(source[tile * kTile + row + j]);
        *to = chunk;
      } else {
        ptx::cp_async16(to, floats ? source + tile * kTile + row : source, 4 * floats);
      }
    }
  }
};

// ---- fragments and products; lane l has rows l / 4 and l / 4 + 8 of an accumulator, columns 2 (l % 4) and the next

// 16 rows of a tile as A operands. kHeld: in registers; otherwise, where the sums need the registers, they are read
// from shared memory again for every product.
template <int kWidth, bool kHeld>
struct Operand {
  uint32_t word[kWidth / 16][4];  // if kHeld
  const Chunk* tile;
  int row;

  __device__ __forceinline__ void load(const Chunk* tile_, int row_) {
    tile = tile_, row = row_;
    if constexpr (kHeld) {
#pragma unroll
      for (int k = 0; k < kWidth / 16; ++k) read(k, word[k]);
    }
  }
  // Columns 16k to 16k + 15.
  __device__ __forceinline__ void columns(int k, uint32_t (&a)[4]) const {
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = word[k][i];
    } else {
      read(k, a);
    }
  }

 private:
  __device__ __forceinline__ void read(int k, uint32_t (&a)[4]) const {
    ptx::ldmatrix_x4(a, tile + swizzle<kWidth>(row + lane() % 16, 2 * k + lane() / 16));
  }
};

// c[i][j] = rows[i] times the transpose of rows 8j to 8j + 7 of the tile, counted from `row`.
template <class T, int kWidth, bool kHeld, int kRowTiles, int kColumns>
__device__ __forceinline__ void times_transposed(ByWarp, float (&c)[kRowTiles][kColumns][4],
                                                 const Operand<kWidth, kHeld> (&rows)[kRowTiles], const Chunk* tile,
                                                 int row) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[i][j][e] = 0;
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) {
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) rows[i].columns(k, a[i]);
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, tile + swizzle<kWidth>(row + 8 * j + lane() / 16 * 8 + lane() % 8, 2 * k + lane() / 8 % 2));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        multiply_add<T>(c[i][j], a[i], b[0], b[1]);
        multiply_add<T>(c[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// Starts c = 64 rows (the `rows` of a warpgroup's four warps) times the transpose of a tile. The caller waits for the
// product.
template <class T, int kWidth>
__device__ __forceinline__ void start_times_transposed(float (&c)[8][4], const Operand<kWidth, false>& rows,
                                                       const Chunk* tile) {
  static_assert(kWidth == 64, "rows of 128 bytes");
  const uint64_t a = ptx::matrix_descriptor(rows.tile + rows.row / 64 * 64 * kWidth / 8),
                 b = ptx::matrix_descriptor(tile);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k)
    ptx::wgmma_m64n64k16<T>(c, ptx::advance(a, 32 * k), ptx::advance(b, 32 * k), k > 0);
  ptx::wgmma_commit();
}

// Two such products, with the same part of two tiles. Both are complete when this returns.
template <class T, int kWidth, bool kHeld, int kColumns>
__device__ __forceinline__ void times_transposed_twice(ByWarp by, float (&c)[1][kColumns][4],
                                                       const Operand<kWidth, kHeld> (&rows)[1], const Chunk* tile,
                                                       float (&c2)[1][kColumns][4],
                                                       const Operand<kWidth, kHeld> (&rows2)[1], const Chunk* tile2,
                                                       int row) {
  times_transposed<T>(by, c, rows, tile, row);
  times_transposed<T>(by, c2, rows2, tile2, row);
}
template <class T, int kWidth>
__device__ __forceinline__ void times_transposed_twice(ByWarpgroup, float (&c)[1][8][4],
                                                       const Operand<kWidth, false> (&rows)[1], const Chunk* tile,
                                                       float (&c2)[1][8][4], const Operand<kWidth, false> (&rows2)[1],
                                                       const Chunk* tile2, int) {
  start_times_transposed<T>(c[0], rows[0], tile);
  start_times_transposed<T>(c2[0], rows2[0], tile2);
  ptx::wgmma_wait<0>();
  ptx::hold(c[0]), ptx::hold(c2[0]);
}

// Which elements of p below are kept, as a mask for two columns of a row at a time: all of them, or those of a lane's
// 16 that dropout keeps.
struct KeepAll {
  __device__ __forceinline__ uint32_t mask(int, int, int) const { return ~0u; }
};

template <int kRowTiles>
struct KeepSome {
  Words bytes[kRowTiles][2];  // kept_bytes() of each row
  __device__ __forceinline__ uint32_t mask(int i, int lower, int column) const {
    return ptx::spread_signs(bytes[i][lower].word[column / 2], column % 2);
  }
};

// p[i], rounded to T, as an A operand: columns 16 k to 16 k + 15.
template <class T, int kColumns, int kRowTiles, class Keep>
__device__ __forceinline__ void pack_columns(uint32_t (&a)[4], const float (&p)[kRowTiles][kColumns][4], int i, int k,
                                             const Keep& keep) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    a[2 * half] = pack<T>(p[i][2 * k + half][0], p[i][2 * k + half][1]) & keep.mask(i, 0, 2 * k + half);
    a[2 * half + 1] = pack<T>(p[i][2 * k + half][2], p[i][2 * k + half][3]) & keep.mask(i, 1, 2 * k + half);
  }
}

// sum[i] += p[i], rounded to T, times the tile's rows from `row` on, one row for each column of p.
template <class T, int kWidth, int kRowTiles, int kColumns, class Keep = KeepAll>
__device__ __forceinline__ void add_product(ByWarp, float (&sum)[kRowTiles][kWidth / 8][4],
                                            const float (&p)[kRowTiles][kColumns][4], const Chunk* tile, int row,
                                            const Keep& keep = {}) {
#pragma unroll
  for (int k = 0; k < kColumns / 2; ++k) {
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) pack_columns<T>(a[i], p, i, k, keep);
#pragma unroll
    for (int j = 0; j < kWidth / 8; j += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, tile + swizzle<kWidth>(row + 16 * k + lane() % 16, j + lane() / 16));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        multiply_add<T>(sum[i][j], a[i], b[0], b[1]);
        multiply_add<T>(sum[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// All 64 columns of p[i], rounded, as A operands.
struct Packed {
  uint32_t columns[4][4];

  // Call this after the wait for the product.
  __device__ __forceinline__ void hold() {
#pragma unroll
    for (int k = 0; k < 4; ++k) ptx::hold(columns[k]);
  }
};
template <class T, int kRowTiles, class Keep = KeepAll>
__device__ __forceinline__ Packed packed(const float (&p)[kRowTiles][8][4], int i, const Keep& keep = {}) {
  Packed a;
#pragma unroll
  for (int k = 0; k < 4; ++k) pack_columns<T>(a.columns[k], p, i, k, keep);
  return a;
}

// Starts sum += p times a tile, by a warpgroup. The caller waits for the product, and keeps p until then.
template <class T, int kWidth>
__device__ __forceinline__ void start_add_product(float (&sum)[8][4], Packed& p, const Chunk* tile) {
  static_assert(kWidth == 64, "rows of 128 bytes");
  const uint64_t b = ptx::matrix_descriptor(tile);
  ptx::hold(sum), p.hold();
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k)
    ptx::wgmma_m64n64k16<T, true>(sum, p.columns[k], ptx::advance(b, 16 * k * kWidth * 2), true);
  ptx::wgmma_commit();
}
template <class T, int kWidth>
__device__ __forceinline__ void add_product(ByWarpgroup, float (&sum)[1][8][4], const float (&p)[1][8][4],
                                            const Chunk* tile, int) {
  Packed a = packed<T>(p, 0);
  start_add_product<T, kWidth>(sum[0], a, tile);
  ptx::wgmma_wait<0>();
  ptx::hold(sum[0]), a.hold();
}

// Two such products, with the same part of two tiles. Both are complete when this returns.
template <class T, int kWidth, int kColumns>
__device__ __forceinline__ void add_products(ByWarp by, float (&sum)[1][kWidth / 8][4],
                                             const float (&p)[1][kColumns][4], const Chunk* tile,
                                             float (&sum2)[1][kWidth / 8][4], const float (&p2)[1][kColumns][4],
                                             const Chunk* tile2, int row) {
  add_product<T, kWidth>(by, sum, p, tile, row);
  add_product<T, kWidth>(by, sum2, p2, tile2, row);
}
template <class T, int kWidth>
__device__ __forceinline__ void add_products(ByWarpgroup, float (&sum)[1][8][4], const float (&p)[1][8][4],
                                             const Chunk* tile, float (&sum2)[1][8][4], const float (&p2)[1][8][4],
                                             const Chunk* tile2, int) {
  Packed a = packed<T>(p, 0), a2 = packed<T>(p2, 0);
  start_add_product<T, kWidth>(sum[0], a, tile);
  start_add_product<T, kWidth>(sum2[0], a2, tile2);
  ptx::wgmma_wait<0>();
  ptx::hold(sum[0]), ptx::hold(sum2[0]), a.hold(), a2.hold();
}

// Writes -inf to an accumulator's columns from `columns` on; `first` is the number of its first column.
template <int kColumns>
__device__ __forceinline__ void hide(float (&c)[kColumns][4], int first, int columns) {
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (first + 8 * j + 2 * (lane() % 4) + e % 2 >= columns) c[j][e] = -INFINITY;
}

// Sum and maximum over the four lanes that share a row.
__device__ __forceinline__ float sum_of_row(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}
__device__ __forceinline__ float largest_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// Writes 16 rows of sums to x, from row `row` on: the first 8 times `upper`, the other 8 times `lower`. They pass
// through 16 rows of `tile`, shared memory that only this warp uses, so that global memory is written in whole chunks.
template <class T, int kWidth>
__device__ __forceinline__ void store(const float (&sums)[kWidth / 8][4], float upper, float lower, Chunk* tile,
                                      int tile_row, T* x, int64_t stride, int row, int rows, int D) {
  constexpr int kChunks = kWidth / 8;
  const int g = lane() / 4, t = lane() % 4;
  __syncwarp();  // all lanes have read their operands from the tile
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    tile[swizzle<kWidth>(tile_row + g, j)].word[t] = pack<T>(sums[j][0] * upper, sums[j][1] * upper);
    tile[swizzle<kWidth>(tile_row + g + 8, j)].word[t] = pack<T>(sums[j][2] * lower, sums[j][3] * lower);
  }
  __syncwarp();
#pragma unroll
  for (int i = lane(); i < 16 * kChunks; i += 32) {
    const int r = i / kChunks, chunk = i % kChunks;
    if (row + r < rows && chunk * 8 < D)
      *reinterpret_cast<Chunk*>(x + (row + r) * stride + chunk * 8) = tile[swizzle<kWidth>(tile_row + r, chunk)];
  }
}

// One head of one sequence.
template <class T>
struct Head {
  Bounds bounds;
  Rows<T> q, k, v;

  __device__ Head(const Attention& a, Work work) : bounds(bounds_of(a, work.sequence)) {
    const int64_t columns = int64_t(a.heads) * a.D, stride = 3 * columns;
    const T* const first = static_cast<const T*>(a.qkv) + bounds.start * stride + work.head * a.D;
    q = {first, stride, bounds.length};
    k = {first + columns, stride, bounds.length};
    v = {first + 2 * columns, stride, bounds.length};
  }
};

}  // namespace fastbert::cuda
