// A kernel for each instruction, for tests/ops/test_cuda_on_cpu.py: they run on the CPU, and on a GPU if there is one.
// Each runs in one warp, wgmma in four; memory is [lane][register]. One more shows attention's order of sequences.
#include "../../csrc/cuda/attention.cuh"
#include "../../csrc/cuda/tiles.cuh"
#include "../../csrc/cuda/wgmma.cuh"

#define FB_EXPORT extern "C" __attribute__((visibility("default")))

namespace fastbert::cuda {

namespace {

template <class T>
__global__ void mma(const uint32_t* a, const uint32_t* b, float* d) {
  const int lane = threadIdx.x;
  uint32_t from[4];
  float to[4];
  for (int i = 0; i < 4; ++i) from[i] = a[lane * 4 + i], to[i] = d[lane * 4 + i];
  ptx::mma_m16n8k16<T>(to, from, b[lane * 2], b[lane * 2 + 1]);
  for (int i = 0; i < 4; ++i) d[lane * 4 + i] = to[i];
}

// Multiplies the first half of the inner dimension.
__global__ void mma_of_eight(const uint32_t* a, const uint32_t* b, float* d) {
  const int lane = threadIdx.x;
  float to[4];
  for (int i = 0; i < 4; ++i) to[i] = d[lane * 4 + i];
  ptx::mma_m16n8k8(to, a[lane * 4], a[lane * 4 + 1], b[lane * 2]);
  for (int i = 0; i < 4; ++i) d[lane * 4 + i] = to[i];
}

// rows: [32][8]
__global__ void ldmatrix(const uint16_t* rows, uint32_t* fragment, bool transposed) {
  FB_SHARED(uint16_t, matrices, 32 * 8);
  const int lane = threadIdx.x;
  for (int i = 0; i < 8; ++i) matrices[lane * 8 + i] = rows[lane * 8 + i];
  __syncthreads();
  uint32_t r[4];
  if (transposed) {
    ptx::ldmatrix_x4_trans(r, &matrices[lane * 8]);
  } else {
    ptx::ldmatrix_x4(r, &matrices[lane * 8]);
  }
  for (int i = 0; i < 4; ++i) fragment[lane * 4 + i] = r[i];
}

#ifdef FB_HOPPER
// a: [64][64], in shared memory or as fragments; b: [64][64], its rows or its columns; d: [4][8][32][4], by warp
template <class T>
__global__ void wgmma(const T* a, const T* b, float* d, bool a_is_shared, bool by_row) {
  FB_TILES(shared);
  Chunk *const left = reinterpret_cast<Chunk*>(shared), *const right = left + 64 * 8;
  for (int i = threadIdx.x; i < 64 * 8; i += blockDim.x) {
    left[swizzle<64>(i / 8, i % 8)] = reinterpret_cast<const Chunk*>(a)[i];
    right[swizzle<64>(i / 8, i % 8)] = reinterpret_cast<const Chunk*>(b)[i];
  }
#ifndef FB_CUDA_ON_CPU
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");  // for the stores; attention copies its tiles
#endif
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sum[8][4];
  uint32_t words[4][4];
  for (int j = 0; j < 8; ++j)
    for (int e = 0; e < 4; ++e) sum[j][e] = d[((warp * 8 + j) * 32 + lane) * 4 + e];
  for (int k = 0; k < 4; ++k) ptx::ldmatrix_x4(words[k], left + swizzle<64>(16 * warp + lane % 16, 2 * k + lane / 16));
  const uint64_t from = ptx::matrix_descriptor(left), with = ptx::matrix_descriptor(right);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (a_is_shared) {
      ptx::wgmma_m64n64k16<T>(sum, ptx::advance(from, 32 * k), ptx::advance(with, 32 * k), true);
    } else if (by_row) {
      ptx::wgmma_m64n64k16<T, true>(sum, words[k], ptx::advance(with, 2048 * k), true);
    } else {
      ptx::wgmma_m64n64k16<T, false>(sum, words[k], ptx::advance(with, 32 * k), k > 0);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::hold(sum);
  for (int j = 0; j < 8; ++j)
    for (int e = 0; e < 4; ++e) d[((warp * 8 + j) * 32 + lane) * 4 + e] = sum[j][e];
}
#endif

// Lane l copies l bytes, at most 16, into the first of three groups and 16 into the others; waits for two groups, then
// for the last one. from, to: [3][32][16]
__global__ void cp_async(const unsigned char* from, unsigned char* to) {
  FB_SHARED(unsigned char, copied, 3 * 32 * 16);
  const int lane = threadIdx.x, bytes = min(lane, 16);
  for (int group = 0; group < 3; ++group) {
    const int at = (group * 32 + lane) * 16;
    ptx::cp_async16(copied + at, from + at, group == 0 ? bytes : 16);
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<1>();
  for (int i = 0; i < 16; ++i) {
    for (int group = 0; group < 2; ++group) to[(group * 32 + lane) * 16 + i] = copied[(group * 32 + lane) * 16 + i];
  }
  ptx::cp_async_wait<0>();
  for (int i = 0; i < 16; ++i) to[(2 * 32 + lane) * 16 + i] = copied[(2 * 32 + lane) * 16 + i];
}

// to: [7][32]
__global__ void shuffles(int* to) {
  const int lane = threadIdx.x;
  to[lane] = __shfl_sync(~0u, lane, 5);
  to[32 + lane] = __shfl_sync(~0u, lane, 9, 8);
  to[64 + lane] = __shfl_xor_sync(~0u, lane, 3);
  to[96 + lane] = __shfl_up_sync(~0u, lane, 2, 8);
  to[128 + lane] = __shfl_down_sync(~0u, lane, 2, 8);
  to[160 + lane] = __shfl_xor_sync(~0u, lane, 4, 4);
  to[192 + lane] = int(__shfl_sync(~0u, double(lane), 31 - lane));
}

// to: [5][32]. In the second vote, odd and even lanes vote separately.
__global__ void votes(unsigned* to) {
  const int lane = threadIdx.x;
  to[lane] = __ballot_sync(~0u, lane % 3 == 0);
  to[32 + lane] = lane % 2 ? __ballot_sync(0xAAAAAAAAu, lane > 15) : __ballot_sync(0x55555555u, lane < 16);
  to[64 + lane] = __any_sync(~0u, lane == 7);
  to[96 + lane] = __all_sync(~0u, lane < 31);
  to[128 + lane] = __all_sync(~0u, lane < 32);
}

// to: [sequences], by rank; every step-th of them is written
__global__ void order(Attention a, int* to, int step) {
  for (int rank = 0; rank < a.sequences; rank += step) {
    const int sequence = sequence_of_rank(a, rank);
    if (threadIdx.x == 0) to[rank] = sequence;
  }
}

}  // namespace

FB_EXPORT const char* run_order(const int32_t* cu_seqlens, int* to, int sequences, int tokens, int longest, int step) {
  Attention a{};
  a.cu_seqlens = cu_seqlens, a.sequences = sequences, a.tokens = tokens, a.longest = longest;
  return launch(order, dim3(1), dim3(32), 0, nullptr, a, to, step);
}
FB_EXPORT const char* run_mma(const uint32_t* a, const uint32_t* b, float* d, bool bf16) {
  return launch(bf16 ? mma<__nv_bfloat16> : mma<__half>, dim3(1), dim3(32), 0, nullptr, a, b, d);
}
FB_EXPORT const char* run_mma_of_eight(const uint32_t* a, const uint32_t* b, float* d) {
  return launch(mma_of_eight, dim3(1), dim3(32), 0, nullptr, a, b, d);
}
#ifdef FB_HOPPER
FB_EXPORT const char* run_wgmma(const void* a, const void* b, float* d, bool a_is_shared, bool by_row, bool bf16) {
  const auto run = [&](auto element) {
    using T = decltype(element);
    return launch(wgmma<T>, dim3(1), dim3(128), 2 * 64 * 64 * sizeof(T), nullptr, static_cast<const T*>(a),
                  static_cast<const T*>(b), d, a_is_shared, by_row);
  };
  return bf16 ? run(__nv_bfloat16{}) : run(__half{});
}
#endif
FB_EXPORT const char* run_ldmatrix(const uint16_t* rows, uint32_t* fragment, bool transposed) {
  return launch(ldmatrix, dim3(1), dim3(32), 0, nullptr, rows, fragment, transposed);
}
FB_EXPORT const char* run_cp_async(const unsigned char* from, unsigned char* to) {
  return launch(cp_async, dim3(1), dim3(32), 0, nullptr, from, to);
}
FB_EXPORT const char* run_shuffles(int* to) { return launch(shuffles, dim3(1), dim3(32), 0, nullptr, to); }
FB_EXPORT const char* run_votes(unsigned* to) { return launch(votes, dim3(1), dim3(32), 0, nullptr, to); }

}  // namespace fastbert::cuda
