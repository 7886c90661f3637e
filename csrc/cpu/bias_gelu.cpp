// The torch side of bias_gelu on the CPU: checks, allocation, threads. The schema is defined in
// fastbert/ops/bias_gelu.py, the CUDA side is csrc/cuda/bias_gelu.cpp.
#include "../bias_gelu.h"

#include "../checks.h"
#include "../tensor.h"
#include "gelu_rows.h"

namespace fastbert {

void gelu_cpu(const Tensor& x, const OptionalTensor& bias, std::string_view approximate, const Tensor& y) {
  const auto loop = FB_BEST_ISA(bias_gelu_fwd);
  FB_CHECK(loop, kNoIsa);
  if (x.numel() == 0) return;
  const DType dtype = dtype_of(x);
  const Tensor in = contiguous(x);
  const auto b = as_math(bias, x);
  const int64_t channels = x.size(-1), rows = x.numel() / channels, row_bytes = channels * x.element_size();
  const char* const src = bytes_of(in);
  char* const dst = static_cast<char*>(y.mutable_data_ptr());
  parallel_rows(rows, channels, 0, [&](int64_t begin, int64_t end, void*) {
    loop(src + begin * row_bytes, data(b), dst + begin * row_bytes, end - begin, channels, dtype,
         approximate == "tanh");
  });
}

std::tuple<Tensor, Tensor> gelu_bwd_cpu(const Tensor& dy, const Tensor& x, const OptionalTensor& bias,
                                        std::string_view approximate, std::optional<ScalarType> dbias_type) {
  const auto loop = FB_BEST_ISA(bias_gelu_bwd);
  FB_CHECK(loop, kNoIsa);
  const DType dtype = dtype_of(x);
  Tensor dx = empty(x.sizes(), x);
  const int64_t channels = x.size(-1), rows = channels ? x.numel() / channels : 0;
  const int64_t row_bytes = channels * x.element_size();
  const Tensor grad = contiguous(dy), in = contiguous(x);
  const auto b = as_math(bias, x);
  const char *const dys = bytes_of(grad), *const xs = bytes_of(in);
  char* const dxs = static_cast<char*>(dx.mutable_data_ptr());
  const Tensor dbias = sum_rows(rows, channels, 1, 0, x, [&](int64_t begin, int64_t end, char* sums, void*) {
    const int64_t start = begin * row_bytes;
    loop(dys + start, xs + start, data(b), dxs + start, sums, end - begin, channels, dtype, approximate == "tanh");
  });
  if (!dbias_type) return {dx, empty({0}, x)};
  return {dx, copy_of(row(dbias, 0), *dbias_type)};
}

namespace {

Tensor bias_gelu_fwd_cpu(const Tensor& x, const Tensor& bias, std::string_view approximate) {
  check_bias_gelu(x, bias, approximate);
  const Tensor y = empty(x.sizes(), x);
  gelu_cpu(x, bias, approximate, y);
  return y;
}

std::tuple<Tensor, Tensor> bias_gelu_bwd_cpu(const Tensor& dy, const Tensor& x, const Tensor& bias,
                                             std::string_view approximate, bool need_dbias) {
  check_bias_gelu(x, bias, approximate);
  check_gradient("bias_gelu", "dy", dy, x);
  auto [dx, dbias] = gelu_bwd_cpu(dy, x, bias, approximate, need_dbias ? std::optional(type_of(bias)) : std::nullopt);
  return {dx, need_dbias ? dbias : empty({0}, bias)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("bias_gelu_fwd", TORCH_BOX(&bias_gelu_fwd_cpu));
  m.impl("bias_gelu_bwd", TORCH_BOX(&bias_gelu_bwd_cpu));
}

}  // namespace fastbert
