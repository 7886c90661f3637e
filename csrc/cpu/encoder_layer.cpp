// A whole post-norm layer on the CPU, forward and backward: the C++ behind the operators of its parts, one after the
// other, without the way through Python and torch's dispatcher between them. The schema is defined in
// fastbert/ops/encoder_layer.py.
//
// For the backward it keeps, of a token: qkv (3C), what attention gave (C) and a number a head, what both projections
// into the residual stream gave (2C), the sum after attention (C), the MLP's pre-activation (that is intermediate_size)
// and four numbers of statistics. The GELU is computed again.

#include <cstring>
#include <string_view>
#include <vector>

#include "../checks.h"
#include "../tensor.h"
#include "gelu_rows.h"
#include "layer_ops.h"
#include "linear.h"

namespace fastbert {

namespace {

using Tensors = std::vector<Tensor>;

struct Dense {
  Tensor weight, bias;
};

// The parameters in the order of the schema: weight and bias of each.
struct Parameters {
  std::vector<Dense> projections;  // to queries, keys and values, or one to all three
  Dense out, out_norm, up, down, down_norm;

  explicit Parameters(const Tensors& all) {
    FB_CHECK_VALUE(all.size() == 12 || all.size() == 16, "encoder_layer: ", all.size(),
                   " parameters; expected 12, or 16 with three projections");
    size_t next = 0;
    const auto take = [&] { return next += 2, Dense{all[next - 2], all[next - 1]}; };
    while (next < all.size() - 10) projections.push_back(take());
    out = take(), out_norm = take(), up = take(), down = take(), down_norm = take();
  }
};

// The parameters and how they are applied, the same in forward and backward.
struct Layer {
  Parameters parameters;
  int64_t heads;
  std::string_view approximate;
  ScalarType dtype;  // of the products

  Layer(const Tensor& hidden, const Tensors& parameters_, int64_t heads_, std::string_view approximate_,
        ScalarType dtype_)
      : parameters(parameters_), heads(heads_), approximate(approximate_), dtype(dtype_) {
    check_floating("encoder_layer", "hidden", hidden);
    FB_CHECK_VALUE(hidden.dim() == 2, "encoder_layer: hidden has shape ", hidden.sizes(), "; expected (T, C)");
    FB_CHECK_VALUE(heads > 0, "encoder_layer: heads is ", heads, "; expected a positive number");
    check_approximate("encoder_layer", approximate);
  }

  Tensor cast(const Tensor& x) const { return x.scalar_type() == dtype ? x : copy_of(x, dtype); }
  Tensor apply(const Tensor& x, const Dense& dense, bool with_bias) const {
    const Tensor weight = cast(dense.weight);
    const OptionalTensor bias = with_bias ? std::optional(cast(dense.bias)) : std::nullopt;
    check_dense("encoder_layer", x, weight, bias);
    return linear(x, weight, bias);
  }
  Tensor activate(const Tensor& preactivation) const {
    const Tensor y = empty_rows(preactivation.sizes(), preactivation);
    gelu_cpu(preactivation, std::nullopt, approximate, y);
    return y;
  }
};

// (T, ...) as a matrix.
Tensor by_token(const Tensor& x) {
  const int64_t tokens = x.size(0), *const sizes = x.sizes().begin();
  return view(contiguous(x), {tokens, std::accumulate(sizes + 1, sizes + x.dim(), int64_t(1), std::multiplies<>())});
}

// ---- three projections that are one matrix to attention

// Whether their weights are put together for one product, or else their products. What is copied is 3 C a channel of
// input in the one case and 3 a token in the other.
bool joins_weights(int64_t tokens, int64_t channels) { return tokens > channels; }

Tensor joined(const std::vector<Dense>& projections, Tensor Dense::* part) {
  Tensors parts;
  for (const Dense& each : projections) parts.push_back(each.*part);
  return call("aten::cat", "", parts, int64_t(0));
}

// (T, K) -> (T, 3, H, D).
Tensor project(const Layer& layer, const Tensor& x) {
  const std::vector<Dense>& each = layer.parameters.projections;
  const int64_t tokens = x.size(0);
  Tensor qkv;
  if (each.size() == 1) {
    qkv = layer.apply(x, each[0], true);
  } else if (joins_weights(tokens, x.size(1))) {
    qkv = layer.apply(x, {joined(each, &Dense::weight), joined(each, &Dense::bias)}, true);
  } else {
    const int64_t width = each[0].weight.size(0), row_bytes = width * x.element_size();
    qkv = empty({tokens, 3 * width}, x);
    char* const to = static_cast<char*>(qkv.mutable_data_ptr());
    for (int64_t i = 0; i < 3; ++i) {
      const Tensor product = contiguous(layer.apply(x, each[i], true));
      check_shape("encoder_layer", "a projection", product, {tokens, width});
      const char* const from = static_cast<const char*>(product.const_data_ptr());
      parallel_rows(tokens, width, 0, [&](int64_t begin, int64_t end, void*) {
        for (int64_t row = begin; row < end; ++row)
          std::memcpy(to + (3 * row + i) * row_bytes, from + row * row_bytes, row_bytes);
      });
    }
  }
  FB_CHECK_VALUE(qkv.size(1) % (3 * layer.heads) == 0, "encoder_layer: the projections give ", qkv.size(1),
                 " numbers a token; expected a multiple of 3 heads, ", 3 * layer.heads);
  return view(qkv, {tokens, 3, layer.heads, qkv.size(1) / (3 * layer.heads)});
}

// ---- forward

enum Saved { kQkv, kContext, kLse, kProjected, kMean, kRstd, kMiddle, kPreactivation, kDown, kMean2, kRstd2, kCount };

std::tuple<Tensor, Tensors> encoder_layer_fwd_cpu(const Tensor& hidden, const Tensors& parameters,
                                                  const Tensor& cu_seqlens, const OptionalTensor& rng,
                                                  int64_t max_seqlen, int64_t heads, double scale, double attention_p,
                                                  double out_p, double down_p, int64_t site,
                                                  std::string_view approximate, ScalarType dtype, double out_eps,
                                                  double down_eps, bool save) {
  const NoGrad guard;
  const Layer layer(hidden, parameters, heads, approximate, dtype);
  const Parameters& p = layer.parameters;
  const Tensor qkv = project(layer, layer.cast(hidden));
  const auto [context, lse] = attention_fwd_cpu(qkv, cu_seqlens, max_seqlen, scale, attention_p, rng, site);
  const Tensor projected = layer.apply(by_token(context), p.out, false);
  const auto [middle, mean, rstd] = add_layer_norm_fwd_cpu(projected, hidden, p.out_norm.weight, p.out_norm.bias,
                                                           p.out.bias, rng, out_eps, out_p, site + 1);
  const Tensor preactivation = contiguous(layer.apply(layer.cast(middle), p.up, true));
  const Tensor wide = save ? layer.activate(preactivation) : preactivation;
  if (!save) gelu_cpu(preactivation, std::nullopt, approximate, wide);
  const Tensor down = layer.apply(wide, p.down, false);
  const auto [y, mean2, rstd2] = add_layer_norm_fwd_cpu(down, middle, p.down_norm.weight, p.down_norm.bias, p.down.bias,
                                                        rng, down_eps, down_p, site + 2);
  if (!save) return {y, {}};
  return {y, {qkv, context, lse, projected, mean, rstd, middle, preactivation, down, mean2, rstd2}};
}

// ---- backward

// Gradients that somebody asked for.
struct Gradients {
  const Tensors& parameters;
  const std::vector<int64_t>& needed;  // 1 or 0: of hidden, and of the parameters
  std::vector<OptionalTensor> found;

  Gradients(const Tensors& parameters_, const std::vector<int64_t>& needed_)
      : parameters(parameters_), needed(needed_), found(parameters_.size()) {
    FB_CHECK_VALUE(needed.size() == parameters.size() + 1, "encoder_layer: ", needed.size(),
                   " gradients; expected one for hidden and each of ", parameters.size(), " parameters");
  }
  // The others are empty.
  Tensors all() const {
    Tensors tensors;
    for (size_t i = 0; i < found.size(); ++i) tensors.push_back(found[i] ? *found[i] : empty({0}, parameters[i]));
    return tensors;
  }
  bool wants(size_t i) const { return needed[i + 1]; }
  bool wants_any(size_t first, size_t count) const {
    for (size_t i = first; i < first + count; ++i)
      if (wants(i)) return true;
    return false;
  }
  void set(size_t i, const Tensor& gradient) {
    if (wants(i)) found[i] = contiguous(gradient, parameters[i].scalar_type());
  }
  // dweight and dbias of a dense layer, parameters i and i + 1. dbias may be known already.
  void set_dense(size_t i, const Tensor& dy, const Tensor& x, const OptionalTensor& dbias) {
    if (wants(i)) set(i, matrix_product(dy, true, x));
    if (wants(i + 1)) set(i + 1, dbias ? *dbias : sum_first(dy));
  }
};

std::tuple<Tensor, Tensors> encoder_layer_bwd_cpu(const Tensor& dy, const Tensor& hidden, const Tensors& parameters,
                                                  const Tensors& saved, const Tensor& cu_seqlens,
                                                  const OptionalTensor& rng, int64_t max_seqlen, int64_t heads,
                                                  double scale, double attention_p, double out_p, double down_p,
                                                  int64_t site, std::string_view approximate, ScalarType dtype,
                                                  double /*out_eps*/, double /*down_eps*/,
                                                  const std::vector<int64_t>& needed) {
  FB_CHECK_VALUE(saved.size() == kCount, "encoder_layer: ", saved.size(), " saved tensors; expected ", int(kCount));
  const NoGrad guard;
  const Layer layer(hidden, parameters, heads, approximate, dtype);
  const Parameters& p = layer.parameters;
  Gradients gradients(parameters, needed);
  const size_t out = parameters.size() - 10, out_norm = out + 2, up = out + 4, down = out + 6, down_norm = out + 8;

  // Down to the first parameter that needs a gradient, or to hidden: nothing below is computed in vain.
  const bool below_projection = needed[0] || gradients.wants_any(0, out);
  const bool below_middle = below_projection || gradients.wants_any(out, 4),
             below_up = below_middle || gradients.wants_any(up, 2);
  auto [ddown, dmiddle, dweight2, dbias2, ddown_bias] =
      add_layer_norm_bwd_cpu(dy, saved[kDown], saved[kMiddle], p.down_norm.weight, saved[kMean2], saved[kRstd2],
                             p.down.bias, rng, down_p, site + 2, gradients.wants_any(down + 1, 3));
  gradients.set(down_norm, dweight2), gradients.set(down_norm + 1, dbias2);
  if (ddown.numel() == 0) ddown = dmiddle;
  const Tensor& preactivation = saved[kPreactivation];
  if (gradients.wants_any(down, 2))
    gradients.set_dense(down, ddown, gradients.wants(down) ? layer.activate(preactivation) : preactivation, ddown_bias);
  if (!below_up) return {empty({0}, hidden), gradients.all()};

  const Tensor dwide = matrix_product(ddown, false, layer.cast(p.down.weight));
  check_gradient("encoder_layer", "the saved pre-activation", preactivation, dwide);
  const auto [dpre, dup_bias] =
      gelu_bwd_cpu(dwide, preactivation, std::nullopt, approximate,
                   gradients.wants(up + 1) ? std::optional(preactivation.scalar_type()) : std::nullopt);
  gradients.set_dense(up, dpre, layer.cast(saved[kMiddle]), dup_bias);
  if (!below_middle) return {empty({0}, hidden), gradients.all()};
  dmiddle = add(dmiddle, matrix_product(dpre, false, layer.cast(p.up.weight)));

  auto [dprojected, dhidden, dweight, dbias, dout_bias] =
      add_layer_norm_bwd_cpu(dmiddle, saved[kProjected], hidden, p.out_norm.weight, saved[kMean], saved[kRstd],
                             p.out.bias, rng, out_p, site + 1, gradients.wants_any(out + 1, 3));
  gradients.set(out_norm, dweight), gradients.set(out_norm + 1, dbias);
  if (dprojected.numel() == 0) dprojected = dhidden;
  gradients.set_dense(out, dprojected, by_token(saved[kContext]), dout_bias);
  if (!below_projection) return {empty({0}, hidden), gradients.all()};

  const Tensor dcontext = matrix_product(dprojected, false, layer.cast(p.out.weight));
  check_like("encoder_layer", "the saved context", by_token(saved[kContext]), dcontext);
  const Tensor dqkv = by_token(attention_bwd_cpu(view(dcontext, saved[kContext].sizes()), saved[kQkv], saved[kContext],
                                                 saved[kLse], cu_seqlens, max_seqlen, scale, attention_p, rng, site));
  const Tensor x = layer.cast(hidden);
  const auto& each = p.projections;
  const int64_t count = int64_t(each.size()), width = dqkv.size(1) / count;
  const auto part = [&](int64_t i) { return strided(dqkv, {dqkv.size(0), width}, {dqkv.size(1), 1}, i * width); };
  for (int64_t i = 0; i < count; ++i) gradients.set_dense(2 * i, part(i), x, std::nullopt);
  if (!needed[0]) return {empty({0}, hidden), gradients.all()};
  if (count > 1 && joins_weights(x.size(0), x.size(1))) {
    const Tensor weight = joined(each, &Dense::weight);
    return {add(dhidden, matrix_product(dqkv, false, layer.cast(weight))), gradients.all()};
  }
  for (int64_t i = count - 1; i >= 0; --i)  // in autograd's order
    dhidden = add(dhidden, matrix_product(part(i), false, layer.cast(each[i].weight)));
  return {dhidden, gradients.all()};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("encoder_layer_fwd", TORCH_BOX(&encoder_layer_fwd_cpu));
  m.impl("encoder_layer_bwd", TORCH_BOX(&encoder_layer_bwd_cpu));
}

}  // namespace fastbert
