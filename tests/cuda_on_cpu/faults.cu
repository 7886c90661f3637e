// Kernels with one fault each, which tests/ops/test_cuda_on_cpu.py expects to be reported. Most give right results in
// some order of the threads. `memory` is 4096 bytes of zeros on the device.
#include "../../csrc/cuda/wgmma.cuh"

namespace fastbert::cuda {

namespace {

constexpr int kThreads = 64;

// ---- barriers

__global__ void missing_barrier(float* memory) {
  FB_SHARED(float, values, kThreads);
  values[threadIdx.x] = 0;
  __syncthreads();
  values[threadIdx.x] = float(threadIdx.x);
  memory[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

// The second round overwrites what others may still read in the first; both rounds write the same.
__global__ void reused_buffer(float* memory) {
  FB_SHARED(float, warp_sums, kThreads / 32);
  float sum = 0;
  for (int i = 0; i < 2; ++i) {
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = 1;
    __syncthreads();
    sum += warp_sums[0] + warp_sums[1];
  }
  memory[threadIdx.x] = sum;
}

__global__ void missing_syncwarp(float* memory) {
  FB_SHARED(float, values, kThreads);
  values[threadIdx.x] = 0;
  __syncwarp();
  values[threadIdx.x] = float(threadIdx.x);
  memory[threadIdx.x] = __shfl_sync(~0u, values[threadIdx.x ^ 1], 0);  // shuffles order no memory
}

__global__ void divergent_barrier(float* memory) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  memory[threadIdx.x] = 0;
}

__global__ void early_return(float* memory) {
  if (threadIdx.x == 5) return;
  __syncthreads();
  memory[threadIdx.x] = 0;
}

__global__ void deadlock(float* memory) {
  if (threadIdx.x == 3) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  memory[threadIdx.x] = 0;
}

// ---- warps

__global__ void missing_lane(float* memory) {
  float sum = 1;
  if (threadIdx.x % 32 != 7) sum += __shfl_xor_sync(~0u, sum, 1);
  memory[threadIdx.x] = sum;
}

__global__ void not_in_the_mask(float* memory) { memory[threadIdx.x] = __shfl_xor_sync(0xFFu, 1.0f, 1); }

__global__ void from_outside_the_mask(float* memory) {
  if (threadIdx.x % 32 < 16) memory[threadIdx.x] = __shfl_sync(0xFFFFu, 1.0f, 20);
}

// ---- asynchronous copies: `memory` to shared memory and back

template <int kPending>
__global__ void short_wait(float* memory) {
  FB_SHARED(float, copied, 2 * 4 * kThreads);
  float* const mine = copied + threadIdx.x * 8;
  for (int group = 0; group < 2; ++group) {
    ptx::cp_async16(mine + group * 4, memory + threadIdx.x * 8 + group * 4, 16);
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<kPending>();
  memory[threadIdx.x * 8] = mine[4];  // of the second group
  ptx::cp_async_wait<0>();
}

__global__ void no_wait(float* memory) {
  FB_SHARED(float, copied, 4 * kThreads);
  ptx::cp_async16(copied + threadIdx.x * 4, memory + threadIdx.x * 4, 16);
  ptx::cp_async_commit();
}

__global__ void wait_without_barrier(float* memory) {
  FB_SHARED(float, copied, 4 * kThreads);
  for (int i = 0; i < 4; ++i) copied[threadIdx.x * 4 + i] = 0;
  __syncthreads();
  ptx::cp_async16(copied + threadIdx.x * 4, memory + threadIdx.x * 4, 16);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  memory[512 + threadIdx.x] = copied[(threadIdx.x ^ 32) * 4];  // another thread's copy
}

// ---- addresses

__global__ void row_guard(float* memory) {
  FB_SHARED(float, row, kThreads - 1);
  FB_SHARED(float, next, kThreads);
  next[threadIdx.x] = 0;
  if (threadIdx.x <= kThreads - 1) row[threadIdx.x] = memory[threadIdx.x];
}

__global__ void beyond_dynamic(float*) {
  FB_DYNAMIC_SHARED(bytes);
  bytes[threadIdx.x] = 0;
}

__global__ void unwritten(float* memory) {
  FB_SHARED(float, values, kThreads);
  if (threadIdx.x % 32 != 9) values[threadIdx.x] = 0;
  __syncthreads();
  memory[threadIdx.x] = values[threadIdx.x] > 0 ? 1.0f : 0.0f;
}

__global__ void misaligned_global(float* memory) {
  reinterpret_cast<Vec<float, 4>*>(memory + 1)[threadIdx.x] = Vec<float, 4>{};
}

__global__ void misaligned_shared(float*) {
  FB_SHARED(float, values, kThreads * 2 + 1);
  reinterpret_cast<Vec<float, 2>*>(values + 1)[threadIdx.x] = Vec<float, 2>{};
}

__global__ void misaligned_copy(float* memory) {
  FB_SHARED(float, copied, 4 * kThreads);
  ptx::cp_async16(copied + threadIdx.x * 4, memory + threadIdx.x * 4 + 1, 16);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
}

__global__ void misaligned_ldmatrix(float*) {
  FB_SHARED(float, rows, 4 * kThreads + 1);
  for (int i = threadIdx.x; i < 4 * kThreads + 1; i += kThreads) rows[i] = 0;
  __syncthreads();
  uint32_t r[4];
  ptx::ldmatrix_x4(r, rows + 4 * threadIdx.x + 1);
}

// Multiplies zeros; by default correctly, else from an unaligned address, without a wait, or with a warp missing.
template <int kOffset, bool kWaits, int kThreadsThatMultiply = 128>
__global__ void matrix(float* memory) {
  FB_TILES(shared);
  for (int i = threadIdx.x; i < 4096; i += blockDim.x) reinterpret_cast<uint32_t*>(shared)[i] = 0;
  __syncthreads();
  float sum[8][4];
  if (threadIdx.x >= kThreadsThatMultiply) return;
  ptx::wgmma_fence();
  const uint64_t at = ptx::matrix_descriptor(shared + kOffset);
  ptx::wgmma_m64n64k16<__half>(sum, at, at, false);
  ptx::wgmma_commit();
  if (kWaits) ptx::wgmma_wait<0>();
  memory[threadIdx.x] = sum[0][0];
}

__global__ void blocks_collide(float* memory) { memory[threadIdx.x] = 1; }

__global__ void block_reads_another(float* memory) {
  const float sum = memory[(1 - blockIdx.x) * kThreads + threadIdx.x];  // the block that ran first wrote it
  memory[blockIdx.x * kThreads + threadIdx.x] = sum + 1;
}

// ---- launches

__global__ void large_array(float* memory) {
  FB_SHARED(float, values, 13 << 10);
  values[threadIdx.x] = memory[threadIdx.x];
}

__global__ void nothing(float*) {}

// ---- correct kernels that look like some of the above

__global__ void with_barriers(float* memory) {
  FB_SHARED(float, values, kThreads);
  FB_DYNAMIC_SHARED(bytes);
  bytes[threadIdx.x] = 1;
  values[threadIdx.x] = float(threadIdx.x);
  __syncwarp();
  float sum = values[threadIdx.x ^ 1];
  __syncthreads();
  values[threadIdx.x] = sum + values[threadIdx.x];
  __syncthreads();
  sum += values[kThreads - 1 - threadIdx.x] + bytes[threadIdx.x / 2];
  if (threadIdx.x % 2) {
    sum += __shfl_xor_sync(0xAAAAAAAAu, sum, 2);
  } else {
    sum += __shfl_xor_sync(0x55555555u, sum, 2);
  }
  memory[blockIdx.x * kThreads + threadIdx.x] = sum;
}

__global__ void counts(float* memory) {
  FB_SHARED(int, count, 1);
  if (threadIdx.x == 0) count[0] = 0;
  __syncthreads();
  atomicAdd(count, 1);
  atomicAdd(reinterpret_cast<int*>(memory), 1);
  __syncthreads();
  if (threadIdx.x == 0) memory[1 + blockIdx.x] = float(count[0]);
}

struct Case {
  const char* name;
  void (*kernel)(float*);
  dim3 grid{1}, block{kThreads};
  size_t shared_bytes = 0;
};

const Case kCases[] = {
    {"missing_barrier", missing_barrier},
    {"reused_buffer", reused_buffer},
    {"missing_syncwarp", missing_syncwarp},
    {"divergent_barrier", divergent_barrier},
    {"early_return", early_return},
    {"deadlock", deadlock},
    {"missing_lane", missing_lane},
    {"not_in_the_mask", not_in_the_mask},
    {"from_outside_the_mask", from_outside_the_mask},
    {"short_wait", short_wait<1>},
    {"missing_wait", short_wait<2>},
    {"no_wait", no_wait},
    {"wait_without_barrier", wait_without_barrier},
    {"row_guard", row_guard},
    {"beyond_dynamic", beyond_dynamic, dim3(1), dim3(kThreads), kThreads - 1},
    {"unwritten", unwritten},
    {"misaligned_global", misaligned_global},
    {"misaligned_shared", misaligned_shared},
    {"misaligned_copy", misaligned_copy},
    {"misaligned_ldmatrix", misaligned_ldmatrix},
    {"misaligned_matrix", matrix<128, true>, dim3(1), dim3(128), 4 * 4096},
    {"unfinished_product", matrix<0, false>, dim3(1), dim3(128), 4 * 4096},
    {"missing_warp", matrix<0, true, 96>, dim3(1), dim3(128), 4 * 4096},
    {"right: matrix", matrix<0, true>, dim3(1), dim3(128), 4 * 4096},
    {"blocks_collide", blocks_collide, dim3(2)},
    {"block_reads_another", block_reads_another, dim3(2)},
    {"large_array", large_array},
    {"too_much_dynamic", nothing, dim3(1), dim3(kThreads), (227 << 10) + 1},
    {"empty_grid", nothing, dim3(0)},
    {"long_grid", nothing, dim3(1, 65536)},
    {"large_block", nothing, dim3(1), dim3(1025)},
    {"right: short_wait<0>", short_wait<0>},
    {"right: with_barriers", with_barriers, dim3(3), dim3(kThreads), kThreads},
    {"right: counts", counts, dim3(3)},
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* run_fault(const char* name, float* memory) {
  for (const Case& fault : kCases) {
    if (strcmp(fault.name, name) == 0) {
      return launch(fault.kernel, fault.grid, fault.block, fault.shared_bytes, nullptr, memory);
    }
  }
  return "no such fault";
}

}  // namespace fastbert::cuda
