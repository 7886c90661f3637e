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
  batch.for_tasks(backward.qkv, 1, FB_BEST_ISA(attention_bwd_room),
                  [&](const cpu::AttentionHead& head, int64_t task, int64_t /*part*/, void* room) {
                    backward.run(head, task, room);
                  });
  return backward.dqkv;
}

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("attention_fwd", TORCH_BOX(&attention_fwd_cpu));
  m.impl("attention_bwd", TORCH_BOX(&attention_bwd_cpu));
}

}  // namespace fastbert
