// What every CUDA kernel needs: launching, shared memory, vectors of elements, conversion. No torch here.
#pragma once

#ifdef FB_CUDA_ON_CPU
#include "cuda_on_cpu.h"  // tests run this text on the processor: it stands in for the compiler and for launch()
#else
#include <cuda_runtime.h>

// Shared memory: N elements of T, and what the launch asked for, as bytes.
#define FB_SHARED(T, name, N) __shared__ alignas(16) T name[N]
#define FB_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "../dtype.h"

namespace fastbert::cuda {

#ifndef FB_CUDA_ON_CPU
inline const char* words(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

inline int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, which, device);
  return value;
}
inline int multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }
inline int shared_memory_limit() { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }  // bytes, of a block

// Lets a kernel have all the shared memory of the device. Always the same for a kernel and a device, for the latest
// value counts in all threads of the process.
template <class... Params>
const char* allow_shared_memory(void (*kernel)(Params...)) {
  cudaFuncAttributes has;
  cudaError_t error = cudaFuncGetAttributes(&has, kernel);
  if (error == cudaSuccess) {
    const int bytes = shared_memory_limit() - int(has.sharedSizeBytes);
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  }
  if (error != cudaSuccess) cudaGetLastError();  // is reported here, not by the next launch
  return words(error);
}

// Launches on the current device and returns what went wrong, or nullptr. Nothing here waits, so graphs can capture it.
template <class... Params, class... Args>
const char* launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void* stream, Args... args) {
  constexpr size_t kWithoutAsking = 48 << 10;
  if (shared_bytes > kWithoutAsking)
    if (const char* error = allow_shared_memory(kernel)) return error;
  kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(args...);
  return words(cudaGetLastError());
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

// A number as a type, for generic lambdas that choose a template.
template <int N>
struct Constant {
  static constexpr int value = N;
};

__host__ __device__ constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

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
