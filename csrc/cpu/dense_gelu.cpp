// The torch side of dense_gelu on the CPU: the matrix product of linear, then one pass of bias_gelu's loops over its
// output. oneDNN can apply the GELU too, but that is slower than the two passes (docs/linear.md). The schema is defined
// in fastbert/ops/dense_gelu.py.

#include <string_view>

#include "../checks.h"
#include "../tensor.h"
#include "gelu_rows.h"
#include "linear.h"
#include "matrix_product.h"

namespace fastbert {

namespace {

std::tuple<Tensor, Tensor> dense_gelu_fwd_cpu(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                              std::string_view approximate, bool save) {
  check_dense("dense_gelu", x, weight, bias);
  check_approximate("dense_gelu", approximate);
  const Tensor preactivation = linear(x, weight, bias);
  const Tensor y = save ? empty_rows(preactivation.sizes(), preactivation) : preactivation;
  gelu_cpu(preactivation, std::nullopt, approximate, y);
  return {y, save ? preactivation : empty({0}, x)};
}

std::tuple<Tensor, Tensor, Tensor> dense_gelu_bwd_cpu(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                                      const Tensor& preactivation, std::string_view approximate,
                                                      bool need_dx, bool need_dparams) {
  check_dense("dense_gelu", x, weight, std::nullopt);
  check_dense_gelu_gradients(dy, x, weight, preactivation);
  check_approximate("dense_gelu", approximate);
  const NoGrad guard;
  auto [dpre, dbias] = gelu_bwd_cpu(dy, preactivation, std::nullopt, approximate,
                                    need_dparams ? std::optional(type_of(weight)) : std::nullopt);
  const auto [dx, dweight] = dense_gradients(dpre, x, weight, need_dx, need_dparams);
  return {dx, dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("dense_gelu_fwd", TORCH_BOX(&dense_gelu_fwd_cpu));
  m.impl("dense_gelu_bwd", TORCH_BOX(&dense_gelu_bwd_cpu));
}

}  // namespace fastbert
