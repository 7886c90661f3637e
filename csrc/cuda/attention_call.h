// What the torch sides of attention and relative_attention on a GPU share: how they prepare the arguments of a launch.
#pragma once

#include "../attention.h"
#include "../tensor.h"

namespace fastbert {

// The arguments of a launch, and the tensors that own the memory they point to.
struct AttentionCall {
  Tensor qkv, cu_seqlens;
  cuda::Attention a{};

  AttentionCall(const Tensor& qkv_, const Tensor& cu_seqlens_, int64_t max_seqlen, double scale, double dropout_p,
                const OptionalTensor& rng, int64_t site)
      : qkv(aligned(qkv_)), cu_seqlens(contiguous(cu_seqlens_)) {
    const int64_t tokens = qkv.size(0), heads = qkv.size(2), D = qkv.size(3), sequences = cu_seqlens.numel() - 1;
    FB_CHECK(type_of(qkv) != ScalarType::Double, "attention: the CUDA kernels have no fp64");
    FB_CHECK(D <= cuda::kAttentionLargest, "attention: the CUDA kernels take head sizes up to ",
             cuda::kAttentionLargest, ", not ", D);
    a.qkv = qkv.const_data_ptr(), a.cu_seqlens = cu_seqlens.const_data_ptr<int32_t>();
    a.tokens = tokens, a.sequences = int(sequences), a.heads = int(heads), a.D = int(D);
    a.longest = int(std::clamp<int64_t>(max_seqlen, 0, tokens));
    a.scale = float(scale), a.drop = device_dropout_of(dropout_p, rng, site, kAttentionBits, qkv),
    a.dtype = dtype_of(qkv);
  }
};

}  // namespace fastbert
