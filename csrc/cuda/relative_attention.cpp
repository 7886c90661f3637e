// The torch side of relative_attention on a GPU. The schema is defined in fastbert/ops/relative_attention.py.
#include "relative_attention.h"

#include "../checks.h"
#include "../layer_ops.h"
#include "attention_call.h"

namespace fastbert {

namespace {

OptionalTensor contiguous_of(const OptionalTensor& x) { return x ? std::optional(contiguous(*x)) : std::nullopt; }

// The positions of a call, and the tensors that own the memory they point to.
struct Positions {
  Tensor slots;
  OptionalTensor keys, queries, bias;
  cuda::RelativePositions p{};

  Positions(const Tensor& slots_, const OptionalTensor& keys_, const OptionalTensor& queries_,
            const OptionalTensor& bias_)
      : slots(contiguous(slots_)),
        keys(contiguous_of(keys_)),
        queries(contiguous_of(queries_)),
        bias(contiguous_of(bias_)) {
    p.slots = slots.const_data_ptr<int32_t>(), p.farthest = int(slots.numel() / 2);
    p.width = int(keys ? keys->size(0) : queries ? queries->size(0) : bias->size(1));
    p.keys = data(keys), p.queries = data(queries), p.bias = static_cast<const float*>(data(bias));
  }
};

// An uninitialised tensor like the table; an empty one (of qkv's dtype if there is no table) if no gradient is wanted.
Tensor gradient_of(const OptionalTensor& table, bool wanted, const Tensor& qkv) {
  const Tensor& like = table ? *table : qkv;
  return table && wanted ? empty(like.sizes(), like) : empty({0}, like);
}

void* data_of(const Tensor& gradient) { return gradient.numel() ? gradient.mutable_data_ptr() : nullptr; }

}  // namespace

std::tuple<Tensor, Tensor> relative_attention_fwd_cuda(const Tensor& qkv, const Tensor& slots,
                                                       const OptionalTensor& keys, const OptionalTensor& queries,
                                                       const OptionalTensor& bias, const Tensor& cu_seqlens,
                                                       int64_t max_seqlen, double scale, double dropout_p,
                                                       const OptionalTensor& rng, int64_t site) {
  check_attention(qkv, cu_seqlens);
  check_relative_attention(qkv, slots, keys, queries, bias);
  const DeviceGuard guard(qkv);
  const AttentionCall call(qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site);
  const Positions positions(slots, keys, queries, bias);
  const Tensor out = empty({qkv.size(0), qkv.size(2), qkv.size(3)}, qkv);
  const Tensor lse = empty({qkv.size(2), qkv.size(0)}, qkv, ScalarType::Float);
  if (out.numel() == 0) return {out, lse};
  const char* const error = cuda::relative_attention_fwd(call.a, positions.p, out.mutable_data_ptr(),
                                                         lse.mutable_data_ptr<float>(), current_stream(qkv));
  FB_CHECK(!error, "relative_attention: ", error);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> relative_attention_bwd_cuda(
    const Tensor& dout, const Tensor& qkv, const Tensor& out, const Tensor& lse, const Tensor& slots,
    const OptionalTensor& keys, const OptionalTensor& queries, const OptionalTensor& bias, const Tensor& cu_seqlens,
    int64_t max_seqlen, double scale, double dropout_p, const OptionalTensor& rng, int64_t site, bool table_gradients) {
  check_attention(qkv, cu_seqlens);
  check_attention_gradients(dout, out, lse, qkv, ScalarType::Float);
  check_relative_attention(qkv, slots, keys, queries, bias);
  const DeviceGuard guard(qkv);
  const AttentionCall call(qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site);
  const Positions positions(slots, keys, queries, bias);
  const Tensor grad = contiguous(dout), result = contiguous(out), sums = contiguous(lse);
  const Tensor dqkv = empty(qkv.sizes(), qkv), dkeys = gradient_of(keys, table_gradients, qkv),
               dqueries = gradient_of(queries, table_gradients, qkv), dbias = gradient_of(bias, table_gradients, qkv);
  const cuda::RelativeGradients gradients{data_of(dkeys), data_of(dqueries), static_cast<float*>(data_of(dbias))};
  const Tensor room = empty({cuda::relative_attention_room(call.a, gradients)}, sums);
  const char* const error = cuda::relative_attention_bwd(
      call.a, positions.p, grad.const_data_ptr(), result.const_data_ptr(), sums.const_data_ptr<float>(),
      dqkv.mutable_data_ptr(), gradients, room.mutable_data_ptr<float>(), current_stream(qkv));
  FB_CHECK(!error, "relative_attention: ", error);
  return {dqkv, dkeys, dqueries, dbias};
}

FB_CUDA_LIBRARY(m) {
  m.impl("relative_attention_fwd", TORCH_BOX(&relative_attention_fwd_cuda));
  m.impl("relative_attention_bwd", TORCH_BOX(&relative_attention_bwd_cuda));
}

}  // namespace fastbert
