// The interface between the torch sides of attention and its loops and kernels. On a CPU the torch side calls a library
// for the matrix products between the loops. M stands for the loops' type of arithmetic: double for f64, else float.
#pragma once

#include <stdint.h>

#include "cpu/isa.h"
#include "dropout.h"
#include "dtype.h"

namespace fastbert {

// Some queries of one head of one sequence, with all keys of that sequence.
struct AttentionTile {
  int64_t queries, keys, stride;        // scores are [queries, keys], rows `stride` apart
  int64_t first_query, head, sequence;  // of the dropout counters
  Dropout drop;
  uint8_t* bits;  // attention_bits_room(keys) bytes, if anything is dropped
};

namespace cpu {

FB_FOR_EACH_ISA(int64_t attention_bits_room(int64_t keys);
                // Replaces scores by exp(score - the row's maximum), or 0 where dropped. lse: [queries]. factors:
                // [queries]; multiply the rows' products with V by them.
                void attention_softmax(const AttentionTile& tile, void* scores, void* lse, void* factors, DType dtype);
                // With P = exp(scores - lse) and the dropout factors F: replaces scores by P F and dp by P (dp F -
                // delta).
                void attention_softmax_bwd(const AttentionTile& tile, void* scores, void* dp, const void* lse,
                                           const void* delta, DType dtype);
                // delta[row] = sum of a[row] b[row]; a and b of type dtype.
                void attention_dot(const void* a, const void* b, int64_t rows, int64_t columns, int64_t stride,
                                   void* delta, DType dtype);
                // Converts rows of dtype to contiguous rows of M.
                void attention_load(const void* from, int64_t stride, int64_t rows, int64_t columns, void* to,
                                    DType dtype);
                // Converts rows of M to rows of dtype, times factors[row] unless factors is nullptr. The two may be the
                // same memory.
                void attention_store(const void* from, int64_t from_stride, const void* factors, int64_t rows,
                                     int64_t columns, void* to, int64_t stride, DType dtype);)

}  // namespace cpu

namespace cuda {

// One call: softmax(Q K^T scale) V within each sequence, whatever cu_seqlens holds: sequences are cut to the tokens and
// to `longest`, and rows of tokens that are in none become zeros.
struct Attention {
  const void* qkv;            // [T, 3, H, D], contiguous
  const int32_t* cu_seqlens;  // [B + 1], on the device
  int64_t tokens;             // T
  int sequences, longest, heads, D;
  float scale;
  DeviceDropout drop;
  DType dtype;
};

constexpr int kAttentionLargest = 128;  // D

// Room for the numbers that the backward passes on, in floats.
inline int64_t attention_statistics(const Attention& a) {
  return 3 * a.heads * (a.tokens + 4 * (int64_t(a.sequences) + 1));
}

// out: [T, H, D] of dtype, lse: [H, T] float. Both return what went wrong, or nullptr.
const char* attention_fwd(const Attention& a, void* out, float* lse, void* stream);
// dout, out: [T, H, D], dqkv: [T, 3, H, D]. statistics: attention_statistics(a) floats, 16-byte aligned.
const char* attention_bwd(const Attention& a, const void* dout, const void* out, const float* lse, void* dqkv,
                          float* statistics, void* stream);

}  // namespace cuda

}  // namespace fastbert
