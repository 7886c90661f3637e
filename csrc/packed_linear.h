// The interface between the torch side of packed_linear and its loops: y = gelu(x W^T + bias), where W was packed once
// (fastbert/ops/packed_linear.py) into panels of as many channels as two vectors have lanes.
//
// They are (panels, groups, width, group), where a group is what one instruction multiplies and adds up: one number of
// fp32, two of bf16 where processors have an instruction for that, two or four of int8. Beside int8 weights rows of x
// are quantised to int8 too, by their largest magnitude, and the int32 sums are exact, so every instruction set gives
// the same.
#pragma once

#include <stdint.h>

#include "cpu/isa.h"
#include "dtype.h"

namespace fastbert {

enum class Weights { f32, bf16, s8 };
enum class Gelu { none, erf, tanh };

namespace cpu {

struct PackedLinear {
  const void* x;       // (rows, inner) of x_dtype, rows x_stride elements apart
  const void* weight;  // packed
  const float* scale;  // of int8 weights: (2, channels), the factor of each channel, and the sum of its weights
  const float* bias;   // (channels,), or null
  void* y;             // (rows, channels) of y_dtype, rows y_stride elements apart
  int64_t rows, inner, channels, x_stride, y_stride;
  DType x_dtype, y_dtype;  // f32, bf16 or f16
  Weights weights;
  Gelu gelu;
  // Rows of x as the products take them, each of packed_left_bytes(), up to a multiple of kRowsTogether, and for int8
  // the factor of each; null where x is taken as it is.
  void* left;
  float* left_scale;
};

constexpr int64_t kRowsTogether = 16;  // blocks begin at multiples of these: whole tiles of a matrix unit, but the last

// Up to a multiple of kRowsTogether.
constexpr int64_t whole_tiles(int64_t rows) { return (rows + kRowsTogether - 1) / kRowsTogether * kRowsTogether; }
// Where one of so many blocks of rows begins; at the number of rows for the one behind the last.
constexpr int64_t first_row(int64_t block, int64_t blocks, int64_t rows) {
  const int64_t row = whole_tiles(rows) / kRowsTogether * block / blocks * kRowsTogether;
  return row < rows ? row : rows;
}

FB_FOR_EACH_ISA_TILES_AND_VNNI(
    // The channels of a panel, the numbers of a group, and the most rows of a block.
    int64_t packed_width(); int64_t packed_group(Weights weights); int64_t packed_rows();
    // From how many rows on a thread is to take them alone through several products, of so many bytes of weights, which
    // it reads for them; else threads share the products.
    int64_t packed_fewest_rows(Weights weights, int64_t bytes);

    // Of a row of `left`; 0 where x is taken as it is.
    int64_t packed_left_bytes(int64_t inner, DType x_dtype, Weights weights);
    void packed_left(const PackedLinear& op, int64_t begin, int64_t end);

    // Of a task's scratch.
    int64_t packed_scratch();
    // The block of y that begins at a row and, a multiple of the width, at a channel: at most packed_rows().
    void packed_linear(const PackedLinear& op, int64_t row, int64_t row_end, int64_t channel, int64_t channel_end,
                       void* scratch);)

}  // namespace cpu

}  // namespace fastbert
