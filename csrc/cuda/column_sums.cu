// Adds up partial sums: each block of the previous kernel has written one row of them.
//
// A block adds up 32 neighbouring columns, one per lane. Its warps split the rows, and the warps' sums are added in
// order. There are about as many rows as multiprocessors, so with 32 warps a thread has a handful of loads, all in
// flight at once and served by the L2 cache: the kernel takes little more than its launch.
#include "column_sums.h"
#include "common.cuh"

namespace fastbert::cuda {

namespace {

constexpr int kWarps = 32;

__device__ __forceinline__ void store(const ColumnSum& sum, int64_t channel, float value) {
  switch (sum.dtype) {
    case DType::f32: static_cast<float*>(sum.to)[channel] = value; break;
    case DType::bf16: static_cast<__nv_bfloat16*>(sum.to)[channel] = from_float<__nv_bfloat16>(value); break;
    case DType::f16: static_cast<__half*>(sum.to)[channel] = from_float<__half>(value); break;
    case DType::f64: break;  // no kernel computes in fp64
  }
}

__global__ void __launch_bounds__(32 * kWarps)
    column_sums_kernel(const float* __restrict__ partials,  // [count, quantities, channels]
                       int64_t count, int64_t channels, ColumnSums sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t columns = sums.quantities * channels, column = int64_t(blockIdx.x) * 32 + lane;
  float sum = 0;
  if (column < columns) {
#pragma unroll 4
    for (int64_t row = warp; row < count; row += kWarps) sum += partials[row * columns + column];
  }
  FB_SHARED(float, warp_sums, kWarps * 32);  // [kWarps, 32]
  warp_sums[warp * 32 + lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= columns) return;
  float total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += warp_sums[w * 32 + lane];
  const int64_t quantity = column / channels;
#pragma unroll
  for (int q = 0; q < 3; ++q)
    if (q == quantity) store(sums.of[q], column - q * channels, total);
}

}  // namespace

const char* column_sums(const float* partials, int64_t count, int64_t channels, const ColumnSums& sums, void* stream) {
  const int64_t blocks = divide_up(sums.quantities * channels, 32);
  if (blocks > INT32_MAX) return "the tensor is too large for one launch";
  return launch(column_sums_kernel, dim3(blocks), dim3(32 * kWarps), 0, stream, partials, count, channels, sums);
}

}  // namespace fastbert::cuda
