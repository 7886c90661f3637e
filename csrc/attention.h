// The interface between the torch sides of attention and its loops and kernels.
#pragma once

#include <stdint.h>

#include "cpu/isa.h"
#include "dropout.h"
#include "dtype.h"

namespace fastbert {

namespace cpu {

// What relative positions add to the scores of a head. Distances of fewer than `longest` tokens are mapped to columns;
// neighbouring distances with the same slot share one. by_key lists the column of each distance by rising key - query,
// by_query by rising query - key, [2 longest - 1] numbers each. Tables and gradients are in the type of arithmetic,
// except that keys and queries may be `pairs`.
struct Positions {
  int64_t longest, columns;
  const int32_t *by_key, *by_query;  // each number is the one before it, plus 0 or 1
  // What pack_positions writes: `across`, and for the backward also `rows`. The columns are those of by_key for keys,
  // and those of by_query for queries. nullptr for a table that is absent.
  const void *keys = nullptr, *queries = nullptr;
  const void *key_rows = nullptr, *query_rows = nullptr;
  const void* bias = nullptr;  // a number for each distance, in the order of by_key
  // Gradients: [columns, D rounded up to whole panels], in the order of key_rows and query_rows; nullptr if not needed.
  void *dkeys = nullptr, *dqueries = nullptr;
  void* dbias = nullptr;  // in the order of bias
  // Whether keys and queries are the output of pack_position_pairs. Then bias is divided by scale, and neither
  // key_rows nor query_rows is multiplied by it.
  bool pairs = false;
};

// One head of one sequence. q, k and v point to the D elements of its first token, of type dtype; those of the next
// token are `stride` elements further on, a multiple of D.
struct AttentionHead {
  const void *q, *k, *v;
  int64_t stride, keys, D;
  double scale;
  int64_t head, sequence;  // for the dropout counters
  Dropout drop;
  DType dtype;
  const Positions* positions = nullptr;  // nullptr: plain attention
};

// Whether bf16 scores may be computed in pairs, from queries that are not scaled. Then scale is applied after the
// largest score has been subtracted: scaling must keep the order of scores, and a difference that overflows float has
// to mean a weight of 0. Also, the bias of relative positions is divided by scale.
[[gnu::always_inline]] constexpr bool can_scale_late(double scale) { return scale >= 1e-30 && scale <= 1e30; }

// One head's rows of a table of positions, or of its gradient.
struct PositionTable {
  const void* data;  // [slots, D], rows `stride` apart
  int64_t stride, slots, D;
  DType dtype;
  const int32_t* slot;  // [columns]: the slot of each column
  int64_t columns;
};

struct PositionRoom {
  int64_t across, rows;  // bytes
};

constexpr int64_t kAttentionQueries = 96;  // computed at a time: whole tiles on any instruction set

// out, dout: [keys, D] of dtype, rows `out_stride` apart. lse: [keys], float, or double for f64. dq, dk, dv: laid out
// like q, k, v. room: scratch of attention_fwd_room or attention_bwd_room bytes, aligned to 64 bytes.
FB_FOR_EACH_ISA_AND_TILES(int64_t attention_fwd_room(const AttentionHead& a);  // bytes
                          int64_t attention_bwd_room(const AttentionHead& a);
                          // Computes queries first to last. The result of a row does not depend on the other rows of
                          // the call.
                          void attention_fwd(const AttentionHead& a, int64_t first, int64_t last, void* out,
                                             int64_t out_stride, void* lse, void* room);
                          void attention_bwd(const AttentionHead& a, const void* dout, const void* out,
                                             int64_t out_stride, const void* lse, void* dq, void* dk, void* dv,
                                             void* room);
                          // Packs a table of positions, times a factor, for Positions. across or rows may be nullptr.
                          // room: [columns, D] of the type of arithmetic.
                          PositionRoom position_room(int64_t columns, int64_t D, DType dtype);
                          void pack_positions(const PositionTable& table, double factor, void* across, void* rows,
                                              void* room);
                          // Whether scores can be computed from pairs, and the `across` of a table for that case.
                          bool positions_in_pairs(DType dtype, int64_t D);
                          void pack_position_pairs(const PositionTable& table, void* across, void* room);
                          // Writes `gradient`: the sum of the `count` tasks' gradients, in their order, times a
                          // factor. room: [slots, D rounded up to whole panels].
                          void add_up_positions(const void* const* parts, int64_t count, double factor,
                                                const PositionTable& gradient, void* room);)

}  // namespace cpu

namespace cuda {

// The arguments of one call: softmax(Q K^T scale) V within each sequence. Rows of tokens that are in no sequence become
// zeros. Any values in cu_seqlens are safe: sequences are cut to the tokens and to `longest`. But if they are not in
// ascending order, several blocks may write the same row, and which of them is last can differ from run to run.
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

// The number of floats of scratch in which one kernel of the backward leaves statistics of rows for the next.
inline int64_t attention_statistics(const Attention& a) {
  return 3 * a.heads * (a.tokens + 4 * (int64_t(a.sequences) + 1));
}

// out: [T, H, D] of dtype, lse: [H, T] float. Both functions return an error message, or nullptr.
const char* attention_fwd(const Attention& a, void* out, float* lse, void* stream);
// dout, out: [T, H, D], dqkv: [T, 3, H, D]. statistics: attention_statistics(a) floats, 16-byte aligned.
const char* attention_bwd(const Attention& a, const void* dout, const void* out, const float* lse, void* dqkv,
                          float* statistics, void* stream);

}  // namespace cuda

}  // namespace fastbert
