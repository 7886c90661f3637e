// The dropout of one site, as loops and kernels see it. fastbert/random.py is the specification.
#pragma once

#include <stdint.h>

namespace fastbert {

struct Dropout {
  uint64_t key = 0;        // of the site
  uint32_t threshold = 0;  // elements with random bits below are dropped; 0: nothing is
  double keep_scale = 1;
};

constexpr int kRowBits = 16, kAttentionBits = 8;

}  // namespace fastbert
