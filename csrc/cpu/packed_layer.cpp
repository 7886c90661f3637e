// Whole post-norm layers whose products have packed weights, or the part of such a layer that follows attention;
// forward only. The schema is defined in fastbert/ops/packed_layer.py.
#include <memory>
#include <string_view>
#include <tuple>
#include <vector>

#include "../layer_ops.h"
#include "attention_batch.h"
#include "gelu_rows.h"
#include "linear.h"
#include "packed_product.h"
#include "relative_positions.h"

namespace fastbert::packed {

namespace {

// The parameters of one product. The weight is packed, or plain if it has two dimensions.
struct Dense : Packed {
  bool is_packed() const { return weight.dim() > 2; }
};

struct Layer {
  std::vector<Dense> projections;
  Dense out, up, down;
  Tensor out_norm[2], down_norm[2];  // weight and bias

  // parameters: the weight and bias of each part, in the order of encoder_layer. scales: one for each product, empty if
  // it has none. attended: without the parts before attention.
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

  template <class F>
  void for_products(const F& f) const {
    for (const Dense& each : projections) f(each);
    f(out), f(up), f(down);
  }
  // The numbers in all weights.
  int64_t numbers() const {
    int64_t all = 0;
    for_products([&](const Dense& dense) { all += dense.weight.numel(); });
    return all;
  }
};

bool has_plain(const std::vector<Layer>& layers) {
  bool any = false;
  for (const Layer& layer : layers) layer.for_products([&](const Dense& dense) { any |= !dense.is_packed(); });
  return any;
}

// The type of what the products `from` pass on to the product `to`. For float32 hidden states it is bf16 between int8
// products, whose own rounding is larger: half as much is written and read, and attention multiplies bf16. Otherwise it
// is hidden's.
ScalarType between(const std::vector<Dense>& from, const Dense& to, ScalarType hidden) {
  const auto is_int8 = [](const Dense& dense) { return type_of(dense.weight) == ScalarType::Char; };
  const bool int8 = is_int8(to) && std::all_of(from.begin(), from.end(), is_int8);
  return int8 && hidden == ScalarType::Float ? ScalarType::BFloat16 : hidden;
}

void check_dense_of(const Tensor& x, const Dense& dense) {
  dense.is_packed() ? check_packed(x, dense) : check_dense("packed_layer", x, dense.weight, dense.bias);
}

// Rows that products read, (T, K), each contiguous; and the same rows in the form that products take, if the op that
// wrote them has also converted them.
struct Input {
  Tensor rows;
  std::optional<Left> left = std::nullopt;

  const Left& left_of(const Packed& factor, Workspace& workspace) {
    const Weights weights = weights_of(factor.weight);
    if (!left || left->weights() != weights) left.emplace(rows, weights, workspace), left->put_all();
    return *left;
  }
};

// with_bias: whether the bias is added here. type: that of the output, which differs from x's only next to int8
// products. If the weight is packed, the output is in the workspace's memory for `use`.
Tensor apply(Input x, const Dense& dense, std::string_view approximate, bool with_bias, ScalarType type,
             Workspace& workspace, Workspace::Use use) {
  check_dense_of(x.rows, dense);
  const OptionalTensor bias = with_bias ? dense.bias : std::nullopt;
  if (dense.is_packed()) {
    const Tensor y = workspace.matrix(use, x.rows.size(0), dense.channels, x.rows, type);
    products_into(x.left_of(dense, workspace), {{y, {dense.weight, dense.scale, bias, dense.channels}}},
                  gelu_of(approximate));
    return y;
  }
  const Tensor y = linear(x.rows, dense.weight, bias);
  if (!approximate.empty()) gelu_cpu(y, std::nullopt, approximate, y);
  return y;
}

// Projects the rows of x to those of qkv, (T, 3 H D).
void project(Input x, const std::vector<Dense>& projections, const Tensor& qkv, Workspace& workspace) {
  const int64_t tokens = x.rows.size(0), width = qkv.size(1);
  std::vector<Product> products;  // not computed yet, with weights of one kind
  const auto multiply = [&] {
    if (!products.empty()) products_into(x.left_of(products[0].factor, workspace), products, Gelu::none);
    products.clear();
  };
  for (size_t i = 0; i < projections.size(); ++i) {
    const Dense& each = projections[i];
    check_dense_of(x.rows, each);
    const Tensor part = strided(qkv, {tokens, each.channels}, {width, 1}, int64_t(i) * each.channels);
    if (!each.is_packed()) {
      copy_(part, linear(x.rows, each.weight, each.bias));
      continue;
    }
    if (!products.empty() && type_of(products[0].factor.weight) != type_of(each.weight)) multiply();
    products.push_back({part, each});
  }
  multiply();
}

struct Settings {
  std::string_view approximate;
  double out_eps, down_eps;
};

// The product of x, its bias, the residual and LayerNorm, written into y, which may be the residual. The pass that
// writes y also converts its rows for `next`, the product that reads them, if there is one.
Input normed(const Tensor& x, const Tensor& residual, const Dense& dense, const Tensor (&norm)[2], double eps,
             const Tensor& y, const Dense* next, Workspace& workspace) {
  const Tensor product = apply({x}, dense, "", false, type_of(residual), workspace, Workspace::kProduct);
  Input input{y};
  MoreOfRows more;
  if (next && next->is_packed()) {
    const Left& left = input.left.emplace(y, weights_of(next->weight), workspace);
    if (left.differs()) more = [&left](int64_t begin, int64_t end) { left.put(begin, end); };
  }
  add_layer_norm_into_cpu(y, product, residual, norm[0], norm[1], *dense.bias, eps, more);
  return input;
}

// The part of a layer after attention, written into y, which may be x. next: the product that reads y, if there is one.
Input finish(const Tensor& attended, const Tensor& x, const Layer& layer, const Settings& settings, const Tensor& y,
             const Dense* next, Workspace& workspace) {
  const ScalarType type = type_of(x);
  const Tensor to = workspace.matrix(Workspace::kMiddle, x.size(0), x.size(1), x, type);
  const Input middle = normed(attended, x, layer.out, layer.out_norm, settings.out_eps, to, &layer.up, workspace);
  const Tensor wide = apply(middle, layer.up, settings.approximate, true, between({layer.up}, layer.down, type),
                            workspace, Workspace::kWide);
  return normed(wide, to, layer.down, layer.down_norm, settings.down_eps, y, next, workspace);
}

// How threads share the ops between one attention and the next. Either a thread takes a block of rows through all the
// ops: the output of each op is still in its cache when the next one reads it, and no thread waits for another. Or all
// rows go through one op after the other, and threads share each op: then they wait for each other less if one is
// slower, and for few rows not each of them reads all weights. Products with plain weights are torch's, which share.
class Blocks {
 public:
  Blocks(int64_t rows, const std::vector<Layer>& layers) : rows_(rows) {
    if (!has_plain(layers)) {
      FB_CHECK(FB_BEST_ISA(packed_linear), kNoIsa);
      const Tensor& weight = layers[0].out.weight;
      const Weights weights = weights_of(weight);
      if (rows / threads() >= FB_BEST_ISA(packed_fewest_rows)(weights, layers[0].numbers() * weight.element_size()))
        threads_ = threads(), most_ = FB_BEST_ISA(packed_rows)();
    }
    workspaces_.resize(threads_);
  }

  // Calls f(first row, number of rows, workspace) for each block, or once for all rows.
  template <class F>
  void run(const F& f) {
    if (threads_ == 1 && rows_ <= most_) return f(int64_t(0), rows_, workspaces_[0]);
    constexpr int64_t kUnit = cpu::kRowsTogether;
    const int64_t units = cpu::whole_tiles(rows_) / kUnit, most = most_ / kUnit;
    parallel_ranges({units, threads_, std::min(most / 2, units / threads_), most},
                    [&](const Range& range, int64_t thread) {
                      const int64_t first = range.begin * kUnit;
                      f(first, std::min(rows_, range.end * kUnit) - first, workspaces_[thread]);
                    });
  }

 private:
  int64_t rows_, threads_ = 1, most_ = rows_;  // most_: rows of a block
  std::vector<Workspace> workspaces_;
};

Tensor rows_of(const Tensor& x, int64_t first, int64_t count) {
  return count == x.size(0) ? x : view(x, {count, x.size(1)}, first * x.size(1));
}

// What attention reads and writes. It is the same memory in all layers, because the first access to memory that is new
// from the system is slow.
struct Attention {
  Tensor qkv;      // (T, 3 H D)
  Tensor by_head;  // qkv as (T, 3, H, D)
  Batch batch;
  std::optional<Tables> tables;  // of relative positions, in the type that attention computes in
  std::optional<PackedTables> packed;
  Tensor out, lse, rows;  // rows: out as (T, H D)

  Attention(const Tensor& qkv_, const Tensor& cu_seqlens, const LayerPositions& positions, int64_t heads, double scale)
      : qkv(qkv_),
        by_head(view(qkv, {qkv.size(0), 3, heads, qkv.size(1) / (3 * heads)})),
        batch(by_head, cu_seqlens, scale, {}) {
    if (positions.slots) {
      const auto cast = [&](const OptionalTensor& table) {
        return table ? OptionalTensor(contiguous(*table, type_of(qkv))) : std::nullopt;
      };
      tables.emplace(by_head, *positions.slots, cast(positions.keys), cast(positions.queries), positions.bias);
      packed.emplace(batch, by_head, *positions.slots, *tables, false);
    }
    std::tie(out, lse) = attention_outputs(batch, by_head);
    rows = view(out, {qkv.size(0), qkv.size(1) / 3});
  }

  Attention(const Attention&) = delete;  // `packed` refers to other members

  void run() const { attention_forward_into(out, lse, batch, by_head); }
};

// How many numbers a layer's projections give for each token, checked.
int64_t projected(const Layer& layer, int64_t heads) {
  const std::vector<Dense>& projections = layer.projections;
  const int64_t channels = projections[0].channels, width = channels * int64_t(projections.size());
  for (const Dense& each : projections)
    FB_CHECK_VALUE(each.channels == channels, "packed_layer: projections give ", channels, " and ", each.channels,
                   " numbers a token; expected one number");
  FB_CHECK_VALUE(heads > 0, "packed_layer: heads is ", heads, "; expected a positive number");
  FB_CHECK_VALUE(width % 3 == 0 && width / 3 % heads == 0, "packed_layer: the projections give ", width,
                 " numbers a token; expected a multiple of 3 times ", heads, " heads");
  return width;
}

// Queries, keys and values of each layer are computed as soon as the rows that they are projected from. They overwrite
// those of the layer before, whose attention is done by then.
Tensor run(const Tensor& hidden, const std::vector<Layer>& layers, const OptionalTensor& cu_seqlens,
           const LayerPositions& positions, int64_t heads, double scale, const Settings& settings) {
  FB_CHECK_VALUE(cu_seqlens.has_value(), "packed_layer: neither context nor cu_seqlens; expected one");
  const Tensor x = contiguous(hidden), y = empty_rows(x.sizes(), x);
  Blocks blocks(x.size(0), layers);
  using Shared = std::shared_ptr<const Attention>;
  const auto attention_of = [&](const Layer& layer, const Shared& before) {
    const int64_t width = projected(layer, heads);
    const ScalarType type = between(layer.projections, layer.out, type_of(x));
    if (before && before->qkv.size(1) == width && type_of(before->qkv) == type) return before;
    return Shared(new Attention(empty({x.size(0), width}, x, type), *cu_seqlens, positions, heads, scale));
  };
  Shared attention = attention_of(layers[0], nullptr);
  blocks.run([&](int64_t first, int64_t count, Workspace& workspace) {
    project({rows_of(x, first, count)}, layers[0].projections, rows_of(attention->qkv, first, count), workspace);
  });
  for (size_t i = 0; i < layers.size(); ++i) {
    attention->run();
    const Layer* const next = i + 1 < layers.size() ? &layers[i + 1] : nullptr;
    const Shared following = next ? attention_of(*next, attention) : nullptr;
    blocks.run([&](int64_t first, int64_t count, Workspace& workspace) {
      const Tensor here = rows_of(y, first, count), context = rows_of(attention->rows, first, count);
      const Input input = finish(context, i ? here : rows_of(x, first, count), layers[i], settings, here,
                                 next ? &next->projections[0] : nullptr, workspace);
      if (next) project(input, next->projections, rows_of(following->qkv, first, count), workspace);
    });
    attention = following;
  }
  return y;
}

// The same from the context on. context: the output of the heads, (T, H D).
Tensor run_after(const Tensor& hidden, const Tensor& context, const Layer& layer, const Settings& settings) {
  FB_CHECK_VALUE(context.dim() == 2, "packed_layer: context has shape ", context.sizes(), "; expected (T, D)");
  check_shape("packed_layer", "context", context, {hidden.size(0), context.size(1)});
  check_dtype("packed_layer", "context", context, type_of(hidden));
  check_device("packed_layer", "context", context, hidden.device());
  const Tensor x = contiguous(hidden), attended = contiguous(context), y = empty_rows(x.sizes(), x);
  Blocks(x.size(0), {layer}).run([&](int64_t first, int64_t count, Workspace& workspace) {
    finish(rows_of(attended, first, count), rows_of(x, first, count), layer, settings, rows_of(y, first, count),
           nullptr, workspace);
  });
  return y;
}

// With several layers, parameters and scales have all those of one layer before those of the next.
Tensor packed_layer_fwd_cpu(const Tensor& hidden, const OptionalTensor& context, const Tensors& parameters,
                            const Tensors& scales, const OptionalTensor& cu_seqlens, const OptionalTensor& slots,
                            const OptionalTensor& keys, const OptionalTensor& queries, const OptionalTensor& bias,
                            int64_t /*max_seqlen*/, int64_t heads, double scale, std::string_view approximate,
                            double out_eps, double down_eps, int64_t count) {
  const NoGrad guard;
  check_approximate("packed_layer", approximate);
  const LayerPositions positions{slots, keys, queries, bias};
  positions.check("packed_layer", context.has_value());
  FB_CHECK_VALUE(hidden.dim() == 2, "packed_layer: hidden has shape ", hidden.sizes(), "; expected (T, C)");
  FB_CHECK_VALUE(count == 1 || (count > 1 && !context), "packed_layer: ", count,
                 " layers; expected one, or several without a context");
  if (keys) check_dtype("packed_layer", "keys", *keys, type_of(hidden));
  if (queries) check_dtype("packed_layer", "queries", *queries, type_of(hidden));
  std::vector<Layer> layers;
  for (int64_t i = 0; i < count; ++i)
    layers.emplace_back(part_of(parameters, i, count), part_of(scales, i, count), context.has_value());
  const Settings settings{approximate, out_eps, down_eps};
  Tensor y;
  const auto all = [&] {
    y = context ? run_after(hidden, *context, layers[0], settings)
                : run(hidden, layers, cu_seqlens, positions, heads, scale, settings);
  };
  has_plain(layers) ? all() : together(all);  // products with plain weights are torch's, which use its own threads
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) { m.impl("packed_layer_fwd", TORCH_BOX(&packed_layer_fwd_cpu)); }

}  // namespace fastbert::packed
