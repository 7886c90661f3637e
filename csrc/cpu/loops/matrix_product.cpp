// Computes a block of c = a b, where a may be transposed. For each part of the inner dimension it copies that part of
// the block's a, then packs and multiplies b, one panel at a time.
#include "../../matrix_product.h"

#include "product.h"

namespace fastbert::cpu::FB_ISA {

namespace {

constexpr int64_t kRows = 288;  // rows of a block, a multiple of every tile height; they share each packed panel
constexpr int64_t kInner = 256, kColumns = 16 * kPanel<float>;
// Row strides: of sums, of a's copy, of the copy of a transposed a. Powers of two would use only few sets of the cache.
constexpr int64_t kStride = kColumns + 16, kCopyStride = kInner + 16, kTransposedStride = kRows + 16;

// Like Ahead, but fetches `width` floats of each row; rows are `stride` apart.
struct RowsAhead {
  static constexpr int64_t kFloatsPerLine = Ahead::kLine / int64_t(sizeof(float));
  const float* from;
  int64_t stride, width, step;  // step: lines that a step of a tile fetches, times kPart
  int64_t at = 0, due = 0;

  static int64_t lines(int64_t width) { return (width + kFloatsPerLine - 1) / kFloatsPerLine; }
  // steps: how many steps the prefetches of all rows are spread over.
  static RowsAhead of(const float* from, int64_t stride, int64_t rows, int64_t width, int64_t steps) {
    return {from, stride, width, Ahead::kPart * rows * lines(width) / steps};
  }
  void fetch(int64_t steps) {
    for (due += steps * step; due >= Ahead::kPart; due -= Ahead::kPart) {
      __builtin_prefetch(from + at, 0, 2);
      at += kFloatsPerLine;
      if (at >= width) at = 0, from += stride;
    }
  }
  int64_t undisturbed() const { return step <= Ahead::kPart / 8 ? 64 : 8; }
  RowsAhead share(int64_t row, int64_t count, int64_t rows, int64_t steps) const {
    const int64_t before = steps * step / Ahead::kPart * row / rows;
    return {from + before / lines(width) * stride, stride, width, step * count / rows,
            before % lines(width) * kFloatsPerLine};
  }
};

// Copies `steps` steps of `rows` rows of a.
template <bool transposed>
Left<transposed, float> copy_left(const MatrixProduct& op, int64_t row, int64_t rows, int64_t k, int64_t steps,
                                  float* to) {
  const int64_t count = transposed ? steps : rows, elements = transposed ? rows : steps;
  const float* const from = op.a + (transposed ? k * op.a_stride + row : row * op.a_stride + k);
  constexpr int64_t kApart = transposed ? kTransposedStride : kCopyStride;
  for (int64_t i = 0; i < count; ++i)
    __builtin_memcpy(to + i * kApart, from + i * op.a_stride, elements * sizeof(float));
  return {to, kApart};
}

RowsAhead right_ahead(const MatrixProduct& op, int64_t k, int64_t column, int64_t steps) {
  constexpr int64_t kWidth = kPanel<float>;
  return RowsAhead::of(op.b + k * op.b_stride + column, op.b_stride, steps, kWidth, steps);
}

template <bool transposed>
void sum_up(const MatrixProduct& op, int64_t row, int64_t rows, int64_t column, int64_t columns, float* sums) {
  constexpr int64_t kWidth = kPanel<float>;
  float *const copy = sums + kRows * kStride, *const packed = copy + kRows * kCopyStride;
  for (int64_t k = 0; k < op.inner; k += kInner) {
    const int64_t steps = least(kInner, op.inner - k);
    const Left<transposed, float> left = copy_left<transposed>(op, row, rows, k, steps, copy);
    const auto add =
        k ? product<Onto::sums, transposed, float, RowsAhead> : product<Onto::nothing, transposed, float, RowsAhead>;
    for (int64_t i = 0; i < columns; i += kWidth) {
      const Panels<float> panel{packed, steps};
      pack(op.b + k * op.b_stride + column + i, op.b_stride, least(kWidth, columns - i), 1.0f, panel);
      const bool last = i + kWidth >= columns;
      const RowsAhead ahead = right_ahead(op, last ? k + kInner : k, column + (last ? 0 : i + kWidth), steps);
      add(rows, kWidth, steps, left, panel, sums + i, kStride, nullptr, ahead);
    }
  }
}

}  // namespace

int64_t product_rows() { return kRows; }
int64_t product_width() { return kPanel<float>; }
int64_t product_scratch() {
  static_assert(kInner * kTransposedStride <= kRows * kCopyStride);
  return (kRows * (kStride + kCopyStride) + kInner * kPanel<float>)*int64_t(sizeof(float));
}

void matrix_product(const MatrixProduct& op, int64_t row, int64_t row_end, int64_t column, int64_t column_end,
                    void* scratch) {
  float* const sums = static_cast<float*>(scratch);
  for (; column < column_end; column += kColumns) {
    const int64_t rows = row_end - row, columns = least(kColumns, column_end - column);
    op.a_transposed ? sum_up<true>(op, row, rows, column, columns, sums)
                    : sum_up<false>(op, row, rows, column, columns, sums);
    for (int64_t r = 0; r < rows; ++r)
      __builtin_memcpy(op.c + (row + r) * op.columns + column, sums + r * kStride, columns * sizeof(float));
  }
}

}  // namespace fastbert::cpu::FB_ISA
