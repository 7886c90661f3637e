// LayerNorm of x, or of dropout(x + x_bias) + residual, on [rows, channels], and its gradients; channels <= 8192.
//
// A row of up to 1024 channels belongs to one warp, and each further 1024 channels add a warp. Rows of one warp need no
// barrier, so the many rows on a multiprocessor do not wait for each other. A thread holds 16, 24 or 32 channels of its
// row in registers, so a row is read once; statistics are fp32. A thread owns kVec neighbouring channels at a time (16
// bytes of y), a warp 32 times as many, so accesses are whole cache lines. All loads of a row are issued before the
// first result is used. If a row's size is not a multiple of 16 bytes, or a pointer is not aligned, the same code loads
// element by element.
//
// The mean is summed as differences to the row's first element, so a constant row gives exactly the bias. The rounding
// error of the mean is corrected when the squares are summed, so a large offset costs no digits. The saved mean is
// rounded again; the backward corrects that too.
//
// Backward: one block per multiprocessor, as large as registers allow, loops over the rows. The sums for dweight and
// dbias stay in registers. Those for dx_bias do not fit beside them and are in shared memory, where each thread reads
// and writes only its own. All sums are added up over the block's rows in order and written as one row of partial sums
// per block; column_sums adds these up. The dropout mask is computed again and kept as one bit per channel.
//
// Bytes moved: forward x, residual and y once; backward dy, x, residual, dx and dresidual once, which is the minimum; 8
// bytes of statistics per row, 12 bytes of partial sums per channel and multiprocessor. Parameters are read for each
// row, from the L1 cache. An H100 hides its latency with about 18 KB of loads in flight on a multiprocessor; with 1024
// channels the backward has 32 KB (16 bits) or 64 KB (fp32) in flight, the forward 40 or 64. Even so, on an H200 the
// forward takes 1.5 to 1.8 times as long as a copy of as many bytes, the backward 2.5 times: docs/layer_norm.md.
#include "../layer_norm.h"
#include "rows.cuh"

namespace fastbert::cuda {

namespace {

// Computes z of a row from the loaded x and residual; returns a bit for each element that dropout keeps.
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
    if (drop.threshold) kept |= drop_out(z[i], drop, key, place, i) << (i * kVec);
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
  if (row >= rows) return;  // no barrier is missed: a row of several warps has a block to itself
  const auto place = place_of<kVec, kColumns, kVectors>(row, channels);

  Vec<T, kVec> xs[kColumns];
  Vec<R, kVec> residuals[kColumns];
  float z[kColumns][kVec];
  start_loads(xs, x, place);
  if (residual) start_loads(residuals, residual, place);
  sum(z, xs, residuals, residual, x_bias, drop, drop.threshold ? site_key(drop) : Key{}, place);

  const RowStatistics row_is = centre(z, place, eps);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (!place.inside(i)) continue;
    scale_and_shift(z[i], row_is, weight, bias, place, i);
    store(z[i], y, row, place, i);
  }
  if (place.first == 0) mean[row] = row_is.mean, rstd[row] = row_is.rstd;
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
  auto place = place_of<kVec, kColumns, kVectors>(0, channels);
  const int columns = place.columns;
  const Key key = drop.threshold ? site_key(drop) : Key{};

  float dweight[kColumns][kVec] = {}, dbias[kColumns][kVec] = {};
  FB_DYNAMIC_SHARED(memory);
  float* const row_sums = reinterpret_cast<float*>(memory);  // [blockDim.y, channels]: for dx_bias, if it is wanted
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

    const RowGradient gradient =
        centre(z, [&](int i, int j) { return to_float(d[i].at[j]); }, weight, row_mean, scale, place);

#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (!place.inside(i)) continue;
      const Vec<P, kVec> w = load(weight, 0, place, i);
      float dz[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float dy_ = to_float(d[i].at[j]), n = gradient.n(z[i][j]);
        dz[j] = gradient.dz(n, dy_ * to_float(w.at[j]));
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
  float* const to = partials + int64_t(blockIdx.x) * quantities * channels;
  if (quantities == 3) add_up(row_sums, channels, channels, to + 2 * channels);
  add_up(dweight, row_sums, place, to);
  add_up(dbias, row_sums, place, to + channels);
}

// ---- launchers

static_assert(kMostChannels <= backward_warps(32) * kWarpChannels, "a row fits a block");

// Calls f with values of the element types of x, of y and of the parameters, with how many channels a thread holds, and
// with whether it loads vectors.
template <class F>
const char* for_types(const LayerNorm& op, DType parameters, bool vectors, F&& f) {
  const auto with_types = [&](auto x, auto y, auto parameter) {
    return for_row_size(op.channels, vectors,
                        [&](auto held, auto in_vectors) { return f(x, y, parameter, held, in_vectors); });
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
    const dim3 block = forward_block(op.channels);
    const int64_t blocks = divide_up(rows, int64_t(block.y));
    if (blocks > INT32_MAX) return "the tensor is too large for one launch";
    return launch(layer_norm_fwd_kernel<T, R, P, held.value, in_vectors.value>, dim3(blocks), block, 0, stream,
                  static_cast<const T*>(op.x), static_cast<const R*>(op.residual), static_cast<const P*>(op.x_bias),
                  static_cast<const P*>(op.weight), static_cast<const P*>(op.bias), static_cast<R*>(y),
                  static_cast<float*>(op.mean), static_cast<float*>(op.rstd), rows, int(op.channels), float(op.eps),
                  drop);
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
    const dim3 block = backward_block(op.channels, held.value);
    return launch(layer_norm_bwd_kernel<T, R, P, held.value, in_vectors.value>, dim3(blocks), block,
                  sizeof(float) * block.y * op.channels, stream, static_cast<const R*>(gradients.dy),
                  static_cast<const T*>(op.x), static_cast<const R*>(op.residual), static_cast<const P*>(op.x_bias),
                  static_cast<const P*>(op.weight), static_cast<const float*>(op.mean),
                  static_cast<const float*>(op.rstd), static_cast<T*>(gradients.dx),
                  static_cast<R*>(gradients.dresidual), partials, rows, int(op.channels), quantities, drop);
  });
}

}  // namespace fastbert::cuda
