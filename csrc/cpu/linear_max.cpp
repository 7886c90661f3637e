// The torch side of linear_max on the CPU: checks, allocation, threads. The schema is defined in
// fastbert/ops/linear_max.py.
#include "../linear_max.h"

#include <vector>

#include "../checks.h"
#include "../tensor.h"
#include "sequences.h"

namespace fastbert {

namespace {

std::tuple<Tensor, Tensor> linear_max_fwd_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                              const Tensor& cu_seqlens, bool need_rows) {
  check_linear_max(x, weight, bias);
  check_sequences("linear_max", cu_seqlens, x);
  const auto loop = FB_BEST_ISA(linear_max_fwd);
  FB_CHECK(loop, kNoIsa);
  const NoGrad guard;
  const int64_t tokens = x.size(0), inner = x.size(1), classes = weight.size(0), sequences = cu_seqlens.numel() - 1;
  const Tensor y = empty({sequences, classes}, x);
  const Tensor rows = need_rows ? empty({sequences, classes}, x, ScalarType::Int) : empty({0}, x, ScalarType::Int);
  if (y.numel() == 0) return {y, rows};
  const std::vector<int64_t> bounds = bounds_of(cu_seqlens, tokens);
  const bool pairs = FB_BEST_ISA(linear_max_takes_pairs)(dtype_of(x), inner);
  const Tensor in = pairs ? contiguous(x) : as_math(x, x), w = contiguous(weight);
  const OptionalTensor b = as_math(bias, x);
  const cpu::LinearMax op{in.const_data_ptr(),
                          w.const_data_ptr(),
                          data(b),
                          bounds.data(),
                          y.mutable_data_ptr(),
                          need_rows ? rows.mutable_data_ptr<int32_t>() : nullptr,
                          inner,
                          classes,
                          sequences,
                          dtype_of(x)};
  const int64_t width = FB_BEST_ISA(linear_max_width)(op.dtype), tasks = divide_up(classes, width);
  const int64_t work = std::max<int64_t>(1, tokens * inner * width), least = kShareOfProducts / work + 1;
  parallel_ranges({tasks, threads(), least}, FB_BEST_ISA(linear_max_scratch)(inner, op.dtype),
                  [&](const Range& range, void* scratch) {
                    for (int64_t task = range.begin; task < range.end; ++task)
                      loop(op, task * width, std::min(classes, (task + 1) * width), scratch);
                  });
  return {y, rows};
}

std::tuple<Tensor, Tensor> linear_max_bwd_cpu(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                              const Tensor& rows, bool need_dx, bool need_dweight) {
  check_linear_max(x, weight, std::nullopt);
  check_linear_max_gradients(dy, x, weight, rows);
  FB_CHECK(FB_BEST_ISA(linear_max_dx), kNoIsa);
  const NoGrad guard;
  const int64_t tokens = x.size(0), inner = x.size(1), classes = weight.size(0), sequences = dy.size(0);
  const Tensor grad = contiguous(dy), places = contiguous(rows), in = as_math(x, x), w = contiguous(weight);
  const Tensor dx = empty(need_dx ? x.sizes() : Sizes{0}, x),
               dweight = empty(need_dweight ? weight.sizes() : Sizes{0}, x);
  const cpu::LinearMaxGradients op{grad.const_data_ptr(),
                                   places.const_data_ptr<int32_t>(),
                                   in.const_data_ptr(),
                                   w.const_data_ptr(),
                                   dx.mutable_data_ptr(),
                                   dweight.mutable_data_ptr(),
                                   tokens,
                                   inner,
                                   classes,
                                   sequences,
                                   dtype_of(x)};
  const int64_t scratch_bytes = 2 * inner * in.element_size();
  if (need_dx) {
    std::vector<int64_t> starts(tokens + 1);
    const std::unique_ptr<int64_t[]> entries(new int64_t[grad.numel()]);  // not zeroed
    FB_BEST_ISA(linear_max_group)(op, starts.data(), entries.get());
    const int64_t shares = threads(), gradients = starts.back();
    const auto first = [&](int64_t share) {  // the token at which a thread's share of the gradients begins
      const auto at = std::lower_bound(starts.begin(), starts.end() - 1, gradients * share / shares);
      return share == shares ? tokens : share ? int64_t(at - starts.begin()) : 0;
    };
    parallel_for(shares, 1, [&](int64_t begin, int64_t end) {
      const std::unique_ptr<char[]> scratch(new char[scratch_bytes]);
      FB_BEST_ISA(linear_max_dx)(op, starts.data(), entries.get(), first(begin), first(end), scratch.get());
    });
  }
  if (need_dweight)
    parallel_rows(
        classes, inner * std::max<int64_t>(1, sequences), scratch_bytes,
        [&](int64_t begin, int64_t end, void* scratch) { FB_BEST_ISA(linear_max_dweight)(op, begin, end, scratch); });
  return {dx, dweight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("linear_max_fwd", TORCH_BOX(&linear_max_fwd_cpu));
  m.impl("linear_max_bwd", TORCH_BOX(&linear_max_bwd_cpu));
}

}  // namespace fastbert
