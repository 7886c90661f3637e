#include "matrix_product.h"

#include <climits>

#include "../checks.h"
#include "../matrix_product.h"
#include "../tensor.h"
#include "blas.h"
#include "product_blocks.h"

namespace fastbert {

namespace {

// Products with fewer rows, columns or steps than this leave most of a panel or tile of our loops empty.
constexpr int64_t kThin = 16;

// MKL uses no more than AVX2 on processors that are not Intel's (docs/linear.md), so with AVX-512 our loops are faster.
bool mkl_is_slow() {
#ifdef __x86_64__
  static const bool amd = __builtin_cpu_is("amd");
  return amd && cpu::best_isa() >= cpu::Isa::avx512;
#else
  return false;
#endif
}

// Elements from one row to the next. A single row may have any stride, so there it is the row's length.
int64_t row_stride(const Tensor& x) { return x.size(0) == 1 ? x.size(1) : x.stride(0); }

// Whether x is float32 and not empty, with contiguous rows that do not overlap.
bool is_in_rows(const Tensor& x) {
  return type_of(x) == ScalarType::Float && x.numel() > 0 && (x.size(1) == 1 || x.stride(1) == 1) &&
         row_stride(x) >= x.size(1);
}

// Calls MKL directly.
Tensor small_product(const Tensor& a, bool transposed, const Tensor& b) {
  const int64_t rows = a.size(transposed), inner = b.size(0), columns = b.size(1);
  const Tensor c = empty({rows, columns}, a);
  product(transposed ? Op::transposed : Op::as_is, Op::as_is, rows, columns, inner,
          {a.const_data_ptr<float>(), row_stride(a)}, {b.const_data_ptr<float>(), row_stride(b)}, 0,
          {c.mutable_data_ptr<float>(), columns});
  return c;
}

// By csrc/cpu/loops/matrix_product.cpp.
Tensor own_product(const Tensor& a, bool transposed, const Tensor& b) {
  FB_CHECK(FB_BEST_ISA(matrix_product), kNoIsa);
  const int64_t rows = a.size(transposed), inner = b.size(0), columns = b.size(1);
  const Tensor c = empty({rows, columns}, a);
  cpu::MatrixProduct op{};
  op.a = a.const_data_ptr<float>(), op.a_stride = row_stride(a), op.a_transposed = transposed;
  op.b = b.const_data_ptr<float>(), op.b_stride = row_stride(b), op.c = c.mutable_data_ptr<float>();
  op.rows = rows, op.inner = inner, op.columns = columns;
  const ProductBlocks blocks{rows, inner, columns, FB_BEST_ISA(product_rows)(), FB_BEST_ISA(product_width)()};
  blocks.run(FB_BEST_ISA(product_scratch)(), [&](const auto&... block) { FB_BEST_ISA(matrix_product)(op, block...); });
  return c;
}

}  // namespace

Tensor matrix_product(const Tensor& a, bool a_transposed, const Tensor& b) {
  const int64_t rows = a.size(a_transposed), inner = a.size(!a_transposed), columns = b.size(1);
  if (is_in_rows(a) && is_in_rows(b) && b.size(0) == inner) {
    if (has_blas() && rows * inner * columns <= kSmallProduct && std::max(row_stride(a), row_stride(b)) <= INT_MAX)
      return small_product(a, a_transposed, b);
    if (mkl_is_slow() && std::min({rows, inner, columns}) >= kThin) return own_product(a, a_transposed, b);
  }
  return call("aten::mm", "", a_transposed ? transposed(a) : a, b);
}

std::tuple<Tensor, Tensor> dense_gradients(const Tensor& dy, const Tensor& x, const Tensor& weight, bool need_dx,
                                           bool need_dweight) {
  const Tensor rows = matrix(contiguous(dy));
  return {need_dx ? view(matrix_product(rows, false, contiguous(weight)), x.sizes()) : empty({0}, x),
          need_dweight ? matrix_product(rows, true, matrix(contiguous(x))) : empty({0}, x)};
}

}  // namespace fastbert
