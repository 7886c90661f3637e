// The interface between the torch side of dense_gelu and its kernel: a product with bias and GELU in its epilogue.
#pragma once

#include <stdint.h>

#include "dtype.h"

namespace fastbert::cuda {

// Contiguous matrices of one type.
struct DenseGelu {
  const void *x, *weight, *bias;  // [rows, inner], [channels, inner], [channels]
  int64_t rows, inner, channels;
  DType dtype;
  bool tanh;
};

// Whether the kernel takes these arguments and is fast on the current device. It needs 16-bit types, and rows whose
// size is a multiple of 16 bytes.
bool dense_gelu_takes(const DenseGelu& dense);

// preactivation = x weight^T + bias, rounded; y = gelu(preactivation). Both are [rows, channels] and aligned to 16
// bytes. preactivation may be nullptr. Returns an error message, or nullptr.
const char* dense_gelu_fwd(const DenseGelu& dense, void* y, void* preactivation, void* stream);

}  // namespace fastbert::cuda
