#include "linear.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <algorithm>

namespace fastbert {

namespace {

// torch's own operator for oneDNN's inner product with post-ops; it is registered where torch was built with oneDNN.
const std::optional<c10::OperatorHandle>& onednn_linear() {
  static const auto op = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
  return op;
}

// oneDNN cuts the rows into equal blocks of a size that divides them, and is up to 1.4 x slower than MKL where no
// divisor is a good one. Few rows, and multiples of 32, are where it always wins.
bool onednn_is_faster(const at::Tensor& x, const at::Tensor& weight) {
  const int64_t rows = x.numel() / std::max<int64_t>(1, x.size(-1));
  return x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat && rows > 0 &&
         (rows <= 256 || rows % 32 == 0) && at::globalContext().userEnabledMkldnn() && onednn_linear();
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const at::AutoDispatchBelowAutograd guard;
  if (!onednn_is_faster(x, weight)) return at::linear(x, weight, bias);
  const c10::List<std::optional<at::Scalar>> no_scalars;
  torch::jit::Stack stack{x.contiguous(), weight.contiguous(), bias, "none", no_scalars, ""};
  onednn_linear()->callBoxed(&stack);
  return stack.at(0).toTensor();
}

TORCH_LIBRARY_IMPL(fastbert, CPU, m) { m.impl("linear_fwd", &linear); }

}  // namespace fastbert
