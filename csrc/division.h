// Division that rounds up, for torch's side, loops and kernels. No torch here.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define FB_DIVISION __host__ __device__ __forceinline__ constexpr
#else
#define FB_DIVISION [[gnu::always_inline]] constexpr  // loops for different instruction sets must not share code
#endif

namespace fastbert {

// a / b, rounded up; and n, rounded up to a multiple of b. a and n are at least 0, b at least 1, a + b is no overflow.
FB_DIVISION int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
FB_DIVISION int64_t round_up(int64_t n, int64_t b) { return divide_up(n, b) * b; }

}  // namespace fastbert

#undef FB_DIVISION
