// The interface between the torch side of dense layers on few rows and their loops: y = x weight^T + bias.
#pragma once

#include <stdint.h>

#include "cpu/isa.h"
#include "dtype.h"

namespace fastbert::cpu {

// All are contiguous, of one type, which is not f64. Sums are fp32.
struct FewRows {
  const void *x, *weight;  // (rows, inner) and (channels, inner)
  const void* bias;        // (channels,), or null
  void* y;                 // (rows, channels)
  int64_t rows, inner, channels;
  DType dtype;
  const void* next;  // the weights that the thread reads next, or null
  bool near;         // whether what is read next is prefetched to the first-level cache, not only to the second
};

FB_FOR_EACH_ISA(
    // The channels that are computed together.
    int64_t few_rows_width();
    // Computes channels `channel` to `channel_end` of all rows. Their bits do not depend on other rows or channels.
    void few_rows(const FewRows& op, int64_t channel, int64_t channel_end);)

}  // namespace fastbert::cpu
