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

// The bias in a type that the kernels take: x's, or float.
OptionalTensor parameter(const OptionalTensor& bias, const Tensor& x) {
  if (!bias) return {};
  return aligned(*bias, type_of(*bias) == type_of(x) ? type_of(x) : ScalarType::Float);
}

DType bias_type(const OptionalTensor& bias, const Tensor& x) { return dtype_of(bias ? *bias : x); }

}  // namespace

Tensor gelu_cuda(const Tensor& x, const OptionalTensor& bias, std::string_view approximate) {
  const DeviceGuard guard(x);
  const Tensor y = empty(x.sizes(), x);
  if (x.numel() == 0) return y;
  const Tensor in = contiguous(x);
  const OptionalTensor b = parameter(bias, x);
  const int64_t channels = x.size(-1);
  const char* const error =
      cuda::bias_gelu_fwd(in.const_data_ptr(), data(b), y.mutable_data_ptr(), x.numel() / channels, channels,
                          dtype_of(x), bias_type(b, x), approximate == "tanh", current_stream(x));
  FB_CHECK(!error, "bias_gelu: ", error);
  return y;
}

std::tuple<Tensor, Tensor> gelu_bwd_cuda(const Tensor& dy, const Tensor& x, const OptionalTensor& bias,
                                         std::string_view approximate, bool need_dbias) {
  const DeviceGuard guard(x);
  const Tensor dx = empty(x.sizes(), x);
  const int64_t channels = x.size(-1);
  const std::vector<int64_t> sums_of{need_dbias ? channels : 0};
  const ScalarType type = type_of(bias ? *bias : x);
  if (x.numel() == 0) return {dx, zeros(sums_of, x, type)};
  const Tensor dbias = empty(sums_of, x, type), grad = contiguous(dy), in = contiguous(x);
  const OptionalTensor b = parameter(bias, x);
  const int64_t rows = x.numel() / channels, shares = cuda::bias_gelu_bwd_shares(rows, channels, dtype_of(x));
  const Tensor partials = empty({need_dbias ? shares : 0, channels}, x, ScalarType::Float);
  float* const sums = need_dbias ? partials.mutable_data_ptr<float>() : nullptr;
  const char* error =
      cuda::bias_gelu_bwd(grad.const_data_ptr(), in.const_data_ptr(), data(b), dx.mutable_data_ptr(), sums, rows,
                          channels, shares, dtype_of(x), bias_type(b, x), approximate == "tanh", current_stream(x));
  if (!error && need_dbias)
    error = cuda::column_sums(sums, shares, channels, {{{dbias.mutable_data_ptr(), dtype_of(dbias)}}, 1},
                              current_stream(x));
  FB_CHECK(!error, "bias_gelu: ", error);
  return {dx, dbias};
}

namespace {

Tensor bias_gelu_fwd_cuda(const Tensor& x, const Tensor& bias, std::string_view approximate) {
  check(x, bias, approximate);
  return gelu_cuda(x, bias, approximate);
}

std::tuple<Tensor, Tensor> bias_gelu_bwd_cuda(const Tensor& dy, const Tensor& x, const Tensor& bias,
                                              std::string_view approximate, bool need_dbias) {
  check(x, bias, approximate);
  check_gradient("bias_gelu", "dy", dy, x);
  return gelu_bwd_cuda(dy, x, bias, approximate, need_dbias);
}

}  // namespace

FB_CUDA_LIBRARY(m) {
  m.impl("bias_gelu_fwd", TORCH_BOX(&bias_gelu_fwd_cuda));
  m.impl("bias_gelu_bwd", TORCH_BOX(&bias_gelu_bwd_cuda));
}

}  // namespace fastbert
