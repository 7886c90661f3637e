// A dense layer, by the fastest of the libraries that torch comes with.
#pragma once

#include "../stable.h"

namespace fastbert {

// Of checked arguments: x (..., K) weight (C, K)^T + bias (C,) on the CPU. In fp32 by our own loops for few rows, by
// oneDNN for more, if this torch has it; else as F.linear, by MKL. The measurement is in docs/linear.md.
Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias);

// Multiplications in a product up to which MKL is called directly (docs/linear.md has the measurement).
constexpr int64_t kSmallProduct = 1 << 20;

// a b + bias by our own loops, of float32 matrices whose rows may lie apart, or of transposes of these. The
// inner dimension is at least 1.
Tensor own_product(const Tensor& a, bool a_transposed, const Tensor& b, bool b_transposed, const Tensor* bias);

// a b, or with transposed a^T b, of matrices: for gradients. As at::mm, but in float32 without the way to it where it
// is the longer one, and by csrc/cpu/loops/matrix_product.cpp where that is faster than MKL.
Tensor matrix_product(const Tensor& a, bool transposed, const Tensor& b);

}  // namespace fastbert
