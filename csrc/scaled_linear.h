// The interface between the torch side of scaled_linear and its kernels, which quantise the inputs of fp8 products:
// rows of bfloat16 become rows of float8_e4m3, with a factor each.
#pragma once

#include "layer_norm.h"

namespace fastbert::cuda {

// The GELU that is applied first.
enum class Gelu { none, erf, tanh };

// Quantises gelu(x[r] + bias) to q[r] factors[r]. x: [rows, channels] bf16, channels <= kMostChannels. bias: [channels]
// bf16, or nullptr. q: [rows, channels] e4m3. factors: [rows]. Returns an error message, or nullptr.
const char* scaled_rows(const void* x, const void* bias, void* q, float* factors, int64_t rows, int64_t channels,
                        Gelu gelu, void* stream);

// Computes y as layer_norm_fwd does, with all tensors bf16 and without dropout, and q and factors as scaled_rows does
// from y. op.mean and op.rstd are not written.
const char* scaled_layer_norm(const LayerNorm& op, void* y, void* q, float* factors, int64_t rows, void* stream);

}  // namespace fastbert::cuda
