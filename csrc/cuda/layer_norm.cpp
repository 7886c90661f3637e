// The torch side of layer_norm and add_layer_norm on a GPU: checks, allocation, stream. The schemas are defined in
// fastbert/ops/layer_norm.py.
#include "../layer_norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "../checks.h"
#include "../tensor.h"
#include "column_sums.h"

namespace fastbert {

namespace {

using OptionalTensor = std::optional<at::Tensor>;
using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Tensors5 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// The inputs as the kernels take them, and the tensors that they point into. Kernels take a residual of x's type or
// fp32, and parameters that are all of x's type or all fp32; what is of another type is converted to fp32.
struct Inputs {
  at::Tensor x, weight, bias;
  OptionalTensor residual, x_bias;
  DeviceDropout drop;
  at::ScalarType y_type, parameters;
  LayerNorm op{};
  int64_t rows;
  c10::DeviceGuard guard;

  // bias is absent in the backward
  Inputs(const at::Tensor& x_, const OptionalTensor& residual_, const at::Tensor& weight_, const OptionalTensor& bias_,
         const OptionalTensor& x_bias_, double eps, const OptionalTensor& rng, double dropout_p, int64_t site)
      : drop(device_dropout_of(dropout_p, rng, site, kRowBits, x_)), guard(x_.device()) {
    check_layer_norm(x_, residual_, weight_, bias_, x_bias_);
    const auto wide = [](const OptionalTensor& tensor) { return tensor && dtype_of(*tensor) == DType::f64; };
    TORCH_CHECK_NOT_IMPLEMENTED(!wide(x_) && !wide(residual_) && !wide(weight_) && !wide(bias_) && !wide(x_bias_),
                                "layer_norm: the CUDA kernels have no fp64");
    TORCH_CHECK_NOT_IMPLEMENTED(x_.size(-1) <= cuda::kMostChannels,
                                "layer_norm: the CUDA kernels take rows of at most ", cuda::kMostChannels,
                                " channels, x has shape ", x_.sizes());

    const at::ScalarType type = x_.scalar_type();
    y_type = !residual_ || residual_->scalar_type() == type ? type : at::kFloat;
    parameters = y_type == type && weight_.scalar_type() == type && (!bias_ || bias_->scalar_type() == type) &&
                         (!x_bias_ || x_bias_->scalar_type() == type)
                     ? type
                     : at::kFloat;
    x = x_.contiguous();
    weight = weight_.to(parameters).contiguous();
    if (bias_) bias = bias_->to(parameters).contiguous();
    if (x_bias_) x_bias = x_bias_->to(parameters).contiguous();
    if (residual_) residual = residual_->to(y_type).contiguous();

    op.x = x.const_data_ptr(), op.residual = data(residual), op.x_bias = data(x_bias);
    op.weight = weight.const_data_ptr(), op.bias = bias_ ? bias.const_data_ptr() : nullptr;
    op.channels = x.size(-1), op.eps = eps;
    op.x_type = dtype_of(x), op.residual_type = op.y_type = y_type == type ? op.x_type : DType::f32;
    rows = x.numel() / op.channels;
  }

  DType parameter_type() const { return dtype_of(weight); }
  at::TensorOptions options(at::ScalarType type) const { return x.options().dtype(type); }
};

Tensors3 forward(Inputs in) {
  const at::Tensor y = at::empty(in.x.sizes(), in.options(in.y_type));
  const auto rows = in.x.sizes().slice(0, in.x.dim() - 1);
  const at::Tensor mean = at::empty(rows, in.options(at::kFloat)), rstd = at::empty(rows, in.options(at::kFloat));
  if (in.rows == 0) return {y, mean, rstd};
  in.op.mean = mean.mutable_data_ptr(), in.op.rstd = rstd.mutable_data_ptr();
  const char* const error =
      cuda::layer_norm_fwd(in.op, in.parameter_type(), in.drop, y.mutable_data_ptr(), in.rows, current_stream(in.x));
  TORCH_CHECK(!error, "layer_norm: ", error);
  return {y, mean, rstd};
}

// weight, residual and x_bias: as they were given, because their gradients have the same types.
Tensors5 backward(Inputs in, const at::Tensor& dy, const at::Tensor& mean, const at::Tensor& rstd, bool need_dparams,
                  const at::Tensor& weight, const OptionalTensor& residual, const OptionalTensor& x_bias) {
  check_layer_norm_gradients(dy, in.x, mean, rstd, in.y_type, at::kFloat);
  const bool shared = residual && residual->scalar_type() == in.x.scalar_type() && in.drop.threshold == 0;
  const at::Tensor dx = shared ? at::empty({0}, in.x.options()) : at::empty(in.x.sizes(), in.x.options());
  const at::Tensor dresidual = residual ? at::empty(in.x.sizes(), in.options(in.y_type)) : at::Tensor();
  const int64_t channels = in.op.channels, quantities = need_dparams ? (x_bias ? 3 : 2) : 0;
  const auto sum = [&](int64_t quantity, const at::TensorOptions& options) {
    const int64_t size = quantity < quantities ? channels : 0;
    return in.rows == 0 ? at::zeros({size}, options) : at::empty({size}, options);
  };
  const at::Tensor dweight = sum(0, weight.options()), dbias = sum(1, weight.options()),
                   dx_bias = sum(2, (x_bias ? *x_bias : in.x).options());
  const auto result = [&]() -> Tensors5 {
    return {dx, residual ? dresidual.to(residual->scalar_type()) : dresidual, dweight, dbias, dx_bias};
  };
  if (in.rows == 0) return result();

  const at::Tensor grad = dy.contiguous(), means = mean.contiguous(), rstds = rstd.contiguous();
  in.op.mean = means.data_ptr(), in.op.rstd = rstds.data_ptr();
  LayerNormGradients gradients{};
  gradients.dy = grad.const_data_ptr();
  gradients.dx = shared ? nullptr : dx.mutable_data_ptr();
  gradients.dresidual = residual ? dresidual.mutable_data_ptr() : nullptr;
  const int64_t blocks = cuda::layer_norm_bwd_blocks(in.rows, channels);
  const at::Tensor partials = at::empty({blocks, quantities, channels}, in.options(at::kFloat));
  float* const sums = partials.mutable_data_ptr<float>();
  const char* error = cuda::layer_norm_bwd(in.op, in.parameter_type(), in.drop, gradients, sums, int(quantities),
                                           blocks, in.rows, current_stream(in.x));
  const auto to = [](const at::Tensor& total) { return cuda::ColumnSum{total.mutable_data_ptr(), dtype_of(total)}; };
  if (!error && need_dparams)
    error = cuda::column_sums(sums, blocks, channels, {{to(dweight), to(dbias), to(dx_bias)}, int(quantities)},
                              current_stream(in.x));
  TORCH_CHECK(!error, "layer_norm: ", error);
  return result();
}

Tensors3 layer_norm_fwd_cuda(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps) {
  return forward({x, {}, weight, bias, {}, eps, {}, 0, 0});
}

Tensors3 layer_norm_bwd_cuda(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                             const at::Tensor& mean, const at::Tensor& rstd, bool need_dparams) {
  auto [dx, none, dweight, dbias, no_bias] =
      backward({x, {}, weight, {}, {}, 0, {}, 0, 0}, dy, mean, rstd, need_dparams, weight, {}, {});
  return {dx, dweight, dbias};
}

Tensors3 add_layer_norm_fwd_cuda(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                                 const at::Tensor& bias, const OptionalTensor& x_bias, const OptionalTensor& rng,
                                 double eps, double dropout_p, int64_t site) {
  return forward({x, residual, weight, bias, x_bias, eps, rng, dropout_p, site});
}

Tensors5 add_layer_norm_bwd_cuda(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& residual,
                                 const at::Tensor& weight, const at::Tensor& mean, const at::Tensor& rstd,
                                 const OptionalTensor& x_bias, const OptionalTensor& rng, double dropout_p,
                                 int64_t site, bool need_dparams) {
  return backward({x, residual, weight, {}, x_bias, 0, rng, dropout_p, site}, dy, mean, rstd, need_dparams, weight,
                  residual, x_bias);
}

}  // namespace

FB_CUDA_LIBRARY(m) {
  m.impl("layer_norm_fwd", &layer_norm_fwd_cuda);
  m.impl("layer_norm_bwd", &layer_norm_bwd_cuda);
  m.impl("add_layer_norm_fwd", &add_layer_norm_fwd_cuda);
  m.impl("add_layer_norm_bwd", &add_layer_norm_bwd_cuda);
}

}  // namespace fastbert
