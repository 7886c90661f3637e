// Products of Hopper's warpgroups: four warps whose first is a multiple of 4 multiply together, and their warps may go
// on while the tensor cores work. PTX for sm_90a alone; tests/cuda_on_cpu has functions of the same names.
//
// Warp w of a group has rows 16 w to 16 w + 15 of A and of the accumulator, in fragments as mma.m16n8k16 has them
// (mma.cuh), d[j] for columns 8j to 8j + 7. (PTX ISA, "Register Fragments and Shared Memory Matrix Layouts".) Between
// wgmma_fence and the wgmma_wait of its group nobody may touch a register that a product reads or writes, nor write the
// shared memory that it reads. For what cp.async has copied PTX asks for a fence.proxy.async between its wait and the
// barrier. That costs 2 % (docs/attention.md), and is left out, as Triton leaves it out of such a loop.
#pragma once

#include "mma.cuh"

namespace fastbert::cuda {

#ifndef FB_CUDA_ON_CPU

namespace ptx {

// Before the first product, and wherever registers of one were written since.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

// Waits until at most the kPending latest groups of products are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// After everybody's wgmma_wait, before the group's shared memory is written: the four warps meet. group: 0 to 14.
__device__ __forceinline__ void sync_group(int group) {
  asm volatile("bar.sync %0, 128;\n" ::"r"(group + 1) : "memory");
}

// A matrix in shared memory: rows of 128 bytes, whose chunks swizzle<64> permutes, the first row at a multiple of 1024
// bytes. `at` is where its first row and column would be without the permutation. (PTX ISA, "Matrix Descriptor Format":
// 128-byte swizzle, 1024 bytes from one 8 rows to the next.)
__device__ __forceinline__ uint64_t matrix_descriptor(const void* at) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62, kStride = uint64_t(1024 >> 4) << 32, kLeading = 1 << 16;
  return kSwizzle128 | kStride | kLeading | (shared_address(at) & 0x3FFFF) >> 4;
}

// That of the matrix so many bytes on, a multiple of 16.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, int bytes) { return descriptor + (bytes >> 4); }

#define FB_ACCUMULATOR                                                                                               \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%" \
  "30,"                                                                                                              \
  "%31}"
#define FB_ROW_OF(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define FB_REGISTERS_OF(d)                                                                              \
  FB_ROW_OF(d, 0), FB_ROW_OF(d, 1), FB_ROW_OF(d, 2), FB_ROW_OF(d, 3), FB_ROW_OF(d, 4), FB_ROW_OF(d, 5), \
      FB_ROW_OF(d, 6), FB_ROW_OF(d, 7)

// After the wait for products that write d: what is computed with d stays behind it. And for those that read a: it has
// its registers until then.
__device__ __forceinline__ void hold(float (&d)[8][4]) { asm volatile("" : FB_REGISTERS_OF(d)::"memory"); }
__device__ __forceinline__ void hold(uint32_t (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

// d = a b, or d += a b; a: 64 x 16 in registers, b: 16 x 64. b's rows are those of the matrix if it is by_row, else its
// columns.
#define FB_WGMMA_OF_REGISTERS(type)                                                  \
  asm volatile(                                                                      \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n"                             \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " FB_ACCUMULATOR \
      ", {%32,%33,%34,%35}, %36, adds, 1, 1, %38;\n}\n"                              \
      : FB_REGISTERS_OF(d)                                                           \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)), "n"(int(kByRow)))

template <class T, bool kByRow>
__device__ __forceinline__ void wgmma_m64n64k16(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
  if constexpr (std::is_same_v<T, __half>) {
    FB_WGMMA_OF_REGISTERS("f16");
  } else {
    FB_WGMMA_OF_REGISTERS("bf16");
  }
}

// The same where a is in shared memory too, and b's rows are columns of its matrix.
#define FB_WGMMA_OF_SHARED(type)                                                     \
  asm volatile(                                                                      \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %34, 0;\n"                             \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " FB_ACCUMULATOR \
      ", %32, %33, adds, 1, 1, 0, 0;\n}\n"                                           \
      : FB_REGISTERS_OF(d)                                                           \
      : "l"(a), "l"(b), "r"(int(adds)))

template <class T>
__device__ __forceinline__ void wgmma_m64n64k16(float (&d)[8][4], uint64_t a, uint64_t b, bool adds) {
  if constexpr (std::is_same_v<T, __half>) {
    FB_WGMMA_OF_SHARED("f16");
  } else {
    FB_WGMMA_OF_SHARED("bf16");
  }
}

}  // namespace ptx

#endif

}  // namespace fastbert::cuda
