// The torch side of bias_gelu: checks, allocation, threads or stream. The schema is defined in
// fastbert/ops/bias_gelu.py.
#include "bias_gelu.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <string_view>

#include "gelu_rows.h"
#include "tensor.h"

namespace fastbert {

namespace {

// What memory safety needs; the messages for people are in Python.
void check(const at::Tensor& x, std::string_view approximate) {
  TORCH_CHECK(x.dim() > 0, "bias_gelu: x has shape ", x.sizes());
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh", "bias_gelu: approximate is '", approximate, "'");
}

void check(const at::Tensor& x, const at::Tensor& bias, std::string_view approximate) {
  check(x, approximate);
  TORCH_CHECK(bias.dim() == 1 && bias.size(0) == x.size(-1), "bias_gelu: bias has shape ", bias.sizes(),
              ", x has shape ", x.sizes());
  TORCH_CHECK(bias.device() == x.device(), "bias_gelu: bias is on ", bias.device(), ", x is on ", x.device());
  TORCH_CHECK_TYPE(bias.scalar_type() == x.scalar_type() || bias.scalar_type() == at::kFloat, "bias_gelu: bias is ",
                   bias.scalar_type(), ", x is ", x.scalar_type());
}

}  // namespace

// ---- CPU

void gelu_cpu(const at::Tensor& x, const std::optional<at::Tensor>& bias, std::string_view approximate,
              const at::Tensor& y) {
  check(x, approximate);
  const auto loop = FB_BEST_SET(bias_gelu_fwd);
  TORCH_CHECK_NOT_IMPLEMENTED(loop, kNoSet);
  if (x.numel() == 0) return;
  const DType dtype = dtype_of(x);
  const at::Tensor in = x.contiguous();
  const auto b = as_math(bias, x);
  const int64_t channels = x.size(-1), rows = x.numel() / channels, row_bytes = channels * x.element_size();
  const char* const src = static_cast<const char*>(in.const_data_ptr());
  char* const dst = static_cast<char*>(y.mutable_data_ptr());
  parallel_rows(rows, channels, 0, [&](int64_t begin, int64_t end, void*) {
    loop(src + begin * row_bytes, data(b), dst + begin * row_bytes, end - begin, channels, dtype,
         approximate == "tanh");
  });
}

std::tuple<at::Tensor, at::Tensor> gelu_bwd_cpu(const at::Tensor& dy, const at::Tensor& x,
                                                const std::optional<at::Tensor>& bias, std::string_view approximate,
                                                const std::optional<at::TensorOptions>& dbias_options) {
  check(x, approximate);
  TORCH_CHECK(dy.sizes() == x.sizes() && dy.dtype() == x.dtype(), "bias_gelu: dy is ", dy.scalar_type(), " ",
              dy.sizes(), ", x is ", x.scalar_type(), " ", x.sizes());
  const auto loop = FB_BEST_SET(bias_gelu_bwd);
  TORCH_CHECK_NOT_IMPLEMENTED(loop, kNoSet);
  const DType dtype = dtype_of(x);
  at::Tensor dx = at::empty(x.sizes(), x.options());
  const int64_t channels = x.size(-1), rows = channels ? x.numel() / channels : 0;
  const int64_t row_bytes = channels * x.element_size();
  const at::Tensor grad = dy.contiguous(), in = x.contiguous();
  const auto b = as_math(bias, x);
  const char *const dys = static_cast<const char*>(grad.const_data_ptr()), *const xs = static_cast<const char*>(
                                                                               in.const_data_ptr());
  char* const dxs = static_cast<char*>(dx.mutable_data_ptr());
  const at::Tensor dbias = sum_rows(
      rows, channels, 1, 0, x.options().dtype(math_type(x)), [&](int64_t begin, int64_t end, char* sums, void*) {
        const int64_t start = begin * row_bytes;
        loop(dys + start, xs + start, data(b), dxs + start, sums, end - begin, channels, dtype, approximate == "tanh");
      });
  if (!dbias_options) return {dx, at::empty({0}, x.options())};
  return {dx, dbias[0].to(*dbias_options, false, /*copy=*/true)};
}

namespace {

at::Tensor bias_gelu_fwd_cpu(const at::Tensor& x, const at::Tensor& bias, std::string_view approximate) {
  check(x, bias, approximate);
  const at::Tensor y = at::empty(x.sizes(), x.options());
  gelu_cpu(x, bias, approximate, y);
  return y;
}

std::tuple<at::Tensor, at::Tensor> bias_gelu_bwd_cpu(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& bias,
                                                     std::string_view approximate, bool need_dbias) {
  check(x, bias, approximate);
  auto [dx, dbias] = gelu_bwd_cpu(dy, x, bias, approximate, need_dbias ? std::optional(bias.options()) : std::nullopt);
  return {dx, need_dbias ? dbias : at::empty({0}, bias.options())};
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
