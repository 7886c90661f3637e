#include "linear.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <vector>

#include "../checks.h"
#include "../tensor.h"
#include "blas.h"

namespace fastbert {

namespace {

// Multiplications in a product up to which MKL is called directly (docs/linear.md has the measurement).
constexpr int64_t kSmallProduct = 1 << 20;

// torch's operator for oneDNN's inner product, which exists where torch was built with oneDNN.
const std::optional<c10::OperatorHandle>& onednn_linear() {
  static const auto op = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
  return op;
}

bool use_onednn(const at::Tensor& x, const at::Tensor& weight) {
  return x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat && x.numel() > 0 &&
         at::globalContext().userEnabledMkldnn() && onednn_linear();
}

at::Tensor onednn_product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const c10::List<std::optional<at::Scalar>> no_scalars;
  torch::jit::Stack stack{x, weight, bias, "none", no_scalars, ""};
  onednn_linear()->callBoxed(&stack);
  return stack.at(0).toTensor();
}

// x (rows, K), contiguous, with more rows until its last block is full: whatever follows in its storage, or else zeros
// in a copy. The products of those rows are thrown away.
at::Tensor in_whole_blocks(const at::Tensor& x) {
  const int64_t rows = x.size(0), blocks = whole_blocks(rows), K = x.size(1);
  if (rows == blocks) return x;
  if (size_t(x.storage_offset() + blocks * K) * x.element_size() <= x.storage().nbytes())
    return x.as_strided({blocks, K}, {K, 1});
  const at::Tensor copy = empty_rows(x.sizes(), x.options());
  copy.copy_(x);
  return copy.as_strided({blocks, K}, {K, 1});
}

// Whether oneDNN's way to a product, which it prepares anew in each call, takes longer than the product.
bool is_small(const at::Tensor& rows, const at::Tensor& weight) {
  return has_blas() && weight.numel() > 0 && rows.size(0) * weight.numel() <= kSmallProduct;
}

// By MKL's own entry: bias rows, then one call that adds the product to them.
at::Tensor small_product(const at::Tensor& rows, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const int64_t tokens = rows.size(0), K = rows.size(1), channels = weight.size(0);
  const at::Tensor y = empty_rows({tokens, channels}, rows.options());
  float* const to = y.mutable_data_ptr<float>();
  if (bias)
    for (int64_t row = 0; row < tokens; ++row)
      std::memcpy(to + row * channels, bias->const_data_ptr<float>(), channels * sizeof(float));
  const Matrix<const float> x{rows.const_data_ptr<float>(), K}, w{weight.const_data_ptr<float>(), K};
  product<float>(Op::as_is, Op::transposed, tokens, channels, K, 1, x, w, bias ? 1 : 0, {to, channels});
  return y;
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const at::AutoDispatchBelowAutograd guard;
  if (!use_onednn(x, weight)) return at::linear(x, weight, bias);
  const at::Tensor rows = x.contiguous().flatten(0, -2), w = weight.contiguous();
  const auto b = bias ? std::optional(bias->contiguous()) : bias;  // oneDNN does not look at its stride
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = w.size(0);
  if (is_small(rows, w)) return small_product(rows, w, b).view(shape);
  return onednn_product(in_whole_blocks(rows), w, b).narrow(0, 0, rows.size(0)).view(shape);
}

at::Tensor matrix_product(const at::Tensor& a, bool transposed, const at::Tensor& b) {
  const int64_t rows = a.size(transposed), inner = a.size(!transposed), columns = b.size(1);
  const bool direct = a.scalar_type() == at::kFloat && b.scalar_type() == at::kFloat && has_blas() && rows > 0 &&
                      inner > 0 && columns > 0 && rows * inner * columns <= kSmallProduct && a.stride(1) == 1 &&
                      b.stride(1) == 1 && a.stride(0) >= a.size(1) && b.stride(0) >= columns && b.size(0) == inner;
  if (!direct) return at::mm(transposed ? a.t() : a, b);
  const at::Tensor y = at::empty({rows, columns}, a.options());
  product<float>(transposed ? Op::transposed : Op::as_is, Op::as_is, rows, columns, inner, 1,
                 {a.const_data_ptr<float>(), a.stride(0)}, {b.const_data_ptr<float>(), b.stride(0)}, 0,
                 {y.mutable_data_ptr<float>(), columns});
  return y;
}

namespace {

at::Tensor linear_fwd_cpu(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  check_dense("linear", x, weight, bias);
  return fastbert::linear(x, weight, bias);
}

}  // namespace

TORCH_LIBRARY_IMPL(fastbert, CPU, m) { m.impl("linear_fwd", &linear_fwd_cpu); }

}  // namespace fastbert
