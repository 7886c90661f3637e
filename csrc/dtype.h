// The element types of loops and kernels. No torch here.
#pragma once

namespace fastbert {

enum class DType { f32, bf16, f16, f64 };

}  // namespace fastbert
