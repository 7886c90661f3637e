// The torch side of bias_gelu on a GPU: checks, allocation, stream. The schema is defined in fastbert/ops/bias_gelu.py.
#include "../bias_gelu.h"

#include <string_view>

#include "../checks.h"
#include "../layer_ops.h"
#include "../tensor.h"
#include "column_sums.h"

namespace fastbert {

namespace {

void check(const Tensor& x, const Tensor& bias, std::string_view approximate) {
  check_bias_gelu(x, bias, approximate);
  FB_CHECK(dtype_of(x) != DType::f64 && dtype_of(bias) != DType::f64, "bias_gelu: the CUDA kernels have no fp64");
}

// The kernels take a bias of x's type or float.
Tensor parameter(const Tensor& bias, const Tensor& x) {
  return contiguous(bias, bias.scalar_type() == x.scalar_type() ? x.scalar_type() : ScalarType::Float);
}

}  // namespace

Tensor bias_gelu_fwd_cuda(const Tensor& x, const Tensor& bias, std::string_view approximate) {
  check(x, bias, approximate);
  const DeviceGuard guard(x);
  const Tensor y = empty(x.sizes(), x);
  if (x.numel() == 0) return y;
  const Tensor in = contiguous(x), b = parameter(bias, x);
  const int64_t channels = x.size(-1);
  const char* const error =
      cuda::bias_gelu_fwd(in.const_data_ptr(), b.const_data_ptr(), y.mutable_data_ptr(), x.numel() / channels, channels,
                          dtype_of(x), dtype_of(b), approximate == "tanh", current_stream(x));
  FB_CHECK(!error, "bias_gelu: ", error);
  return y;
}

std::tuple<Tensor, Tensor> bias_gelu_bwd_cuda(const Tensor& dy, const Tensor& x, const Tensor& bias,
                                              std::string_view approximate, bool need_dbias) {
  check(x, bias, approximate);
  check_gradient("bias_gelu", "dy", dy, x);
  const DeviceGuard guard(x);
  const Tensor dx = empty(x.sizes(), x);
  if (x.numel() == 0) return {dx, zeros({need_dbias ? bias.size(0) : 0}, bias, bias.scalar_type())};
  const Tensor dbias = empty({need_dbias ? bias.size(0) : 0}, bias);
  const Tensor grad = contiguous(dy), in = contiguous(x), b = parameter(bias, x);
  const int64_t channels = x.size(-1), rows = x.numel() / channels;
  const int64_t shares = cuda::bias_gelu_bwd_shares(rows, channels, dtype_of(x));
  const Tensor partials = empty({need_dbias ? shares : 0, channels}, x, ScalarType::Float);
  float* const sums = need_dbias ? partials.mutable_data_ptr<float>() : nullptr;
  const char* error =
      cuda::bias_gelu_bwd(grad.const_data_ptr(), in.const_data_ptr(), b.const_data_ptr(), dx.mutable_data_ptr(), sums,
                          rows, channels, shares, dtype_of(x), dtype_of(b), approximate == "tanh", current_stream(x));
  if (!error && need_dbias)
    error = cuda::column_sums(sums, shares, channels, {{{dbias.mutable_data_ptr(), dtype_of(dbias)}}, 1},
                              current_stream(x));
  FB_CHECK(!error, "bias_gelu: ", error);
  return {dx, dbias};
}

FB_CUDA_LIBRARY(m) {
  m.impl("bias_gelu_fwd", TORCH_BOX(&bias_gelu_fwd_cuda));
  m.impl("bias_gelu_bwd", TORCH_BOX(&bias_gelu_bwd_cuda));
}

}  // namespace fastbert
