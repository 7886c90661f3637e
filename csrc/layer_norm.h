// What the loops and the kernels of layer_norm and add_layer_norm offer the torch side.
#pragma once

#include <stdint.h>

#include "cpu/sets.h"
#include "dropout.h"
#include "dtype.h"

namespace fastbert {

// z = dropout(x + x_bias) + residual, y = (z - mean) rstd weight + bias, on rows of `channels` contiguous elements.
// Where x is f64 everything is; else weight, bias, x_bias, mean, rstd and all sums are fp32.
struct LayerNorm {
  const void *x, *residual, *x_bias;  // the latter two: nullptr for layer_norm, where z is x
  const void *weight, *bias;
  void *mean, *rstd;  // [rows]
  int64_t channels;
  double eps;
  Dropout drop;
  DType x_type, residual_type, y_type;
};

struct LayerNormGradients {
  const void* dy;  // of y_type
  // dresidual and dx_bias: nullptr for layer_norm. Without dropout and with residual of x's type, dx is dresidual: it
  // is not written.
  void *dx, *dresidual;
  void *dweight, *dbias, *dx_bias;  // [channels], added to
};

namespace cpu {

// Rows begin to end. scratch: layer_norm_scratch(channels) bytes.
FB_FOR_EACH_SET(int64_t layer_norm_scratch(int64_t channels);
                void layer_norm_fwd(const LayerNorm& op, void* y, int64_t begin, int64_t end, void* scratch);
                void layer_norm_bwd(const LayerNorm& op, const LayerNormGradients& gradients, int64_t begin,
                                    int64_t end, void* scratch);)

}  // namespace cpu

}  // namespace fastbert
