// Philox4x32-7 and the key of a dropout site; fastbert/random.py is the specification.
#pragma once

#include "../dropout.h"
#include "common.cuh"

namespace fastbert::cuda {

struct Key {
  uint32_t low, high;
};

// The key is in device memory: the host never reads it.
__device__ __forceinline__ Key site_key(const DeviceDropout& drop) {
  const uint64_t key = uint64_t(*drop.rng) + drop.offset;
  return {uint32_t(key), uint32_t(key >> 32)};
}

struct Words {
  uint32_t word[4];
};

__device__ __forceinline__ Words philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, Key key) {
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const uint64_t p0 = uint64_t(c0) * 0xD2511F53u, p1 = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ key.low, c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ key.high, c3 = uint32_t(p0);
    key.low += 0x9E3779B9u, key.high += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace fastbert::cuda
