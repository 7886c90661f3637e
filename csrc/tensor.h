// What every torch side needs to hand a tensor to a loop or a kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "dtype.h"

namespace fastbert {

// Fewer elements than this are not worth another thread.
constexpr int64_t kGrain = 32768;

inline DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return DType::f32;
    case at::kBFloat16: return DType::bf16;
    case at::kHalf: return DType::f16;
    case at::kDouble: return DType::f64;
    default: TORCH_CHECK_TYPE(false, "fastbert: no kernel for elements of type ", tensor.scalar_type());
  }
}

// The current stream of the tensor's device, without a CUDA header of torch: one binary serves every build of it.
inline void* current_stream(const at::Tensor& tensor) {
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()).native_handle();
}

}  // namespace fastbert
