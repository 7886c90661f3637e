// The interface between the torch side of products of plain matrices and their loops: c = a b + bias, where a or b may
// be transposed.
#pragma once

#include <stdint.h>

#include "cpu/isa.h"
#include "dtype.h"

namespace fastbert::cpu {

// All are of one type, which is not f64. Sums are fp32.
struct MatrixProduct {
  const void *a, *b;           // (rows, inner) and (inner, columns), or their transposes
  const void* bias;            // (columns,), or null
  void* c;                     // (rows, columns), contiguous
  int64_t inner, columns;      // inner: at least 1
  int64_t a_stride, b_stride;  // elements from one row in memory to the next
  bool a_transposed, b_transposed;
  DType dtype;
};

FB_FOR_EACH_ISA(
    // The most rows of a block, the columns of a panel, and the bytes of a thread's scratch.
    int64_t product_rows(); int64_t product_width(); int64_t product_scratch();
    // Computes rows `row` to `row_end`, at most product_rows() of them, and columns `column` to `column_end`, where
    // `column` is a multiple of product_width().
    void matrix_product(const MatrixProduct& op, int64_t row, int64_t row_end, int64_t column, int64_t column_end,
                        void* scratch);)

}  // namespace fastbert::cpu
