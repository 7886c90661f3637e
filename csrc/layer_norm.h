// The interface between the torch sides of layer_norm and add_layer_norm and their loops and kernels.
#pragma once

#include <stdint.h>

#include "cpu/isa.h"
#include "dropout.h"
#include "dtype.h"

namespace fastbert {

// z = dropout(x + x_bias) + residual, y = (z - mean) rstd weight + bias, on rows of `channels` contiguous elements.
// On the CPU, everything is f64 if x is; otherwise weight, bias, x_bias, mean, rstd and all sums are fp32.
struct LayerNorm {
  const void *x, *residual, *x_bias;  // residual and x_bias are nullptr for layer_norm, where z is x
  const void *weight, *bias;
  void *mean, *rstd;  // [rows]
  int64_t channels;
  double eps;
  Dropout drop;
  DType x_type, residual_type, y_type;
};

struct LayerNormGradients {
  const void* dy;  // of y_type
  // dresidual and dx_bias are nullptr for layer_norm. Without dropout and with a residual of x's type, dx would equal
  // dresidual, and is not written.
  void *dx, *dresidual;
  void *dweight, *dbias, *dx_bias;  // [channels]; the sums are added to them
};

namespace cpu {

// The loops compute rows begin to end. scratch: layer_norm_scratch(channels) bytes.
FB_FOR_EACH_ISA(int64_t layer_norm_scratch(int64_t channels);
                void layer_norm_fwd(const LayerNorm& op, void* y, int64_t begin, int64_t end, void* scratch);
                void layer_norm_bwd(const LayerNorm& op, const LayerNormGradients& gradients, int64_t begin,
                                    int64_t end, void* scratch);)

}  // namespace cpu

namespace cuda {

constexpr int64_t kMostChannels = 8192;

// op.drop is not read. op.x_bias may be nullptr even with a residual. x is of type T; residual and y are both of type T
// or both f32; weight, bias and x_bias are of type `parameters`, which is f32, or T if y is of type T. mean and rstd
// are f32. Each function returns an error message, or nullptr.
const char* layer_norm_fwd(const LayerNorm& op, DType parameters, const DeviceDropout& drop, void* y, int64_t rows,
                           void* stream);

// partials: [blocks, quantities, channels] f32, or nullptr: the sums over each block's rows for dweight, dbias and,
// with 3 quantities, dx_bias; those in `gradients` are not used. dx and dresidual are written if not nullptr.
const char* layer_norm_bwd(const LayerNorm& op, DType parameters, const DeviceDropout& drop,
                           const LayerNormGradients& gradients, float* partials, int quantities, int64_t blocks,
                           int64_t rows, void* stream);

// The number of blocks that occupies all of the current device. rows and channels are at least 1.
int64_t layer_norm_bwd_blocks(int64_t rows, int64_t channels);

}  // namespace cuda

}  // namespace fastbert
