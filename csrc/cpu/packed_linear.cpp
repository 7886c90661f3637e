// The torch side of packed_linear. The schema is defined in fastbert/ops/packed_linear.py.
#include "../linear_max.h"
#include "packed_product.h"
#include "sequences.h"

namespace fastbert::packed {

namespace {

Tensor packed_linear_fwd_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& scale,
                             const OptionalTensor& bias, int64_t channels, std::string_view approximate) {
  const NoGrad guard;
  const Packed p{weight, scale, bias, channels};
  check_packed(x, p);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = channels;
  const Tensor rows = matrix(contiguous(x)), y = empty_rows({rows.size(0), channels}, x);
  Workspace workspace;
  const Left left(rows, weights_of(weight), workspace);
  left.put_all();
  products_into(left, {{y, p}}, gelu_of(approximate));
  return view(y, shape);
}

// Channels `first` to `end` of a checked factor. `first` is a multiple of the panels' width.
Packed part_of(const Packed& p, int64_t first, int64_t end) {
  const int64_t width = p.weight.size(2), channels = end - first, panel = p.weight.size(1) * width * p.weight.size(3);
  Packed part{
      view(p.weight, {divide_up(channels, width), p.weight.size(1), width, p.weight.size(3)}, first / width * panel),
      std::nullopt, std::nullopt, channels};
  if (p.bias) part.bias = view(*p.bias, {channels}, first);
  if (p.scale) part.scale = contiguous(strided(*p.scale, {2, channels}, {p.channels, 1}, first));
  return part;
}

// Some channels at a time: their logits for all rows, then the maxima, while the logits are in the caches.
Tensor packed_linear_max_fwd_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& scale,
                                 const OptionalTensor& bias, int64_t channels, const Tensor& cu_seqlens) {
  constexpr int64_t kLogits = 1 << 17, kFewest = 256, kColumns = cpu::kMaximaColumns;  // logits of a thread; channels
  const NoGrad guard;
  const Packed p{weight, scale, bias, channels};
  check_packed(x, p);
  FB_CHECK_VALUE(x.dim() == 2, "packed_linear_max: x has shape ", x.sizes(), "; expected (T, K)");
  check_sequences("packed_linear_max", cu_seqlens, x);
  const int64_t tokens = x.size(0), sequences = cu_seqlens.numel() - 1;
  const Tensor y = empty({sequences, channels}, x), rows = contiguous(x);
  if (y.numel() == 0) return y;
  const std::vector<int64_t> bounds = bounds_of(cu_seqlens, tokens);
  const int64_t at_once = std::max(kFewest, threads() * kLogits / std::max<int64_t>(1, tokens) / kFewest * kFewest);
  const Tensor memory = empty({tokens, std::min(at_once, channels)}, x, ScalarType::Float);
  Workspace workspace;
  together([&] {
    const Left left(rows, weights_of(weight), workspace);
    left.put_all();
    for (int64_t first = 0; first < channels; first += at_once) {
      const int64_t end = std::min(channels, first + at_once), count = end - first, stride = memory.size(1);
      const Tensor logits = strided(memory, {tokens, count}, {stride, 1}, 0);
      products_into(left, {{logits, part_of(p, first, end)}}, Gelu::none);
      const cpu::Maxima op{memory.const_data_ptr<float>(),
                           bounds.data(),
                           static_cast<char*>(y.mutable_data_ptr()) + first * y.element_size(),
                           stride,
                           channels,
                           sequences,
                           dtype_of(y)};
      parallel_for(divide_up(count, kColumns),
                   std::max<int64_t>(1, grain() / (kColumns * std::max<int64_t>(1, tokens))),
                   [&](int64_t task, int64_t last) {
                     for (; task < last; ++task)
                       FB_BEST_ISA(maxima_of_logits)(op, task * kColumns, std::min(count, (task + 1) * kColumns));
                   });
    }
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("packed_linear_fwd", TORCH_BOX(&packed_linear_fwd_cpu));
  m.impl("packed_linear_max_fwd", TORCH_BOX(&packed_linear_max_fwd_cpu));
}

}  // namespace fastbert::packed
