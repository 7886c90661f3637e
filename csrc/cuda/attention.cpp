// The torch side of attention on a GPU: checks, allocation, stream. The schema is defined in fastbert/ops/attention.py.
#include "../checks.h"
#include "../layer_ops.h"
#include "attention_call.h"

namespace fastbert {

std::tuple<Tensor, Tensor> attention_fwd_cuda(const Tensor& qkv, const Tensor& cu_seqlens, int64_t max_seqlen,
                                              double scale, double dropout_p, const OptionalTensor& rng, int64_t site) {
  check_attention(qkv, cu_seqlens);
  const DeviceGuard guard(qkv);
  const AttentionCall call(qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site);
  const Tensor out = empty({qkv.size(0), qkv.size(2), qkv.size(3)}, qkv);
  const Tensor lse = empty({qkv.size(2), qkv.size(0)}, qkv, ScalarType::Float);
  if (out.numel() == 0) return {out, lse};
  const char* const error =
      cuda::attention_fwd(call.a, out.mutable_data_ptr(), lse.mutable_data_ptr<float>(), current_stream(qkv));
  FB_CHECK(!error, "attention: ", error);
  return {out, lse};
}

Tensor attention_bwd_cuda(const Tensor& dout, const Tensor& qkv, const Tensor& out, const Tensor& lse,
                          const Tensor& cu_seqlens, int64_t max_seqlen, double scale, double dropout_p,
                          const OptionalTensor& rng, int64_t site) {
  check_attention(qkv, cu_seqlens);
  check_attention_gradients(dout, out, lse, qkv, ScalarType::Float);
  const DeviceGuard guard(qkv);
  const AttentionCall call(qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site);
  const Tensor grad = aligned(dout), result = aligned(out), sums = contiguous(lse);
  const Tensor dqkv = empty(qkv.sizes(), qkv);
  if (dqkv.numel() == 0) return dqkv;
  const Tensor statistics = empty({cuda::attention_statistics(call.a)}, sums);
  const char* const error =
      cuda::attention_bwd(call.a, grad.const_data_ptr(), result.const_data_ptr(), sums.const_data_ptr<float>(),
                          dqkv.mutable_data_ptr(), statistics.mutable_data_ptr<float>(), current_stream(qkv));
  FB_CHECK(!error, "attention: ", error);
  return dqkv;
}

FB_CUDA_LIBRARY(m) {
  m.impl("attention_fwd", TORCH_BOX(&attention_fwd_cuda));
  m.impl("attention_bwd", TORCH_BOX(&attention_bwd_cuda));
}

}  // namespace fastbert
