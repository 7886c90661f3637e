// The interface between the torch side of linear_max and its loops: the maximum of x W^T + bias over the rows of each
// sequence, for each class, and the row in which it occurs.
#pragma once

#include <stdint.h>

#include "cpu/isa.h"
#include "dtype.h"

namespace fastbert::cpu {

// x and bias are in the type of arithmetic: f64 where dtype is f64, else f32.
struct LinearMax {
  const void* x;          // (tokens, inner); bf16 if linear_max_takes_pairs()
  const void* weight;     // (classes, inner) of dtype
  const void* bias;       // (classes,), or null
  const int64_t* bounds;  // (sequences + 1,), never decreasing, within the tokens
  void* y;                // (sequences, classes) of dtype
  int32_t* rows;          // (sequences, classes), or null; -1 for an empty sequence
  int64_t inner, classes, sequences;
  DType dtype;
};

struct LinearMaxGradients {
  const void* dy;       // (sequences, classes) of dtype
  const int32_t* rows;  // (sequences, classes); gradients of rows outside of x are ignored
  const void* x;        // (tokens, inner), in the type of arithmetic
  const void* weight;   // (classes, inner) of dtype
  void* dx;             // (tokens, inner) of dtype
  void* dweight;        // (classes, inner) of dtype
  int64_t tokens, inner, classes, sequences;
  DType dtype;
};

constexpr int64_t kMaximaColumns = 128;

// Logits that are in memory. Their rows are `stride` floats apart, those of y `classes` elements.
struct Maxima {
  const float* logits;
  const int64_t* bounds;  // (sequences + 1,), never decreasing, within the rows
  void* y;                // (sequences, classes) of dtype: f32, bf16 or f16
  int64_t stride, classes, sequences;
  DType dtype;
};

FB_FOR_EACH_ISA_AND_TILES(
    // The maxima of columns `first` to `end`, at most kMaximaColumns; y and logits begin at the same class.
    void maxima_of_logits(const Maxima& op, int64_t first, int64_t end);
    bool linear_max_takes_pairs(DType dtype, int64_t inner);
    // The most classes of a task of the forward, and the bytes of its scratch.
    int64_t linear_max_width(DType dtype); int64_t linear_max_scratch(int64_t inner, DType dtype);
    void linear_max_fwd(const LinearMax& op, int64_t first, int64_t end, void* scratch);
    // Groups the gradients that are not zero by token: entries[starts[t]] to entries[starts[t + 1]] are the indices
    // into dy of token t's, in order. starts: (tokens + 1,), zeros before the call; entries: (sequences * classes,).
    void linear_max_group(const LinearMaxGradients& op, int64_t* starts, int64_t* entries);
    // dx of tokens first to end, and dweight of classes first to end. scratch: two rows in the type of arithmetic.
    void linear_max_dx(const LinearMaxGradients& op, const int64_t* starts, const int64_t* entries, int64_t first,
                       int64_t end, void* scratch);
    void linear_max_dweight(const LinearMaxGradients& op, int64_t first, int64_t end, void* scratch);)

}  // namespace fastbert::cpu
