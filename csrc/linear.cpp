#include "linear.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

namespace fastbert {

namespace {

// torch's own operator for oneDNN's inner product with post-ops; it is registered where torch was built with oneDNN.
const std::optional<c10::OperatorHandle>& onednn_linear() {
  static const auto op = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
  return op;
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const at::AutoDispatchBelowAutograd guard;
  const bool onednn = x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat && x.numel() > 0 &&
                      at::globalContext().userEnabledMkldnn() && onednn_linear();
  if (!onednn) return at::linear(x, weight, bias);
  const c10::List<std::optional<at::Scalar>> no_scalars;
  torch::jit::Stack stack{x.contiguous(), weight.contiguous(), bias, "none", no_scalars, ""};
  onednn_linear()->callBoxed(&stack);
  return stack.at(0).toTensor();
}

TORCH_LIBRARY_IMPL(fastbert, CPU, m) { m.impl("linear_fwd", &linear); }

}  // namespace fastbert
