// The interface between the torch sides of attention and its loops and kernels.
#pragma once

#include <stdint.h>

#include "cpu/isa.h"
#include "dropout.h"
#include "dtype.h"

namespace fastbert {

namespace cpu {

// What relative positions add to the scores of a head. Distances of fewer tokens than `longest` are columns, one for
// each run of neighbours of the same slot; by_key is in the order of rising key - query, by_query of query - key.
// [2 longest - 1] numbers each; tables and gradients are of the type of arithmetic, or keys and queries `pairs`.
struct Positions {
  int64_t longest, columns;
  const int32_t *by_key, *by_query;  // the column of each distance, rising by 0 or 1
  // As pack_positions leaves them (`across`), by_key and by_query; may be nullptr. And `rows`, for the backward.
  const void *keys = nullptr, *queries = nullptr;
  const void *key_rows = nullptr, *query_rows = nullptr;
  const void* bias = nullptr;  // of each distance, in the order of by_key
  // [columns, whole panels of D], as key_rows and query_rows; nullptr: not wanted
  void *dkeys = nullptr, *dqueries = nullptr;
  void* dbias = nullptr;  // as bias
  // keys and queries as pack_position_pairs leaves them, bias divided by scale, rows without it
  bool pairs = false;
};

// One head of one sequence. q, k, v: its first token's D elements, of type dtype; the next are `stride` elements on, a
// multiple of D.
struct AttentionHead {
  const void *q, *k, *v;
  int64_t stride, keys, D;
  double scale;
  int64_t head, sequence;  // of the dropout counters
  Dropout drop;
  DType dtype;
  const Positions* positions = nullptr;  // plain attention
};

// Whether scores of bf16 may be made in pairs, of queries that are not scaled: they are multiplied by scale after their
// largest was taken off, so the largest has to stay the largest, and differences beyond float's range have to be so far
// below it that they weigh nothing; and positions' bias is divided by scale.
constexpr bool can_scale_late(double scale) { return scale >= 1e-30 && scale <= 1e30; }

// The rows of a table of positions, or of its gradient, that are one head's.
struct PositionTable {
  const void* data;  // [slots, D], rows `stride` apart
  int64_t stride, slots, D;
  DType dtype;
  const int32_t* slot;  // [columns]: that of each column
  int64_t columns;
};

struct PositionRoom {
  int64_t across, rows;  // bytes
};

constexpr int64_t kAttentionQueries = 96;  // are computed at a time: whole tiles of any instruction set

// out, dout: [keys, D] of dtype, rows `out_stride` apart. lse: [keys], float, or double for f64. dq, dk, dv: as q, k,
// v. room: of the size that is asked for, at a multiple of 64 bytes.
FB_FOR_EACH_ISA_AND_TILES(int64_t attention_fwd_room(const AttentionHead& a);  // bytes
                          int64_t attention_bwd_room(const AttentionHead& a);
                          // Of queries first to last; rows do not depend on which others are computed with them.
                          void attention_fwd(const AttentionHead& a, int64_t first, int64_t last, void* out,
                                             int64_t out_stride, void* lse, void* room);
                          void attention_bwd(const AttentionHead& a, const void* dout, const void* out,
                                             int64_t out_stride, const void* lse, void* dq, void* dk, void* dv,
                                             void* room);
                          // A table of positions times a factor as Positions has it. Either may be nullptr. room:
                          // [columns, D] of the type of arithmetic.
                          PositionRoom position_room(int64_t columns, int64_t D, DType dtype);
                          void pack_positions(const PositionTable& table, double factor, void* across, void* rows,
                                              void* room);
                          // Whether scores can be made in pairs; and a table as `across` for that.
                          bool positions_in_pairs(DType dtype, int64_t D);
                          void pack_position_pairs(const PositionTable& table, void* across, void* room);
                          // The gradients that tasks have left, added up in their order, times a factor. room: [slots,
                          // whole panels of D].
                          void add_up_positions(const void* const* parts, int64_t count, double factor,
                                                const PositionTable& gradient, void* room);)

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
