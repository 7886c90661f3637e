// The torch side of attention on a GPU: checks, allocation, stream. The schema is defined in fastbert/ops/attention.py.
#include "../attention.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "../checks.h"
#include "../tensor.h"

namespace fastbert {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

// Contiguous, and aligned to the 16 bytes in which the kernels read it.
at::Tensor aligned(const at::Tensor& x) {
  const at::Tensor ordered = x.contiguous();
  return reinterpret_cast<uintptr_t>(ordered.const_data_ptr()) % 16 ? ordered.clone() : ordered;
}

// The arguments of a launch, and the tensors that they point into.
struct Call {
  at::Tensor qkv, cu_seqlens;
  cuda::Attention a{};

  Call(const at::Tensor& qkv_, const at::Tensor& cu_seqlens_, int64_t max_seqlen, double scale, double dropout_p,
       const OptionalTensor& rng, int64_t site)
      : qkv(aligned(qkv_)), cu_seqlens(cu_seqlens_.contiguous()) {
    const int64_t tokens = qkv.size(0), heads = qkv.size(2), D = qkv.size(3), sequences = cu_seqlens.numel() - 1;
    TORCH_CHECK_NOT_IMPLEMENTED(qkv.scalar_type() != at::kDouble, "attention: the CUDA kernels have no fp64");
    TORCH_CHECK_NOT_IMPLEMENTED(D <= cuda::kAttentionLargest, "attention: the CUDA kernels take head sizes up to ",
                                cuda::kAttentionLargest, ", not ", D);
    a.qkv = qkv.const_data_ptr(), a.cu_seqlens = cu_seqlens.const_data_ptr<int32_t>();
    a.tokens = tokens, a.sequences = int(sequences), a.heads = int(heads), a.D = int(D);
    a.longest = int(std::clamp<int64_t>(max_seqlen, 0, tokens));
    a.scale = float(scale), a.drop = device_dropout_of(dropout_p, rng, site, kAttentionBits, qkv),
    a.dtype = dtype_of(qkv);
  }
};

std::tuple<at::Tensor, at::Tensor> attention_fwd_cuda(const at::Tensor& qkv, const at::Tensor& cu_seqlens,
                                                      c10::SymInt max_seqlen, double scale, double dropout_p,
                                                      const OptionalTensor& rng, int64_t site) {
  check_attention(qkv, cu_seqlens);
  const c10::DeviceGuard guard(qkv.device());
  const Call call(qkv, cu_seqlens, max_seqlen.expect_int(), scale, dropout_p, rng, site);
  const at::Tensor out = at::empty({qkv.size(0), qkv.size(2), qkv.size(3)}, qkv.options());
  const at::Tensor lse = at::empty({qkv.size(2), qkv.size(0)}, qkv.options().dtype(at::kFloat));
  if (out.numel() == 0) return {out, lse};
  const char* const error =
      cuda::attention_fwd(call.a, out.mutable_data_ptr(), lse.mutable_data_ptr<float>(), current_stream(qkv));
  TORCH_CHECK(!error, "attention: ", error);
  return {out, lse};
}

at::Tensor attention_bwd_cuda(const at::Tensor& dout, const at::Tensor& qkv, const at::Tensor& out,
                              const at::Tensor& lse, const at::Tensor& cu_seqlens, c10::SymInt max_seqlen, double scale,
                              double dropout_p, const OptionalTensor& rng, int64_t site) {
  check_attention(qkv, cu_seqlens);
  check_attention_gradients(dout, out, lse, qkv, at::kFloat);
  const c10::DeviceGuard guard(qkv.device());
  const Call call(qkv, cu_seqlens, max_seqlen.expect_int(), scale, dropout_p, rng, site);
  const at::Tensor grad = aligned(dout), result = aligned(out), sums = lse.contiguous();
  const at::Tensor dqkv = at::empty(qkv.sizes(), qkv.options());
  if (dqkv.numel() == 0) return dqkv;
  const at::Tensor statistics = at::empty({cuda::attention_statistics(call.a)}, sums.options());
  const char* const error =
      cuda::attention_bwd(call.a, grad.const_data_ptr(), result.const_data_ptr(), sums.const_data_ptr<float>(),
                          dqkv.mutable_data_ptr(), statistics.mutable_data_ptr<float>(), current_stream(qkv));
  TORCH_CHECK(!error, "attention: ", error);
  return dqkv;
}

}  // namespace

FB_CUDA_LIBRARY(m) {
  m.impl("attention_fwd", &attention_fwd_cuda);
  m.impl("attention_bwd", &attention_bwd_cuda);
}

}  // namespace fastbert
