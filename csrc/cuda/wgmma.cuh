// Products of Hopper's warpgroups: four consecutive warps, the first a multiple of 4, multiply together, and may do
// other work while the tensor cores are busy. The PTX is for sm_90a only; tests/cuda_on_cpu has functions of the same
// names.
//
// Warp w of a group holds rows 16 w to 16 w + 15 of A and of the accumulator, in the fragments of mma.m16n8k16
// (mma.cuh); d[j] holds columns 8j to 8j + 7. (PTX ISA, "Register Fragments and Shared Memory Matrix Layouts".) Between
// wgmma_fence and the wgmma_wait for its group, do not touch registers that a product reads or writes, and do not write
// the shared memory that it reads. PTX asks for a fence.proxy.async between the wait for data copied by cp.async and
// the barrier. It costs 2 % (docs/attention.md) and is left out, as in the loops that Triton and CUTLASS
// (sm90_mma_multistage_gmma_ss_warpspecialized.hpp) build of cp.async and wgmma.
#pragma once

#include "mma.cuh"

namespace fastbert::cuda {

#ifndef FB_CUDA_ON_CPU

namespace ptx {

// Needed before the first product, and again after registers of a product have been written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

// Waits until at most the kPending latest groups of products are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// A barrier of the group's four warps, after their wgmma_wait and before the group's shared memory is written. group: 0
// or 1. The barriers' numbers are constants: otherwise a block reserves all 16.
__device__ __forceinline__ void sync_group(int group) {
  if (group == 0) {
    asm volatile("bar.sync 1, 128;\n" ::: "memory");
  } else {
    asm volatile("bar.sync 2, 128;\n" ::: "memory");
  }
}

// The descriptor of a matrix in shared memory with rows of 128 bytes, whose chunks are permuted by swizzle<64>, and
// whose first row lies at a multiple of 1024 bytes. `at` is where the first row and column would be without the
// permutation. (PTX ISA, "Matrix Descriptor Format": 128-byte swizzle, 1024 bytes from one group of 8 rows to the
// next.) All lanes have to call this. The shuffle tells the compiler that their addresses are equal, so that it
// computes with descriptors in uniform registers, where the instruction takes them.
__device__ __forceinline__ uint64_t matrix_descriptor(const void* at) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62, kStride = uint64_t(1024 >> 4) << 32, kLeading = 1 << 16;
  return kSwizzle128 | kStride | kLeading | __shfl_sync(~0u, (shared_address(at) & 0x3FFFF) >> 4, 0);
}

// The descriptor of the matrix that begins `bytes` (a multiple of 16) further on.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, int bytes) { return descriptor + (bytes >> 4); }

#define FB_ACCUMULATOR                                                                                               \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%" \
  "30,"                                                                                                              \
  "%31}"
#define FB_ROW_OF(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define FB_REGISTERS_OF(d)                                                                              \
  FB_ROW_OF(d, 0), FB_ROW_OF(d, 1), FB_ROW_OF(d, 2), FB_ROW_OF(d, 3), FB_ROW_OF(d, 4), FB_ROW_OF(d, 5), \
      FB_ROW_OF(d, 6), FB_ROW_OF(d, 7)

// Call these after the wait for a product. hold(d) keeps the compiler from moving computations with the accumulator d
// before the wait; hold(a) keeps the operand a in its registers until then. Call them before the fence, too, if d or a
// has just been computed: the fence orders what was written before it, and the compiler may write registers later.
__device__ __forceinline__ void hold(float (&d)[8][4]) { asm volatile("" : FB_REGISTERS_OF(d)::"memory"); }
__device__ __forceinline__ void hold(uint32_t (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

// d = a b, or d += a b if `adds`; a: 64 x 16 in registers, b: 16 x 64 in shared memory. The matrix there has b's rows
// as its rows if kByRow, else as its columns.
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

// The same with a in shared memory too; the matrix in shared memory has b's rows as its columns.
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
