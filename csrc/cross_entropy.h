// The interface between the torch sides of cross_entropy and its loops and kernels.
#pragma once

#include <stdint.h>

#include "cpu/isa.h"
#include "dtype.h"

namespace fastbert {

namespace cpu {

// bias and targets are in the type of arithmetic: f64 where dtype is f64, else f32.
struct CrossEntropy {
  const void* x;          // (rows, inner), bf16 where cross_entropy_takes_pairs, else in the type of arithmetic
  const void* weight;     // (classes, inner) of dtype
  const void* bias;       // (classes,)
  const int64_t* labels;  // (rows,): a class, or below 0 for none
  void* dlogits;          // (rows, classes) of dtype, rows `stride` apart; or null
  double* losses;         // (rows,)
  void* targets;          // (rows,): scratch
  void* parts;            // (tasks, rows) of CrossEntropyRoom::part bytes: scratch
  int64_t rows, inner, classes, stride;
  DType dtype;
};

struct CrossEntropyRoom {
  int64_t classes;  // of a task
  int64_t scratch;  // bytes, of a task
  int64_t part;     // bytes
};

FB_FOR_EACH_ISA_AND_TILES(
    bool cross_entropy_takes_pairs(DType dtype, int64_t inner);
    CrossEntropyRoom cross_entropy_room(DType dtype, int64_t inner);
    // First the logits of all rows and of the classes of each task, then losses and gradients of rows.
    void cross_entropy_logits(const CrossEntropy& op, int64_t task, int64_t begin, int64_t end, void* scratch);
    void cross_entropy_rows(const CrossEntropy& op, int64_t tasks, int64_t begin, int64_t end);)

}  // namespace cpu

// Of a dense matrix of logits without the bias kernels make the losses of its rows and, in place, softmax - onehot.
namespace cuda {

// One label a row: int64_t or int32_t. Rows whose label is `ignored` weigh nothing; others are clamped to a class.
struct Labels {
  const void* of_rows;
  bool is_long;
  int64_t rows, ignored;
};

// logits is [rows, stride], of which the first `classes` columns are products; what lies behind them is not read. Of
// the gradient, columns from there to `padded` are zeros, and what lies behind those is not written. Rows, and bias
// [classes], are aligned to 16 bytes. losses is [rows]. Each function returns an error message, or nullptr.
const char* cross_entropy_rows(void* logits, const void* bias, const Labels& labels, float* losses, int64_t classes,
                               int64_t padded, int64_t stride, bool need_dlogits, DType dtype, void* stream);

// mean [1] = the sum of values [count], divided by the number of labelled rows, at least 1.
const char* mean_over_labelled(const float* values, int64_t count, const Labels& labels, float* mean, void* stream);

// y [count] = x [count] times *factor, rounded once. y may be x.
const char* scaled(const void* x, DType x_type, const float* factor, void* y, DType y_type, int64_t count,
                   void* stream);

}  // namespace cuda

}  // namespace fastbert
