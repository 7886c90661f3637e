// The torch side of attention on a GPU: checks, allocation, stream. The schema is defined in fastbert/ops/attention.py.
#include "../attention.h"

#include "../checks.h"
#include "../layer_ops.h"
#include "../tensor.h"

namespace fastbert {

namespace {

// Contiguous, and aligned to the 16 bytes in which the kernels read it.
Tensor aligned(const Tensor& x) {
  const Tensor ordered = contiguous(x);
  return reinterpret_cast<uintptr_t>(ordered.const_data_ptr()) % 16 ? copy_of(ordered, ordered.scalar_type()) : ordered;
}

// The arguments of a launch, and the tensors that they point into.
struct Call {
  Tensor qkv, cu_seqlens;
  cuda::Attention a{};

  Call(const Tensor& qkv_, const Tensor& cu_seqlens_, int64_t max_seqlen, double scale, double dropout_p,
       const OptionalTensor& rng, int64_t site)
      : qkv(aligned(qkv_)), cu_seqlens(contiguous(cu_seqlens_)) {
    const int64_t tokens = qkv.size(0), heads = qkv.size(2), D = qkv.size(3), sequences = cu_seqlens.numel() - 1;
    FB_CHECK(qkv.scalar_type() != ScalarType::Double, "attention: the CUDA kernels have no fp64");
    FB_CHECK(D <= cuda::kAttentionLargest, "attention: the CUDA kernels take head sizes up to ",
             cuda::kAttentionLargest, ", not ", D);
    a.qkv = qkv.const_data_ptr(), a.cu_seqlens = cu_seqlens.const_data_ptr<int32_t>();
    a.tokens = tokens, a.sequences = int(sequences), a.heads = int(heads), a.D = int(D);
    a.longest = int(std::clamp<int64_t>(max_seqlen, 0, tokens));
    a.scale = float(scale), a.drop = device_dropout_of(dropout_p, rng, site, kAttentionBits, qkv),
    a.dtype = dtype_of(qkv);
  }
};

}  // namespace

std::tuple<Tensor, Tensor> attention_fwd_cuda(const Tensor& qkv, const Tensor& cu_seqlens, int64_t max_seqlen,
                                              double scale, double dropout_p, const OptionalTensor& rng, int64_t site) {
  check_attention(qkv, cu_seqlens);
  const DeviceGuard guard(qkv);
  const Call call(qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site);
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
  const Call call(qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site);
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
