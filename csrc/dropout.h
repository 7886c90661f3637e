// The dropout of one site, as loops and kernels see it. fastbert/random.py is the specification.
#pragma once

#include <stdint.h>

namespace fastbert {

struct Dropout {
  uint64_t key = 0;        // of the site
  uint32_t threshold = 0;  // elements with random bits below are dropped; 0: nothing is
  double keep_scale = 1;
};

// The same for a kernel on a device, where the key is in memory and stays there.
struct DeviceDropout {
  const int64_t* rng = nullptr;  // [1], on the device
  uint64_t offset = 0;           // of the site, added to the key
  uint32_t threshold = 0;        // 0: nothing is dropped
  float keep_scale = 1;
};

constexpr int kRowBits = 16, kAttentionBits = 8;

}  // namespace fastbert
