// The second stage of sums over rows: kernels write one row of partial sums a block, and this adds the rows up. No
// atomics, and an order that depends on the shape alone: the same bits each time.
#pragma once

#include <stdint.h>

#include "../dtype.h"

namespace fastbert::cuda {

// Where the sums of one quantity go: [channels] of type dtype.
struct ColumnSum {
  void* to;
  DType dtype;
};

struct ColumnSums {
  ColumnSum of[3];
  int quantities;
};

// partials is [count, sums.quantities, channels]. Returns what went wrong, or nullptr.
const char* column_sums(const float* partials, int64_t count, int64_t channels, const ColumnSums& sums, void* stream);

}  // namespace fastbert::cuda
