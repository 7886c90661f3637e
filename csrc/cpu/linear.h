// A dense layer, by the fastest of the libraries that torch comes with.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fastbert {

// Of checked arguments: x (..., K) weight (C, K)^T + bias (C,) on the CPU. In fp32 by oneDNN, if this torch has it;
// else as F.linear, by MKL. The measurement is in docs/linear.md.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// a b, or with transposed a^T b, of matrices: for gradients. As at::mm, without the way to it where it is the longer
// one.
at::Tensor matrix_product(const at::Tensor& a, bool transposed, const at::Tensor& b);

}  // namespace fastbert
