// The torch side of packing on a GPU: checks, allocation, stream. The schemas are defined in fastbert/ops/padding.py.
#include "padding.h"

#include "../checks.h"
#include "../tensor.h"

namespace fastbert {

namespace {

using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;

Tensors3 padding_places_cuda(const Tensor& mask) {
  check_mask("padding_places", mask);
  FB_CHECK_VALUE(mask.numel() <= INT32_MAX, "padding_places: expected less than 2**31 places, got ", mask.sizes());
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

// The first element, on the host: a host synchronisation.
int64_t first_element(const Tensor& x) {
  const int32_t cpu = aoti_torch_device_type_cpu(), type = aoti_torch_dtype_int64();
  const int64_t one = 1;
  AtenTensorHandle made = nullptr;
  check_call(aoti_torch_empty_strided(1, &one, &one, type, cpu, 0, &made), "empty");
  const Tensor here(made);
  copy_(here, view(x, {1}));
  return *here.const_data_ptr<int64_t>();
}

// The size of the result depends on the mask's values, so this needs a host synchronisation. fastbert/padding.py does
// not call it on a GPU, because padding_places gives the same information without one.
Tensors3 padding_plan_cuda(const Tensor& mask) {
  const auto [places, cu_seqlens, facts] = padding_places_cuda(mask);
  return {copy_of(view(places, {first_element(facts)}), ScalarType::Long), cu_seqlens,
          copy_of(view(facts, {2}, 1), ScalarType::Long)};
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
  m.impl("padding_plan", TORCH_BOX(&padding_plan_cuda));
  m.impl("padding_places", TORCH_BOX(&padding_places_cuda));
  m.impl("padding_pack", TORCH_BOX(&padding_pack_cuda));
  m.impl("padding_unpack", TORCH_BOX(&padding_unpack_cuda));
}

}  // namespace fastbert
