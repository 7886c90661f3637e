// Products of plain matrices: ours of float32, and which one is for gradients.
#include "../matrix_product.h"

#include "../checks.h"
#include "../tensor.h"
#include "blas.h"
#include "linear.h"
#include "product_blocks.h"

namespace fastbert {

namespace {

// Than MKL, which keeps to AVX2 on processors that are not Intel's (docs/linear.md).
bool ours_is_faster() {
#ifdef __x86_64__
  static const bool amd = __builtin_cpu_is("amd");
  return amd && cpu::best_isa() >= cpu::Isa::avx2;
#else
  return false;
#endif
}

}  // namespace

Tensor own_product(const Tensor& a, bool a_transposed, const Tensor& b, bool b_transposed, const Tensor* bias) {
  FB_CHECK(FB_BEST_ISA(matrix_product), kNoIsa);
  const int64_t rows = a.size(a_transposed), inner = a.size(!a_transposed), columns = b.size(!b_transposed);
  const Tensor c = empty({rows, columns}, a);
  cpu::MatrixProduct op{};
  op.a = a.const_data_ptr<float>(), op.a_stride = a.stride(0), op.a_transposed = a_transposed;
  op.b = b.const_data_ptr<float>(), op.b_stride = b.stride(0), op.b_transposed = b_transposed;
  op.bias = bias ? bias->const_data_ptr<float>() : nullptr, op.c = c.mutable_data_ptr<float>();
  op.rows = rows, op.inner = inner, op.columns = columns;
  const ProductBlocks blocks{rows, inner, columns, FB_BEST_ISA(product_rows)(), FB_BEST_ISA(product_width)()};
  blocks.run(FB_BEST_ISA(product_scratch)(), [&](const auto&... block) { FB_BEST_ISA(matrix_product)(op, block...); });
  return c;
}

Tensor matrix_product(const Tensor& a, bool transposed, const Tensor& b) {
  const int64_t rows = a.size(transposed), inner = a.size(!transposed), columns = b.size(1);
  const bool direct = type_of(a) == ScalarType::Float && type_of(b) == ScalarType::Float && rows > 0 && inner > 0 &&
                      columns > 0 && a.stride(1) == 1 && b.stride(1) == 1 && a.stride(0) >= a.size(1) &&
                      b.stride(0) >= columns && b.size(0) == inner;
  const bool small = has_blas() && rows * inner * columns <= kSmallProduct;
  if (!direct || !(small || ours_is_faster())) return call("aten::mm", "", transposed ? call("aten::t", "", a) : a, b);
  if (!small) return own_product(a, transposed, b, false, nullptr);
  const Tensor c = empty({rows, columns}, a);
  product(transposed ? Op::transposed : Op::as_is, Op::as_is, rows, columns, inner,
          {a.const_data_ptr<float>(), a.stride(0)}, {b.const_data_ptr<float>(), b.stride(0)}, 0,
          {c.mutable_data_ptr<float>(), columns});
  return c;
}

}  // namespace fastbert
