// What every CUDA kernel needs: launching, vectors of elements, conversion. No torch here.
#pragma once

#ifdef FB_CUDA_ON_CPU
#include "cuda_on_cpu.h"  // tests run this text on the processor: it stands in for the compiler and for launch()
#else
#include <cuda_runtime.h>
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "../dtype.h"

namespace fastbert::cuda {

#ifndef FB_CUDA_ON_CPU
// Launches and returns what went wrong, or nullptr.
template <class... Params, class... Args>
const char* launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void* stream, Args... args) {
  kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(args...);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
#endif

// N elements that move in as few instructions as their size allows, 16 bytes each at most. Index with pointers to Vec:
// nvcc splits a store into its elements where the address was computed in elements and cast.
template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Vec {
  T at[N];
};

inline bool is_aligned(const void* pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float(float x) {
  return __float2half_rn(x);
}

// Calls f with a value of the element type that dtype names; fp64 has no kernels.
template <class F>
const char* for_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32: return f(float{});
    case DType::bf16: return f(__nv_bfloat16{});
    case DType::f16: return f(__half{});
    case DType::f64: break;
  }
  return "no kernel for this element type";
}

}  // namespace fastbert::cuda
