// LayerNorm of x, or of dropout(x + x_bias) + residual, on [rows, channels], and its gradients; channels <= 8192.
//
// A row belongs to one warp, and from 1025 channels on to one more for every 1024. Rows of one warp need no barrier, so
// the many rows of a multiprocessor do not wait for each other. A thread holds 16, 24 or 32 channels of its row in
// registers, so a row is read once; statistics are fp32. A thread owns kVec neighbouring channels at a time (16 bytes
// of y), a warp 32 times as many: accesses are whole cache lines. All loads of a row are issued before the first result
// is used. If a row's size is no multiple of 16 bytes, or a pointer is not aligned, the same code loads element by
// element.
//
// The mean is summed as differences to the row's first element, so a constant row gives exactly the bias. The rounding
// error of the mean is corrected when the squares are summed, so a large offset costs no digits. The saved mean is
// rounded again: the backward corrects that too.
//
// Backward: one block a multiprocessor, as large as registers allow, loops over the rows. The sums for dweight and
// dbias stay in registers. Those for dx_bias do not fit beside them: they are in shared memory, where each thread reads
// and writes only its own. All are added over the block's rows in order and leave as one row of partial sums a block,
// which column_sums adds up. The dropout mask is computed again and kept as one bit a channel.
//
// Bytes moved: forward x, residual and y once; backward dy, x, residual, dx and dresidual once, which is the floor; 8
// bytes of statistics a row, 12 a channel and multiprocessor of partial sums. Parameters are read for each row, from
// the first-level cache. An H100 hides its latency with about 18 KB of loads in flight on a multiprocessor; of 1024
// channels the backward has 32 KB (16 bits) or 64 KB (fp32), the forward 40 or 64. Expected there, not measured: 85 %
// of the bandwidth of a copy forward, 80 % backward. 4096 rows of 1024 in fp32: 50 MB and 17 us at 3 TB/s, 21 us at 80
// %; adding up the sums in the block takes 1 us, column_sums 2 us.
#include "../layer_norm.h"
#include "common.cuh"
#include "philox.cuh"

namespace fastbert::cuda {

namespace {

constexpr int kMaxWarps = 16;    // of a block
constexpr int kForwardRows = 4;  // of a block, where a row is a warp

// How many warps of the backward a multiprocessor has registers for; a channel takes two sums, z, and dy or residual.
constexpr int backward_warps(int thread_channels) {
  return thread_channels == 16 ? 16 : thread_channels == 24 ? 12 : 8;
}

// ---- rows

// A thread's columns, of kVec channels each: number i is column(i) of the row. Neighbouring lanes have neighbouring
// columns, and each warp has its own range of them.
template <int kVec, bool kVectors>
struct Place {
  int64_t row;
  int channels, columns;  // of the row; columns is 0 beyond the last row
  int first;

  __device__ int column(int i) const { return first + 32 * i; }
  __device__ bool inside(int i) const { return column(i) < columns; }
  __device__ bool inside(int i, int j) const {
    return kVectors ? inside(i) : column(i) * kVec + j < channels && columns > 0;
  }
};

// Column i of a tensor of rows, or of a parameter, which is a tensor of one row; zeros beyond the row's end.
template <class T, int kVec, bool kVectors>
__device__ __forceinline__ Vec<T, kVec> load(const T* tensor, int64_t row, const Place<kVec, kVectors>& place, int i) {
  if constexpr (kVectors) {
    return reinterpret_cast<const Vec<T, kVec>*>(tensor)[row * place.columns + place.column(i)];
  } else {
    Vec<T, kVec> v;
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      v.at[j] = place.inside(i, j) ? tensor[row * place.channels + place.column(i) * kVec + j] : from_float<T>(0);
    return v;
  }
}

template <class T, int kVec, bool kVectors>
__device__ __forceinline__ void store(const float (&v)[kVec], T* tensor, int64_t row,
                                      const Place<kVec, kVectors>& place, int i) {
  Vec<T, kVec> rounded;
#pragma unroll
  for (int j = 0; j < kVec; ++j) rounded.at[j] = from_float<T>(v[j]);
  if constexpr (kVectors) {
    reinterpret_cast<Vec<T, kVec>*>(tensor)[row * place.columns + place.column(i)] = rounded;
  } else {
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (place.inside(i, j)) tensor[row * place.channels + place.column(i) * kVec + j] = rounded.at[j];
  }
}

// Replaces v in all threads of a row by its sums over them. Several warps exchange theirs through shared memory.
template <int N>
__device__ __forceinline__ void add_over_row(float (&v)[N]) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
#pragma unroll
    for (int n = 0; n < N; ++n) v[n] += __shfl_xor_sync(~0u, v[n], lanes);
  if (blockDim.x == 32) return;
  FB_SHARED(float, warp_sums, N* kMaxWarps);
  const int warps = blockDim.x / 32, first = threadIdx.y * warps;
  __syncthreads();  // the sums of an earlier call have been read
  if (threadIdx.x % 32 == 0)
#pragma unroll
    for (int n = 0; n < N; ++n) warp_sums[n * kMaxWarps + first + threadIdx.x / 32] = v[n];
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    v[n] = warp_sums[n * kMaxWarps + first];
#pragma unroll 1
    for (int w = 1; w < warps; ++w) v[n] += warp_sums[n * kMaxWarps + first + w];
  }
}

// v of the first thread of the row. To be called once a kernel; a row of several warps has a block to itself.
__device__ __forceinline__ float first_of_row(float v) {
  if (blockDim.x == 32) return __shfl_sync(~0u, v, 0);
  FB_SHARED(float, first, 1);
  if (threadIdx.x == 0) first[0] = v;
  __syncthreads();
  return first[0];
}

// Loads all of a thread's columns of a row. Nothing waits here: the results are first used in sum().
template <class T, int kVec, int kColumns, bool kVectors>
__device__ __forceinline__ void start_loads(Vec<T, kVec> (&v)[kColumns], const T* tensor,
                                            const Place<kVec, kVectors>& place) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (place.inside(i)) v[i] = load(tensor, place.row, place, i);
}

// Applies dropout to column i of z; bit i kVec + j of the result is set where element j is kept. A call of Philox
// serves 8 channels: where columns have 4, two threads make the same call and use half of it each.
template <int kVec, bool kVectors>
__device__ __forceinline__ uint32_t drop_out(float (&z)[kVec], const DeviceDropout& drop, Key key,
                                             const Place<kVec, kVectors>& place, int i) {
  const Words words = philox(place.column(i) * kVec / 8, uint32_t(place.row), uint32_t(place.row >> 32), 0, key);
  const int half = place.column(i) * kVec % 8 / 4;  // which half, for columns of 4
  uint32_t kept = 0;
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    const uint32_t word = kVec == 4 && half ? words.word[2 + j / 2 % 2] : words.word[j / 2];
    const bool keep = (word >> 16 * (j % 2) & 0xffff) >= drop.threshold;
    z[j] = keep ? z[j] * drop.keep_scale : 0;
    kept |= uint32_t(keep) << (i * kVec + j);
  }
  return kept;
}

// z of a row from the loaded x and residual; returns a bit for each element that dropout keeps.
template <class T, class R, class P, int kVec, int kColumns, bool kVectors>
__device__ __forceinline__ uint32_t sum(float (&z)[kColumns][kVec], const Vec<T, kVec> (&x)[kColumns],
                                        const Vec<R, kVec> (&residual)[kColumns], bool with_residual, const P* x_bias,
                                        const DeviceDropout& drop, Key key, const Place<kVec, kVectors>& place) {
  uint32_t kept = 0;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (!place.inside(i)) continue;
#pragma unroll
    for (int j = 0; j < kVec; ++j) z[i][j] = to_float(x[i].at[j]);
    if (x_bias) {
      const Vec<P, kVec> b = load(x_bias, 0, place, i);
#pragma unroll
      for (int j = 0; j < kVec; ++j) z[i][j] += to_float(b.at[j]);
    }
    if (drop.threshold) kept |= drop_out(z[i], drop, key, place, i);
    if (with_residual)
#pragma unroll
      for (int j = 0; j < kVec; ++j) z[i][j] += to_float(residual[i].at[j]);
  }
  return kept;
}

// ---- forward

template <class T, class R, class P, int kThreadChannels, bool kVectors>
__global__ void __launch_bounds__(256, 2)                  // without the 2, ptxas goes down to 80 registers and spills
    layer_norm_fwd_kernel(const T* __restrict__ x,         // [rows, channels]
                          const R* __restrict__ residual,  // [rows, channels], or nullptr
                          const P* __restrict__ x_bias,    // [channels], or nullptr
                          const P* __restrict__ weight,    // [channels]
                          const P* __restrict__ bias,      // [channels]
                          R* __restrict__ y,               // [rows, channels]
                          float* __restrict__ mean,        // [rows]
                          float* __restrict__ rstd,        // [rows]
                          int64_t rows, int channels, float eps, DeviceDropout drop) {
  constexpr int kVec = 16 / sizeof(R), kColumns = kThreadChannels / kVec;
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;  // never some warps of a row alone, which would miss barriers: such a row has its own block
  const Place<kVec, kVectors> place{row, channels, int(divide_up(channels, kVec)),
                                    int(threadIdx.x / 32 * 32 * kColumns + threadIdx.x % 32)};

  Vec<T, kVec> xs[kColumns];
  Vec<R, kVec> residuals[kColumns];
  float z[kColumns][kVec];
  start_loads(xs, x, place);
  if (residual) start_loads(residuals, residual, place);
  sum(z, xs, residuals, residual, x_bias, drop, drop.threshold ? site_key(drop) : Key{}, place);

  const float shift = first_of_row(z[0][0]);
  float total[1] = {};
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (place.inside(i, j)) total[0] += z[i][j] - shift;
  add_over_row(total);
  const float inverse_channels = 1.0f / channels, row_mean = shift + total[0] * inverse_channels;

  float moments[2] = {};
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (place.inside(i, j)) {
        z[i][j] -= row_mean;
        moments[0] += z[i][j];
        moments[1] = fmaf(z[i][j], z[i][j], moments[1]);
      }
  add_over_row(moments);
  const float correction = moments[0] * inverse_channels,
              variance = fmaxf(moments[1] * inverse_channels - correction * correction, 0);
  const float scale = rsqrtf(variance + eps), offset = -correction * scale;

#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (!place.inside(i)) continue;
    const Vec<P, kVec> w = load(weight, 0, place, i), b = load(bias, 0, place, i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) z[i][j] = fmaf(fmaf(z[i][j], scale, offset), to_float(w.at[j]), to_float(b.at[j]));
    store(z[i], y, row, place, i);
  }
  if (place.first == 0) mean[row] = row_mean + correction, rstd[row] = scale;
}

// ---- backward: with g = dy weight and n = (z - mean) rstd, dz = rstd (g - mean(g) - n mean(g n)); dresidual = dz,
// dx = dropout(dz), and the sums over the rows dweight = sum(dy n), dbias = sum(dy), dx_bias = sum(dx)

template <class T, class R, class P, int kThreadChannels, bool kVectors>
__global__ void __launch_bounds__(32 * backward_warps(kThreadChannels), 1)
    layer_norm_bwd_kernel(const R* __restrict__ dy,        // [rows, channels]
                          const T* __restrict__ x,         // [rows, channels]
                          const R* __restrict__ residual,  // [rows, channels], or nullptr
                          const P* __restrict__ x_bias,    // [channels], or nullptr
                          const P* __restrict__ weight,    // [channels]
                          const float* __restrict__ mean,  // [rows]
                          const float* __restrict__ rstd,  // [rows]
                          T* __restrict__ dx,              // [rows, channels], or nullptr
                          R* __restrict__ dresidual,       // [rows, channels], or nullptr
                          float* __restrict__ partials,    // [blocks, quantities, channels]: dweight, dbias, dx_bias
                          int64_t rows, int channels, int quantities, DeviceDropout drop) {
  constexpr int kVec = 16 / sizeof(R), kColumns = kThreadChannels / kVec;
  const int columns = divide_up(channels, kVec);
  Place<kVec, kVectors> place{0, channels, columns, int(threadIdx.x / 32 * 32 * kColumns + threadIdx.x % 32)};
  const Key key = drop.threshold ? site_key(drop) : Key{};
  const float inverse_channels = 1.0f / channels;

  float dweight[kColumns][kVec] = {}, dbias[kColumns][kVec] = {};
  FB_DYNAMIC_SHARED(memory);
  float* const row_sums = reinterpret_cast<float*>(memory);  // [blockDim.y, channels]: of dx_bias, if it is wanted
  if (quantities == 3) {
    const float zeros[kVec] = {};
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (place.inside(i)) store(zeros, row_sums, threadIdx.y, place, i);
  }

  for (int64_t first_row = int64_t(blockIdx.x) * blockDim.y; first_row < rows;
       first_row += int64_t(gridDim.x) * blockDim.y) {
    place.row = first_row + threadIdx.y;
    place.columns = place.row < rows ? columns : 0;
    Vec<T, kVec> xs[kColumns];
    Vec<R, kVec> d[kColumns];  // the residual and, once z is computed, dy: there are no registers for both
    float z[kColumns][kVec];
    start_loads(xs, x, place);
    start_loads(d, residual ? residual : dy, place);
    const float row_mean = place.row < rows ? mean[place.row] : 0, scale = place.row < rows ? rstd[place.row] : 0;
    const uint32_t kept = sum(z, xs, d, residual, x_bias, drop, key, place);
    if (residual) start_loads(d, dy, place);

    float total[3] = {};  // z - mean, g, and their products
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (!place.inside(i)) continue;
      const Vec<P, kVec> w = load(weight, 0, place, i);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        if (!place.inside(i, j)) continue;
        z[i][j] -= row_mean;
        const float g = to_float(d[i].at[j]) * to_float(w.at[j]);
        total[0] += z[i][j];
        total[1] += g;
        total[2] = fmaf(g, z[i][j], total[2]);
      }
    }
    add_over_row(total);
    const float correction = total[0] * inverse_channels, g_mean = total[1] * inverse_channels;
    const float offset = -correction * scale,
                minus_gn_mean = -(total[2] * inverse_channels - correction * g_mean) * scale;

#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (!place.inside(i)) continue;
      const Vec<P, kVec> w = load(weight, 0, place, i);
      float dz[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float dy_ = to_float(d[i].at[j]), n = fmaf(z[i][j], scale, offset);
        dz[j] = (fmaf(n, minus_gn_mean, dy_ * to_float(w.at[j])) - g_mean) * scale;
        dweight[i][j] = fmaf(dy_, n, dweight[i][j]);
        dbias[i][j] += dy_;
      }
      if (dresidual) store(dz, dresidual, place.row, place, i);
      if (drop.threshold) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) dz[j] = kept >> (i * kVec + j) & 1 ? dz[j] * drop.keep_scale : 0;
      }
      if (dx) store(dz, dx, place.row, place, i);
      if (quantities == 3) {
        const Vec<float, kVec> so_far = load(row_sums, threadIdx.y, place, i);
#pragma unroll
        for (int j = 0; j < kVec; ++j) dz[j] += so_far.at[j];
        store(dz, row_sums, threadIdx.y, place, i);
      }
    }
  }
  if (quantities == 0) return;

  place.columns = columns;
  const auto add_up = [&](int quantity) {
    __syncthreads();
    for (int channel = threadIdx.y * blockDim.x + threadIdx.x; channel < channels; channel += blockDim.x * blockDim.y) {
      float total = 0;
      for (unsigned r = 0; r < blockDim.y; ++r) total += row_sums[r * channels + channel];
      partials[(int64_t(blockIdx.x) * quantities + quantity) * channels + channel] = total;
    }
  };
  const auto add_up_registers = [&](int quantity, const float (&sums)[kColumns][kVec]) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (place.inside(i)) store(sums[i], row_sums, threadIdx.y, place, i);
    add_up(quantity);
  };
  if (quantities == 3) add_up(2);
  add_up_registers(0, dweight);
  add_up_registers(1, dbias);
}

// ---- launchers

constexpr int kWarpChannels = 1024;  // that a warp holds
static_assert(kMostChannels <= backward_warps(32) * kWarpChannels, "a row fits a block");

int warps_per_row(int64_t channels) { return int(divide_up(channels, kWarpChannels)); }

// How many channels a thread holds: as few as possible, so that more rows fit.
int thread_channels(int64_t channels) {
  const int64_t each = divide_up(channels, 32 * warps_per_row(channels));
  return each <= 16 ? 16 : each <= 24 ? 24 : 32;
}

int backward_rows(int64_t channels) { return backward_warps(thread_channels(channels)) / warps_per_row(channels); }

// Calls f with values of the element types of x, of y and of the parameters, with how many channels a thread holds, and
// with whether it loads vectors.
template <class F>
const char* for_types(const LayerNorm& op, DType parameters, bool vectors, F&& f) {
  const auto with_types = [&](auto x, auto y, auto parameter) {
    constexpr auto yes = Constant<true>{};
    if (!vectors) return f(x, y, parameter, Constant<32>{}, Constant<false>{});
    switch (thread_channels(op.channels)) {
      case 16: return f(x, y, parameter, Constant<16>{}, yes);
      case 24: return f(x, y, parameter, Constant<24>{}, yes);
      default: return f(x, y, parameter, Constant<32>{}, yes);
    }
  };
  return for_dtype(op.x_type, [&](auto x) {
    if (op.y_type == DType::f32) return with_types(x, float{}, float{});
    return parameters == DType::f32 ? with_types(x, x, float{}) : with_types(x, x, x);
  });
}

bool inputs_are_aligned(const LayerNorm& op) {
  return op.channels % (op.y_type == DType::f32 ? 4 : 8) == 0 && is_aligned(op.x, 16) && is_aligned(op.residual, 16) &&
         is_aligned(op.x_bias, 16) && is_aligned(op.weight, 16) && is_aligned(op.bias, 16);
}

}  // namespace

const char* layer_norm_fwd(const LayerNorm& op, DType parameters, const DeviceDropout& drop, void* y, int64_t rows,
                           void* stream) {
  const bool vectors = inputs_are_aligned(op) && is_aligned(y, 16);
  return for_types(op, parameters, vectors, [&](auto x, auto out, auto p, auto held, auto in_vectors) {
    using T = decltype(x);
    using R = decltype(out);
    using P = decltype(p);
    const int warps = warps_per_row(op.channels), block_rows = warps == 1 ? kForwardRows : 1;
    const int64_t blocks = divide_up(rows, block_rows);
    if (blocks > INT32_MAX) return "the tensor is too large for one launch";
    return launch(
        layer_norm_fwd_kernel<T, R, P, held.value, in_vectors.value>, dim3(blocks), dim3(32 * warps, block_rows), 0,
        stream, static_cast<const T*>(op.x), static_cast<const R*>(op.residual), static_cast<const P*>(op.x_bias),
        static_cast<const P*>(op.weight), static_cast<const P*>(op.bias), static_cast<R*>(y),
        static_cast<float*>(op.mean), static_cast<float*>(op.rstd), rows, int(op.channels), float(op.eps), drop);
  });
}

int64_t layer_norm_bwd_blocks(int64_t rows, int64_t channels) {
  const int64_t possible = divide_up(rows, backward_rows(channels)), processors = multiprocessors();
  return possible < processors ? possible : processors;
}

const char* layer_norm_bwd(const LayerNorm& op, DType parameters, const DeviceDropout& drop,
                           const LayerNormGradients& gradients, float* partials, int quantities, int64_t blocks,
                           int64_t rows, void* stream) {
  const bool vectors = inputs_are_aligned(op) && is_aligned(gradients.dy, 16) && is_aligned(gradients.dx, 16) &&
                       is_aligned(gradients.dresidual, 16);
  return for_types(op, parameters, vectors, [&](auto x, auto out, auto p, auto held, auto in_vectors) {
    using T = decltype(x);
    using R = decltype(out);
    using P = decltype(p);
    const int warps = warps_per_row(op.channels), block_rows = backward_warps(held.value) / warps;
    return launch(layer_norm_bwd_kernel<T, R, P, held.value, in_vectors.value>, dim3(blocks),
                  dim3(32 * warps, block_rows), sizeof(float) * block_rows * op.channels, stream,
                  static_cast<const R*>(gradients.dy), static_cast<const T*>(op.x), static_cast<const R*>(op.residual),
                  static_cast<const P*>(op.x_bias), static_cast<const P*>(op.weight),
                  static_cast<const float*>(op.mean), static_cast<const float*>(op.rstd), static_cast<T*>(gradients.dx),
                  static_cast<R*>(gradients.dresidual), partials, rows, int(op.channels), quantities, drop);
  });
}

}  // namespace fastbert::cuda
