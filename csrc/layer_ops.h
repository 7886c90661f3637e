// The ops that encoder_layer and packed_layer consist of, as C++ functions that do what their operators do on a device.
#pragma once

#include <functional>
#include <string_view>
#include <tuple>
#include <vector>

#include "stable.h"

namespace fastbert {

using Tensors = std::vector<Tensor>;

// The tensors of the i-th layer, where `all` has equally many for each layer, one layer after the other.
inline Tensors part_of(const Tensors& all, int64_t i, int64_t layers) {
  FB_CHECK_VALUE(all.size() % layers == 0, "fastbert: ", all.size(), " tensors of ", layers,
                 " layers; expected as many of each");
  const std::ptrdiff_t count = all.size() / layers;
  return {all.begin() + i * count, all.begin() + (i + 1) * count};
}

// What the distance of query and key adds to their score: arguments of relative_attention. All are absent where
// attention is plain.
struct LayerPositions {
  OptionalTensor slots, keys, queries, bias;

  // attended: whether attention has run before.
  void check(const char* op, bool attended) const {
    FB_CHECK_VALUE(slots ? !attended : !keys && !queries && !bias, op, ": ",
                   slots ? "slots beside a context" : "tables of positions without slots");
  }
};

// attention_fwd returns out (T, H, D) and lse (H, T). relative_attention_bwd returns dqkv and the gradients of keys,
// queries and bias (empty if they are not needed, or there is no such table). add_layer_norm_fwd returns y, mean and
// rstd; add_layer_norm_bwd returns dx (empty if it equals dresidual), dresidual, and dweight, dbias, dx_bias (empty if
// they are not needed).
#define FB_LAYER_OPS(device)                                                                                           \
  std::tuple<Tensor, Tensor> attention_fwd_##device(const Tensor& qkv, const Tensor& cu_seqlens, int64_t max_seqlen,   \
                                                    double scale, double dropout_p, const OptionalTensor& rng,         \
                                                    int64_t site);                                                     \
  Tensor attention_bwd_##device(const Tensor& dout, const Tensor& qkv, const Tensor& out, const Tensor& lse,           \
                                const Tensor& cu_seqlens, int64_t max_seqlen, double scale, double dropout_p,          \
                                const OptionalTensor& rng, int64_t site);                                              \
  std::tuple<Tensor, Tensor> relative_attention_fwd_##device(                                                          \
      const Tensor& qkv, const Tensor& slots, const OptionalTensor& keys, const OptionalTensor& queries,               \
      const OptionalTensor& bias, const Tensor& cu_seqlens, int64_t max_seqlen, double scale, double dropout_p,        \
      const OptionalTensor& rng, int64_t site);                                                                        \
  std::tuple<Tensor, Tensor, Tensor, Tensor> relative_attention_bwd_##device(                                          \
      const Tensor& dout, const Tensor& qkv, const Tensor& out, const Tensor& lse, const Tensor& slots,                \
      const OptionalTensor& keys, const OptionalTensor& queries, const OptionalTensor& bias, const Tensor& cu_seqlens, \
      int64_t max_seqlen, double scale, double dropout_p, const OptionalTensor& rng, int64_t site,                     \
      bool table_gradients);                                                                                           \
  std::tuple<Tensor, Tensor, Tensor> add_layer_norm_fwd_##device(                                                      \
      const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias, const OptionalTensor& x_bias, \
      const OptionalTensor& rng, double eps, double dropout_p, int64_t site);                                          \
  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> add_layer_norm_bwd_##device(                                      \
      const Tensor& dy, const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& mean,             \
      const Tensor& rstd, const OptionalTensor& x_bias, const OptionalTensor& rng, double dropout_p, int64_t site,     \
      bool need_dparams);

FB_LAYER_OPS(cpu)
FB_LAYER_OPS(cuda)
#undef FB_LAYER_OPS

// A function that further processes rows begin to end while they are in the first-level cache.
using MoreOfRows = std::function<void(int64_t begin, int64_t end)>;

// add_layer_norm without dropout, written into y, which is contiguous, has the shape and dtype of x and residual, and
// may be either of them. more: called for rows of y as soon as they are written; may be empty.
void add_layer_norm_into_cpu(const Tensor& y, const Tensor& x, const Tensor& residual, const Tensor& weight,
                             const Tensor& bias, const Tensor& x_bias, double eps, const MoreOfRows& more);

// bias_gelu for arguments that the caller has checked; the bias may be absent. For CPUs: csrc/cpu/gelu_rows.h.
Tensor gelu_cuda(const Tensor& x, const OptionalTensor& bias, std::string_view approximate);

// Returns dx, and dbias in the bias's dtype, or in x's if there is no bias; dbias is empty if it is not needed.
std::tuple<Tensor, Tensor> gelu_bwd_cuda(const Tensor& dy, const Tensor& x, const OptionalTensor& bias,
                                         std::string_view approximate, bool need_dbias);

}  // namespace fastbert
