// A dense layer, by our own loops or by the libraries that torch comes with, whichever is fastest.
#pragma once

#include "../stable.h"

namespace fastbert {

// x (..., K) weight (C, K)^T + bias (C,) on the CPU, contiguous, for checked arguments. By our own loops: few rows, any
// number of rows of a 16-bit type that torch has no fast product for, and in fp32 and bf16 whatever they are faster
// with. In fp32 small products by MKL and the rest, if this torch has it, by oneDNN. Otherwise as F.linear.
// docs/linear.md has the measurements.
Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias);

// Whether our own loops compute it for so many rows of the weight's type.
bool is_linear_ours(int64_t rows, const Tensor& weight);

}  // namespace fastbert
