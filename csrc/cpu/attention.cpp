// The torch side of attention on the CPU. The schema is defined in fastbert/ops/attention.py.
#include "../layer_ops.h"
#include "attention_batch.h"

namespace fastbert {

std::tuple<Tensor, Tensor> attention_fwd_cpu(const Tensor& qkv, const Tensor& cu_seqlens, int64_t /*max_seqlen*/,
                                             double scale, double dropout_p, const OptionalTensor& rng, int64_t site) {
  return attention_forward({qkv, cu_seqlens, scale, dropout_of(dropout_p, rng, site, kAttentionBits)}, qkv);
}

Tensor attention_bwd_cpu(const Tensor& dout, const Tensor& qkv, const Tensor& out, const Tensor& lse,
                         const Tensor& cu_seqlens, int64_t /*max_seqlen*/, double scale, double dropout_p,
                         const OptionalTensor& rng, int64_t site) {
  const Batch batch(qkv, cu_seqlens, scale, dropout_of(dropout_p, rng, site, kAttentionBits));
  const AttentionBackward backward(batch, dout, qkv, out, lse);
  backward.run_all();
  return backward.dqkv;
}

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("attention_fwd", TORCH_BOX(&attention_fwd_cpu));
  m.impl("attention_bwd", TORCH_BOX(&attention_bwd_cpu));
}

}  // namespace fastbert
