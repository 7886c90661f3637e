// The second stage of sums over rows: each block of a kernel writes one row of partial sums, and column_sums adds up
// these rows. No atomics; the order depends on the shape alone, so the bits are the same each time.
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

// partials is [count, sums.quantities, channels]. Returns an error message, or nullptr.
const char* column_sums(const float* partials, int64_t count, int64_t channels, const ColumnSums& sums, void* stream);

}  // namespace fastbert::cuda
