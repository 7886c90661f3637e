// The torch side of packing on a GPU: checks, allocation, stream. The schemas are defined in fastbert/ops/padding.py.
#include "padding.h"

#include "../checks.h"
#include "../tensor.h"

namespace fastbert {

namespace {

std::tuple<Tensor, Tensor, Tensor> padding_places_cuda(const Tensor& mask) {
  check_mask("padding_places", mask);
  const DeviceGuard guard(mask);
  const Tensor visible = contiguous(mask), rows = empty({mask.size(0), 2}, mask, ScalarType::Int);
  const Tensor places = empty({mask.numel()}, mask, ScalarType::Long),
               cu_seqlens = empty({mask.size(0) + 1}, mask, ScalarType::Int), facts = empty({4}, places);
  const char* const error = cuda::padding_places(
      {static_cast<const uint8_t*>(visible.const_data_ptr()), mask.size(0), mask.size(1), rows.mutable_data_ptr<int>(),
       places.mutable_data_ptr<int64_t>(), cu_seqlens.mutable_data_ptr<int>(), facts.mutable_data_ptr<int64_t>()},
      current_stream(mask));
  FB_CHECK(!error, "padding_places: ", error);
  return {places, cu_seqlens, facts};
}

Tensor padding_pack_cuda(const Tensor& x, const Tensor& indices) {
  check_packing("padding_pack", x, indices, 2);
  const DeviceGuard guard(x);
  const Tensor out = empty(shape_of_rows(x, 2, {indices.numel()}), x);
  if (!out.numel()) return out;
  const Tensor in = contiguous(x), from = contiguous(indices);
  const int64_t rows = indices.numel(), bytes = out.numel() / rows * x.element_size();
  const char* const error =
      cuda::padding_pack(in.const_data_ptr(), from.const_data_ptr<int64_t>(), out.mutable_data_ptr(), rows,
                         x.size(0) * x.size(1), bytes, current_stream(x));
  FB_CHECK(!error, "padding_pack: ", error);
  return out;
}

Tensor padding_unpack_cuda(const Tensor& x, const Tensor& indices, int64_t batch, int64_t seqlen) {
  check_unpacking("padding_unpack", x, indices, batch, seqlen);
  const DeviceGuard guard(x);
  const int64_t rows = batch * seqlen;
  const Tensor out = empty(shape_of_rows(x, 1, {batch, seqlen}), x);
  if (!out.numel()) return out;
  const Tensor in = contiguous(x), to = contiguous(indices), token_of = zeros({rows}, indices, ScalarType::Long);
  const int64_t bytes = out.numel() / rows * x.element_size();
  const char* const error =
      cuda::padding_unpack(in.const_data_ptr(), to.const_data_ptr<int64_t>(), token_of.mutable_data_ptr<int64_t>(),
                           out.mutable_data_ptr(), indices.numel(), rows, bytes, current_stream(x));
  FB_CHECK(!error, "padding_unpack: ", error);
  return out;
}

}  // namespace

FB_CUDA_LIBRARY(m) {
  m.impl("padding_places", TORCH_BOX(&padding_places_cuda));
  m.impl("padding_pack", TORCH_BOX(&padding_pack_cuda));
  m.impl("padding_unpack", TORCH_BOX(&padding_unpack_cuda));
}

}  // namespace fastbert
