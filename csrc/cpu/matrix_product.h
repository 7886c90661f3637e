// Products of matrices on the CPU, for linear and for the gradients of ops that have products.
#pragma once

#include <tuple>

#include "../stable.h"

namespace fastbert {

// Products of up to this many multiplications call MKL directly (docs/linear.md has the measurement).
constexpr int64_t kSmallProduct = 1 << 20;

// Weights of up to this many numbers a channel are read as they are with AVX2, for up to 192 rows (docs/linear.md).
constexpr int64_t kNarrow = 1024;

// Whether this is AMD's processor and our loops use AVX-512: MKL uses no more than AVX2 there (docs/linear.md).
bool is_amd_with_avx512();

// Products with fewer rows, columns or steps than this leave most of a panel or tile of our loops empty.
constexpr int64_t kThin = 16;

// Whether PyTorch multiplies this 16-bit type in simple loops of its own, because the processor lacks the instructions
// without which it does not call oneDNN: a hundredth of the speed.
bool library_is_missing(ScalarType dtype);

// A factor of a product: a matrix, which is not empty and whose rows are contiguous and do not overlap, or its
// transpose.
struct Factor {
  const Tensor& matrix;
  bool transposed;

  int64_t rows() const { return matrix.size(transposed); }
  int64_t columns() const { return matrix.size(!transposed); }
};

// Elements from one row to the next. A single row may have any stride, so there it is the row's length.
inline int64_t row_stride(const Tensor& x) { return x.size(0) == 1 ? x.size(1) : x.stride(0); }

// a b + bias (columns,), if there is one, by MKL: float32, and the bias is copied to each row before the product is
// added.
Tensor small_product(const Factor& a, const Factor& b, const Tensor* bias);

// The same by csrc/cpu/loops/matrix_product.cpp, in any type but float64.
Tensor own_product(const Factor& a, const Factor& b, const Tensor* bias);

// The same by csrc/cpu/loops/packed_linear.cpp, in float32, and whether it is faster than the libraries even though it
// packs a factor in each call: for `rows` rows of a, which has this type. The rows of a are contiguous and do not
// overlap. packs_rows: whether it packs those rather than b, if there are enough columns for all threads. The bits are
// the same either way.
bool use_packing_product(ScalarType type, int64_t rows, const Factor& b);
bool packs_rows(int64_t rows, const Factor& b);
Tensor packing_product(const Tensor& a, const Factor& b, const Tensor* bias);

// a b, or a^T b if transposed. Like at::mm, but small float32 products call MKL directly, and our own loops multiply
// where they are faster than PyTorch's library or where it has none.
Tensor matrix_product(const Tensor& a, bool transposed, const Tensor& b);

// dx and dweight of a dense layer, from its checked x (..., K) and weight (C, K), and dy (..., C), the gradient of its
// output. Empty where not needed.
std::tuple<Tensor, Tensor> dense_gradients(const Tensor& dy, const Tensor& x, const Tensor& weight, bool need_dx,
                                           bool need_dweight);
}  // namespace fastbert
