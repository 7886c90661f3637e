// Checks that memory safety needs. The checks for users, with better messages, are in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

namespace fastbert {

inline void check_rows(const char* op, const at::Tensor& x) {
  TORCH_CHECK(x.dim() > 0, op, ": x has shape ", x.sizes());
}

// The tensor has x's shape and device.
inline void check_like(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& x) {
  TORCH_CHECK(tensor.sizes() == x.sizes(), op, ": ", name, " has shape ", tensor.sizes(), ", x has shape ", x.sizes());
  TORCH_CHECK(tensor.device() == x.device(), op, ": ", name, " is on ", tensor.device(), ", x is on ", x.device());
}

inline void check_dtype(const char* op, const char* name, const at::Tensor& tensor, at::ScalarType expected) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == expected, op, ": ", name, " is ", tensor.scalar_type(), ", not ", expected);
}

// One element a channel, on x's device.
inline void check_parameter(const char* op, const char* name, const at::Tensor& parameter, const at::Tensor& x) {
  TORCH_CHECK(parameter.dim() == 1 && parameter.size(0) == x.size(-1), op, ": ", name, " has shape ", parameter.sizes(),
              ", x has shape ", x.sizes());
  TORCH_CHECK(parameter.device() == x.device(), op, ": ", name, " is on ", parameter.device(), ", x is on ",
              x.device());
}

// x_bias and residual: absent in layer_norm; bias: absent in the backward.
inline void check_layer_norm(const at::Tensor& x, const std::optional<at::Tensor>& residual, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& x_bias) {
  check_rows("layer_norm", x);
  TORCH_CHECK(x.size(-1) > 0, "layer_norm: x has shape ", x.sizes());
  if (residual) check_like("layer_norm", "residual", *residual, x);
  check_parameter("layer_norm", "weight", weight, x);
  if (bias) check_parameter("layer_norm", "bias", *bias, x);
  if (x_bias) check_parameter("layer_norm", "x_bias", *x_bias, x);
}

// One mean and one rstd of the given type for each row.
inline void check_statistics(const char* op, const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& x,
                             at::ScalarType type) {
  const int64_t rows = x.numel() / x.size(-1);
  TORCH_CHECK(mean.numel() == rows && rstd.numel() == rows && mean.scalar_type() == type &&
                  rstd.scalar_type() == type && mean.device() == x.device() && rstd.device() == x.device(),
              op, ": mean is ", mean.scalar_type(), " ", mean.sizes(), ", rstd ", rstd.scalar_type(), " ", rstd.sizes(),
              ", x has shape ", x.sizes());
}

inline void check_approximate(const char* op, std::string_view approximate) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh", op, ": approximate is '", approximate, "'");
}

// ---- attention

inline void check_attention(const at::Tensor& qkv, const at::Tensor& cu_seqlens) {
  TORCH_CHECK(qkv.dim() == 4 && qkv.size(1) == 3 && cu_seqlens.dim() == 1 && cu_seqlens.numel() > 0 &&
                  cu_seqlens.scalar_type() == at::kInt && cu_seqlens.device() == qkv.device(),
              "attention: qkv has shape ", qkv.sizes(), " on ", qkv.device(), ", cu_seqlens is ",
              cu_seqlens.scalar_type(), " ", cu_seqlens.sizes(), " on ", cu_seqlens.device());
}

// The further arguments of the backward; lse is of the given type.
inline void check_attention_gradients(const at::Tensor& dout, const at::Tensor& out, const at::Tensor& lse,
                                      const at::Tensor& qkv, at::ScalarType type) {
  const std::vector<int64_t> expected = {qkv.size(0), qkv.size(2), qkv.size(3)};
  TORCH_CHECK(dout.sizes() == expected && out.sizes() == expected && dout.dtype() == qkv.dtype() &&
                  out.dtype() == qkv.dtype() && lse.numel() == expected[0] * expected[1] && lse.scalar_type() == type &&
                  dout.device() == qkv.device() && out.device() == qkv.device() && lse.device() == qkv.device(),
              "attention: dout is ", dout.scalar_type(), " ", dout.sizes(), ", out ", out.scalar_type(), " ",
              out.sizes(), ", lse ", lse.scalar_type(), " ", lse.sizes(), ", qkv ", qkv.scalar_type(), " ",
              qkv.sizes());
}

}  // namespace fastbert
