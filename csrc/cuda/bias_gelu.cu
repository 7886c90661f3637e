// y = gelu(x + bias) on [rows, channels], and its gradients.
//
// A thread owns kVec neighbouring channels, 16 bytes of x, and reads their biases once. If a row's size is not a
// multiple of 16 bytes, or a pointer is not aligned, kVec is 1. Rows and channels share one dimension of the grid,
// because the other two are limited to 65535 blocks.
//
// Forward: a thread has kRows consecutive rows and starts all of their loads before it computes. Neighbouring blocks
// have neighbouring channels, so that they share pages of memory. Backward: a block is as wide as one warp, and its
// warps split its rows. The sums for dbias stay in registers, are added over the warps in order, and are written as one
// row of partial sums per block; column_sums adds these up. Blocks are narrow and tall, so that there are few such
// rows: 22 for the 3072 channels of BERT on an H100, 0.3 MB.
//
// Bytes moved: forward x and y once, backward dy, x and dx, which is the least possible; for an fp32 bias beside 16-bit
// x, one kRows-th of that in addition, from L2. On sm_90, an element of 16 bits takes 18 instructions with erf (37 with
// the formula for fp32) and 29 with tanh, everything included; in the backward it takes 37, or 51 with an fp32 bias. An
// H100 issues about 38 instructions in the time that the forward's 4 bytes take, and 57 in that of the backward's 6
// bytes.
#include "../bias_gelu.h"
#include "../gelu.h"
#include "common.cuh"

namespace fastbert::cuda {

namespace {

constexpr int kThreads = 128, kRows = 4;                            // of the forward
constexpr int kWarps = 8, kRowsAtOnce = 2, kBlocksOnProcessor = 2;  // of the backward

// ---- forward

template <class T, class B, int kVec, bool kTanh>
__global__ void __launch_bounds__(kThreads)
    bias_gelu_fwd_kernel(const Vec<T, kVec>* __restrict__ x,     // [rows, columns], a column is kVec channels
                         const Vec<B, kVec>* __restrict__ bias,  // [columns], or nullptr
                         Vec<T, kVec>* __restrict__ y,           // [rows, columns]
                         int64_t rows, int64_t columns, unsigned blocks_per_row) {
  const int64_t column = int64_t(blockIdx.x % blocks_per_row) * kThreads + threadIdx.x;
  const int64_t first_row = int64_t(blockIdx.x / blocks_per_row) * kRows;
  if (column >= columns) return;

  Vec<B, kVec> b{};
  if (bias) b = bias[column];
  Vec<T, kVec> v[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (first_row + r < rows) v[r] = x[(first_row + r) * columns + column];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first_row + r >= rows) return;
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      v[r].at[i] = from_float<T>(gelu_for<T, kTanh>(to_float(v[r].at[i]) + to_float(b.at[i])));
    y[(first_row + r) * columns + column] = v[r];
  }
}

template <class T, class B, int kVec>
const char* forward(const void* x, const void* bias, void* y, int64_t rows, int64_t channels, bool tanh, void* stream) {
  const int64_t columns = channels / kVec;
  const int64_t blocks_per_row = divide_up(columns, kThreads), blocks = divide_up(rows, kRows) * blocks_per_row;
  if (blocks > INT32_MAX) return "the tensor is too large for one launch";
  const auto kernel = tanh ? bias_gelu_fwd_kernel<T, B, kVec, true> : bias_gelu_fwd_kernel<T, B, kVec, false>;
  return launch(kernel, dim3(blocks), dim3(kThreads), 0, stream, static_cast<const Vec<T, kVec>*>(x),
                static_cast<const Vec<B, kVec>*>(bias), static_cast<Vec<T, kVec>*>(y), rows, columns,
                unsigned(blocks_per_row));
}

// ---- backward: dx = dy gelu'(x + bias), dbias = the sum of dx over the rows, before dx is rounded

template <class T, class B, int kVec, bool kTanh>
__global__ void __launch_bounds__(32 * kWarps, kBlocksOnProcessor)
    bias_gelu_bwd_kernel(const Vec<T, kVec>* __restrict__ dy,    // [rows, columns], a column is kVec channels
                         const Vec<T, kVec>* __restrict__ x,     // [rows, columns]
                         const Vec<B, kVec>* __restrict__ bias,  // [columns], or nullptr
                         Vec<T, kVec>* __restrict__ dx,          // [rows, columns]
                         float* __restrict__ partials,           // [shares, columns * kVec], or nullptr
                         int64_t rows, int64_t columns, unsigned blocks_per_row, int64_t share) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first_column = int64_t(blockIdx.x % blocks_per_row) * 32, column = first_column + lane;
  const int64_t block = blockIdx.x / blocks_per_row, begin = block * share;
  const int64_t end = begin + share < rows ? begin + share : rows;

  float dbias[kVec] = {};
  if (column < columns) {
    Vec<B, kVec> b{};
    if (bias) b = bias[column];
    for (int64_t row = begin + warp; row < end; row += kWarps * kRowsAtOnce) {
      Vec<T, kVec> d[kRowsAtOnce], v[kRowsAtOnce];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const int64_t place = (row + r * kWarps) * columns + column;
        if (row + r * kWarps < end) d[r] = dy[place], v[r] = x[place];
      }
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        if (row + r * kWarps >= end) break;
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const float slope = gelu_derivative_for<B, kTanh>(to_float(v[r].at[i]) + to_float(b.at[i]));
          const float gradient = to_float(d[r].at[i]) * slope;
          dbias[i] += gradient;
          d[r].at[i] = from_float<T>(gradient);
        }
        dx[(row + r * kWarps) * columns + column] = d[r];
      }
    }
  }
  if (!partials) return;

  constexpr int kChannels = 32 * kVec;  // of a block
  FB_SHARED(float, warp_sums, kWarps* kChannels);
#pragma unroll
  for (int i = 0; i < kVec; ++i) warp_sums[warp * kChannels + lane * kVec + i] = dbias[i];
  __syncthreads();
  const int64_t channel = first_column * kVec + threadIdx.x, channels = columns * kVec;
  if (threadIdx.x >= kChannels || channel >= channels) return;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += warp_sums[w * kChannels + threadIdx.x];
  partials[block * channels + channel] = sum;
}

template <class T, class B, int kVec>
const char* backward(const void* dy, const void* x, const void* bias, void* dx, float* partials, int64_t rows,
                     int64_t channels, int64_t shares, bool tanh, void* stream) {
  const int64_t columns = channels / kVec, blocks_per_row = divide_up(columns, 32);
  if (shares * blocks_per_row > INT32_MAX) return "the tensor is too large for one launch";
  const auto kernel = tanh ? bias_gelu_bwd_kernel<T, B, kVec, true> : bias_gelu_bwd_kernel<T, B, kVec, false>;
  return launch(kernel, dim3(shares * blocks_per_row), dim3(32 * kWarps), 0, stream,
                static_cast<const Vec<T, kVec>*>(dy), static_cast<const Vec<T, kVec>*>(x),
                static_cast<const Vec<B, kVec>*>(bias), static_cast<Vec<T, kVec>*>(dx), partials, rows, columns,
                unsigned(blocks_per_row), divide_up(rows, shares));
}

}  // namespace

// ---- launchers

namespace {

// Calls f with values of the element types of x and of the bias, and with how many channels a thread owns.
template <class F>
const char* for_types(DType dtype, DType bias_dtype, bool vectors, F&& f) {
  return for_dtype(dtype, [&](auto element) {
    const auto with_bias = [&](auto bias_element) {
      return vectors ? f(element, bias_element, Constant<16 / sizeof(element)>{})
                     : f(element, bias_element, Constant<1>{});
    };
    return bias_dtype == DType::f32 ? with_bias(float{}) : with_bias(element);
  });
}

int64_t vector_width(DType dtype) { return dtype == DType::f32 ? 4 : 8; }

}  // namespace

const char* bias_gelu_fwd(const void* x, const void* bias, void* y, int64_t rows, int64_t channels, DType dtype,
                          DType bias_dtype, bool tanh, void* stream) {
  const bool vectors =
      channels % vector_width(dtype) == 0 && is_aligned(x, 16) && is_aligned(y, 16) && is_aligned(bias, 16);
  return for_types(dtype, bias_dtype, vectors, [&](auto element, auto bias_element, auto vec) {
    return forward<decltype(element), decltype(bias_element), vec.value>(x, bias, y, rows, channels, tanh, stream);
  });
}

int64_t bias_gelu_bwd_shares(int64_t rows, int64_t channels, DType dtype) {
  const int64_t blocks_per_row = divide_up(channels, 32 * vector_width(dtype));
  const int64_t wanted =
      kBlocksOnProcessor * multiprocessors() / blocks_per_row;  // a single wave of blocks: no half-empty second one
  const int64_t possible = divide_up(rows, kWarps * kRowsAtOnce);
  return wanted < 1 ? 1 : wanted < possible ? wanted : possible;
}

const char* bias_gelu_bwd(const void* dy, const void* x, const void* bias, void* dx, float* partials, int64_t rows,
                          int64_t channels, int64_t shares, DType dtype, DType bias_dtype, bool tanh, void* stream) {
  const bool vectors = channels % vector_width(dtype) == 0 && is_aligned(dy, 16) && is_aligned(x, 16) &&
                       is_aligned(dx, 16) && is_aligned(bias, 16);
  return for_types(dtype, bias_dtype, vectors, [&](auto element, auto bias_element, auto vec) {
    return backward<decltype(element), decltype(bias_element), vec.value>(dy, x, bias, dx, partials, rows, channels,
                                                                          shares, tanh, stream);
  });
}

}  // namespace fastbert::cuda
