// What the loops and the kernels offer the torch side: y = gelu(x + bias), rounded once. x and y are [rows, channels],
// contiguous, of type dtype; bias is [channels].
#pragma once

#include <stdint.h>

#include "cpu/sets.h"
#include "dtype.h"

namespace fastbert {

namespace cpu {

// bias, dbias: double where dtype is f64, else float. bias may be nullptr; dbias is added to.
FB_FOR_EACH_SET(void bias_gelu_fwd(const void* x, const void* bias, void* y, int64_t rows, int64_t channels,
                                   DType dtype, bool tanh);
                void bias_gelu_bwd(const void* dy, const void* x, const void* bias, void* dx, void* dbias, int64_t rows,
                                   int64_t channels, DType dtype, bool tanh);)

}  // namespace cpu

namespace cuda {

// bias: of type dtype or float. Returns what went wrong, or nullptr.
const char* bias_gelu_fwd(const void* x, const void* bias, void* y, int64_t rows, int64_t channels, DType dtype,
                          DType bias_dtype, bool tanh, void* stream);

}  // namespace cuda

}  // namespace fastbert
