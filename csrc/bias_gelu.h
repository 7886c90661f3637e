// The interface between the torch sides of bias_gelu and its loops and kernels: y = gelu(x + bias), rounded once. x, y
// and their gradients are [rows, channels], contiguous, of type dtype; bias is [channels].
#pragma once

#include <stdint.h>

#include "cpu/isa.h"
#include "dtype.h"

namespace fastbert {

namespace cpu {

// bias, dbias: double where dtype is f64, else float. bias may be nullptr; dbias is added to.
FB_FOR_EACH_ISA(void bias_gelu_fwd(const void* x, const void* bias, void* y, int64_t rows, int64_t channels,
                                   DType dtype, bool tanh);
                void bias_gelu_bwd(const void* dy, const void* x, const void* bias, void* dx, void* dbias, int64_t rows,
                                   int64_t channels, DType dtype, bool tanh);)

}  // namespace cpu

namespace cuda {

// bias: of type dtype or float, or nullptr. Each returns an error message, or nullptr.
const char* bias_gelu_fwd(const void* x, const void* bias, void* y, int64_t rows, int64_t channels, DType dtype,
                          DType bias_dtype, bool tanh, void* stream);

// partials: [shares, channels], the sums of dx over each of `shares` parts of the rows, or nullptr.
const char* bias_gelu_bwd(const void* dy, const void* x, const void* bias, void* dx, float* partials, int64_t rows,
                          int64_t channels, int64_t shares, DType dtype, DType bias_dtype, bool tanh, void* stream);

// The number of shares that occupies all of the current device. rows and channels are at least 1.
int64_t bias_gelu_bwd_shares(int64_t rows, int64_t channels, DType dtype);

}  // namespace cuda

}  // namespace fastbert
