// The torch side of layer_norm and add_layer_norm on a GPU: checks, allocation, stream. The schemas are defined in
// fastbert/ops/layer_norm.py.
#include "../layer_norm.h"

#include "../checks.h"
#include "../layer_ops.h"
#include "../tensor.h"
#include "column_sums.h"

namespace fastbert {

namespace {

using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;
using Tensors5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// The inputs in the types that kernels take, and the tensors that own the memory they point to. Kernels take a residual
// of x's type or fp32, and parameters that are all of x's type or all fp32; any other type is converted to fp32.
struct Inputs {
  Tensor x, weight, bias;
  OptionalTensor residual, x_bias;
  DeviceDropout drop;
  ScalarType y_type, parameters;
  LayerNorm op{};
  int64_t rows;
  DeviceGuard guard;

  // bias is absent in the backward
  Inputs(const Tensor& x_, const OptionalTensor& residual_, const Tensor& weight_, const OptionalTensor& bias_,
         const OptionalTensor& x_bias_, double eps, const OptionalTensor& rng, double dropout_p, int64_t site)
      : drop(device_dropout_of(dropout_p, rng, site, kRowBits, x_)), guard(x_) {
    check_layer_norm(x_, residual_, weight_, bias_, x_bias_);
    const auto wide = [](const OptionalTensor& tensor) { return tensor && dtype_of(*tensor) == DType::f64; };
    FB_CHECK(!wide(x_) && !wide(residual_) && !wide(weight_) && !wide(bias_) && !wide(x_bias_),
             "layer_norm: the CUDA kernels have no fp64");
    FB_CHECK(x_.size(-1) <= cuda::kMostChannels, "layer_norm: the CUDA kernels take rows of at most ",
             cuda::kMostChannels, " channels, x has shape ", x_.sizes());

    const ScalarType type = type_of(x_);
    y_type = !residual_ || type_of(*residual_) == type ? type : ScalarType::Float;
    parameters = y_type == type && type_of(weight_) == type && (!bias_ || type_of(*bias_) == type) &&
                         (!x_bias_ || type_of(*x_bias_) == type)
                     ? type
                     : ScalarType::Float;
    x = contiguous(x_);
    weight = aligned(weight_, parameters);
    if (bias_) bias = aligned(*bias_, parameters);
    if (x_bias_) x_bias = aligned(*x_bias_, parameters);
    if (residual_) residual = contiguous(*residual_, y_type);

    op.x = x.const_data_ptr(), op.residual = data(residual), op.x_bias = data(x_bias);
    op.weight = weight.const_data_ptr(), op.bias = bias_ ? bias.const_data_ptr() : nullptr;
    op.channels = x.size(-1), op.eps = eps;
    op.x_type = dtype_of(x), op.residual_type = op.y_type = y_type == type ? op.x_type : DType::f32;
    rows = x.numel() / op.channels;
  }

  DType parameter_type() const { return dtype_of(weight); }
};

Tensors3 forward(Inputs in) {
  const Tensor y = empty(in.x.sizes(), in.x, in.y_type);
  const auto rows = in.x.sizes().slice(0, in.x.dim() - 1);
  const Tensor mean = empty(rows, in.x, ScalarType::Float), rstd = empty(rows, in.x, ScalarType::Float);
  if (in.rows == 0) return {y, mean, rstd};
  in.op.mean = mean.mutable_data_ptr(), in.op.rstd = rstd.mutable_data_ptr();
  const char* const error =
      cuda::layer_norm_fwd(in.op, in.parameter_type(), in.drop, y.mutable_data_ptr(), in.rows, current_stream(in.x));
  FB_CHECK(!error, "layer_norm: ", error);
  return {y, mean, rstd};
}

// weight, residual and x_bias: as the caller gave them, because their gradients have the same types.
Tensors5 backward(Inputs in, const Tensor& dy, const Tensor& mean, const Tensor& rstd, bool need_dparams,
                  const Tensor& weight, const OptionalTensor& residual, const OptionalTensor& x_bias) {
  check_layer_norm_gradients(dy, in.x, mean, rstd, in.y_type, ScalarType::Float);
  const bool shared = residual && type_of(*residual) == type_of(in.x) && in.drop.threshold == 0;
  const Tensor dx = shared ? empty({0}, in.x) : empty(in.x.sizes(), in.x);
  const Tensor dresidual = residual ? empty(in.x.sizes(), in.x, in.y_type) : Tensor();
  const int64_t channels = in.op.channels, quantities = need_dparams ? (x_bias ? 3 : 2) : 0;
  const auto sum = [&](int64_t quantity, ScalarType type) {
    const int64_t size = quantity < quantities ? channels : 0;
    return in.rows == 0 ? zeros({size}, in.x, type) : empty({size}, in.x, type);
  };
  const Tensor dweight = sum(0, type_of(weight)), dbias = sum(1, type_of(weight)),
               dx_bias = sum(2, type_of(x_bias ? *x_bias : in.x));
  const auto result = [&]() -> Tensors5 {
    return {dx, residual ? contiguous(dresidual, type_of(*residual)) : dresidual, dweight, dbias, dx_bias};
  };
  if (in.rows == 0) return result();

  const Tensor grad = contiguous(dy), means = contiguous(mean), rstds = contiguous(rstd);
  in.op.mean = means.data_ptr(), in.op.rstd = rstds.data_ptr();
  LayerNormGradients gradients{};
  gradients.dy = grad.const_data_ptr();
  gradients.dx = shared ? nullptr : dx.mutable_data_ptr();
  gradients.dresidual = residual ? dresidual.mutable_data_ptr() : nullptr;
  const int64_t blocks = cuda::layer_norm_bwd_blocks(in.rows, channels);
  const Tensor partials = empty({blocks, quantities, channels}, in.x, ScalarType::Float);
  float* const sums = partials.mutable_data_ptr<float>();
  const char* error = cuda::layer_norm_bwd(in.op, in.parameter_type(), in.drop, gradients, sums, int(quantities),
                                           blocks, in.rows, current_stream(in.x));
  const auto to = [](const Tensor& total) { return cuda::ColumnSum{total.mutable_data_ptr(), dtype_of(total)}; };
  if (!error && need_dparams)
    error = cuda::column_sums(sums, blocks, channels, {{to(dweight), to(dbias), to(dx_bias)}, int(quantities)},
                              current_stream(in.x));
  FB_CHECK(!error, "layer_norm: ", error);
  return result();
}

Tensors3 layer_norm_fwd_cuda(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return forward({x, {}, weight, bias, {}, eps, {}, 0, 0});
}

Tensors3 layer_norm_bwd_cuda(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& mean,
                             const Tensor& rstd, bool need_dparams) {
  auto [dx, none, dweight, dbias, no_bias] =
      backward({x, {}, weight, {}, {}, 0, {}, 0, 0}, dy, mean, rstd, need_dparams, weight, {}, {});
  return {dx, dweight, dbias};
}

}  // namespace

Tensors3 add_layer_norm_fwd_cuda(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias,
                                 const OptionalTensor& x_bias, const OptionalTensor& rng, double eps, double dropout_p,
                                 int64_t site) {
  return forward({x, residual, weight, bias, x_bias, eps, rng, dropout_p, site});
}

Tensors5 add_layer_norm_bwd_cuda(const Tensor& dy, const Tensor& x, const Tensor& residual, const Tensor& weight,
                                 const Tensor& mean, const Tensor& rstd, const OptionalTensor& x_bias,
                                 const OptionalTensor& rng, double dropout_p, int64_t site, bool need_dparams) {
  return backward({x, residual, weight, {}, x_bias, 0, rng, dropout_p, site}, dy, mean, rstd, need_dparams, weight,
                  residual, x_bias);
}

FB_CUDA_LIBRARY(m) {
  m.impl("layer_norm_fwd", TORCH_BOX(&layer_norm_fwd_cuda));
  m.impl("layer_norm_bwd", TORCH_BOX(&layer_norm_bwd_cuda));
  m.impl("add_layer_norm_fwd", TORCH_BOX(&add_layer_norm_fwd_cuda));
  m.impl("add_layer_norm_bwd", TORCH_BOX(&add_layer_norm_bwd_cuda));
}

}  // namespace fastbert
