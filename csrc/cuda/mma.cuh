// PTX that the kernels use: asynchronous copies, matrix fragments, products, the fast exponential; wgmma.cuh has the
// products of Hopper's warpgroups. Where tests run kernels on the CPU, tests/cuda_on_cpu has functions of the same
// names. At the end of this file are the replacements for sm_75.
//
// Fragments of mma.m16n8k16, for lane l with g = l / 4 and t = l % 4. A register of A or B holds two elements, the
// first in the lower half:
//   A (16 x 16): a[0] row g, columns 2t, 2t + 1; a[1] row g + 8; a[2], a[3] the same rows, columns 8 + 2t, 9 + 2t
//   B (16 x 8):  b[0] rows 2t, 2t + 1 of column g; b[1] rows 8 + 2t, 9 + 2t
//   C (16 x 8):  c[0], c[1] row g, columns 2t, 2t + 1; c[2], c[3] row g + 8
// (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".) mma.m16n8k8 covers the first half of the
// inner dimension: a[0], a[1] and b[0].
#pragma once

#include <type_traits>

#include "common.cuh"

namespace fastbert::cuda {

#ifdef FB_CUDA_ON_CPU

namespace ptx = ::cuda_on_cpu;

#else

namespace ptx {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return unsigned(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes from global to shared memory, but writes zeros in place of the last 16 - source_bytes of them. The
// copy is visible to this thread after cp_async_wait for its group, and to other threads after a barrier that follows
// that wait.
__device__ __forceinline__ void cp_async16(void* shared, const void* global, int source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global),
               "r"(source_bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most the kPending latest groups of this thread are unfinished.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Loads four 8 x 8 matrices of 16-bit elements; lanes 8i to 8i + 7 give the addresses of the rows of matrix i. r[i] of
// lane l holds row l / 4, columns 2 (l % 4) and the next one. The transposed variant swaps rows and columns.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// d += a b
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                            uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a b, of 16 x 8 and 8 x 8 fp16 elements
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

// Fills the lower half of the result with copies of the highest bit of byte 2 * pair, and the upper half with copies of
// the highest bit of the next byte.
__device__ __forceinline__ uint32_t spread_signs(uint32_t bytes, int pair) {
  uint32_t spread;
  asm("prmt.b32 %0, %1, 0, %2;\n" : "=r"(spread) : "r"(bytes), "r"(pair ? 0xBBAA : 0x9988));
  return spread;
}

// 2^x to 2 ulp; denormal results are 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ptx

#endif

// ---- sm_75 (T4, RTX 20): no asynchronous copies; products only of fp16, and with half the inner dimension

#ifdef FB_CUDA_ON_CPU
inline bool is_turing() { return major_architecture() < 8; }
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
__device__ constexpr bool is_turing() { return true; }
#else
__device__ constexpr bool is_turing() { return false; }
#endif

// Whether this kernel is never chosen by a launcher on the architecture that it is compiled for. Its body is then left
// out, and it traps if it is launched all the same.
template <class T, int kWidth>
__device__ __forceinline__ bool is_unused() {
  const bool unused = is_turing() && (kWidth > 64 || !std::is_same_v<T, __half>);
  if (unused) __trap();
  return unused;
}

__device__ __forceinline__ void commit_copies() {
  if (!is_turing()) ptx::cp_async_commit();
}

template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  if (!is_turing()) ptx::cp_async_wait<kPending>();
}

// d += a b, of 16 x 16 and 16 x 8 elements.
template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if (!is_turing()) {
    ptx::mma_m16n8k16<T>(d, a, b0, b1);
  } else if constexpr (std::is_same_v<T, __half>) {
    ptx::mma_m16n8k8(d, a[0], a[1], b0);
    ptx::mma_m16n8k8(d, a[2], a[3], b1);
  }
}

// Two floats as two rounded 16-bit elements, the first in the lower half.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}

}  // namespace fastbert::cuda
