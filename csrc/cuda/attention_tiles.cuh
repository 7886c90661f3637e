// Tiles of attention's matrices in shared memory, and the products of their fragments on tensor cores.
#pragma once

#include "attention.cuh"
#include "mma.cuh"

namespace fastbert::cuda {

constexpr int kTile = 64;     // rows of the streamed side a step; a block of dropout bits
constexpr int kRotating = 3;  // tiles in shared memory where not all fit; 2 where not even 3 do
constexpr unsigned kAll = 0xffffffff;

// ---- tiles in shared memory

struct alignas(16) Chunk {  // 8 elements
  uint32_t word[4];
};

// Place of a chunk in a tile of rows of kWidth elements.
template <int kWidth>
__device__ __forceinline__ int at(int row, int chunk) {
  constexpr int kChunks = kWidth / 8, kRowsOfBanks = kChunks < 8 ? 8 / kChunks : 1,
                kMask = kChunks < 8 ? kChunks - 1 : 7;
  return row * kChunks + (chunk ^ (row / kRowsOfBanks & kMask));
}

// Rows of a matrix of one head: `count` of them lie `stride` elements apart.
template <class T>
struct Rows {
  const T* first;
  int64_t stride;
  int count;
};

// Copies kRows rows from `row` on to a tile, zeros behind the last and beyond D. A thread copies the same chunk of
// every so many rows: a multiple of 8, after which chunks are exchanged in the same way.
template <int kRows, int kWidth, class T>
__device__ __forceinline__ void copy(Chunk* tile, const Rows<T>& from, int row, int D) {
  constexpr int kChunks = kWidth / 8;
  const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks, turn = blockDim.x / kChunks;
  const int rows = chunk * 8 < D ? min(from.count - row, kRows) : 0;
  Chunk* to = tile + at<kWidth>(first, chunk);
  const T* source = from.first + (row + first) * from.stride + chunk * 8;
  for (int r = first; r < kRows; r += turn, to += turn * kChunks, source += turn * from.stride)
    ptx::cp_async16(to, r < rows ? source : from.first, r < rows ? 16 : 0);
}

// ---- the streamed side: two matrices, K and V or Q and dO, in tiles of kTile rows

template <int kWidth, class T>
struct Stream {
  static constexpr int kMatrix = kTile * kWidth / 8;  // chunks
  static constexpr int kNumbers = 3 * kTile / 4;      // chunks of statistics of the rows, where there are any

  Chunk* shared;
  Rows<T> one, two;
  const float *lse, *delta, *inverse;  // of the rows, or nullptr
  int D, slots, tiles, ahead;          // ahead: tiles under way

  __device__ Stream(Chunk* shared_, Rows<T> one_, Rows<T> two_, int D_, int slots_)
      : shared(shared_), one(one_), two(two_), lse(nullptr), delta(nullptr), inverse(nullptr), D(D_), slots(slots_) {
    tiles = (one.count + kTile - 1) / kTile;
    ahead = stays() ? kRotating - 1 : slots - 1;
  }

  __host__ __device__ static constexpr int chunks(bool numbers) { return 2 * kMatrix + numbers * kNumbers; }
  __device__ bool stays() const { return tiles <= slots; }
  __device__ const Chunk* first(int tile) const { return slot(tile); }
  __device__ const Chunk* second(int tile) const { return slot(tile) + kMatrix; }
  // lse, delta and inverse, kTile each
  __device__ const float* numbers(int tile) const { return reinterpret_cast<const float*>(slot(tile) + 2 * kMatrix); }

  // Starts to copy a tile; a group of copies in any case, so that they can be counted.
  __device__ void start(int tile) {
    if (tile < tiles) {
      copy<kTile, kWidth>(slot(tile), one, tile * kTile, D);
      copy<kTile, kWidth>(slot(tile) + kMatrix, two, tile * kTile, D);
      if (lse) start_numbers(tile);
    }
    ptx::cp_async_commit();
  }

  // After the block's own rows have been asked for: they arrive with the first tile, or, where the tiles have arrived
  // for earlier rows, are waited for here.
  __device__ void begin(bool arrived) {
    if (arrived) {
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      __syncthreads();
    } else {
      for (int tile = 0; tile < ahead; ++tile) start(tile);
    }
  }

  // Waits for a tile and starts the one that is `ahead` behind it, in the place of one that no warp reads any more.
  __device__ void next(int tile) {
    if (ahead > 1) {
      ptx::cp_async_wait<1>();
    } else {
      ptx::cp_async_wait<0>();
    }
    __syncthreads();
    start(tile + ahead);
  }

 private:
  __device__ Chunk* slot(int tile) const { return shared + tile % slots * chunks(lse); }

  __device__ void start_numbers(int tile) {
    for (int i = threadIdx.x; i < kNumbers; i += blockDim.x) {
      const int row = i * 4 % kTile, behind = one.count - tile * kTile - row;
      const float* const of = i * 4 < kTile ? lse : i * 4 < 2 * kTile ? delta : inverse;
      const int bytes = within(behind * 4, 0, 16);
      ptx::cp_async16(slot(tile) + 2 * kMatrix + i, bytes ? of + tile * kTile + row : of, bytes);
    }
  }
};

// ---- fragments and products; lane l has rows l / 4 and l / 4 + 8 of an accumulator, columns 2 (l % 4) and the next

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }

// 16 rows of a tile as A operands: held in registers, or, where those are needed for sums, read again for every
// product.
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
    ptx::ldmatrix_x4(a, tile + at<kWidth>(row + lane() % 16, 2 * k + lane() / 16));
  }
};

// c[i][j] = rows of a[i] times, transposed, rows 8j to 8j + 7 of the tile behind `row`.
template <class T, int kWidth, bool kHeld, int kRowTiles, int kColumns>
__device__ __forceinline__ void times_transposed(float (&c)[kRowTiles][kColumns][4],
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
      ptx::ldmatrix_x4(b, tile + at<kWidth>(row + 8 * j + lane() / 16 * 8 + lane() % 8, 2 * k + lane() / 8 % 2));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        ptx::mma_m16n8k16<T>(c[i][j], a[i], b[0], b[1]);
        ptx::mma_m16n8k16<T>(c[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// sum[i] += p[i], rounded, times the tile's rows from `row` on, as many as p has columns.
template <class T, int kWidth, int kRowTiles, int kColumns>
__device__ __forceinline__ void add_product(float (&sum)[kRowTiles][kWidth / 8][4],
                                            const float (&p)[kRowTiles][kColumns][4], const Chunk* tile, int row) {
#pragma unroll
  for (int k = 0; k < kColumns / 2; ++k) {
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        a[i][2 * half] = pack<T>(p[i][2 * k + half][0], p[i][2 * k + half][1]);
        a[i][2 * half + 1] = pack<T>(p[i][2 * k + half][2], p[i][2 * k + half][3]);
      }
#pragma unroll
    for (int j = 0; j < kWidth / 8; j += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, tile + at<kWidth>(row + 16 * k + lane() % 16, j + lane() / 16));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        ptx::mma_m16n8k16<T>(sum[i][j], a[i], b[0], b[1]);
        ptx::mma_m16n8k16<T>(sum[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// -inf in the columns from `columns` on, of an accumulator whose first column is `first`.
template <int kRowTiles, int kColumns>
__device__ __forceinline__ void hide(float (&c)[kRowTiles][kColumns][4], int first, int columns) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (first + 8 * j + 2 * (lane() % 4) + e % 2 >= columns) c[i][j][e] = -INFINITY;
}

// A row's four lanes together.
__device__ __forceinline__ float sum_of_row(float x) {
  x += __shfl_xor_sync(kAll, x, 1);
  return x + __shfl_xor_sync(kAll, x, 2);
}
__device__ __forceinline__ float largest_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAll, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAll, x, 2));
}

// Writes 16 rows of `sums`, each times the factor of its half, from row `row` of x on. They pass through `tile`, the
// warp's own 16 rows of shared memory, to leave in chunks.
template <class T, int kWidth>
__device__ __forceinline__ void store(const float (&sums)[kWidth / 8][4], float upper, float lower, Chunk* tile,
                                      int tile_row, T* x, int64_t stride, int row, int rows, int D) {
  constexpr int kChunks = kWidth / 8;
  const int g = lane() / 4, t = lane() % 4;
  __syncwarp();  // all lanes have read their operands
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    tile[at<kWidth>(tile_row + g, j)].word[t] = pack<T>(sums[j][0] * upper, sums[j][1] * upper);
    tile[at<kWidth>(tile_row + g + 8, j)].word[t] = pack<T>(sums[j][2] * lower, sums[j][3] * lower);
  }
  __syncwarp();
#pragma unroll
  for (int i = lane(); i < 16 * kChunks; i += 32) {
    const int r = i / kChunks, chunk = i % kChunks;
    if (row + r < rows && chunk * 8 < D)
      *reinterpret_cast<Chunk*>(x + (row + r) * stride + chunk * 8) = tile[at<kWidth>(tile_row + r, chunk)];
  }
}

template <class T>
struct Head {  // one head of one sequence
  Bounds at;
  Rows<T> q, k, v;

  __device__ Head(const Attention& a, Work work) : at(bounds_of(a, work.sequence)) {
    const int64_t part = int64_t(a.heads) * a.D, stride = 3 * part;
    const T* const first = static_cast<const T*>(a.qkv) + at.start * stride + work.head * a.D;
    q = {first, stride, at.length}, k = {first + part, stride, at.length}, v = {first + 2 * part, stride, at.length};
  }
};

}  // namespace fastbert::cuda
