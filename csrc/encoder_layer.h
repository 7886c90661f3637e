// A whole post-norm layer, forward and backward. It calls the C++ functions behind the operators of its parts one after
// the other, without going through Python and torch's dispatcher between them. The schema is defined in
// fastbert/ops/encoder_layer.py. With a context, the output of the heads from another backend's attention, only the
// part after attention is computed. The forward takes several layers at once if nothing is saved for the backward.
//
// Saved for the backward, per token: qkv (3C numbers), the output of attention (C) and one number per head, the outputs
// of both projections into the residual stream (2C), the output of the LayerNorm after attention (C), the MLP's first
// product (intermediate_size) and four numbers of LayerNorm statistics. The GELU is computed again.
//
// Where scores depend on the distance of query and key, the layer also takes the tables of relative_attention.
#pragma once

#include <string_view>
#include <tuple>
#include <vector>

#include "checks.h"
#include "layer_ops.h"
#include "tensor.h"

namespace fastbert {

struct Dense {
  Tensor weight, bias;
};

// The weight and bias of each part, in the order of the schema.
struct LayerParameters {
  std::vector<Dense> projections;  // to queries, keys and values, or one to all three; empty with a context
  Dense out, out_norm, up, down, down_norm;

  LayerParameters(const Tensors& all, bool with_context) {
    if (with_context) {
      FB_CHECK_VALUE(all.size() == 10, "encoder_layer: ", all.size(), " parameters; expected 10 after attention");
    } else {
      FB_CHECK_VALUE(all.size() == 12 || all.size() == 16, "encoder_layer: ", all.size(),
                     " parameters; expected 12, or 16 with three projections");
    }
    size_t next = 0;
    const auto take = [&] { return next += 2, Dense{all[next - 2], all[next - 1]}; };
    while (next < all.size() - 10) projections.push_back(take());
    out = take(), out_norm = in_one_dtype(take()), up = take(), down = take(), down_norm = in_one_dtype(take());
  }

  // As in fastbert/ops/numbers.py.
  static Dense in_one_dtype(const Dense& norm) {
    if (type_of(norm.weight) == type_of(norm.bias)) return norm;
    for (const Tensor& each : {norm.weight, norm.bias})
      check_floating_beside("encoder_layer", "a LayerNorm's parameter", each, ScalarType::Float);
    return {contiguous(norm.weight, ScalarType::Float), contiguous(norm.bias, ScalarType::Float)};
  }
};

// x (T, ...) as a matrix of T rows.
inline Tensor by_token(const Tensor& x) {
  const int64_t tokens = x.size(0), *const sizes = x.sizes().begin();
  return view(contiguous(x), {tokens, std::accumulate(sizes + 1, sizes + x.dim(), int64_t(1), std::multiplies<>())});
}

inline Tensor joined(const std::vector<Dense>& projections, Tensor Dense::* part) {
  Tensors parts;
  for (const Dense& each : projections) parts.push_back(each.*part);
  return call("aten::cat", "", parts, int64_t(0));
}

// The gradients of the parameters, as far as they are needed.
template <class Ops>
struct LayerGradients {
  const Tensors& parameters;
  const std::vector<int64_t>& needed;  // 1 or 0: for hidden, the context, each parameter, and the tables of positions
  std::vector<OptionalTensor> found;

  LayerGradients(const Tensors& parameters_, const std::vector<int64_t>& needed_)
      : parameters(parameters_), needed(needed_), found(parameters_.size()) {
    FB_CHECK_VALUE(needed.size() == parameters.size() + 3, "encoder_layer: ", needed.size(),
                   " gradients; expected one for hidden, the context, each of ", parameters.size(),
                   " parameters, and the tables of positions");
  }
  // One for each parameter, empty if it is not needed.
  Tensors all() const {
    Tensors tensors;
    for (size_t i = 0; i < found.size(); ++i) tensors.push_back(found[i] ? *found[i] : empty({0}, parameters[i]));
    return tensors;
  }
  bool wants(size_t i) const { return needed[i + 2]; }
  bool wants_tables() const { return needed.back(); }
  bool wants_any(size_t first, size_t count) const {
    for (size_t i = first; i < first + count; ++i)
      if (wants(i)) return true;
    return false;
  }
  void set(size_t i, const Tensor& gradient) {
    if (wants(i)) found[i] = contiguous(gradient, type_of(parameters[i]));
  }
  // dweight and dbias of a dense layer, parameters i and i + 1. dbias is given if it has been computed already.
  void set_dense(size_t i, const Tensor& dy, const Tensor& x, const OptionalTensor& dbias) {
    if (wants(i)) set(i, Ops::matrix_product(dy, true, x));
    if (wants(i + 1)) set(i + 1, dbias ? *dbias : sum_first(dy));
  }
};

// Ops: the functions with which a device computes the parts.
//   run(hidden, parameters, layers, dtype, f)   calls f(), which runs layers forward
//   linear(x, weight, bias)             all of one dtype
//   matrix_product(a, transposed, b)    a b or a^T b
//   joins_weights(tokens, channels)     whether the three projections are one product, with concatenated weights
//   linear_into(y, x, weight, bias)     y: (T, C), whose rows may lie apart; absent if weights are always joined
//   gelu(x, approximate, keep)          keep: x must not be overwritten
//   gelu_bwd(dy, x, approximate, need_dbias)
//   attention_fwd, attention_bwd, relative_attention_fwd, relative_attention_bwd, add_layer_norm_fwd,
//   add_layer_norm_bwd                  like their operators
template <class Ops>
struct EncoderLayer {
  LayerParameters p;
  LayerPositions positions;
  int64_t heads;
  std::string_view approximate;
  ScalarType dtype;  // of the products

  EncoderLayer(const Tensor& hidden, const OptionalTensor& context, const Tensors& parameters,
               const OptionalTensor& cu_seqlens, const LayerPositions& positions_, int64_t heads_,
               std::string_view approximate_, ScalarType dtype_)
      : p(parameters, context.has_value()),
        positions(positions_),
        heads(heads_),
        approximate(approximate_),
        dtype(dtype_) {
    check_floating("encoder_layer", "hidden", hidden);
    FB_CHECK_VALUE(hidden.dim() == 2, "encoder_layer: hidden has shape ", hidden.sizes(), "; expected (T, C)");
    FB_CHECK_VALUE(heads > 0, "encoder_layer: heads is ", heads, "; expected a positive number");
    check_approximate("encoder_layer", approximate);
    check_together(hidden, parameters);
    if (cu_seqlens) check_device("encoder_layer", "cu_seqlens", *cu_seqlens, hidden.device());
    if (context) check_device("encoder_layer", "context", *context, hidden.device());
    FB_CHECK_VALUE(context.has_value() != cu_seqlens.has_value(), "encoder_layer: expected a context or cu_seqlens");
    positions.check("encoder_layer", context.has_value());
    if (!context) return;
    check_floating("encoder_layer", "context", *context);
    FB_CHECK_VALUE(p.out.weight.dim() == 2, "encoder_layer: a weight has shape ", p.out.weight.sizes(),
                   "; expected two dimensions");
    check_shape("encoder_layer", "context", *context, {hidden.size(0), p.out.weight.size(1)});
    check_floating_beside("encoder_layer", "context", *context, dtype);
  }

  // Checked here, because the dispatcher chooses the kernels for GPUs as soon as one of the tensors is on a GPU.
  static void check_together(const Tensor& hidden, const Tensors& others) {
    for (const Tensor& each : others) check_device("encoder_layer", "an argument", each, hidden.device());
  }

  Tensor cast(const Tensor& x) const { return contiguous(x, dtype); }

  // Weight and bias in the dtype of the products, checked against x.
  std::tuple<Tensor, OptionalTensor> beside(const Tensor& x, const Dense& dense, bool with_bias) const {
    check_floating_beside("encoder_layer", "a weight", dense.weight, dtype);
    check_floating_beside("encoder_layer", "a bias", dense.bias, dtype);
    const Tensor weight = cast(dense.weight);
    const OptionalTensor bias = with_bias ? std::optional(cast(dense.bias)) : std::nullopt;
    check_dense("encoder_layer", x, weight, bias);
    return {weight, bias};
  }

  Tensor apply(const Tensor& x, const Dense& dense, bool with_bias) const {
    const auto [weight, bias] = beside(x, dense, with_bias);
    return Ops::linear(x, weight, bias);
  }

  // ---- the projections to queries, keys and values: (T, K) -> (T, 3, H, D), one tensor for attention

  Tensor project(const Tensor& x) const {
    const std::vector<Dense>& each = p.projections;
    const int64_t tokens = x.size(0);
    Tensor qkv;
    if (each.size() == 1) {
      qkv = apply(x, each[0], true);
    } else if (Ops::joins_weights(tokens, x.size(1))) {
      qkv = apply(x, {joined(each, &Dense::weight), joined(each, &Dense::bias)}, true);
    } else if constexpr (requires { &Ops::linear_into; }) {
      const int64_t width = each[0].weight.size(0);
      qkv = empty({tokens, 3 * width}, x);
      for (int64_t i = 0; i < 3; ++i) {
        const auto [weight, bias] = beside(x, each[i], true);
        check_shape("encoder_layer", "the bias of a projection", *bias, {width});
        Ops::linear_into(strided(qkv, {tokens, width}, {3 * width, 1}, i * width), x, weight, *bias);
      }
    }
    FB_CHECK_VALUE(qkv.size(1) % (3 * heads) == 0, "encoder_layer: the projections give ", qkv.size(1),
                   " numbers a token; expected a multiple of 3 heads, ", 3 * heads);
    return view(qkv, {tokens, 3, heads, qkv.size(1) / (3 * heads)});
  }

  // ---- attention, plain or with relative positions; rest: max_seqlen and what comes after it

  template <class... Rest>
  std::tuple<Tensor, Tensor> attend(const Tensor& qkv, const Tensor& cu_seqlens, const Rest&... rest) const {
    const auto& [slots, keys, queries, bias] = positions;
    if (!slots) return Ops::attention_fwd(qkv, cu_seqlens, rest...);
    return Ops::relative_attention_fwd(qkv, *slots, keys, queries, bias, cu_seqlens, rest...);
  }

  // Returns dqkv, and the gradients of the tables as in relative_attention_bwd; none for plain attention.
  template <class... Rest>
  std::tuple<Tensor, Tensors> attend_bwd(const Tensor& dout, const Tensor& qkv, const Tensor& out, const Tensor& lse,
                                         bool tables, const Tensor& cu_seqlens, const Rest&... rest) const {
    const auto& [slots, keys, queries, bias] = positions;
    if (!slots) return {Ops::attention_bwd(dout, qkv, out, lse, cu_seqlens, rest...), {}};
    const auto [dqkv, dkeys, dqueries, dbias] =
        Ops::relative_attention_bwd(dout, qkv, out, lse, *slots, keys, queries, bias, cu_seqlens, rest..., tables);
    return {dqkv, {dkeys, dqueries, dbias}};
  }

  // What attend_bwd returns for the tables if no gradient is needed.
  Tensors no_gradients(const Tensor& hidden) const {
    Tensors none;
    if (positions.slots)
      for (const OptionalTensor* table : {&positions.keys, &positions.queries, &positions.bias})
        none.push_back(empty({0}, hidden, *table ? type_of(**table) : dtype));
    return none;
  }
};

// The tensors saved for the backward, in order. With a context, those before kProjected are absent.
enum LayerSaved {
  kQkv,
  kContext,
  kLse,
  kProjected,
  kMean,
  kRstd,
  kMiddle,
  kProduct,
  kDown,
  kMean2,
  kRstd2,
  kSavedCount
};

// Returns y and, with `save`, the tensors for the backward.
template <class Ops>
std::tuple<Tensor, Tensors> one_layer_fwd(const Tensor& hidden, const OptionalTensor& context_,
                                          const Tensors& parameters, const OptionalTensor& cu_seqlens,
                                          const LayerPositions& positions, const OptionalTensor& rng,
                                          int64_t max_seqlen, int64_t heads, double scale, double attention_p,
                                          double out_p, double down_p, int64_t site, std::string_view approximate,
                                          ScalarType dtype, double out_eps, double down_eps, bool save) {
  const EncoderLayer<Ops> layer(hidden, context_, parameters, cu_seqlens, positions, heads, approximate, dtype);
  const LayerParameters& p = layer.p;
  Tensors saved;
  Tensor context;
  if (context_) {
    context = layer.cast(*context_);
  } else {
    const Tensor qkv = layer.project(layer.cast(hidden));
    const auto [out, lse] = layer.attend(qkv, *cu_seqlens, max_seqlen, scale, attention_p, rng, site);
    context = by_token(out);
    if (save) saved = {qkv, out, lse};
  }
  const Tensor projected = layer.apply(context, p.out, false);
  const auto [middle, mean, rstd] = Ops::add_layer_norm_fwd(projected, hidden, p.out_norm.weight, p.out_norm.bias,
                                                            p.out.bias, rng, out_eps, out_p, site + 1);
  const Tensor product = contiguous(layer.apply(layer.cast(middle), p.up, true));
  const Tensor down = layer.apply(Ops::gelu(product, approximate, save), p.down, false);
  const auto [y, mean2, rstd2] = Ops::add_layer_norm_fwd(down, middle, p.down_norm.weight, p.down_norm.bias,
                                                         p.down.bias, rng, down_eps, down_p, site + 2);
  if (save)
    for (const Tensor& each : {projected, mean, rstd, middle, product, down, mean2, rstd2}) saved.push_back(each);
  return {y, saved};
}

// The same for one or more layers, one after the other; `parameters` has all those of one layer before those of the
// next. Nothing can be saved for several layers. Each layer has three sites of dropout; the positions are the same.
template <class Ops>
std::tuple<Tensor, Tensors> encoder_layer_fwd(const Tensor& hidden, const OptionalTensor& context,
                                              const Tensors& parameters, const OptionalTensor& cu_seqlens,
                                              const OptionalTensor& slots, const OptionalTensor& keys,
                                              const OptionalTensor& queries, const OptionalTensor& bias,
                                              const OptionalTensor& rng, int64_t max_seqlen, int64_t heads,
                                              double scale, double attention_p, double out_p, double down_p,
                                              int64_t site, std::string_view approximate, ScalarType dtype,
                                              double out_eps, double down_eps, bool save, int64_t layers) {
  const NoGrad guard;
  const LayerPositions positions{slots, keys, queries, bias};
  const auto run = [&](const Tensor& x, const Tensors& of_one, int64_t layer) {
    return one_layer_fwd<Ops>(x, context, of_one, cu_seqlens, positions, rng, max_seqlen, heads, scale, attention_p,
                              out_p, down_p, site + 3 * layer, approximate, dtype, out_eps, down_eps, save);
  };
  FB_CHECK_VALUE(layers == 1 || (layers > 1 && !context && !save), "encoder_layer: ", layers,
                 " layers; expected one, or several without a context and a backward");
  Tensor x = hidden;
  Tensors saved;
  Ops::run(hidden, parameters, layers, dtype, [&] {
    for (int64_t i = 0; i < layers; ++i)
      std::tie(x, saved) = run(x, layers == 1 ? parameters : part_of(parameters, i, layers), i);
  });
  return {x, saved};
}

// Returns dhidden, dcontext, the gradients of the parameters, and those of keys, queries and bias of positions (nothing
// without positions); those that are not needed are empty.
template <class Ops>
std::tuple<Tensor, Tensor, Tensors, Tensors> encoder_layer_bwd(
    const Tensor& dy, const Tensor& hidden, const OptionalTensor& context, const Tensors& parameters,
    const Tensors& saved, const OptionalTensor& cu_seqlens, const OptionalTensor& slots, const OptionalTensor& keys,
    const OptionalTensor& queries, const OptionalTensor& bias, const OptionalTensor& rng, int64_t max_seqlen,
    int64_t heads, double scale, double attention_p, double out_p, double down_p, int64_t site,
    std::string_view approximate, ScalarType dtype, double /*out_eps*/, double /*down_eps*/,
    const std::vector<int64_t>& needed) {
  const NoGrad guard;
  const LayerPositions positions{slots, keys, queries, bias};
  const EncoderLayer<Ops> layer(hidden, context, parameters, cu_seqlens, positions, heads, approximate, dtype);
  const LayerParameters& p = layer.p;
  const int64_t before = context ? kProjected : 0;
  FB_CHECK_VALUE(int64_t(saved.size()) == kSavedCount - before, "encoder_layer: ", saved.size(),
                 " saved tensors; expected ", kSavedCount - before);
  layer.check_together(hidden, saved), layer.check_together(hidden, Tensors{dy});
  const auto kept = [&](LayerSaved which) -> const Tensor& { return saved[which - before]; };
  LayerGradients<Ops> gradients(parameters, needed);
  const size_t out = parameters.size() - 10, out_norm = out + 2, up = out + 4, down = out + 6, down_norm = out + 8;
  const Tensor nothing = empty({0}, hidden), no_context = empty({0}, context ? *context : hidden);
  const auto without_inputs = [&] {
    return std::tuple(nothing, no_context, gradients.all(), layer.no_gradients(hidden));
  };

  // The backward ends at the first part of the layer that needs a gradient, so that nothing is computed in vain.
  const bool below_projection = needed[0] || needed[1] || gradients.wants_any(0, out) || gradients.wants_tables();
  const bool below_middle = below_projection || gradients.wants_any(out, 4),
             below_up = below_middle || gradients.wants_any(up, 2);
  auto [ddown, dmiddle, dweight2, dbias2, ddown_bias] =
      Ops::add_layer_norm_bwd(dy, kept(kDown), kept(kMiddle), p.down_norm.weight, kept(kMean2), kept(kRstd2),
                              p.down.bias, rng, down_p, site + 2, gradients.wants_any(down + 1, 3));
  gradients.set(down_norm, dweight2), gradients.set(down_norm + 1, dbias2);
  if (ddown.dim() == 1) ddown = dmiddle;  // empty: one tensor serves as both gradients
  const Tensor& product = kept(kProduct);
  // dweight needs the GELU's output, dbias does not.
  const bool wide = gradients.wants(down);
  gradients.set_dense(down, ddown, wide ? Ops::gelu(product, approximate, true) : product, ddown_bias);
  if (!below_up) return without_inputs();

  {  // a scope, so that tensors as wide as the MLP are freed before attention allocates
    const Tensor dwide = Ops::matrix_product(ddown, false, layer.cast(p.down.weight));
    check_gradient("encoder_layer", "the saved product", product, dwide);
    const auto [dproduct, dup_bias] = Ops::gelu_bwd(dwide, product, approximate, gradients.wants(up + 1));
    gradients.set_dense(up, dproduct, layer.cast(kept(kMiddle)), dup_bias);
    if (!below_middle) return without_inputs();
    dmiddle = add(dmiddle, Ops::matrix_product(dproduct, false, layer.cast(p.up.weight)));
  }

  auto [dprojected, dhidden, dweight, dbias, dout_bias] =
      Ops::add_layer_norm_bwd(dmiddle, kept(kProjected), hidden, p.out_norm.weight, kept(kMean), kept(kRstd),
                              p.out.bias, rng, out_p, site + 1, gradients.wants_any(out + 1, 3));
  gradients.set(out_norm, dweight), gradients.set(out_norm + 1, dbias);
  if (dprojected.dim() == 1) dprojected = dhidden;
  const Tensor into = context ? layer.cast(*context) : by_token(kept(kContext));
  gradients.set_dense(out, dprojected, into, dout_bias);
  if (!below_projection) return without_inputs();

  const Tensor dinto =
      context && !needed[1] ? nothing : Ops::matrix_product(dprojected, false, layer.cast(p.out.weight));
  if (context) {
    return {needed[0] ? contiguous(dhidden, type_of(hidden)) : nothing,
            needed[1] ? contiguous(dinto, type_of(*context)) : no_context,
            gradients.all(),
            {}};
  }
  check_like("encoder_layer", "the saved context", into, dinto);
  const auto [dprojections, dpositions] =
      layer.attend_bwd(view(dinto, kept(kContext).sizes()), kept(kQkv), kept(kContext), kept(kLse),
                       gradients.wants_tables(), *cu_seqlens, max_seqlen, scale, attention_p, rng, site);
  const Tensor dqkv = by_token(dprojections);
  const Tensor x = layer.cast(hidden);
  const auto& each = p.projections;
  const int64_t count = int64_t(each.size()), width = dqkv.size(1) / count;
  const auto part = [&](int64_t i) { return strided(dqkv, {dqkv.size(0), width}, {dqkv.size(1), 1}, i * width); };
  for (int64_t i = 0; i < count; ++i) gradients.set_dense(2 * i, part(i), x, std::nullopt);
  if (!needed[0]) return {nothing, no_context, gradients.all(), dpositions};
  if (count > 1 && Ops::joins_weights(x.size(0), x.size(1))) {
    const Tensor weight = joined(each, &Dense::weight);
    dhidden = add(dhidden, Ops::matrix_product(dqkv, false, layer.cast(weight)));
  } else {
    for (int64_t i = count - 1; i >= 0; --i)  // in the order in which autograd adds
      dhidden = add(dhidden, Ops::matrix_product(part(i), false, layer.cast(each[i].weight)));
  }
  return {contiguous(dhidden, type_of(hidden)), no_context, gradients.all(), dpositions};
}

}  // namespace fastbert
