// The torch side of layer_norm and add_layer_norm on the CPU. The schemas are defined in fastbert/ops/layer_norm.py,
// the CUDA side is csrc/cuda/layer_norm.cpp.
#include "../layer_norm.h"

#include "../checks.h"
#include "../layer_ops.h"
#include "../tensor.h"

namespace fastbert {

namespace {

using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;
using Tensors5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// The inputs as the loops take them, and the tensors that they point into.
struct Inputs {
  Tensor x, weight, bias;
  OptionalTensor residual, x_bias;
  LayerNorm op{};
  int64_t rows;

  // bias is absent in the backward
  Inputs(const Tensor& x_, const OptionalTensor& residual_, const Tensor& weight_, const OptionalTensor& bias_,
         const OptionalTensor& x_bias_, double eps, Dropout drop) {
    check_layer_norm(x_, residual_, weight_, bias_, x_bias_);
    x = contiguous(x_), weight = as_math(weight_, x);
    if (bias_) bias = as_math(*bias_, x);
    if (residual_) residual = contiguous(*residual_);
    if (residual_) x_bias = x_bias_ ? as_math(*x_bias_, x) : zeros({x.size(-1)}, x, math_type(x));
    op.x = x.const_data_ptr(), op.residual = data(residual), op.x_bias = data(x_bias);
    op.weight = weight.const_data_ptr(), op.bias = bias_ ? bias.const_data_ptr() : nullptr;
    op.channels = x.size(-1), op.eps = eps, op.drop = drop;
    op.x_type = dtype_of(x), op.residual_type = residual ? dtype_of(*residual) : op.x_type;
    op.y_type = op.residual_type == op.x_type ? op.x_type : DType::f32;
    rows = x.numel() / op.channels;
  }

  ScalarType math() const { return math_type(x); }
  ScalarType output() const { return op.y_type == op.x_type ? type_of(x) : math(); }
};

constexpr int64_t kRowsForMore = 4;  // per call of `more`; with 768 floats each, 12 KiB

// Writes y, and the mean and rstd of each row. more: called for the rows of y that have just been written.
void forward_into(Inputs& in, const Tensor& y, void* mean, void* rstd, const MoreOfRows& more = {}) {
  const auto loop = FB_BEST_ISA(layer_norm_fwd);
  FB_CHECK(loop, kNoIsa);
  in.op.mean = mean, in.op.rstd = rstd;
  void* const out = y.mutable_data_ptr();
  const int64_t scratch = FB_BEST_ISA(layer_norm_scratch)(in.op.channels);
  parallel_rows(in.rows, in.op.channels, scratch, [&](int64_t begin, int64_t end, void* room) {
    if (!more) return loop(in.op, out, begin, end, room);
    for (; begin < end; begin += kRowsForMore) {
      const int64_t next = std::min(end, begin + kRowsForMore);
      loop(in.op, out, begin, next, room), more(begin, next);
    }
  });
}

Tensors3 forward(Inputs in) {
  const Tensor y = empty_rows(in.x.sizes(), in.x, in.output());
  const auto rows = in.x.sizes().slice(0, in.x.dim() - 1);
  const Tensor mean = empty(rows, in.x, in.math()), rstd = empty(rows, in.x, in.math());
  forward_into(in, y, mean.mutable_data_ptr(), rstd.mutable_data_ptr());
  return {y, mean, rstd};
}

Tensors5 backward(Inputs in, const Tensor& dy, const Tensor& mean, const Tensor& rstd, bool need_dparams,
                  ScalarType weight, std::optional<ScalarType> x_bias) {
  const auto loop = FB_BEST_ISA(layer_norm_bwd);
  FB_CHECK(loop, kNoIsa);
  check_layer_norm_gradients(dy, in.x, mean, rstd, in.output(), in.math());
  const Tensor grad = contiguous(dy), means = contiguous(mean), rstds = contiguous(rstd);
  in.op.mean = means.data_ptr(), in.op.rstd = rstds.data_ptr();
  const bool shared = in.residual && in.op.residual_type == in.op.x_type && in.op.drop.threshold == 0;
  const Tensor dx = shared ? empty({0}, in.x) : empty(in.x.sizes(), in.x);
  Tensor dresidual = in.residual ? empty(in.x.sizes(), *in.residual) : Tensor();
  LayerNormGradients gradients{};
  gradients.dy = grad.const_data_ptr(), gradients.dx = dx.mutable_data_ptr();
  if (in.residual) gradients.dresidual = dresidual.mutable_data_ptr();
  const int64_t C = in.op.channels, scratch = FB_BEST_ISA(layer_norm_scratch)(C);
  const Tensor sums = sum_rows(in.rows, C, 3, scratch, in.x, [&](int64_t begin, int64_t end, char* chunk, void* room) {
    LayerNormGradients here = gradients;
    const int64_t row_bytes = C * in.weight.element_size();
    here.dweight = chunk, here.dbias = chunk + row_bytes, here.dx_bias = chunk + 2 * row_bytes;
    loop(in.op, here, begin, end, room);
  });
  // Copies, because the three outputs of an operator must not share memory; empty where they are not needed.
  const auto sum = [&](int64_t i, ScalarType type) {
    if (!need_dparams) return empty({0}, in.x, type);
    if (type != type_of(sums)) return copy_of(row(sums, i), type);
    const Tensor copy = empty({C}, sums);
    const int64_t bytes = C * sums.element_size();
    std::memcpy(copy.mutable_data_ptr(), bytes_of(sums) + i * bytes, bytes);
    return copy;
  };
  return {dx, dresidual, sum(0, weight), sum(1, weight), need_dparams && x_bias ? sum(2, *x_bias) : empty({0}, in.x)};
}

Tensors3 layer_norm_fwd_cpu(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return forward({x, {}, weight, bias, {}, eps, {}});
}

Tensors3 layer_norm_bwd_cpu(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& mean,
                            const Tensor& rstd, bool need_dparams) {
  auto [dx, none, dweight, dbias, no_bias] =
      backward({x, {}, weight, {}, {}, 0, {}}, dy, mean, rstd, need_dparams, type_of(weight), {});
  return {dx, dweight, dbias};
}

}  // namespace

Tensors3 add_layer_norm_fwd_cpu(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias,
                                const OptionalTensor& x_bias, const OptionalTensor& rng, double eps, double dropout_p,
                                int64_t site) {
  return forward({x, residual, weight, bias, x_bias, eps, dropout_of(dropout_p, rng, site, kRowBits)});
}

void add_layer_norm_into_cpu(const Tensor& y, const Tensor& x, const Tensor& residual, const Tensor& weight,
                             const Tensor& bias, const Tensor& x_bias, double eps, const MoreOfRows& more) {
  Inputs in(x, residual, weight, bias, x_bias, eps, {});
  check_gradient("layer_norm", "y", y, in.x);
  check_dtype("layer_norm", "residual", residual, type_of(in.x));
  std::vector<double> statistics(2 * in.rows);  // mean and rstd, which are not used: float or double
  forward_into(in, y, statistics.data(), statistics.data() + in.rows, more);
}

Tensors5 add_layer_norm_bwd_cpu(const Tensor& dy, const Tensor& x, const Tensor& residual, const Tensor& weight,
                                const Tensor& mean, const Tensor& rstd, const OptionalTensor& x_bias,
                                const OptionalTensor& rng, double dropout_p, int64_t site, bool need_dparams) {
  return backward({x, residual, weight, {}, x_bias, 0, dropout_of(dropout_p, rng, site, kRowBits)}, dy, mean, rstd,
                  need_dparams, type_of(weight), x_bias ? std::optional(type_of(*x_bias)) : std::nullopt);
}

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("layer_norm_fwd", TORCH_BOX(&layer_norm_fwd_cpu));
  m.impl("layer_norm_bwd", TORCH_BOX(&layer_norm_bwd_cpu));
  m.impl("add_layer_norm_fwd", TORCH_BOX(&add_layer_norm_fwd_cpu));
  m.impl("add_layer_norm_bwd", TORCH_BOX(&add_layer_norm_bwd_cpu));
}

}  // namespace fastbert
