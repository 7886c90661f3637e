// Products of matrices on the CPU, for linear and for the gradients of ops that have products.
#pragma once

#include <tuple>

#include "../stable.h"

namespace fastbert {

// Multiplications in a product up to which MKL is called directly (docs/linear.md has the measurement).
constexpr int64_t kSmallProduct = 1 << 20;

// a b, or with transposed a^T b. As at::mm, but in float32 MKL is called directly where a product is small, and
// csrc/cpu/loops/matrix_product.cpp where that is faster than MKL.
Tensor matrix_product(const Tensor& a, bool transposed, const Tensor& b);

// a b + bias, or with transposes of a or b, by these loops. float32; elements of a row are neighbours in memory, rows
// may lie apart. The inner dimension is at least 1.
Tensor own_product(const Tensor& a, bool a_transposed, const Tensor& b, bool b_transposed, const Tensor* bias);

// Of a dense layer's checked x (..., K) and weight (C, K), and the gradient dy (..., C) of its result: dx, and that of
// the weight; empty where not needed.
std::tuple<Tensor, Tensor> dense_gradients(const Tensor& dy, const Tensor& x, const Tensor& weight, bool need_dx,
                                           bool need_dweight);

// Products with fewer rows, columns or steps than this leave most of a panel or tile of these loops empty.
constexpr int64_t kThin = 16;

}  // namespace fastbert
