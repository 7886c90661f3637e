// The torch side of bias_gelu on a GPU: checks, allocation, stream. The schema is defined in fastbert/ops/bias_gelu.py.
#include "../bias_gelu.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <string_view>

#include "../checks.h"
#include "../tensor.h"
#include "column_sums.h"

namespace fastbert {

namespace {

void check(const at::Tensor& x, const at::Tensor& bias, std::string_view approximate) {
  check_bias_gelu(x, bias, approximate);
  TORCH_CHECK_NOT_IMPLEMENTED(dtype_of(x) != DType::f64 && dtype_of(bias) != DType::f64,
                              "bias_gelu: the CUDA kernels have no fp64");
}

// The kernels take a bias of x's type or float.
at::Tensor parameter(const at::Tensor& bias, const at::Tensor& x) {
  return (bias.scalar_type() == x.scalar_type() ? bias : bias.to(at::kFloat)).contiguous();
}

at::Tensor bias_gelu_fwd_cuda(const at::Tensor& x, const at::Tensor& bias, std::string_view approximate) {
  check(x, bias, approximate);
  const c10::DeviceGuard guard(x.device());
  const at::Tensor y = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return y;
  const at::Tensor in = x.contiguous(), b = parameter(bias, x);
  const int64_t channels = x.size(-1);
  const char* const error =
      cuda::bias_gelu_fwd(in.const_data_ptr(), b.const_data_ptr(), y.mutable_data_ptr(), x.numel() / channels, channels,
                          dtype_of(x), dtype_of(b), approximate == "tanh", current_stream(x));
  TORCH_CHECK(!error, "bias_gelu: ", error);
  return y;
}

std::tuple<at::Tensor, at::Tensor> bias_gelu_bwd_cuda(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& bias,
                                                      std::string_view approximate, bool need_dbias) {
  check(x, bias, approximate);
  check_gradient("bias_gelu", "dy", dy, x);
  const c10::DeviceGuard guard(x.device());
  const at::Tensor dx = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return {dx, at::zeros({need_dbias ? bias.size(0) : 0}, bias.options())};
  const at::Tensor dbias = at::empty({need_dbias ? bias.size(0) : 0}, bias.options());
  const at::Tensor grad = dy.contiguous(), in = x.contiguous(), b = parameter(bias, x);
  const int64_t channels = x.size(-1), rows = x.numel() / channels;
  const int64_t shares = cuda::bias_gelu_bwd_shares(rows, channels, dtype_of(x));
  const at::Tensor partials = at::empty({need_dbias ? shares : 0, channels}, x.options().dtype(at::kFloat));
  float* const sums = need_dbias ? partials.mutable_data_ptr<float>() : nullptr;
  const char* error =
      cuda::bias_gelu_bwd(grad.const_data_ptr(), in.const_data_ptr(), b.const_data_ptr(), dx.mutable_data_ptr(), sums,
                          rows, channels, shares, dtype_of(x), dtype_of(b), approximate == "tanh", current_stream(x));
  if (!error && need_dbias)
    error = cuda::column_sums(sums, shares, channels, {{{dbias.mutable_data_ptr(), dtype_of(dbias)}}, 1},
                              current_stream(x));
  TORCH_CHECK(!error, "bias_gelu: ", error);
  return {dx, dbias};
}

}  // namespace

FB_CUDA_LIBRARY(m) {
  m.impl("bias_gelu_fwd", &bias_gelu_fwd_cuda);
  m.impl("bias_gelu_bwd", &bias_gelu_bwd_cuda);
}

}  // namespace fastbert
