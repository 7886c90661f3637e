// The torch side of bias_gelu: checks, allocation, threads or stream. The schema is defined in
// fastbert/ops/bias_gelu.py.
#include "bias_gelu.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

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

// ---- CPU

at::Tensor bias_gelu_fwd_cpu(const at::Tensor& x, const at::Tensor& bias, std::string_view approximate) {
  check(x, bias, approximate);
  const auto loop = FB_BEST_SET(bias_gelu_fwd);
  TORCH_CHECK_NOT_IMPLEMENTED(loop, kNoSet);
  const DType dtype = dtype_of(x);
  at::Tensor y = at::empty(x.sizes(), x.options());
  if (y.numel() == 0) return y;
  const at::Tensor in = x.contiguous(), b = as_math(bias, x);
  const int64_t channels = x.size(-1), rows = x.numel() / channels, row_bytes = channels * x.element_size();
  const char* const src = static_cast<const char*>(in.const_data_ptr());
  char* const dst = static_cast<char*>(y.mutable_data_ptr());
  parallel_rows(rows, channels, 0, [&](int64_t begin, int64_t end, void*) {
    loop(src + begin * row_bytes, b.const_data_ptr(), dst + begin * row_bytes, end - begin, channels, dtype,
         approximate == "tanh");
  });
  return y;
}

std::tuple<at::Tensor, at::Tensor> bias_gelu_bwd_cpu(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& bias,
                                                     std::string_view approximate, bool need_dbias) {
  check(x, bias, approximate);
  TORCH_CHECK(dy.sizes() == x.sizes() && dy.dtype() == x.dtype(), "bias_gelu: dy is ", dy.scalar_type(), " ",
              dy.sizes(), ", x is ", x.scalar_type(), " ", x.sizes());
  const auto loop = FB_BEST_SET(bias_gelu_bwd);
  TORCH_CHECK_NOT_IMPLEMENTED(loop, kNoSet);
  const DType dtype = dtype_of(x);
  at::Tensor dx = at::empty(x.sizes(), x.options());
  const int64_t channels = x.size(-1), rows = channels ? x.numel() / channels : 0;
  const int64_t row_bytes = channels * x.element_size();
  const at::Tensor grad = dy.contiguous(), in = x.contiguous(), b = as_math(bias, x);
  const char *const dys = static_cast<const char*>(grad.const_data_ptr()),
             *const xs = static_cast<const char*>(in.const_data_ptr());
  char* const dxs = static_cast<char*>(dx.mutable_data_ptr());
  const auto run = [&](int64_t begin, int64_t end, void* dbias) {
    const int64_t start = begin * row_bytes;
    loop(dys + start, xs + start, b.const_data_ptr(), dxs + start, dbias, end - begin, channels, dtype,
         approximate == "tanh");
  };
  if (!need_dbias) {
    if (rows) parallel_rows(rows, channels, 0, [&](int64_t begin, int64_t end, void*) { run(begin, end, nullptr); });
    return {dx, at::empty({0}, bias.options())};
  }
  const at::Tensor dbias =
      sum_rows(rows, channels, 1, 0, b.options(), [&](int64_t begin, int64_t end, char* sums, void*) { run(begin, end, sums); });
  return {dx, dbias[0].to(bias.options(), false, /*copy=*/true)};
}

// ---- CUDA

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

TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("bias_gelu_fwd", &bias_gelu_fwd_cpu);
  m.impl("bias_gelu_bwd", &bias_gelu_bwd_cpu);
}

#ifdef FB_CUDA
TORCH_LIBRARY_IMPL(fastbert, CUDA, m) { m.impl("bias_gelu_fwd", &bias_gelu_fwd_cuda); }
#endif

}  // namespace fastbert
