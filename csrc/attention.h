// What the loops of attention offer the torch side, which calls the matrix products between them. M stands for the type
// of arithmetic, double where dtype is f64, else float.
#pragma once

#include <stdint.h>

#include "cpu/sets.h"
#include "dropout.h"
#include "dtype.h"

namespace fastbert {

// Some queries of one head of one sequence against all its keys.
struct AttentionTile {
  int64_t queries, keys, stride;        // scores are [queries, keys], rows `stride` apart
  int64_t first_query, head, sequence;  // of the dropout counters
  Dropout drop;
  uint8_t* bits;  // attention_bits_room(keys) bytes, if anything is dropped
};

namespace cpu {

FB_FOR_EACH_SET(int64_t attention_bits_room(int64_t keys);
                // Scores to exp(score - their row's largest), zeros where dropped. lse: [queries]. factors: [queries],
                // what the rows' products with V are to be multiplied by.
                void attention_softmax(const AttentionTile& tile, void* scores, void* lse, void* factors, DType dtype);
                // P = exp(scores - lse) and the dropout factors F: scores becomes P F, dp becomes P (dp F - delta).
                void attention_softmax_bwd(const AttentionTile& tile, void* scores, void* dp, const void* lse,
                                           const void* delta, DType dtype);
                // delta[row] = sum of a[row] b[row]; a and b of type dtype.
                void attention_dot(const void* a, const void* b, int64_t rows, int64_t columns, int64_t stride,
                                   void* delta, DType dtype);
                // Rows of dtype to contiguous rows of M.
                void attention_load(const void* from, int64_t stride, int64_t rows, int64_t columns, void* to,
                                    DType dtype);
                // Rows of M to rows of dtype, times factors[row] unless that is nullptr. The two may be the same rows.
                void attention_store(const void* from, int64_t from_stride, const void* factors, int64_t rows,
                                     int64_t columns, void* to, int64_t stride, DType dtype);)

}  // namespace cpu

}  // namespace fastbert
