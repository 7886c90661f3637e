// Makes the inputs of fp8 products in the pass that has the values in registers anyway. A row becomes float8_e4m3
// values and a factor: the largest magnitude of the row divided by 448, e4m3's largest value. Values are rounded to
// bf16 before they are rounded to e4m3, so one pass gives the same bits as two.
//
// Rows are split over threads as in layer_norm.cu. Bytes moved: x (and the residual) and y once, half as many bytes as
// y for its rows in fp8, 4 bytes per factor. After GELU only the rows in fp8 and their factors are written.
//
// A row with a NaN or an infinity becomes zeros with the factor NaN; a row whose magnitudes are all below 2^-100
// becomes zeros with the factor 0.
#include <cuda_fp8.h>

#include <algorithm>
#include <initializer_list>

#include "../gelu.h"
#include "../scaled_linear.h"
#include "rows.cuh"

namespace fastbert::cuda {

namespace {

using T = __nv_bfloat16;

constexpr int kVec = 8;                 // 16 bytes of bf16
constexpr float kLargest = 448;         // of e4m3
constexpr float kSmallest = 0x1p-100f;  // 448 / kSmallest is finite

// A pair in e4m3, the first in the low byte: one instruction from sm_89 on.
__device__ __forceinline__ unsigned to_e4m3(float first, float second) {
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ float greater_or_nan(float a, float b) { return a > b || a != a ? a : b; }

// Rounds z to bf16, and its row to e4m3 with a factor.
template <int kColumns, bool kVectors>
__device__ __forceinline__ void store_scaled(float (&z)[kColumns][kVec], __nv_fp8_storage_t* q, float* factors,
                                             const Place<kVec, kVectors>& place) {
  float high[1] = {};
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (place.inside(i, j)) {
        z[i][j] = to_float(from_float<T>(z[i][j]));
        high[0] = greater_or_nan(high[0], fabsf(z[i][j]));
      }
  over_row(high, greater_or_nan);

  const bool finite = high[0] < INFINITY, usable = finite && high[0] >= kSmallest;
  const float scale = usable ? kLargest / high[0] : 0;
  const unsigned kept = usable ? 0xffff : 0;  // a mask, because NaN times 0 is not 0
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (!place.inside(i)) continue;
    Vec<__nv_fp8_storage_t, kVec> rounded;
#pragma unroll
    for (int j = 0; j < kVec; j += 2) {
      const unsigned pair = to_e4m3(z[i][j] * scale, z[i][j + 1] * scale) & kept;
      rounded.at[j] = pair & 0xff, rounded.at[j + 1] = pair >> 8;
    }
    store(rounded, q, place.row, place, i);
  }
  if (place.first == 0) factors[place.row] = usable ? high[0] / kLargest : finite ? 0 : NAN;
}

template <int kThreadChannels, bool kVectors, Gelu kGelu>
__global__ void __launch_bounds__(256, 2) scaled_rows_kernel(const T* __restrict__ x,     // [rows, channels]
                                                             const T* __restrict__ bias,  // [channels], or nullptr
                                                             __nv_fp8_storage_t* __restrict__ q,  // [rows, channels]
                                                             float* __restrict__ factors,         // [rows]
                                                             int64_t rows, int channels) {
  constexpr int kColumns = kThreadChannels / kVec;
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;  // as in layer_norm.cu
  const auto place = place_of<kVec, kColumns, kVectors>(row, channels);

  Vec<T, kVec> xs[kColumns];
  float z[kColumns][kVec];
  start_loads(xs, x, place);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (!place.inside(i)) continue;
    Vec<T, kVec> b{};
    if (bias) b = load(bias, 0, place, i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      z[i][j] = to_float(xs[i].at[j]) + to_float(b.at[j]);
      if constexpr (kGelu != Gelu::none) z[i][j] = gelu_for<T, kGelu == Gelu::tanh>(z[i][j]);
    }
  }
  store_scaled(z, q, factors, place);
}

template <int kThreadChannels, bool kVectors>
__global__ void __launch_bounds__(256, 2)
    scaled_layer_norm_kernel(const T* __restrict__ x,             // [rows, channels]
                             const T* __restrict__ residual,      // [rows, channels]
                             const T* __restrict__ x_bias,        // [channels], or nullptr
                             const T* __restrict__ weight,        // [channels]
                             const T* __restrict__ bias,          // [channels]
                             T* __restrict__ y,                   // [rows, channels]
                             __nv_fp8_storage_t* __restrict__ q,  // [rows, channels]
                             float* __restrict__ factors,         // [rows]
                             int64_t rows, int channels, float eps) {
  constexpr int kColumns = kThreadChannels / kVec;
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;  // as in layer_norm.cu
  const auto place = place_of<kVec, kColumns, kVectors>(row, channels);

  Vec<T, kVec> xs[kColumns], residuals[kColumns];
  float z[kColumns][kVec];
  start_loads(xs, x, place);
  start_loads(residuals, residual, place);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (!place.inside(i)) continue;
    Vec<T, kVec> b{};
    if (x_bias) b = load(x_bias, 0, place, i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) z[i][j] = to_float(xs[i].at[j]) + to_float(b.at[j]) + to_float(residuals[i].at[j]);
  }

  const RowStatistics row_is = centre(z, place, eps);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (!place.inside(i)) continue;
    scale_and_shift(z[i], row_is, weight, bias, place, i);
    store(z[i], y, row, place, i);
  }
  store_scaled(z, q, factors, place);
}

// ---- launchers

const char* problem() { return major_architecture() < 9 ? "there are no products in fp8 before sm_90" : nullptr; }

bool are_aligned(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(), [](const void* each) { return is_aligned(each, 16); });
}

}  // namespace

const char* scaled_rows(const void* x, const void* bias, void* q, float* factors, int64_t rows, int64_t channels,
                        Gelu gelu, void* stream) {
  if (const char* const error = problem()) return error;
  const bool vectors = channels % kVec == 0 && are_aligned({x, bias, q});
  return for_row_size(channels, vectors, [&](auto held, auto in_vectors) {
    const auto kernel = gelu == Gelu::none  ? scaled_rows_kernel<held.value, in_vectors.value, Gelu::none>
                        : gelu == Gelu::erf ? scaled_rows_kernel<held.value, in_vectors.value, Gelu::erf>
                                            : scaled_rows_kernel<held.value, in_vectors.value, Gelu::tanh>;
    const dim3 block = forward_block(channels);
    const int64_t blocks = divide_up(rows, int64_t(block.y));
    if (blocks > INT32_MAX) return "the tensor is too large for one launch";
    return launch(kernel, dim3(blocks), block, 0, stream, static_cast<const T*>(x), static_cast<const T*>(bias),
                  static_cast<__nv_fp8_storage_t*>(q), factors, rows, int(channels));
  });
}

const char* scaled_layer_norm(const LayerNorm& op, void* y, void* q, float* factors, int64_t rows, void* stream) {
  if (const char* const error = problem()) return error;
  const bool vectors = op.channels % kVec == 0 && are_aligned({op.x, op.residual, op.x_bias, op.weight, op.bias, y, q});
  return for_row_size(op.channels, vectors, [&](auto held, auto in_vectors) {
    const dim3 block = forward_block(op.channels);
    const int64_t blocks = divide_up(rows, int64_t(block.y));
    if (blocks > INT32_MAX) return "the tensor is too large for one launch";
    return launch(scaled_layer_norm_kernel<held.value, in_vectors.value>, dim3(blocks), block, 0, stream,
                  static_cast<const T*>(op.x), static_cast<const T*>(op.residual), static_cast<const T*>(op.x_bias),
                  static_cast<const T*>(op.weight), static_cast<const T*>(op.bias), static_cast<T*>(y),
                  static_cast<__nv_fp8_storage_t*>(q), factors, rows, int(op.channels), float(op.eps));
  });
}

}  // namespace fastbert::cuda
