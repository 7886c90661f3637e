// Computes a block of c = a b + bias, where a or b may be transposed. For each part of the inner dimension it copies
// that part of the block's a as floats, then packs b as floats and multiplies, one panel at a time.
#include "../../matrix_product.h"

#include "product.h"

namespace fastbert::cpu::FB_ISA {

namespace {

constexpr int64_t kRows = 288;  // rows of a block, a multiple of every tile height; they share each packed panel
constexpr int64_t kInner = 256, kColumns = 16 * kPanel<float>;
// Row strides: of sums, of a's copy, of the copy of a transposed a. Powers of two would use only few sets of the cache.
constexpr int64_t kStride = kColumns + 16, kCopyStride = kInner + 16, kTransposedStride = kRows + 16;

// Copies `steps` steps of `rows` rows of a.
template <bool transposed, class T>
Left<transposed, float> copy_left(const MatrixProduct& op, int64_t row, int64_t rows, int64_t k, int64_t steps,
                                  float* to) {
  const int64_t count = transposed ? steps : rows, elements = transposed ? rows : steps;
  const T* const from = static_cast<const T*>(op.a) + (transposed ? k * op.a_stride + row : row * op.a_stride + k);
  constexpr int64_t kApart = transposed ? kTransposedStride : kCopyStride;
  for (int64_t i = 0; i < count; ++i) convert(from + i * op.a_stride, elements, to + i * kApart);
  return {to, kApart};
}

// Packs some steps of a panel of `columns` columns of b.
template <class T>
void pack_right(const MatrixProduct& op, const T* from, int64_t columns, Panels<float> to) {
  op.b_transposed ? pack_transposed(from, op.b_stride, columns, to) : pack(from, op.b_stride, columns, 1.0f, to);
}

template <bool transposed, class T>
void sum_up(const MatrixProduct& op, int64_t row, int64_t rows, int64_t column, int64_t columns, float* sums) {
  constexpr int64_t kWidth = kPanel<float>;
  float *const copy = sums + kRows * kStride, *const packed = copy + kRows * kCopyStride;
  const auto right = [&](int64_t k, int64_t i) {
    const T* const b = static_cast<const T*>(op.b);
    return op.b_transposed ? b + (column + i) * op.b_stride + k : b + k * op.b_stride + column + i;
  };
  for (int64_t k = 0; k < op.inner; k += kInner) {
    const int64_t steps = least(kInner, op.inner - k);
    const Left<transposed, float> left = copy_left<transposed, T>(op, row, rows, k, steps, copy);
    const auto add =
        k ? product<Onto::sums, transposed, float, RowsAhead> : product<Onto::nothing, transposed, float, RowsAhead>;
    for (int64_t i = 0; i < columns; i += kWidth) {
      const Panels<float> panel{packed, steps};
      pack_right(op, right(k, i), least(kWidth, columns - i), panel);
      const T* const next = i + kWidth < columns ? right(k, i + kWidth) : right(k + kInner, 0);
      const RowsAhead ahead = op.b_transposed ? RowsAhead::of(next, op.b_stride, kWidth, steps, steps)
                                              : RowsAhead::of(next, op.b_stride, steps, kWidth, steps);
      add(rows, kWidth, steps, left, panel, sums + i, kStride, nullptr, ahead);
    }
  }
}

template <class T>
void finish_row(const float* sums, const T* bias, int64_t columns, T* c) {
  if (!bias) return convert(sums, columns, c);
  for_vectors<float>(columns, [&](int64_t i, auto n) { store(load(sums + i, n) + load(bias + i, n), c + i, n); });
}

template <bool transposed, class T>
void run(const MatrixProduct& op, int64_t row, int64_t row_end, int64_t column, int64_t column_end, float* sums) {
  const T* const bias = static_cast<const T*>(op.bias);
  T* const c = static_cast<T*>(op.c);
  for (; column < column_end; column += kColumns) {
    const int64_t rows = row_end - row, columns = least(kColumns, column_end - column);
    sum_up<transposed, T>(op, row, rows, column, columns, sums);
    for (int64_t r = 0; r < rows; ++r)
      finish_row(sums + r * kStride, bias ? bias + column : nullptr, columns, c + (row + r) * op.columns + column);
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
  for_dtype_up_to_f32(op.dtype, [&](auto element) {
    using T = decltype(element);
    const auto loop = op.a_transposed ? run<true, T> : run<false, T>;
    loop(op, row, row_end, column, column_end, static_cast<float*>(scratch));
  });
}

}  // namespace fastbert::cpu::FB_ISA
