// The interface between the torch sides of cross_entropy and its loops and kernels.
#pragma once

#include <stdint.h>

#include "cpu/isa.h"
#include "dtype.h"

namespace fastbert {

namespace cpu {

// bias and targets are in the type of arithmetic: f64 where dtype is f64, else f32.
struct CrossEntropy {
  const void* x;          // (rows, inner), bf16 if cross_entropy_takes_pairs(), else in the type of arithmetic
  const void* weight;     // (classes, inner) of dtype
  const void* bias;       // (classes,)
  const int64_t* labels;  // (rows,): the class of each row; negative if the row does not count
  void* dlogits;          // (rows, classes) of dtype, rows `stride` elements apart; or null
  double* losses;         // (rows,)
  void* targets;          // (rows,): scratch
  void* parts;            // (tasks, rows), CrossEntropyRoom::part bytes each: scratch
  int64_t rows, inner, classes, stride;
  DType dtype;
};

struct CrossEntropyRoom {
  int64_t classes;  // per task
  int64_t scratch;  // bytes per thread
  int64_t part;     // bytes per entry of CrossEntropy::parts
};

FB_FOR_EACH_ISA_AND_TILES(bool cross_entropy_takes_pairs(DType dtype, int64_t inner);
                          CrossEntropyRoom cross_entropy_room(DType dtype, int64_t inner);
                          // Rows begin to end. First the logits of one task's classes; then, once all tasks have those
                          // of a row, its loss and gradient.
                          void cross_entropy_logits(const CrossEntropy& op, int64_t task, int64_t begin, int64_t end,
                                                    void* scratch);
                          void cross_entropy_rows(const CrossEntropy& op, int64_t tasks, int64_t begin, int64_t end);)

}  // namespace cpu

// The kernels take a dense matrix of logits without the bias, and compute the loss of each row and, in place,
// softmax - onehot.
namespace cuda {

// One label per row, int64_t or int32_t. Rows with the label `ignored` do not count. Of a label that is no
// class, the nearest one is read, and the loss and the gradient of its row are NaN.
struct Labels {
  const void* of_rows;
  bool is_long;
  int64_t rows, ignored;
};

// logits is [rows, stride]. Its first `classes` columns are products; the columns after them are not read. In the
// gradient, columns `classes` to `padded` are zeros, and those after them are not written. Rows, and bias [classes],
// are aligned to 16 bytes. losses is [rows]. Each function returns an error message, or nullptr.
const char* cross_entropy_rows(void* logits, const void* bias, const Labels& labels, float* losses, int64_t classes,
                               int64_t padded, int64_t stride, bool need_dlogits, DType dtype, void* stream);

// mean [1] = the sum of values [count] / max(the number of rows that count, 1).
const char* mean_over_labelled(const float* values, int64_t count, const Labels& labels, float* mean, void* stream);

// y [count] = x [count] times *factor, rounded once. y may be x.
const char* scaled(const void* x, DType x_type, const float* factor, void* y, DType y_type, int64_t count,
                   void* stream);

}  // namespace cuda

}  // namespace fastbert
