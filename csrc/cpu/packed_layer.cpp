// A whole post-norm layer whose products have packed weights, or what follows its attention; forward only. The schema
// is defined in fastbert/ops/packed_layer.py.
#include <string_view>
#include <vector>

#include "../layer_ops.h"
#include "gelu_rows.h"
#include "linear.h"
#include "packed_product.h"

namespace fastbert::packed {

namespace {

// The parameters of one of its products: packed, or a plain weight where it has two dimensions.
struct Dense : Packed {
  bool is_packed() const { return weight.dim() > 2; }
};

struct Layer {
  std::vector<Dense> projections;
  Dense out, up, down;
  Tensor out_norm[2], down_norm[2];  // weight and bias

  // parameters: weight and bias of each, in the order of encoder_layer; scales: of each product, empty where it has
  // none. attended: without those before attention.
  Layer(const Tensors& parameters, const Tensors& scales, bool attended) {
    const size_t count = parameters.size();
    FB_CHECK_VALUE(attended ? count == 10 : count == 12 || count == 16, "packed_layer: ", count,
                   " parameters; expected ", attended ? "10 beside a context" : "12 or 16");
    FB_CHECK_VALUE(scales.size() == count / 2 - 2, "packed_layer: ", scales.size(), " scales; expected ",
                   count / 2 - 2);
    size_t next = 0, product = 0;
    const auto take = [&] {
      const Tensor &weight = parameters[next], &bias = parameters[next + 1], &scale = scales[product++];
      FB_CHECK_VALUE(bias.dim() == 1, "packed_layer: a bias has shape ", bias.sizes(), "; expected (C,)");
      next += 2;
      return Dense{{weight, scale.numel() ? OptionalTensor(scale) : std::nullopt, bias, bias.size(0)}};
    };
    const auto take_norm = [&](Tensor(&norm)[2]) { norm[0] = parameters[next++], norm[1] = parameters[next++]; };
    while (next < count - 10) projections.push_back(take());
    out = take(), take_norm(out_norm), up = take(), down = take(), take_norm(down_norm);
  }
};

// The type of what passes from products to another: bf16 between int8 ones, beside which its rounding is small, so that
// half as much is written and read, and attention multiplies bf16; else hidden's.
ScalarType between(const std::vector<Dense>& from, const Dense& to, ScalarType hidden) {
  const auto is_int8 = [](const Dense& dense) { return dense.weight.scalar_type() == ScalarType::Char; };
  const bool int8 = is_int8(to) && std::all_of(from.begin(), from.end(), is_int8);
  return int8 && hidden == ScalarType::Float ? ScalarType::BFloat16 : hidden;
}

void check_dense_of(const Tensor& x, const Dense& dense) {
  dense.is_packed() ? check_packed(x, dense) : check_dense("packed_layer", x, dense.weight, dense.bias);
}

// x: (T, K), contiguous. bias: whether it is added here. type: of what is returned, x's but between int8 products.
Tensor apply(const Tensor& x, const Dense& dense, std::string_view approximate, bool with_bias, ScalarType type) {
  check_dense_of(x, dense);
  const OptionalTensor bias = with_bias ? dense.bias : std::nullopt;
  if (dense.is_packed())
    return product(x, {dense.weight, dense.scale, bias, dense.channels}, gelu_of(approximate), type);
  const Tensor y = contiguous(linear(x, dense.weight, bias));
  if (!approximate.empty()) gelu_cpu(y, std::nullopt, approximate, y);
  return y;
}

// (T, C) -> (T, 3, H, D). What the products take is made once for all three, where they take the same.
Tensor project(const Tensor& x, const std::vector<Dense>& projections, int64_t heads, ScalarType type) {
  const int64_t tokens = x.size(0), width = projections[0].channels * int64_t(projections.size());
  FB_CHECK_VALUE(width % 3 == 0 && width / 3 % heads == 0, "packed_layer: the projections give ", width,
                 " numbers a token; expected a multiple of 3 times ", heads, " heads");
  const Tensor qkv = empty({tokens, width}, x, type);
  std::optional<Left> left;
  for (size_t i = 0; i < projections.size(); ++i) {
    const Dense& each = projections[i];
    FB_CHECK_VALUE(each.channels == projections[0].channels, "packed_layer: projections give ", each.channels, " and ",
                   projections[0].channels, " numbers a token; expected one number");
    check_dense_of(x, each);
    const Tensor part = strided(qkv, {tokens, each.channels}, {width, 1}, int64_t(i) * each.channels);
    if (!each.is_packed()) {
      copy_(part, linear(x, each.weight, each.bias));
      continue;
    }
    const Weights weights = weights_of(each.weight);
    if (!left || left->weights() != weights) left.emplace(x, weights);
    product_into(part, *left, each, Gelu::none);
  }
  return view(qkv, {tokens, 3, heads, width / (3 * heads)});
}

// What the heads give, (T, H D): that given, or by attention.
Tensor context_of(const Tensor& x, const OptionalTensor& given, const Layer& layer, const OptionalTensor& cu_seqlens,
                  int64_t max_seqlen, int64_t heads, double scale) {
  if (given) {
    FB_CHECK_VALUE(given->dim() == 2, "packed_layer: context has shape ", given->sizes(), "; expected (T, D)");
    check_shape("packed_layer", "context", *given, {x.size(0), given->size(1)});
    check_dtype("packed_layer", "context", *given, x.scalar_type());
    check_device("packed_layer", "context", *given, x.device());
    return contiguous(*given);
  }
  FB_CHECK_VALUE(cu_seqlens.has_value(), "packed_layer: neither context nor cu_seqlens; expected one");
  FB_CHECK_VALUE(heads > 0, "packed_layer: heads is ", heads, "; expected a positive number");
  const ScalarType type = between(layer.projections, layer.out, x.scalar_type());
  const Tensor qkv = project(x, layer.projections, heads, type);
  const auto [out, lse] = attention_fwd_cpu(qkv, *cu_seqlens, max_seqlen, scale, 0, std::nullopt, 0);
  return view(out, {x.size(0), out.size(1) * out.size(2)});
}

Tensor run(const Tensor& hidden, const OptionalTensor& context, const Layer& layer, const OptionalTensor& cu_seqlens,
           int64_t max_seqlen, int64_t heads, double scale, std::string_view approximate, double out_eps,
           double down_eps) {
  const Tensor x = contiguous(hidden);
  const Tensor attended = context_of(x, context, layer, cu_seqlens, max_seqlen, heads, scale);
  const auto normed = [](const Tensor& y, const Tensor& residual, const Dense& dense, const Tensor(&norm)[2],
                         double eps) {
    return std::get<0>(add_layer_norm_fwd_cpu(y, residual, norm[0], norm[1], dense.bias, std::nullopt, eps, 0, 0));
  };
  const ScalarType type = x.scalar_type();
  const Tensor middle = normed(apply(attended, layer.out, "", false, type), x, layer.out, layer.out_norm, out_eps);
  const Tensor wide = apply(middle, layer.up, approximate, true, between({layer.up}, layer.down, type));
  return normed(apply(wide, layer.down, "", false, type), middle, layer.down, layer.down_norm, down_eps);
}

// Of several layers parameters and scales follow each other.
Tensor packed_layer_fwd_cpu(const Tensor& hidden, const OptionalTensor& context, const Tensors& parameters,
                            const Tensors& scales, const OptionalTensor& cu_seqlens, int64_t max_seqlen, int64_t heads,
                            double scale, std::string_view approximate, double out_eps, double down_eps,
                            int64_t layers) {
  const NoGrad guard;
  FB_CHECK_VALUE(hidden.dim() == 2, "packed_layer: hidden has shape ", hidden.sizes(), "; expected (T, C)");
  FB_CHECK_VALUE(layers == 1 || (layers > 1 && !context), "packed_layer: ", layers,
                 " layers; expected one, or several without a context");
  Tensor x = hidden;
  const auto all = [&] {
    for (int64_t i = 0; i < layers; ++i) {
      const Layer layer(part_of(parameters, i, layers), part_of(scales, i, layers), context.has_value());
      x = run(x, context, layer, cu_seqlens, max_seqlen, heads, scale, approximate, out_eps, down_eps);
    }
  };
  const bool plain = std::any_of(parameters.begin(), parameters.end(), [](const Tensor& p) { return p.dim() == 2; });
  plain ? all() : together(all);  // the products of plain weights are torch's, and need threads of their own
  return x;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) { m.impl("packed_layer_fwd", TORCH_BOX(&packed_layer_fwd_cpu)); }

}  // namespace fastbert::packed
