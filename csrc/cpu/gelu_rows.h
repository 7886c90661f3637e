// bias_gelu on the CPU for other ops: the bias may be absent. The caller checks the arguments and allocates the output.
#pragma once

#include <optional>
#include <string_view>
#include <tuple>

#include "../stable.h"

namespace fastbert {

// y = gelu(x + bias); y is contiguous, of x's shape and dtype, and may be x.
void gelu_cpu(const Tensor& x, const OptionalTensor& bias, std::string_view approximate, const Tensor& y);

// Returns dx, and dbias if its type is given; dbias is empty otherwise.
std::tuple<Tensor, Tensor> gelu_bwd_cpu(const Tensor& dy, const Tensor& x, const OptionalTensor& bias,
                                        std::string_view approximate, std::optional<ScalarType> dbias_type);

}  // namespace fastbert
