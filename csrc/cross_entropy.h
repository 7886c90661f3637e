// The interface between the torch side of cross_entropy and its kernels. Of a dense matrix of logits without the bias
// they make the losses of its rows and, in place, softmax - onehot.
#pragma once

#include <stdint.h>

#include "dtype.h"

namespace fastbert::cuda {

// One label a row: int64_t or int32_t. Rows whose label is `ignored` weigh nothing; others are clamped to a class.
struct Labels {
  const void* of_rows;
  bool is_long;
  int64_t rows, ignored;
};

// logits is [rows, stride], of which the first `classes` columns are products; what lies behind them is neither read
// nor written. Rows, and bias [classes], are aligned to 16 bytes. losses is [rows]. Each function returns an error
// message, or nullptr.
const char* cross_entropy_rows(void* logits, const void* bias, const Labels& labels, float* losses, int64_t classes,
                               int64_t stride, bool need_dlogits, DType dtype, void* stream);

// mean [1] = the sum of values [count], divided by the number of labelled rows, at least 1.
const char* mean_over_labelled(const float* values, int64_t count, const Labels& labels, float* mean, void* stream);

// y [count] = x [count] times *factor, rounded once. y may be x.
const char* scaled(const void* x, DType x_type, const float* factor, void* y, DType y_type, int64_t count,
                   void* stream);

}  // namespace fastbert::cuda
