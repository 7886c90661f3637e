// y = gelu(x weight^T + bias) in 16-bit types: a product on tensor cores (mma.sync) with the GELU in its epilogue.
//
// A block computes a tile of y: 128 x 128 by four warps of 64 x 64, or 64 x 64 if the large tiles would not fill the
// device. Its rows of x and weight arrive by cp.async in steps of 32 columns, three steps ahead of the products, in
// four slots of swizzled shared memory. Two blocks share a multiprocessor (64 KB each), so that one multiplies while
// the other applies the GELU. On sm_75 one block takes all the shared memory, and waits for its copies. Tiles are
// computed in groups of 8 rows of tiles, whose x and weight stay in L2.
//
// The epilogue adds the bias and rounds. The result is the pre-activation, at which the backward takes the derivative.
// It passes through shared memory, from which each thread reads 8 neighbouring channels at a time to write them and to
// apply the GELU: by then the accumulators' registers are free.
//
// The kernel takes rows whose size is a multiple of 16 bytes. Everything else, and fp32, which obeys PyTorch's TF32
// setting, is computed by the library's product and then bias_gelu's pass (dense_gelu.cpp). So are calls on sm_100 and
// similar GPUs, which multiply many times faster with other instructions than with mma.sync. On sm_90, which reaches
// some 60 % of its peak with mma.sync, the library's product and a pass are faster: docs/linear.md has the times.
//
// Bytes moved: x, weight and y once, and the pre-activation if it is kept; from L2, x once for every 128 channels and
// weight once for every 128 rows. On sm_90 a step of a large tile takes 144 instructions per warp, of which 64 are mma
// and 16 ldmatrix, and the epilogue about 20 per element (39 with tanh).
#include "../dense_gelu.h"
#include "../gelu.h"
#include "tiles.cuh"

namespace fastbert::cuda {

namespace {

constexpr int kThreads = 128;  // 2 x 2 warps
constexpr int kStages = 4, kStep = 32;
constexpr int kGroup = 8;  // rows of tiles

template <int kSide>
constexpr int kTileChunks = kSide * kStep / 8;

struct Tile {
  int row, column;
};

// The order of tiles: column by column within a group of kGroup rows of tiles, group by group.
__device__ __forceinline__ Tile tile_of(int index, int down, int across) {
  const int group = index / (kGroup * across), within = index % (kGroup * across);
  const int height = min(down - group * kGroup, kGroup);
  return {group * kGroup + within % height, within / height};
}

// A thread's part of the copies to a tile of kSide rows of x or weight: the same chunk of every kRowsApart-th row.
// After the last row, that row is copied again; products with these copies are not used.
template <class T, int kSide>
struct Copies {
  static constexpr int kChunks = kStep / 8, kRowsApart = kThreads / kChunks, kCount = kSide / kRowsApart;
  const T* from[kCount];
  int place, columns;  // columns: the number of columns from this thread's first on

  __device__ __forceinline__ Copies(const Rows<T>& rows, int first_row, int inner) {
    const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      from[i] = rows.first + min(first_row + row + i * kRowsApart, rows.count - 1) * rows.stride + chunk * 8;
    place = swizzle<kStep>(row, chunk), columns = inner - chunk * 8;
  }

  // Starts the copies, from `column` on, with zeros after the last column.
  __device__ __forceinline__ void start(Chunk* tile, int column) const {
    Chunk* const to = tile + place;
    if (is_turing()) {
      Chunk chunk[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        chunk[i] = column < columns ? *reinterpret_cast<const Chunk*>(from[i] + column) : Chunk{};
#pragma unroll
      for (int i = 0; i < kCount; ++i) to[i * kRowsApart * kChunks] = chunk[i];
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        ptx::cp_async16(to + i * kRowsApart * kChunks, from[i] + column, column < columns ? 16 : 0);
    }
  }
};

template <class T, int kSide, bool kTanh>
__global__ void __launch_bounds__(kThreads, 2)
    dense_gelu_kernel(Rows<T> x,       // [rows, inner]
                      Rows<T> weight,  // [channels, inner]
                      int inner,
                      const T* __restrict__ bias,               // [channels]
                      Vec<T, 8>* __restrict__ y,                // [rows, channels / 8]
                      Vec<T, 8>* __restrict__ preactivation) {  // the same, or nullptr
  if (is_unused<T, kStep>()) return;
  constexpr int kWarpSide = kSide / 2, kRowTiles = kWarpSide / 16, kColumns = kWarpSide / 8;
  const Tile tile = tile_of(blockIdx.x, divide_up(x.count, kSide), divide_up(weight.count, kSide));
  const int first_row = tile.row * kSide, first_channel = tile.column * kSide, steps = divide_up(inner, kStep);
  const int warp = threadIdx.x / 32, warp_row = warp / 2 * kWarpSide, warp_channel = warp % 2 * kWarpSide;
  FB_DYNAMIC_SHARED(shared);
  Chunk* const slots = reinterpret_cast<Chunk*>(shared);
  const Copies<T, kSide> of_x(x, first_row, inner), of_weight(weight, first_channel, inner);

  // After the last step it commits an empty group, because the loop waits by counting groups.
  const auto start = [&](int step) {
    if (step < steps) {
      Chunk* const slot = slots + step % kStages * 2 * kTileChunks<kSide>;
      of_x.start(slot, step * kStep);
      of_weight.start(slot + kTileChunks<kSide>, step * kStep);
    }
    commit_copies();
  };
  for (int step = 0; step < kStages - 1; ++step) start(step);

  float sum[kRowTiles][kColumns][4] = {};
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kStages - 2>();
    __syncthreads();
    start(step + kStages - 1);  // into the slot that all warps had read before the barrier
    const Chunk* const rows = slots + step % kStages * 2 * kTileChunks<kSide>;
    const Chunk* const channels = rows + kTileChunks<kSide>;
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
        ptx::ldmatrix_x4(a[i], rows + swizzle<kStep>(warp_row + 16 * i + lane() % 16, 2 * k + lane() / 16));
#pragma unroll
      for (int j = 0; j < kColumns; j += 2) {
        const int channel = warp_channel + 8 * j + lane() / 16 * 8 + lane() % 8;
        uint32_t b[4];
        ptx::ldmatrix_x4(b, channels + swizzle<kStep>(channel, 2 * k + lane() / 8 % 2));
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          multiply_add<T>(sum[i][j], a[i], b[0], b[1]);
          multiply_add<T>(sum[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }

  __syncthreads();  // all warps have read the last slot
  Chunk* const own = slots + warp * kWarpSide * kWarpSide / 8;
  const int g = lane() / 4, t = lane() % 4, row = first_row + warp_row, first = first_channel + warp_channel;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    const int channel = first + 8 * j + 2 * t;
    const bool inside = channel < weight.count;
    const float b0 = inside ? to_float(bias[channel]) : 0, b1 = inside ? to_float(bias[channel + 1]) : 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      own[swizzle<kWarpSide>(16 * i + g, j)].word[t] = pack<T>(sum[i][j][0] + b0, sum[i][j][1] + b1);
      own[swizzle<kWarpSide>(16 * i + g + 8, j)].word[t] = pack<T>(sum[i][j][2] + b0, sum[i][j][3] + b1);
    }
  }
  __syncwarp();
#pragma unroll 2
  for (int i = lane(); i < kWarpSide * kColumns; i += 32) {
    const int r = i / kColumns, j = i % kColumns;
    if (row + r >= x.count || first + 8 * j >= weight.count) continue;
    const int64_t place = int64_t(row + r) * (weight.count / 8) + first / 8 + j;
    Vec<T, 8> v = *reinterpret_cast<const Vec<T, 8>*>(own + swizzle<kWarpSide>(r, j));
    if (preactivation) preactivation[place] = v;
#pragma unroll
    for (int e = 0; e < 8; ++e) v.at[e] = from_float<T>(gelu_for<T, kTanh>(to_float(v.at[e])));
    y[place] = v;
  }
}

template <class T, int kSide>
const char* forward(const DenseGelu& dense, void* y, void* preactivation, void* stream) {
  const int64_t blocks = divide_up(dense.rows, kSide) * divide_up(dense.channels, kSide);
  if (blocks > INT32_MAX) return "the tensor is too large for one launch";
  const auto kernel = dense.tanh ? dense_gelu_kernel<T, kSide, true> : dense_gelu_kernel<T, kSide, false>;
  const auto rows = [&](const void* first, int64_t count) {
    return Rows<T>{static_cast<const T*>(first), dense.inner, int(count)};
  };
  return launch(kernel, dim3(unsigned(blocks)), dim3(kThreads), kStages * 2 * kTileChunks<kSide> * sizeof(Chunk),
                stream, rows(dense.x, dense.rows), rows(dense.weight, dense.channels), int(dense.inner),
                static_cast<const T*>(dense.bias), static_cast<Vec<T, 8>*>(y), static_cast<Vec<T, 8>*>(preactivation));
}

}  // namespace

// ---- launchers

bool dense_gelu_takes(const DenseGelu& dense) {
  const auto fits = [](int64_t size) { return size > 0 && size < INT32_MAX - 256; };
  const int architecture = major_architecture();
  return (dense.dtype == DType::f16 || (dense.dtype == DType::bf16 && architecture > 7)) && fits(dense.rows) &&
         fits(dense.inner) && fits(dense.channels) && dense.inner % 8 == 0 && dense.channels % 8 == 0 &&
         is_aligned(dense.x, 16) && is_aligned(dense.weight, 16) && architecture != 10 && architecture != 11;
}

const char* dense_gelu_fwd(const DenseGelu& dense, void* y, void* preactivation, void* stream) {
  const bool large = divide_up(dense.rows, 128) * divide_up(dense.channels, 128) >= multiprocessors();
  const auto of_type = [&](auto element) {
    using T = decltype(element);
    return large ? forward<T, 128>(dense, y, preactivation, stream) : forward<T, 64>(dense, y, preactivation, stream);
  };
  return dense.dtype == DType::bf16 ? of_type(__nv_bfloat16{}) : of_type(__half{});
}

}  // namespace fastbert::cuda
