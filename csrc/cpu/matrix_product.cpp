#include "matrix_product.h"

#include <climits>
#include <cstring>

#include "../matrix_product.h"
#include "../tensor.h"
#include "blas.h"
#include "product_blocks.h"

namespace fastbert {

namespace {

// The answer of an operator that has no arguments, or false if this build of torch does not have it.
[[maybe_unused]] bool answer_of(const char* name) {
  StableIValue answer[1]{};
  return torch_call_dispatcher(name, "", answer, TORCH_ABI_VERSION) == TORCH_SUCCESS &&
         torch::stable::detail::to<bool>(answer[0]);
}

// Whether x is not empty, and its rows are contiguous and do not overlap.
bool is_in_rows(const Tensor& x) {
  return x.numel() > 0 && (x.size(1) == 1 || x.stride(1) == 1) && row_stride(x) >= x.size(1);
}

}  // namespace

bool is_amd_with_avx512() {
#ifdef __x86_64__
  static const bool amd = __builtin_cpu_is("amd");
  return amd && cpu::best_isa() >= cpu::Isa::avx512;
#else
  return false;
#endif
}

Tensor small_product(const Factor& a, const Factor& b, const Tensor* bias) {
  const int64_t rows = a.rows(), columns = b.columns();
  const Tensor c = empty_rows({rows, columns}, a.matrix);
  float* const to = c.mutable_data_ptr<float>();
  if (bias)
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(to + row * columns, bias->const_data_ptr<float>(), columns * sizeof(float));
  const auto as_given = [](const Factor& x) { return x.transposed ? Op::transposed : Op::as_is; };
  const auto numbers = [](const Factor& x) {
    return Matrix<const float>{x.matrix.const_data_ptr<float>(), row_stride(x.matrix)};
  };
  product(as_given(a), as_given(b), rows, columns, a.columns(), numbers(a), numbers(b), bias ? 1 : 0, {to, columns});
  return c;
}

Tensor own_product(const Factor& a, const Factor& b, const Tensor* bias) {
  const int64_t rows = a.rows(), inner = a.columns(), columns = b.columns();
  const Tensor c = empty({rows, columns}, a.matrix);
  cpu::MatrixProduct op{};
  op.a = a.matrix.const_data_ptr(), op.a_stride = row_stride(a.matrix), op.a_transposed = a.transposed;
  op.b = b.matrix.const_data_ptr(), op.b_stride = row_stride(b.matrix), op.b_transposed = b.transposed;
  op.bias = bias ? bias->const_data_ptr() : nullptr, op.c = c.mutable_data_ptr();
  op.inner = inner, op.columns = columns, op.dtype = dtype_of(a.matrix);
  const ProductBlocks blocks{rows, inner, columns, FB_BEST_ISA(product_rows)(), FB_BEST_ISA(product_width)()};
  blocks.run(FB_BEST_ISA(product_scratch)(), [&](const ProductBlocks::Block& block, void* scratch) {
    FB_BEST_ISA(matrix_product)(op, block.row, block.row_end, block.column, block.column_end, scratch);
  });
  return c;
}

bool library_is_missing(ScalarType dtype) {
#ifdef __x86_64__
  if (dtype != ScalarType::Half && dtype != ScalarType::BFloat16) return false;
  static const bool float16 = !answer_of("mkldnn::_is_mkldnn_fp16_supported"),
                    bfloat16 = !answer_of("mkldnn::_is_mkldnn_bf16_supported");
  return dtype == ScalarType::Half ? float16 : bfloat16;
#else
  return false;  // torch has loops for them that use the processor's instructions
#endif
}

Tensor matrix_product(const Tensor& a, bool a_transposed, const Tensor& b) {
  const int64_t rows = a.size(a_transposed), inner = a.size(!a_transposed), columns = b.size(1);
  const ScalarType type = type_of(a);
  if (is_in_rows(a) && is_in_rows(b) && b.size(0) == inner && type_of(b) == type) {
    const bool is_float = type == ScalarType::Float, is_small = rows * inner * columns <= kSmallProduct;
    if (is_float && is_small && has_blas() && std::max(row_stride(a), row_stride(b)) <= INT_MAX)
      return small_product({a, a_transposed}, {b, false}, nullptr);
    const bool own =
        is_float ? is_amd_with_avx512() && std::min({rows, inner, columns}) >= kThin : library_is_missing(type);
    if (own && FB_BEST_ISA(matrix_product)) return own_product({a, a_transposed}, {b, false}, nullptr);
    if (!a_transposed && rows >= kThin && use_packing_product(type, rows, {b, false}))
      return packing_product(a, {b, false}, nullptr);
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
