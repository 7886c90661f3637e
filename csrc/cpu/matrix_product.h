// Products of matrices on the CPU, for linear and for the gradients of ops that have products.
#pragma once

#include <tuple>

#include "../stable.h"

namespace fastbert {

// Products of up to this many multiplications call MKL directly (docs/linear.md has the measurement).
constexpr int64_t kSmallProduct = 1 << 20;

// a b, or a^T b if transposed. Like at::mm, but float32 products call MKL directly if they are small, and
// csrc/cpu/loops/matrix_product.cpp where that is faster than MKL.
Tensor matrix_product(const Tensor& a, bool transposed, const Tensor& b);

// dx and dweight of a dense layer, from its checked x (..., K) and weight (C, K), and dy (..., C), the gradient of its
// output. Empty where not needed.
std::tuple<Tensor, Tensor> dense_gradients(const Tensor& dy, const Tensor& x, const Tensor& weight, bool need_dx,
                                           bool need_dweight);
}  // namespace fastbert
