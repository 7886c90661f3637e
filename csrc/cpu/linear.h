// A dense layer, by our own loops or by the libraries that torch comes with, whichever is fastest.
#pragma once

#include "../stable.h"

namespace fastbert {

// x (..., K) weight (C, K)^T + bias (C,) on the CPU, contiguous, for checked arguments. Few rows by our own loops, and
// any number of rows of a 16-bit type that torch has no fast product for; in fp32 small products by MKL and the rest
// by our own loops or, if this torch has it, by oneDNN. Otherwise as F.linear. docs/linear.md has the measurements.
Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias);

}  // namespace fastbert
