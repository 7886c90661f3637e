// The interface between the torch side of scaled_linear and its kernels: what makes the inputs of products in fp8. Rows
// are float8_e4m3 with a factor each, from bfloat16.
#pragma once

#include "layer_norm.h"

namespace fastbert::cuda {

// What GELU comes first.
enum class Gelu { none, erf, tanh };

// q[r] factors[r] is about gelu(x[r] + bias). x: [rows, channels] bf16, channels <= kMostChannels. bias: [channels]
// bf16, or nullptr. q: [rows, channels] e4m3. factors: [rows]. Returns an error message, or nullptr.
const char* scaled_rows(const void* x, const void* bias, void* q, float* factors, int64_t rows, int64_t channels,
                        Gelu gelu, void* stream);

// y as layer_norm_fwd, all of it bf16 and without dropout; q and factors are scaled_rows of y. op.mean and op.rstd are
// not written.
const char* scaled_layer_norm(const LayerNorm& op, void* y, void* q, float* factors, int64_t rows, void* stream);

}  // namespace fastbert::cuda
