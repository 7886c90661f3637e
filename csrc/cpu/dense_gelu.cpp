// The torch side of dense_gelu on the CPU: a library's matrix product, then one pass of bias_gelu's loops over its
// output. oneDNN can apply the GELU too, but that is slower than the two passes (docs/linear.md). The schema is defined
// in fastbert/ops/dense_gelu.py.
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <string_view>

#include "../checks.h"
#include "../tensor.h"
#include "gelu_rows.h"
#include "linear.h"

namespace fastbert {

namespace {

std::tuple<at::Tensor, at::Tensor> dense_gelu_fwd_cpu(const at::Tensor& x, const at::Tensor& weight,
                                                      const at::Tensor& bias, std::string_view approximate, bool save) {
  check_dense("dense_gelu", x, weight, bias);
  check_approximate("dense_gelu", approximate);
  const at::Tensor preactivation = linear(x, weight, bias).contiguous();
  const at::Tensor y = save ? empty_rows(preactivation.sizes(), preactivation.options()) : preactivation;
  gelu_cpu(preactivation, std::nullopt, approximate, y);
  return {y, save ? preactivation : at::empty({0}, x.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> dense_gelu_bwd_cpu(const at::Tensor& dy, const at::Tensor& x,
                                                                  const at::Tensor& weight,
                                                                  const at::Tensor& preactivation,
                                                                  std::string_view approximate, bool need_dx,
                                                                  bool need_dparams) {
  check_dense("dense_gelu", x, weight, std::nullopt);
  check_dense_gelu_gradients(dy, x, weight, preactivation);
  check_approximate("dense_gelu", approximate);
  const at::AutoDispatchBelowAutograd guard;
  auto [dpre, dbias] = gelu_bwd_cpu(dy, preactivation, std::nullopt, approximate,
                                    need_dparams ? std::optional(weight.options()) : std::nullopt);
  const at::Tensor rows = dpre.flatten(0, -2);
  return {need_dx ? at::matmul(dpre, weight) : at::empty({0}, x.options()),
          need_dparams ? at::mm(rows.t(), x.flatten(0, -2)) : at::empty({0}, x.options()), dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("dense_gelu_fwd", &dense_gelu_fwd_cpu);
  m.impl("dense_gelu_bwd", &dense_gelu_bwd_cpu);
}

}  // namespace fastbert
