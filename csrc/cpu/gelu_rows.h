// bias_gelu on the CPU for other ops: the bias may be absent. The caller checks the arguments and allocates the output.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace fastbert {

// y = gelu(x + bias); y is contiguous, of x's shape and dtype, and may be x.
void gelu_cpu(const at::Tensor& x, const std::optional<at::Tensor>& bias, std::string_view approximate,
              const at::Tensor& y);

// dx, and with options also dbias.
std::tuple<at::Tensor, at::Tensor> gelu_bwd_cpu(const at::Tensor& dy, const at::Tensor& x,
                                                const std::optional<at::Tensor>& bias, std::string_view approximate,
                                                const std::optional<at::TensorOptions>& dbias_options);

}  // namespace fastbert
