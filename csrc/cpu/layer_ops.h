// The ops of a layer on the CPU, for encoder_layer: what their operators do, called from C++.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <tuple>

namespace fastbert {

// out (T, H, D) and lse (H, T).
std::tuple<at::Tensor, at::Tensor> attention_fwd_cpu(const at::Tensor& qkv, const at::Tensor& cu_seqlens,
                                                     c10::SymInt max_seqlen, double scale, double dropout_p,
                                                     const std::optional<at::Tensor>& rng, int64_t site);

at::Tensor attention_bwd_cpu(const at::Tensor& dout, const at::Tensor& qkv, const at::Tensor& out,
                             const at::Tensor& lse, const at::Tensor& cu_seqlens, c10::SymInt max_seqlen, double scale,
                             double dropout_p, const std::optional<at::Tensor>& rng, int64_t site);

// y, mean, rstd.
std::tuple<at::Tensor, at::Tensor, at::Tensor> add_layer_norm_fwd_cpu(const at::Tensor& x, const at::Tensor& residual,
                                                                      const at::Tensor& weight, const at::Tensor& bias,
                                                                      const std::optional<at::Tensor>& x_bias,
                                                                      const std::optional<at::Tensor>& rng, double eps,
                                                                      double dropout_p, int64_t site);

// dx (empty where it would be dresidual), dresidual, dweight, dbias, dx_bias (empty where they are not needed).
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_bwd_cpu(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
    const at::Tensor& mean, const at::Tensor& rstd, const std::optional<at::Tensor>& x_bias,
    const std::optional<at::Tensor>& rng, double dropout_p, int64_t site, bool need_dparams);

}  // namespace fastbert
