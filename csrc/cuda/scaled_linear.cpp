// The torch side of scaled_linear's passes on a GPU: checks, allocation, stream. The schemas are defined in
// fastbert/ops/scaled_linear.py, which also calls the products.
#include "../scaled_linear.h"

#include <string_view>
#include <tuple>

#include "../checks.h"
#include "../tensor.h"

namespace fastbert {

namespace {

constexpr const char* kOp = "scaled_linear";

// Rows in e4m3, and the factor of each, [..., 1].
struct Scaled {
  Tensor rows, factors;

  explicit Scaled(const Tensor& x) {
    std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
    rows = empty(shape, x, ScalarType::Float8_e4m3fn);
    shape.back() = 1;
    factors = empty(shape, x, ScalarType::Float);
  }
};

void check_bfloat16(const char* name, const Tensor& tensor) { check_dtype(kOp, name, tensor, ScalarType::BFloat16); }

void check_x(const Tensor& x) {
  check_rows(kOp, "x", x);
  check_bfloat16("x", x);
  FB_CHECK_VALUE(x.size(-1) > 0 && x.size(-1) <= cuda::kMostChannels, kOp, ": x has shape ", x.sizes(),
                 "; expected rows of 1 to ", cuda::kMostChannels, " channels");
}

void check_of_channels(const char* name, const Tensor& parameter, const Tensor& x) {
  check_parameter(kOp, name, parameter, x);
  check_bfloat16(name, parameter);
}

cuda::Gelu gelu_of(std::string_view approximate) {
  FB_CHECK_VALUE(approximate.empty() || approximate == "none" || approximate == "tanh", kOp, ": approximate is '",
                 approximate, "'; expected '', 'none' or 'tanh'");
  return approximate.empty() ? cuda::Gelu::none : approximate == "none" ? cuda::Gelu::erf : cuda::Gelu::tanh;
}

std::tuple<Tensor, Tensor> scaled_rows_fwd_cuda(const Tensor& x, const OptionalTensor& bias,
                                                std::string_view approximate) {
  check_x(x);
  if (bias) check_of_channels("bias", *bias, x);
  const cuda::Gelu gelu = gelu_of(approximate);
  const DeviceGuard guard(x);
  const Scaled made(x);
  if (x.numel() == 0) return {made.rows, made.factors};
  const Tensor in = contiguous(x);
  const OptionalTensor b = bias ? OptionalTensor(aligned(*bias)) : OptionalTensor();
  const int64_t channels = x.size(-1);
  const char* const error = cuda::scaled_rows(in.const_data_ptr(), data(b), made.rows.mutable_data_ptr(),
                                              made.factors.mutable_data_ptr<float>(), x.numel() / channels, channels,
                                              gelu, current_stream(x));
  FB_CHECK(!error, kOp, ": ", error);
  return {made.rows, made.factors};
}

std::tuple<Tensor, Tensor, Tensor> scaled_layer_norm_fwd_cuda(const Tensor& x, const Tensor& residual,
                                                              const Tensor& weight, const Tensor& bias,
                                                              const OptionalTensor& x_bias, double eps) {
  check_x(x);
  check_like(kOp, "residual", residual, x);
  check_bfloat16("residual", residual);
  check_of_channels("weight", weight, x);
  check_of_channels("bias", bias, x);
  if (x_bias) check_of_channels("x_bias", *x_bias, x);
  const DeviceGuard guard(x);
  const Scaled made(x);
  const Tensor y = empty(x.sizes(), x);
  if (x.numel() == 0) return {y, made.rows, made.factors};
  const Tensor in = contiguous(x), rest = contiguous(residual), w = aligned(weight), b = aligned(bias);
  const OptionalTensor in_bias = x_bias ? OptionalTensor(aligned(*x_bias)) : OptionalTensor();
  LayerNorm op{};
  op.x = in.const_data_ptr(), op.residual = rest.const_data_ptr(), op.x_bias = data(in_bias);
  op.weight = w.const_data_ptr(), op.bias = b.const_data_ptr();
  op.channels = x.size(-1), op.eps = eps;
  const char* const error =
      cuda::scaled_layer_norm(op, y.mutable_data_ptr(), made.rows.mutable_data_ptr(),
                              made.factors.mutable_data_ptr<float>(), x.numel() / op.channels, current_stream(x));
  FB_CHECK(!error, kOp, ": ", error);
  return {y, made.rows, made.factors};
}

}  // namespace

FB_CUDA_LIBRARY(m) {
  m.impl("scaled_rows_fwd", TORCH_BOX(&scaled_rows_fwd_cuda));
  m.impl("scaled_layer_norm_fwd", TORCH_BOX(&scaled_layer_norm_fwd_cuda));
}

}  // namespace fastbert
