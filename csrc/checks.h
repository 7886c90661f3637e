// Checks for memory safety: shapes, dtypes and devices of all tensors of every primitive, on CPUs and GPUs. The checks
// meant for users are in Python; these also run where an operator is called without them, for example in compiled code.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "stable.h"

namespace fastbert {

// ---- one tensor

inline void check_shape(const char* op, const char* name, const Tensor& tensor, Sizes expected) {
  FB_CHECK_VALUE(tensor.sizes().equals(expected), op, ": ", name, " has shape ", tensor.sizes(), "; expected ",
                 expected);
}

inline void check_device(const char* op, const char* name, const Tensor& tensor, const Device& expected) {
  FB_CHECK_VALUE(tensor.device() == expected, op, ": ", name, " is on ", tensor.device(), "; expected ", expected);
}

inline void check_dtype(const char* op, const char* name, const Tensor& tensor, ScalarType expected) {
  FB_CHECK_VALUE(type_of(tensor) == expected, op, ": ", name, " is ", type_of(tensor), "; expected ", expected);
}

inline void check_floating(const char* op, const char* name, const Tensor& tensor) {
  const ScalarType type = type_of(tensor);
  FB_CHECK_VALUE(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half ||
                     type == ScalarType::Double,
                 op, ": ", name, " is ", type, "; expected Float, BFloat16, Half or Double");
}

// The loops convert between fp32 and the half types, but not from or to fp64.
inline void check_floating_beside(const char* op, const char* name, const Tensor& tensor, ScalarType other) {
  check_floating(op, name, tensor);
  FB_CHECK_VALUE((type_of(tensor) == ScalarType::Double) == (other == ScalarType::Double), op, ": ", name, " is ",
                 type_of(tensor), " beside ", other, "; Double does not mix with others");
}

inline void check_indices(const char* op, const char* name, const Tensor& tensor) {
  FB_CHECK_VALUE(type_of(tensor) == ScalarType::Long || type_of(tensor) == ScalarType::Int, op, ": ", name, " is ",
                 type_of(tensor), "; expected Long or Int");
}

// ---- a tensor, relative to x

// x has at least one dimension, and is floating point.
inline void check_rows(const char* op, const char* name, const Tensor& x) {
  FB_CHECK_VALUE(x.dim() > 0, op, ": ", name, " has shape []; expected (..., C)");
  check_floating(op, name, x);
}

// The tensor has x's shape and device.
inline void check_like(const char* op, const char* name, const Tensor& tensor, const Tensor& x) {
  check_shape(op, name, tensor, x.sizes());
  check_device(op, name, tensor, x.device());
}

// A gradient has the shape, device and dtype of the tensor that it belongs to.
inline void check_gradient(const char* op, const char* name, const Tensor& gradient, const Tensor& of) {
  check_like(op, name, gradient, of);
  check_dtype(op, name, gradient, type_of(of));
}

// A parameter has one floating-point element for each channel, and is on x's device.
inline void check_parameter(const char* op, const char* name, const Tensor& parameter, const Tensor& x) {
  check_shape(op, name, parameter, {x.size(-1)});
  check_device(op, name, parameter, x.device());
  check_floating_beside(op, name, parameter, type_of(x));
}

inline void check_tensor(const char* op, const char* name, const Tensor& tensor, Sizes sizes, ScalarType type,
                         const Device& device) {
  check_shape(op, name, tensor, sizes);
  check_dtype(op, name, tensor, type);
  check_device(op, name, tensor, device);
}

// cu_seqlens is int32, on x's device. Its values are not checked: they are clamped where they are read.
inline void check_sequences(const char* op, const Tensor& cu_seqlens, const Tensor& x) {
  FB_CHECK_VALUE(cu_seqlens.dim() == 1 && cu_seqlens.numel() > 0, op, ": cu_seqlens has shape ", cu_seqlens.sizes(),
                 "; expected (sequences + 1,)");
  check_dtype(op, "cu_seqlens", cu_seqlens, ScalarType::Int);
  check_device(op, "cu_seqlens", cu_seqlens, x.device());
}

// ---- layer_norm, add_layer_norm

// x_bias and residual: absent in layer_norm; bias: absent in the backward.
inline void check_layer_norm(const Tensor& x, const OptionalTensor& residual, const Tensor& weight,
                             const OptionalTensor& bias, const OptionalTensor& x_bias) {
  check_rows("layer_norm", "x", x);
  FB_CHECK_VALUE(x.size(-1) > 0, "layer_norm: x has shape ", x.sizes(), "; expected (..., C) with C > 0");
  if (residual) check_like("layer_norm", "residual", *residual, x);
  if (residual) check_floating_beside("layer_norm", "residual", *residual, type_of(x));
  check_parameter("layer_norm", "weight", weight, x);
  if (bias) check_parameter("layer_norm", "bias", *bias, x);
  if (x_bias) check_parameter("layer_norm", "x_bias", *x_bias, x);
}

// The other arguments of the backward. y_type: the dtype of the output; statistics: that of mean and rstd.
inline void check_layer_norm_gradients(const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                                       ScalarType y_type, ScalarType statistics) {
  const auto rows = x.sizes().slice(0, x.dim() - 1);
  check_like("layer_norm", "dy", dy, x);
  check_dtype("layer_norm", "dy", dy, y_type);
  check_tensor("layer_norm", "mean", mean, rows, statistics, x.device());
  check_tensor("layer_norm", "rstd", rstd, rows, statistics, x.device());
}

// ---- bias_gelu

inline void check_approximate(const char* op, std::string_view approximate) {
  FB_CHECK_VALUE(approximate == "none" || approximate == "tanh", op, ": approximate is '", approximate,
                 "'; expected 'none' or 'tanh'");
}

inline void check_bias_gelu(const Tensor& x, const Tensor& bias, std::string_view approximate) {
  check_rows("bias_gelu", "x", x);
  check_parameter("bias_gelu", "bias", bias, x);
  check_approximate("bias_gelu", approximate);
}

// ---- linear, dense_gelu

// x (..., K), weight (C, K) and bias (C,) of one floating-point type on one device.
inline void check_dense(const char* op, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                        const char* name = "x") {
  check_floating(op, name, x);
  FB_CHECK_VALUE(x.dim() >= 2, op, ": ", name, " has shape ", x.sizes(),
                 "; expected (..., K) of at least two dimensions");
  FB_CHECK_VALUE(weight.dim() == 2, op, ": weight has shape ", weight.sizes(), "; expected (C, K)");
  check_shape(op, "weight", weight, {weight.size(0), x.size(-1)});
  if (bias) check_shape(op, "bias", *bias, {weight.size(0)});
  check_dtype(op, "weight", weight, type_of(x));
  if (bias) check_dtype(op, "bias", *bias, type_of(x));
  check_device(op, "weight", weight, x.device());
  if (bias) check_device(op, "bias", *bias, x.device());
}

// The output of a dense layer for checked x and weight, or the gradient of that output.
inline void check_dense_result(const char* op, const char* name, const Tensor& result, const Tensor& x,
                               const Tensor& weight) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = weight.size(0);
  check_tensor(op, name, result, shape, type_of(x), x.device());
}

// The other arguments of dense_gelu's backward.
inline void check_dense_gelu_gradients(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                       const Tensor& preactivation) {
  check_dense_result("dense_gelu", "preactivation", preactivation, x, weight);
  check_gradient("dense_gelu", "dy", dy, preactivation);
}

// ---- linear_max

inline void check_linear_max(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  check_dense("linear_max", x, weight, bias);
  FB_CHECK_VALUE(x.dim() == 2 && x.size(0) <= INT32_MAX, "linear_max: x has shape ", x.sizes(),
                 "; expected (T, C) with T < 2**31");
}

// The other arguments of the backward. The values in `rows` are checked where they are read.
inline void check_linear_max_gradients(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rows) {
  FB_CHECK_VALUE(dy.dim() == 2, "linear_max: dy has shape ", dy.sizes(), "; expected (B, V)");
  check_tensor("linear_max", "dy", dy, {dy.size(0), weight.size(0)}, type_of(x), x.device());
  check_tensor("linear_max", "rows", rows, dy.sizes(), ScalarType::Int, x.device());
}

// ---- cross_entropy

// The bias is absent in the backward. The values of labels are clamped where they are read.
inline void check_cross_entropy(const Tensor& hidden, const Tensor& weight, const OptionalTensor& bias,
                                const Tensor& labels) {
  check_dense("cross_entropy", hidden, weight, bias, "hidden");
  FB_CHECK_VALUE(hidden.dim() == 2, "cross_entropy: hidden has shape ", hidden.sizes(), "; expected (T, C)");
  check_indices("cross_entropy", "labels", labels);
  check_shape("cross_entropy", "labels", labels, {hidden.size(0)});
  check_device("cross_entropy", "labels", labels, hidden.device());
}

// The other arguments of the backward. math: the dtype of the loss.
inline void check_cross_entropy_gradients(const Tensor& dloss, const Tensor& dlogits, const Tensor& hidden,
                                          const Tensor& weight, ScalarType math) {
  check_tensor("cross_entropy", "dloss", dloss, {}, math, hidden.device());
  check_tensor("cross_entropy", "dlogits", dlogits, {hidden.size(0), weight.size(0)}, type_of(hidden), hidden.device());
}

// ---- embedding

// Checks a table and its ids against the input ids and the word table. The values of the ids are not checked here.
inline void check_table(const char* name, const Tensor& ids, const Tensor& table, const Tensor& input_ids,
                        const Tensor& word) {
  check_indices("embedding", name, ids);
  check_like("embedding", name, ids, input_ids);
  FB_CHECK_VALUE(table.dim() == 2 && word.dim() == 2 && word.size(1) > 0, "embedding: the table of ", name,
                 " has shape ", table.sizes(), "; expected (rows, C) with C > 0");
  check_shape("embedding", "table", table, {table.size(0), word.size(1)});
  check_device("embedding", "table", table, input_ids.device());
  check_floating_beside("embedding", "table", table, type_of(word));
}

// The other arguments of the backward. type: the dtype of the output; statistics: that of mean and rstd.
inline void check_embedding_gradients(const Tensor& dy, const Tensor& input_ids, const Tensor& word, const Tensor& mean,
                                      const Tensor& rstd, ScalarType type, ScalarType statistics) {
  std::vector<int64_t> shape = input_ids.sizes().vec();
  check_tensor("embedding", "mean", mean, shape, statistics, word.device());
  check_tensor("embedding", "rstd", rstd, shape, statistics, word.device());
  shape.push_back(word.size(1));
  check_tensor("embedding", "dy", dy, shape, type, word.device());
}

// ---- attention

inline void check_attention(const Tensor& qkv, const Tensor& cu_seqlens) {
  check_floating("attention", "qkv", qkv);
  FB_CHECK_VALUE(qkv.dim() == 4 && qkv.size(1) == 3 && qkv.size(3) > 0, "attention: qkv has shape ", qkv.sizes(),
                 "; expected (T, 3, H, D) with D > 0");
  FB_CHECK_VALUE(qkv.size(0) <= INT32_MAX && qkv.size(2) <= INT32_MAX / 3 / qkv.size(3), "attention: qkv has shape ",
                 qkv.sizes(), "; expected less than 2**31 rows, and numbers a row");
  check_sequences("attention", cu_seqlens, qkv);
}

// The other arguments of the backward. type: the dtype of lse.
inline void check_attention_gradients(const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& qkv,
                                      ScalarType type) {
  check_tensor("attention", "out", out, {qkv.size(0), qkv.size(2), qkv.size(3)}, type_of(qkv), qkv.device());
  check_gradient("attention", "dout", dout, out);
  check_tensor("attention", "lse", lse, {qkv.size(2), qkv.size(0)}, type, qkv.device());
}

// ---- relative_attention

// In addition to check_attention. Slots are clamped to the tables' rows where they are read, so a table needs a row.
inline void check_relative_attention(const Tensor& qkv, const Tensor& slots, const OptionalTensor& keys,
                                     const OptionalTensor& queries, const OptionalTensor& bias) {
  const char* const op = "relative_attention";
  FB_CHECK_VALUE(slots.dim() == 1 && slots.numel() % 2 == 1 && slots.numel() <= INT32_MAX, op, ": slots has shape ",
                 slots.sizes(), "; expected (2 L - 1,), an odd number");
  check_dtype(op, "slots", slots, ScalarType::Int);
  check_device(op, "slots", slots, qkv.device());
  FB_CHECK_VALUE(keys || queries || bias, op, ": keys, queries and bias are None; expected at least one");
  const Tensor& first = keys ? *keys : queries ? *queries : *bias;
  FB_CHECK_VALUE(first.dim() == (keys || queries ? 3 : 2), op, ": a table has shape ", first.sizes(),
                 "; expected (W, H, D) for keys and queries, (H, W) for bias");
  const int64_t width = first.size(keys || queries ? 0 : 1), heads = qkv.size(2), D = qkv.size(3);
  FB_CHECK_VALUE(width > 0 && width <= INT32_MAX, op, ": a table has shape ", first.sizes(),
                 "; expected 0 < W < 2**31");
  const ScalarType type = type_of(qkv), wide = type == ScalarType::Double ? type : ScalarType::Float;
  if (keys) check_tensor(op, "keys", *keys, {width, heads, D}, type, qkv.device());
  if (queries) check_tensor(op, "queries", *queries, {width, heads, D}, type, qkv.device());
  if (bias) check_tensor(op, "bias", *bias, {heads, width}, wide, qkv.device());
}

// ---- padding

inline void check_mask(const char* op, const Tensor& mask) {
  FB_CHECK_VALUE(mask.dim() == 2 && type_of(mask) == ScalarType::Bool, op, ": expected (B, S) bool, got ", mask.sizes(),
                 " ", type_of(mask));
  FB_CHECK_VALUE(mask.numel() <= INT32_MAX, op, ": expected less than 2**31 places, got ", mask.sizes());
}

// x has at least `dims` dimensions; the first are tokens (dims = 1) or (batch, sequence) (dims = 2).
inline void check_packing(const char* op, const Tensor& x, const Tensor& indices, int64_t dims) {
  FB_CHECK_VALUE(x.dim() >= dims, op, ": x has shape ", x.sizes(), "; expected at least ", dims, " dimension(s)");
  FB_CHECK_VALUE(indices.dim() == 1, op, ": indices has shape ", indices.sizes(), "; expected (T,)");
  check_dtype(op, "indices", indices, ScalarType::Long);
  check_device(op, "indices", indices, x.device());
}

inline void check_unpacking(const char* op, const Tensor& x, const Tensor& indices, int64_t batch, int64_t seqlen) {
  check_packing(op, x, indices, 1);
  check_shape(op, "indices", indices, {x.size(0)});
  FB_CHECK_VALUE(batch >= 0 && seqlen >= 0 && (seqlen == 0 || batch <= INT64_MAX / seqlen), op, ": batch is ", batch,
                 " and seqlen ", seqlen, "; expected numbers of rows");
}

}  // namespace fastbert
