// The ops of a layer on a GPU, for encoder_layer: what their operators do, called from C++.
#pragma once

#include <string_view>
#include <tuple>

#include "../stable.h"

namespace fastbert {

// out (T, H, D) and lse (H, T).
std::tuple<Tensor, Tensor> attention_fwd_cuda(const Tensor& qkv, const Tensor& cu_seqlens, int64_t max_seqlen,
                                              double scale, double dropout_p, const OptionalTensor& rng, int64_t site);

Tensor attention_bwd_cuda(const Tensor& dout, const Tensor& qkv, const Tensor& out, const Tensor& lse,
                          const Tensor& cu_seqlens, int64_t max_seqlen, double scale, double dropout_p,
                          const OptionalTensor& rng, int64_t site);

// y, mean, rstd.
std::tuple<Tensor, Tensor, Tensor> add_layer_norm_fwd_cuda(const Tensor& x, const Tensor& residual,
                                                           const Tensor& weight, const Tensor& bias,
                                                           const OptionalTensor& x_bias, const OptionalTensor& rng,
                                                           double eps, double dropout_p, int64_t site);

// dx (empty where it would be dresidual), dresidual, dweight, dbias, dx_bias (empty where they are not needed).
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> add_layer_norm_bwd_cuda(const Tensor& dy, const Tensor& x,
                                                                           const Tensor& residual, const Tensor& weight,
                                                                           const Tensor& mean, const Tensor& rstd,
                                                                           const OptionalTensor& x_bias,
                                                                           const OptionalTensor& rng, double dropout_p,
                                                                           int64_t site, bool need_dparams);

Tensor bias_gelu_fwd_cuda(const Tensor& x, const Tensor& bias, std::string_view approximate);

// dx, and dbias, which is empty where it is not needed.
std::tuple<Tensor, Tensor> bias_gelu_bwd_cuda(const Tensor& dy, const Tensor& x, const Tensor& bias,
                                              std::string_view approximate, bool need_dbias);

}  // namespace fastbert
