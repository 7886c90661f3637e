// y = gelu(x + bias) on [rows, channels].
//
// A thread owns kVec neighbouring channels, 16 bytes of x, in kRows consecutive rows: it reads its biases once and has
// kRows loads in flight before it computes. Blocks run over the channels first, so that neighbouring blocks share pages
// of memory. One grid dimension carries both, for the other two end at 65535.
//
// Where a row is no multiple of 16 bytes or a pointer is not aligned, kVec is 1.
//
// Bytes moved: x and y once, a kRows-th of that again for an fp32 bias beside 16-bit x, from L2. On sm_90 erf costs 37
// instructions an element, all included, and tanh 29; an H100 issues about 38 in the time that 4 bytes take.
#include "../bias_gelu.h"
#include "../gelu.h"
#include "common.cuh"

namespace fastbert::cuda {

namespace {

constexpr int kThreads = 128, kRows = 4;

// ---- forward

template <class T, class B, int kVec, bool kTanh>
__global__ void __launch_bounds__(kThreads)
    bias_gelu_fwd_kernel(const Vec<T, kVec>* __restrict__ x,     // [rows, columns], a column is kVec channels
                         const Vec<B, kVec>* __restrict__ bias,  // [columns]
                         Vec<T, kVec>* __restrict__ y,           // [rows, columns]
                         int64_t rows, int64_t columns, unsigned blocks_per_row) {
  const int64_t column = int64_t(blockIdx.x % blocks_per_row) * kThreads + threadIdx.x;
  const int64_t first_row = int64_t(blockIdx.x / blocks_per_row) * kRows;
  if (column >= columns) return;

  const Vec<B, kVec> b = bias[column];
  Vec<T, kVec> v[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (first_row + r < rows) v[r] = x[(first_row + r) * columns + column];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first_row + r >= rows) return;
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[r].at[i] = from_float<T>(gelu<kTanh>(to_float(v[r].at[i]) + to_float(b.at[i])));
    y[(first_row + r) * columns + column] = v[r];
  }
}

template <class T, class B, int kVec>
const char* forward(const void* x, const void* bias, void* y, int64_t rows, int64_t channels, bool tanh, void* stream) {
  const int64_t columns = channels / kVec;
  const int64_t blocks_per_row = (columns + kThreads - 1) / kThreads;
  const int64_t blocks = (rows + kRows - 1) / kRows * blocks_per_row;
  if (blocks > INT32_MAX) return "the tensor is too large for one launch";
  const auto kernel = tanh ? bias_gelu_fwd_kernel<T, B, kVec, true> : bias_gelu_fwd_kernel<T, B, kVec, false>;
  return launch(kernel, dim3(blocks), dim3(kThreads), 0, stream, static_cast<const Vec<T, kVec>*>(x),
                static_cast<const Vec<B, kVec>*>(bias), static_cast<Vec<T, kVec>*>(y), rows, columns,
                unsigned(blocks_per_row));
}

}  // namespace

const char* bias_gelu_fwd(const void* x, const void* bias, void* y, int64_t rows, int64_t channels, DType dtype,
                          DType bias_dtype, bool tanh, void* stream) {
  return for_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kVec = 16 / sizeof(T);
    const bool vectors = channels % kVec == 0 && is_aligned(x, 16) && is_aligned(y, 16) && is_aligned(bias, 16);
    const auto run = [&](auto bias_element) {
      using B = decltype(bias_element);
      const auto fwd = vectors ? forward<T, B, kVec> : forward<T, B, 1>;
      return fwd(x, bias, y, rows, channels, tanh, stream);
    };
    return bias_dtype == DType::f32 ? run(float{}) : run(T{});
  });
}

}  // namespace fastbert::cuda
