// The dropout of one site (a place in a layer) for loops and kernels. fastbert/random.py is the specification.
#pragma once

#include <stdint.h>

namespace fastbert {

struct Dropout {
  uint64_t key = 0;        // of the site
  uint32_t threshold = 0;  // elements whose random bits are below it are dropped; 0: no dropout
  double keep_scale = 1;
};

// The same for a kernel on a device. The key stays in device memory: the host never reads it.
struct DeviceDropout {
  const int64_t* rng = nullptr;  // [1], on the device
  uint64_t offset = 0;           // of the site, added to the key
  uint32_t threshold = 0;        // 0: no dropout
  float keep_scale = 1;
};

constexpr int kRowBits = 16, kAttentionBits = 8;

}  // namespace fastbert
