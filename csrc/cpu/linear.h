// The dense layer of the fastest library that torch carries.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fastbert {

// x (..., K) weight (C, K)^T + bias (C,) on the CPU. In fp32 that is oneDNN where this torch has it, MKL (as in
// F.linear) elsewhere; docs/linear.md has the measurement.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

}  // namespace fastbert
