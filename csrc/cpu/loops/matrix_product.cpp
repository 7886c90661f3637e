// A block of c = a b or a^T b, a part of the inner dimension at a time: its rows of a are put side by side, and then of
// b one panel after the other.
#include "../../matrix_product.h"

#include "product.h"

namespace fastbert::cpu::FB_ISA {

namespace {

constexpr int64_t kRows = 288;  // a multiple of every tile's: a panel is put in place once for all of them
constexpr int64_t kInner = 256, kColumns = 16 * kPanel<float>;
// Rows of sums, of a and of its transpose: powers of two would use few sets of the cache.
constexpr int64_t kStride = kColumns + 16, kNear = kInner + 16, kAcross = kRows + 16;

// As Ahead, of what lies apart: of each row as much as a panel has.
struct RowsAhead {
  const float* from;
  int64_t stride, step = Ahead::kPart, due = 0;  // step: parts of a row for each step of a tile

  void fetch(int64_t steps) {
    for (due += steps * step; due >= Ahead::kPart; due -= Ahead::kPart, from += stride)
      for (int64_t i = 0; i < kPanel<float>; i += Ahead::kLine / int64_t(sizeof(float)))
        __builtin_prefetch(from + i, 0, 2);
  }
  static int64_t undisturbed() { return 64; }
  RowsAhead share(int64_t row, int64_t count, int64_t rows, int64_t steps) const {
    return {from + steps * row / rows * stride, stride, Ahead::kPart * count / rows};
  }
};

// Rows of a, or of its transpose, some steps of them.
template <bool transposed>
Left<transposed, float> copy_left(const MatrixProduct& op, int64_t row, int64_t rows, int64_t k, int64_t steps,
                                  float* to) {
  const int64_t count = transposed ? steps : rows, elements = transposed ? rows : steps;
  const float* const from = op.a + (transposed ? k * op.a_stride + row : row * op.a_stride + k);
  constexpr int64_t kApart = transposed ? kAcross : kNear;
  for (int64_t i = 0; i < count; ++i)
    __builtin_memcpy(to + i * kApart, from + i * op.a_stride, elements * sizeof(float));
  return {to, kApart};
}

template <bool transposed>
void sum_up(const MatrixProduct& op, int64_t row, int64_t rows, int64_t column, int64_t columns, float* sums) {
  float *const near = sums + kRows * kStride, *const room = near + kRows * kNear;
  for (int64_t k = 0; k == 0 || k < op.inner; k += kInner) {
    const int64_t steps = least(kInner, op.inner - k);
    const Left<transposed, float> left = copy_left<transposed>(op, row, rows, k, steps, near);
    const auto add =
        k ? product<Onto::sums, transposed, float, RowsAhead> : product<Onto::nothing, transposed, float, RowsAhead>;
    for (int64_t i = 0; i < columns; i += kPanel<float>) {
      const int64_t count = least(kPanel<float>, columns - i);
      const Panels<float> panels{room, steps};
      pack(op.b + k * op.b_stride + column + i, op.b_stride, count, 1.0f, panels);
      const bool last = i + kPanel<float> >= columns;
      const float* const next = op.b + (last ? k + kInner : k) * op.b_stride + column + (last ? 0 : i + kPanel<float>);
      add(rows, count, steps, left, panels, sums + i, kStride, nullptr, {next, op.b_stride});
    }
  }
}

}  // namespace

int64_t product_rows() { return kRows; }
int64_t product_width() { return kPanel<float>; }
int64_t product_scratch() {
  static_assert(kInner * kAcross <= kRows * kNear);
  return (kRows * (kStride + kNear) + kInner * kPanel<float>)*int64_t(sizeof(float));
}

void matrix_product(const MatrixProduct& op, int64_t row, int64_t row_end, int64_t column, int64_t column_end,
                    void* scratch) {
  float* const sums = static_cast<float*>(scratch);
  for (; column < column_end; column += kColumns) {
    const int64_t rows = row_end - row, columns = least(kColumns, column_end - column);
    op.transposed ? sum_up<true>(op, row, rows, column, columns, sums)
                  : sum_up<false>(op, row, rows, column, columns, sums);
    for (int64_t r = 0; r < rows; ++r)
      __builtin_memcpy(op.c + (row + r) * op.columns + column, sums + r * kStride, columns * sizeof(float));
  }
}

}  // namespace fastbert::cpu::FB_ISA
