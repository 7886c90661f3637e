// A dense layer, by the fastest of the libraries that torch comes with.
#pragma once

#include "../stable.h"

namespace fastbert {

// Of checked arguments: x (..., K) weight (C, K)^T + bias (C,) on the CPU. In fp32 by our own loops for few rows, by
// oneDNN for more, if this torch has it; else as F.linear, by MKL. The measurement is in docs/linear.md.
Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias);

}  // namespace fastbert
