// LayerNorm of x, or of dropout(x + x_bias) + residual, on [rows, channels], and its gradients; channels <= 8192.
//
// A row belongs to one warp, and from 1025 channels on to one more for every 1024: there is no barrier, and the many
// rows of a multiprocessor do not wait for each other. A thread holds 16, 24 or 32 channels of its row in registers, so
// a row is read once; statistics are fp32. It owns kVec neighbouring channels at a time, 16 bytes of y, and the warp 32
// kVec: accesses are whole cache lines. All loads of a row are issued before the first of them is waited for. Where a
// row is no multiple of 16 bytes or a pointer is not aligned, the same text loads element by element.
//
// Sums run from the row's first element on, so a constant row gives exactly the bias; what rounding left of the mean is
// taken off in the walk that sums the squares, so a large offset costs no digits. The saved mean is rounded too: the
// backward takes off what is left again.
//
// Backward: one block a multiprocessor, as large as registers allow, walks over the rows. The sums for dweight and
// dbias stay in registers. Those for dx_bias would be too many: they are in shared memory, where each thread reads and
// writes what is its own. All are added over the block's rows in order and leave as one row of partial sums a block;
// column_sums adds those. The dropout mask is drawn again, and is one bit a channel.
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

// How many warps of the backward a multiprocessor has registers for: two sums, z and dy or residual for each channel.
constexpr int backward_warps(int thread_channels) {
  return thread_channels == 16 ? 16 : thread_channels == 24 ? 12 : 8;
}

// ---- rows

// Where a thread stands: its column i is kVec channels at column(i) of the row. Neighbouring lanes have neighbouring
// columns, and each warp a range of its own.
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
__device__ __forceinline__ Vec<T, kVec> load(const T* tensor, int64_t row, const Place<kVec, kVectors>& at, int i) {
  if constexpr (kVectors) {
    return reinterpret_cast<const Vec<T, kVec>*>(tensor)[row * at.columns + at.column(i)];
  } else {
    Vec<T, kVec> v;
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      v.at[j] = at.inside(i, j) ? tensor[row * at.channels + at.column(i) * kVec + j] : from_float<T>(0);
    return v;
  }
}

template <class T, int kVec, bool kVectors>
__device__ __forceinline__ void store(const float (&v)[kVec], T* tensor, int64_t row, const Place<kVec, kVectors>& at,
                                      int i) {
  Vec<T, kVec> rounded;
#pragma unroll
  for (int j = 0; j < kVec; ++j) rounded.at[j] = from_float<T>(v[j]);
  if constexpr (kVectors) {
    reinterpret_cast<Vec<T, kVec>*>(tensor)[row * at.columns + at.column(i)] = rounded;
  } else {
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (at.inside(i, j)) tensor[row * at.channels + at.column(i) * kVec + j] = rounded.at[j];
  }
}

// The sums of v over the threads of a row, in all of them. Rows of several warps meet in shared memory.
template <int N>
__device__ __forceinline__ void add_over_row(float (&v)[N]) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
#pragma unroll
    for (int n = 0; n < N; ++n) v[n] += __shfl_xor_sync(~0u, v[n], lanes);
  if (blockDim.x == 32) return;
  FB_SHARED(float, of_warp, N* kMaxWarps);
  const int warps = blockDim.x / 32, first = threadIdx.y * warps;
  __syncthreads();  // the sums before these have been read
  if (threadIdx.x % 32 == 0)
#pragma unroll
    for (int n = 0; n < N; ++n) of_warp[n * kMaxWarps + first + threadIdx.x / 32] = v[n];
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    v[n] = of_warp[n * kMaxWarps + first];
#pragma unroll 1
    for (int w = 1; w < warps; ++w) v[n] += of_warp[n * kMaxWarps + first + w];
  }
}

// v of the first thread of the row. Once a kernel; rows of several warps have a block each.
__device__ __forceinline__ float first_of_row(float v) {
  if (blockDim.x == 32) return __shfl_sync(~0u, v, 0);
  FB_SHARED(float, first, 1);
  if (threadIdx.x == 0) first[0] = v;
  __syncthreads();
  return first[0];
}

// All of a thread's columns of a row: the loads are on their way, and nothing waits for them yet.
template <class T, int kVec, int kColumns, bool kVectors>
__device__ __forceinline__ void start_loads(Vec<T, kVec> (&v)[kColumns], const T* tensor,
                                            const Place<kVec, kVectors>& at) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (at.inside(i)) v[i] = load(tensor, at.row, at, i);
}

// Dropout of column i of z; bit i kVec + j of the result is set where it keeps element j. A call of Philox serves 8
// channels: where columns have 4, two threads make the same and take a half each.
template <int kVec, bool kVectors>
__device__ __forceinline__ uint32_t drop_out(float (&z)[kVec], const DeviceDropout& drop, Key key,
                                             const Place<kVec, kVectors>& at, int i) {
  const Words words = philox(at.column(i) * kVec / 8, uint32_t(at.row), uint32_t(at.row >> 32), 0, key);
  const int half = at.column(i) * kVec % 8 / 4;  // of the words, for columns of 4
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

// z of a row, from x and residual as they came; returns which elements dropout keeps.
template <class T, class R, class P, int kVec, int kColumns, bool kVectors>
__device__ __forceinline__ uint32_t sum(float (&z)[kColumns][kVec], const Vec<T, kVec> (&x)[kColumns],
                                        const Vec<R, kVec> (&residual)[kColumns], bool with_residual, const P* x_bias,
                                        const DeviceDropout& drop, Key key, const Place<kVec, kVectors>& at) {
  uint32_t kept = 0;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (!at.inside(i)) continue;
#pragma unroll
    for (int j = 0; j < kVec; ++j) z[i][j] = to_float(x[i].at[j]);
    if (x_bias) {
      const Vec<P, kVec> b = load(x_bias, 0, at, i);
#pragma unroll
      for (int j = 0; j < kVec; ++j) z[i][j] += to_float(b.at[j]);
    }
    if (drop.threshold) kept |= drop_out(z[i], drop, key, at, i);
    if (with_residual)
#pragma unroll
      for (int j = 0; j < kVec; ++j) z[i][j] += to_float(residual[i].at[j]);
  }
  return kept;
}

// ---- forward

template <class T, class R, class P, int kThreadChannels, bool kVectors>
__global__ void __launch_bounds__(256, 2)  // the 2: left alone, ptxas spills some bytes to get down to 80 registers
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
  if (row >= rows) return;  // a row of several warps has a block to itself: all of that stays
  const Place<kVec, kVectors> at{row, channels, int(divide_up(channels, kVec)),
                                 int(threadIdx.x / 32 * 32 * kColumns + threadIdx.x % 32)};

  Vec<T, kVec> xs[kColumns];
  Vec<R, kVec> residuals[kColumns];
  float z[kColumns][kVec];
  start_loads(xs, x, at);
  if (residual) start_loads(residuals, residual, at);
  sum(z, xs, residuals, residual, x_bias, drop, drop.threshold ? site_key(drop) : Key{}, at);

  const float shift = first_of_row(z[0][0]);
  float total[1] = {};
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (at.inside(i, j)) total[0] += z[i][j] - shift;
  add_over_row(total);
  const float one_of = 1.0f / channels, middle = shift + total[0] * one_of;

  float moments[2] = {};
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (at.inside(i, j)) {
        z[i][j] -= middle;
        moments[0] += z[i][j];
        moments[1] = fmaf(z[i][j], z[i][j], moments[1]);
      }
  add_over_row(moments);
  const float left = moments[0] * one_of, variance = fmaxf(moments[1] * one_of - left * left, 0);
  const float scale = rsqrtf(variance + eps), offset = -left * scale;

#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (!at.inside(i)) continue;
    const Vec<P, kVec> w = load(weight, 0, at, i), b = load(bias, 0, at, i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) z[i][j] = fmaf(fmaf(z[i][j], scale, offset), to_float(w.at[j]), to_float(b.at[j]));
    store(z[i], y, row, at, i);
  }
  if (at.first == 0) mean[row] = middle + left, rstd[row] = scale;
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
  Place<kVec, kVectors> at{0, channels, columns, int(threadIdx.x / 32 * 32 * kColumns + threadIdx.x % 32)};
  const Key key = drop.threshold ? site_key(drop) : Key{};
  const float one_of = 1.0f / channels;

  float dweight[kColumns][kVec] = {}, dbias[kColumns][kVec] = {};
  FB_DYNAMIC_SHARED(memory);
  float* const of_rows = reinterpret_cast<float*>(memory);  // [blockDim.y, channels]: dx_bias, where it is asked for
  if (quantities == 3) {
    const float zeros[kVec] = {};
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (at.inside(i)) store(zeros, of_rows, threadIdx.y, at, i);
  }

  for (int64_t first_row = int64_t(blockIdx.x) * blockDim.y; first_row < rows;
       first_row += int64_t(gridDim.x) * blockDim.y) {
    at.row = first_row + threadIdx.y;
    at.columns = at.row < rows ? columns : 0;
    Vec<T, kVec> xs[kColumns];
    Vec<R, kVec> d[kColumns];  // the residual and, when z is made of it, dy: both would be too many registers
    float z[kColumns][kVec];
    start_loads(xs, x, at);
    start_loads(d, residual ? residual : dy, at);
    const float middle = at.row < rows ? mean[at.row] : 0, scale = at.row < rows ? rstd[at.row] : 0;
    const uint32_t kept = sum(z, xs, d, residual, x_bias, drop, key, at);
    if (residual) start_loads(d, dy, at);

    float total[3] = {};  // z - mean, g, and their products
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (!at.inside(i)) continue;
      const Vec<P, kVec> w = load(weight, 0, at, i);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        if (!at.inside(i, j)) continue;
        z[i][j] -= middle;
        const float g = to_float(d[i].at[j]) * to_float(w.at[j]);
        total[0] += z[i][j];
        total[1] += g;
        total[2] = fmaf(g, z[i][j], total[2]);
      }
    }
    add_over_row(total);
    const float left = total[0] * one_of, g_mean = total[1] * one_of;
    const float offset = -left * scale, along = -(total[2] * one_of - left * g_mean) * scale;

#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (!at.inside(i)) continue;
      const Vec<P, kVec> w = load(weight, 0, at, i);
      float dz[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float dy_ = to_float(d[i].at[j]), n = fmaf(z[i][j], scale, offset);
        dz[j] = (fmaf(n, along, dy_ * to_float(w.at[j])) - g_mean) * scale;
        dweight[i][j] = fmaf(dy_, n, dweight[i][j]);
        dbias[i][j] += dy_;
      }
      if (dresidual) store(dz, dresidual, at.row, at, i);
      if (drop.threshold) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) dz[j] = kept >> (i * kVec + j) & 1 ? dz[j] * drop.keep_scale : 0;
      }
      if (dx) store(dz, dx, at.row, at, i);
      if (quantities == 3) {
        const Vec<float, kVec> so_far = load(of_rows, threadIdx.y, at, i);
#pragma unroll
        for (int j = 0; j < kVec; ++j) dz[j] += so_far.at[j];
        store(dz, of_rows, threadIdx.y, at, i);
      }
    }
  }
  if (quantities == 0) return;

  at.columns = columns;
  const auto add_up = [&](int quantity) {
    __syncthreads();
    for (int channel = threadIdx.y * blockDim.x + threadIdx.x; channel < channels; channel += blockDim.x * blockDim.y) {
      float total = 0;
      for (unsigned r = 0; r < blockDim.y; ++r) total += of_rows[r * channels + channel];
      partials[(int64_t(blockIdx.x) * quantities + quantity) * channels + channel] = total;
    }
  };
  const auto add_up_registers = [&](int quantity, const float (&sums)[kColumns][kVec]) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (at.inside(i)) store(sums[i], of_rows, threadIdx.y, at, i);
    add_up(quantity);
  };
  if (quantities == 3) add_up(2);
  add_up_registers(0, dweight);
  add_up_registers(1, dbias);
}

// ---- launchers

constexpr int kWarpChannels = 1024;  // more take another warp
static_assert(kMostChannels <= backward_warps(32) * kWarpChannels, "a row fits a block");

int warps_per_row(int64_t channels) { return int(divide_up(channels, kWarpChannels)); }

// How many channels a thread holds: the fewest that will do, so that more rows fit.
int thread_channels(int64_t channels) {
  const int64_t each = divide_up(channels, 32 * warps_per_row(channels));
  return each <= 16 ? 16 : each <= 24 ? 24 : 32;
}

int backward_rows(int64_t channels) { return backward_warps(thread_channels(channels)) / warps_per_row(channels); }

// Calls f with values of the element types of x, of y and of the parameters, and with what a thread holds.
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
  return for_types(op, parameters, vectors, [&](auto x, auto out, auto p, auto held, auto whole) {
    using T = decltype(x);
    using R = decltype(out);
    using P = decltype(p);
    const int warps = warps_per_row(op.channels), block_rows = warps == 1 ? kForwardRows : 1;
    const int64_t blocks = divide_up(rows, block_rows);
    if (blocks > INT32_MAX) return "the tensor is too large for one launch";
    return launch(layer_norm_fwd_kernel<T, R, P, held.value, whole.value>, dim3(blocks), dim3(32 * warps, block_rows),
                  0, stream, static_cast<const T*>(op.x), static_cast<const R*>(op.residual),
                  static_cast<const P*>(op.x_bias), static_cast<const P*>(op.weight), static_cast<const P*>(op.bias),
                  static_cast<R*>(y), static_cast<float*>(op.mean), static_cast<float*>(op.rstd), rows,
                  int(op.channels), float(op.eps), drop);
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
  return for_types(op, parameters, vectors, [&](auto x, auto out, auto p, auto held, auto whole) {
    using T = decltype(x);
    using R = decltype(out);
    using P = decltype(p);
    const int warps = warps_per_row(op.channels), block_rows = backward_warps(held.value) / warps;
    return launch(layer_norm_bwd_kernel<T, R, P, held.value, whole.value>, dim3(blocks), dim3(32 * warps, block_rows),
                  sizeof(float) * block_rows * op.channels, stream, static_cast<const R*>(gradients.dy),
                  static_cast<const T*>(op.x), static_cast<const R*>(op.residual), static_cast<const P*>(op.x_bias),
                  static_cast<const P*>(op.weight), static_cast<const float*>(op.mean),
                  static_cast<const float*>(op.rstd), static_cast<T*>(gradients.dx),
                  static_cast<R*>(gradients.dresidual), partials, rows, int(op.channels), quantities, drop);
  });
}

}  // namespace fastbert::cuda
