// The torch side of bias_gelu: checks, allocation, threads or stream. The schema is defined in
// fastbert/ops/bias_gelu.py.
#include "bias_gelu.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <string_view>

#include "tensor.h"

namespace fastbert {

namespace {

// What memory safety needs; the messages for people are in Python.
void check(const at::Tensor& x, const at::Tensor& bias, std::string_view approximate) {
  TORCH_CHECK(x.dim() > 0 && bias.dim() == 1 && bias.size(0) == x.size(-1), "bias_gelu: bias has shape ", bias.sizes(),
              ", x has shape ", x.sizes());
  TORCH_CHECK(bias.device() == x.device(), "bias_gelu: bias is on ", bias.device(), ", x is on ", x.device());
  TORCH_CHECK_TYPE(bias.scalar_type() == x.scalar_type() || bias.scalar_type() == at::kFloat, "bias_gelu: bias is ",
                   bias.scalar_type(), ", x is ", x.scalar_type());
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh", "bias_gelu: approximate is '", approximate, "'");
}

// ---- forward

at::Tensor bias_gelu_fwd_cpu(const at::Tensor& x, const at::Tensor& bias, std::string_view approximate) {
  check(x, bias, approximate);
  const auto loop = FB_BEST_SET(bias_gelu_fwd);
  TORCH_CHECK_NOT_IMPLEMENTED(loop, "bias_gelu: the CPU kernel needs a processor with AVX2 and FMA");
  const DType dtype = dtype_of(x);
  at::Tensor y = at::empty(x.sizes(), x.options());
  if (y.numel() == 0) return y;
  const at::Tensor in = x.contiguous();
  const at::Tensor b = bias.to(dtype == DType::f64 ? at::kDouble : at::kFloat).contiguous();
  const int64_t channels = x.size(-1), row_bytes = channels * x.element_size();
  const char* const src = static_cast<const char*>(in.const_data_ptr());
  char* const dst = static_cast<char*>(y.mutable_data_ptr());
  const bool tanh = approximate == "tanh";
  const int64_t grain = std::max<int64_t>(1, kGrain / channels);
  at::parallel_for(0, y.numel() / channels, grain, [&](int64_t begin, int64_t end) {
    loop(src + begin * row_bytes, b.const_data_ptr(), dst + begin * row_bytes, end - begin, channels, dtype, tanh);
  });
  return y;
}

#ifdef FB_CUDA
at::Tensor bias_gelu_fwd_cuda(const at::Tensor& x, const at::Tensor& bias, std::string_view approximate) {
  check(x, bias, approximate);
  const DType dtype = dtype_of(x);
  TORCH_CHECK_NOT_IMPLEMENTED(dtype != DType::f64, "bias_gelu: the CUDA kernel has no fp64");
  const c10::DeviceGuard guard(x.device());
  at::Tensor y = at::empty(x.sizes(), x.options());
  if (y.numel() == 0) return y;
  const at::Tensor in = x.contiguous(), b = bias.contiguous();
  const int64_t channels = x.size(-1);
  const char* const error =
      cuda::bias_gelu_fwd(in.const_data_ptr(), b.const_data_ptr(), y.mutable_data_ptr(), y.numel() / channels, channels,
                          dtype, dtype_of(b), approximate == "tanh", current_stream(x));
  TORCH_CHECK(!error, "bias_gelu: ", error);
  return y;
}
#endif

}  // namespace

TORCH_LIBRARY_IMPL(fastbert, CPU, m) { m.impl("bias_gelu_fwd", &bias_gelu_fwd_cpu); }

#ifdef FB_CUDA
TORCH_LIBRARY_IMPL(fastbert, CUDA, m) { m.impl("bias_gelu_fwd", &bias_gelu_fwd_cuda); }
#endif

}  // namespace fastbert
