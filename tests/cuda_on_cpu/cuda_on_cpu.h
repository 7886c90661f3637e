// Replaces nvcc's keywords and the CUDA runtime where csrc/cuda is compiled as host C++ (FB_CUDA_ON_CPU). A CUDA thread
// is a fiber, one block runs at a time, and launch() returns what went wrong: docs/cuda_on_cpu.md.
//
// It uses only headers of the CUDA toolkit: the vector types, and __nv_bfloat16 and __half, which work on the host.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <tuple>

#undef __global__
#undef __launch_bounds__
#undef __shared__
#define __global__
#define __launch_bounds__(...)
#define __shared__ static_assert(false, "write FB_SHARED or FB_DYNAMIC_SHARED");

namespace cuda_on_cpu {

// ---- indices. [[gnu::const]]: they do not change while a kernel runs, so the compiler calls each once.

[[gnu::const]] uint3 thread_index();
[[gnu::const]] uint3 block_index();
[[gnu::const]] dim3 block_size();
[[gnu::const]] dim3 grid_size();

#define threadIdx (::cuda_on_cpu::thread_index())
#define blockIdx (::cuda_on_cpu::block_index())
#define blockDim (::cuda_on_cpu::block_size())
#define gridDim (::cuda_on_cpu::grid_size())
#define warpSize 32

// ---- shared memory

// `here` identifies the array: as in CUDA, every instance of a template has its own.
void* shared_array(const void* here, const char* name, size_t bytes);
void* dynamic_shared();

template <class T, size_t kSize>
using Array = T[kSize];

#define FB_SHARED(T, name, N)                             \
  static char name##_is_here;                             \
  auto& name = *static_cast<::cuda_on_cpu::Array<T, N>*>( \
      ::cuda_on_cpu::shared_array(&name##_is_here, #name, sizeof(::cuda_on_cpu::Array<T, N>)))
#define FB_DYNAMIC_SHARED(name) auto* const name = static_cast<unsigned char*>(::cuda_on_cpu::dynamic_shared())
#define FB_TILES(name) FB_DYNAMIC_SHARED(name)

// ---- barriers and collectives

void sync_threads(const char* file, int line);
void sync_warp(unsigned mask = ~0u);
void thread_fence();
void trap();
unsigned ballot(unsigned mask, bool predicate);

enum class Shuffle { from, across, up, down };
uint64_t shuffle(Shuffle how, unsigned mask, uint64_t bits, int lane, int width);

template <class T>
T shuffle(Shuffle how, unsigned mask, T value, int lane, int width) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = shuffle(how, mask, bits, lane, width);
  memcpy(&value, &bits, sizeof value);
  return value;
}

#define __syncthreads() ::cuda_on_cpu::sync_threads(__FILE__, __LINE__)
#define __syncwarp ::cuda_on_cpu::sync_warp
#define __trap ::cuda_on_cpu::trap
#define __threadfence ::cuda_on_cpu::thread_fence
#define __threadfence_block ::cuda_on_cpu::thread_fence

// ---- atomics

void atomic(void* address, size_t bytes);  // checks the access

// f maps the old value to the new one. Uninstrumented: the checker would take the load and the store for ordinary ones.
template <class T, class F>
__attribute__((no_sanitize("thread"))) T atomically(T* address, const F& f) {
  atomic(address, sizeof(T));
  T old, changed;
  memcpy(&old, address, sizeof old);
  changed = f(old);
  memcpy(static_cast<void*>(address), &changed, sizeof changed);
  return old;
}

// ---- PTX, as csrc/cuda/mma.cuh declares it

void cp_async16(void* shared, const void* global, int source_bytes);
void cp_async_commit();
void cp_async_wait_for(int pending);
template <int kPending>
void cp_async_wait() {
  cp_async_wait_for(kPending);
}

void ldmatrix_x4(uint32_t (&r)[4], const void* row);
void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row);

void mma(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, bool is_bf16);
template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>);
  mma(d, a, b0, b1, std::is_same_v<T, __nv_bfloat16>);
}

void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0);  // for __half

// As csrc/cuda/wgmma.cuh declares them. A descriptor is an address. Products are computed at the wait.
inline void sync_group(int) { sync_warp(); }  // a warp computes only its own rows
inline void hold(float (&)[8][4]) {}
inline void hold(uint32_t (&)[4]) {}
inline void wgmma_fence() {}
void wgmma_commit();
void wgmma_wait_for(int pending);
template <int kPending>
void wgmma_wait() {
  wgmma_wait_for(kPending);
}
inline uint64_t matrix_descriptor(const void* at) { return reinterpret_cast<uint64_t>(at); }
inline uint64_t advance(uint64_t descriptor, int bytes) { return descriptor + bytes; }

struct GroupProduct {
  float (*d)[4];      // [8]
  const uint32_t* a;  // [4]; nullptr if it is in shared memory
  uint64_t shared_a, b;
  bool by_row, adds, is_bf16;
};
void wgmma(const GroupProduct& product);
template <class T, bool kByRow>
void wgmma_m64n64k16(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
  wgmma({d, a, 0, b, kByRow, adds, std::is_same_v<T, __nv_bfloat16>});
}
template <class T>
void wgmma_m64n64k16(float (&d)[8][4], uint64_t a, uint64_t b, bool adds) {
  wgmma({d, nullptr, a, b, false, adds, std::is_same_v<T, __nv_bfloat16>});
}

inline uint32_t spread_signs(uint32_t bytes, int pair) {
  const auto sign = [&](int byte) { return uint32_t(int32_t(bytes << (24 - 8 * byte)) >> 31); };
  return (sign(2 * pair) & 0xFFFF) | sign(2 * pair + 1) << 16;
}

inline float exp2_approx(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0 : y;
}

// ---- launches

int multiprocessors();
int major_architecture();
int shared_memory_limit();
const char* run_grid(dim3 grid, dim3 block, size_t shared_bytes, void (*kernel)(const void*), const void* parameters);

}  // namespace cuda_on_cpu

namespace fastbert::cuda {

// Runs the kernel to its end. Returns an error message, valid until this host thread's next launch, or nullptr.
template <class... Params, class... Args>
const char* launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void*, Args... args) {
  const auto call = std::make_pair(kernel, std::tuple<Params...>(args...));
  return ::cuda_on_cpu::run_grid(
      grid, block, shared_bytes,
      [](const void* data) {
        const auto& [function, parameters] = *static_cast<decltype(call)*>(data);
        std::apply(function, parameters);
      },
      &call);
}

inline int multiprocessors() { return ::cuda_on_cpu::multiprocessors(); }
inline int major_architecture() { return ::cuda_on_cpu::major_architecture(); }
inline int shared_memory_limit() { return ::cuda_on_cpu::shared_memory_limit(); }

}  // namespace fastbert::cuda

// ---- CUDA's built-in functions

using std::max;
using std::min;

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return cuda_on_cpu::shuffle(cuda_on_cpu::Shuffle::from, mask, value, lane, width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  return cuda_on_cpu::shuffle(cuda_on_cpu::Shuffle::across, mask, value, lanes, width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
  return cuda_on_cpu::shuffle(cuda_on_cpu::Shuffle::up, mask, value, int(lanes), width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
  return cuda_on_cpu::shuffle(cuda_on_cpu::Shuffle::down, mask, value, int(lanes), width);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) { return cuda_on_cpu::ballot(mask, predicate); }
inline int __any_sync(unsigned mask, int predicate) { return cuda_on_cpu::ballot(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return cuda_on_cpu::ballot(mask, !predicate) == 0; }

template <class T>
T atomicAdd(T* address, T value) {
  return cuda_on_cpu::atomically(address, [=](T old) { return T(old + value); });
}
template <class T>
T atomicMax(T* address, T value) {
  return cuda_on_cpu::atomically(address, [=](T old) { return max(old, value); });
}
template <class T>
T atomicMin(T* address, T value) {
  return cuda_on_cpu::atomically(address, [=](T old) { return min(old, value); });
}
template <class T>
T atomicExch(T* address, T value) {
  return cuda_on_cpu::atomically(address, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* address, T expected, T value) {
  return cuda_on_cpu::atomically(address, [=](T old) { return old == expected ? value : old; });
}

template <class T>
T __ldg(const T* address) {
  return *address;
}

// Macros, because glibc declares functions of these names.
#define __expf(x) expf(x)
#define __logf(x) logf(x)

inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __fdividef(float p, float q) { return p / q; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
// The compiler fuses products and sums, as nvcc does; the empty asm keeps it from fusing these.
inline float rounded(float x) {
  asm("" : "+m"(x));
  return x;
}
inline float __fmul_rn(float a, float b) { return rounded(a * b); }
inline float __fadd_rn(float a, float b) { return rounded(rounded(a) + rounded(b)); }
inline float __fsub_rn(float a, float b) { return __fadd_rn(a, -b); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
inline int __float2int_rn(float x) { return int(nearbyintf(x)); }
inline int __float2int_rd(float x) { return int(floorf(x)); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }

template <class To, class From>
To cuda_bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline int __float_as_int(float x) { return cuda_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return cuda_bits<unsigned>(x); }
inline float __int_as_float(int x) { return cuda_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return cuda_bits<float>(x); }
