// The interface between the torch side of packed_linear and its loops: y = gelu(x W^T + bias), where W was packed once
// (fastbert/ops/packed_linear.py) into panels. A panel has as many channels as two vectors have lanes.
//
// Packed weights are (panels, groups, width, group). A group is the numbers of a channel that one instruction
// multiplies and adds up: one of fp32, two of bf16 on processors with an instruction for that, two or four of int8.
// With int8 weights, rows of x are quantised to int8 too, by their largest magnitude. The int32 sums are exact, so all
// instruction sets give the same result.
#pragma once

#include <stdint.h>

#include "cpu/isa.h"
#include "division.h"
#include "dtype.h"

namespace fastbert {

enum class Weights { f32, bf16, s8 };
enum class Gelu { none, erf, tanh };

namespace cpu {

struct PackedLinear {
  const void* x;       // (rows, inner) of x_dtype, rows x_stride elements apart
  const void* weight;  // packed
  const float* scale;  // for int8 weights: (2, channels), the factor of each channel, then the sum of its weights
  const void* bias;    // (channels,) of floats, or null
  void* y;             // (rows, channels) of y_dtype, rows y_stride elements apart
  int64_t rows, inner, channels, x_stride, y_stride;
  DType x_dtype, y_dtype;  // f32, bf16 or f16
  Weights weights;
  Gelu gelu;
  // Rows of x in the form that the products take, packed_left_bytes() each, with room for whole_tiles(rows) of them;
  // and for int8 the factor of each row. Null if the products read x itself.
  void* left;
  float* left_scale;
  const void* next;  // prefetched: the weights that the thread reads after these channels'; null: those that follow
};

constexpr int64_t kTurnedTiles = 4;
constexpr int64_t kRowsTogether = 16;  // blocks begin at multiples of it: all but the last are whole AMX tiles

// rows, rounded up to a multiple of kRowsTogether.
constexpr int64_t whole_tiles(int64_t rows) { return round_up(rows, kRowsTogether); }
// The first row of a block, where the rows are split into `blocks` blocks. For block == blocks: the number of rows.
constexpr int64_t first_row(int64_t block, int64_t blocks, int64_t rows) {
  const int64_t row = whole_tiles(rows) / kRowsTogether * block / blocks * kRowsTogether;
  return row < rows ? row : rows;
}

FB_FOR_EACH_ISA_TILES_AND_VNNI(
    // The channels of a panel, the numbers of a group, and the most rows of a block.
    int64_t packed_width(); int64_t packed_group(Weights weights); int64_t packed_rows();
    // How many rows take as long as reading a panel once more does.
    int64_t packed_rows_a_panel(Weights weights);
    // The fewest rows per thread for which each thread should take its own rows through several products, and so read
    // all of their weights, `bytes` in total. With fewer rows, threads should share each product.
    int64_t packed_fewest_rows(Weights weights, int64_t bytes);

    // The bytes of a row of `left`, 0 if the products read x itself; and what writes rows begin to end of `left`.
    int64_t packed_left_bytes(int64_t inner, DType x_dtype, Weights weights);
    void packed_left(const PackedLinear& op, int64_t begin, int64_t end);

    // Packs a weight (channels, inner), or (inner, channels) with `across`. Its rows are `stride` numbers apart.
    void pack_weight(const float* weight, int64_t stride, bool across, int64_t inner, int64_t channels, float* packed);

    // The bytes of a thread's scratch.
    int64_t packed_scratch();
    // Computes rows `row` to `row_end` of y, at most packed_rows() of them, and channels `channel` to `channel_end`,
    // where `channel` is a multiple of packed_width().
    void packed_linear(const PackedLinear& op, int64_t row, int64_t row_end, int64_t channel, int64_t channel_end,
                       void* scratch);
    // The same for all channels, with the factors exchanged: x is the weight, and `weight` the packed rows that it
    // multiplies, which are the channels here. All are floats. y is (channels, rows), bias (rows,). next: rows of x
    // that the thread reads next. inner is at least 1.
    // turned_rows(): the rows to take at a time, kTurnedTiles tiles and whole vectors.
    int64_t turned_rows(); void turned_linear(const PackedLinear& op, int64_t row, int64_t row_end, void* scratch);)

}  // namespace cpu

}  // namespace fastbert
