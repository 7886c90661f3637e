// Products of plain matrices, for gradients: in float32 by our own loops where MKL's are slow, else by MKL.
#include "../matrix_product.h"

#include "../checks.h"
#include "../tensor.h"
#include "blas.h"
#include "linear.h"
#include "product_blocks.h"

namespace fastbert {

namespace {

// MKL keeps to AVX2 on processors that are not Intel's (docs/linear.md).
bool ours_is_faster() {
#ifdef __x86_64__
  static const bool amd = __builtin_cpu_is("amd") && FB_BEST_ISA(matrix_product);
  return amd;
#else
  return false;
#endif
}

Tensor own_product(const Tensor& a, bool transposed, const Tensor& b, const Tensor& c) {
  const int64_t rows = c.size(0), inner = b.size(0), columns = c.size(1);
  const cpu::MatrixProduct op{a.const_data_ptr<float>(),
                              b.const_data_ptr<float>(),
                              c.mutable_data_ptr<float>(),
                              rows,
                              inner,
                              columns,
                              a.stride(0),
                              b.stride(0),
                              transposed};
  const ProductBlocks blocks{rows, inner, columns, FB_BEST_ISA(product_rows)(), FB_BEST_ISA(product_width)()};
  blocks.run(FB_BEST_ISA(product_scratch)(), [&](const auto&... block) { FB_BEST_ISA(matrix_product)(op, block...); });
  return c;
}

}  // namespace

Tensor matrix_product(const Tensor& a, bool transposed, const Tensor& b) {
  const int64_t rows = a.size(transposed), inner = a.size(!transposed), columns = b.size(1);
  const bool direct = type_of(a) == ScalarType::Float && type_of(b) == ScalarType::Float && rows > 0 && inner > 0 &&
                      columns > 0 && a.stride(1) == 1 && b.stride(1) == 1 && a.stride(0) >= a.size(1) &&
                      b.stride(0) >= columns && b.size(0) == inner;
  const bool small = has_blas() && rows * inner * columns <= kSmallProduct;
  if (!direct || !(small || ours_is_faster())) return call("aten::mm", "", transposed ? call("aten::t", "", a) : a, b);
  const Tensor c = empty_rows({rows, columns}, a);
  if (!small) return own_product(a, transposed, b, c);
  product(transposed ? Op::transposed : Op::as_is, Op::as_is, rows, columns, inner,
          {a.const_data_ptr<float>(), a.stride(0)}, {b.const_data_ptr<float>(), b.stride(0)}, 0,
          {c.mutable_data_ptr<float>(), columns});
  return c;
}

}  // namespace fastbert
