// What every CUDA kernel needs: launching, shared memory, vectors of elements, conversion. No torch here.
#pragma once

#ifdef FB_CUDA_ON_CPU
#include "cuda_on_cpu.h"  // tests run the kernels on the CPU; this replaces nvcc's keywords, the runtime and launch()
#else
#include <cuda_runtime.h>

// Shared memory: an array of N elements of T; and the dynamic memory that the launch asked for, as bytes.
#define FB_SHARED(T, name, N) __shared__ alignas(16) T name[N]
#define FB_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define FB_TILES(name) extern __shared__ __align__(1024) unsigned char name[]  // aligned as wgmma needs it
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "../division.h"
#include "../dtype.h"

namespace fastbert::cuda {

#ifndef FB_CUDA_ON_CPU
inline const char* message(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

inline int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, which, device);
  return value;
}
inline int multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }
inline int major_architecture() { return attribute(cudaDevAttrComputeCapabilityMajor); }         // 9 on sm_90
inline int shared_memory_limit() { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }  // bytes per block

// Lets a kernel use all the shared memory that a block can have. This is not just what the current launch needs,
// because the setting applies to all threads of the process, and another one may launch the kernel with more.
template <class... Params>
const char* allow_shared_memory(void (*kernel)(Params...)) {
  cudaFuncAttributes has;
  cudaError_t error = cudaFuncGetAttributes(&has, kernel);
  if (error == cudaSuccess) {
    const int bytes = shared_memory_limit() - int(has.sharedSizeBytes);
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  }
  if (error != cudaSuccess) cudaGetLastError();  // clears the error: it is reported here, not by the next launch
  return message(error);
}

// Launches on the current device; returns an error message, or nullptr. No host synchronisation, so CUDA graphs can
// capture it.
template <class... Params, class... Args>
const char* launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void* stream, Args... args) {
  constexpr size_t kEnough = 32 << 10;  // the default limit is 48 KiB, static shared memory included
  if (shared_bytes > kEnough)
    if (const char* error = allow_shared_memory(kernel)) return error;
  kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(args...);
  return message(cudaGetLastError());
}
#endif

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }

// N elements that are loaded and stored together, up to 16 bytes in one instruction. Compute addresses with pointers to
// Vec: if an address is computed in elements and then cast, nvcc splits the store into single elements.
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

// A number as a type, so that generic lambdas can use it as a template argument.
template <int N>
struct Constant {
  static constexpr int value = N;
};

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
