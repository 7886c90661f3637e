// Packed matrices, the right factors of products. They consist of panels of a few columns, so that a row of a panel is
// two whole vectors.
//
// Elements are floats, doubles, or pairs of bf16. The numbers of a pair are neighbours in the inner dimension, which is
// then counted in pairs; one instruction multiplies two pairs and adds both products to a float.
#pragma once

#include "simd.h"

namespace fastbert::cpu::FB_ISA {

template <class M>
constexpr int64_t kPanel = 2 * kLanes<M>;  // columns
#ifdef __AVX512F__
constexpr int kTile = 12;  // rows of a tile: its sums take 24 of 32 vector registers
#else
constexpr int kTile = 6;  // 12 of 16
#endif

// Whether bf16 is multiplied in pairs: where that is faster than in floats.
#ifdef __AVX512BF16__
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

// Whether rows of `inner` elements are multiplied in pairs; otherwise they are converted to the type of arithmetic.
inline bool takes_pairs(DType dtype, int64_t inner) { return kPairs && dtype == DType::bf16 && inner % 2 == 0; }

template <class E>
using sum_t = either<kSame<E, pair>, float, E>;

// sums + the two products of each pair; the product of the second numbers is added first. The instruction takes numbers
// below 2^-126 as 0.
inline vfloat fma(vint a, vint b, vfloat sums) {
#ifdef __AVX512BF16__
  return (vfloat)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
  const auto high = [](vint v) { return reinterpret<vfloat>(v & int32_t(0xffff0000)); };
  return fma(high(a << 16), high(b << 16), fma(high(a), high(b), sums));
#endif
}

template <class M>
constexpr int64_t whole_panels(int64_t columns) {
  return round_up(columns, kPanel<M>);
}

template <class M>
inline vec<M> broadcast(const M* value) {
  return *value - vec<M>{};  // x - 0 is x for every number; compilers omit it
}
inline vint broadcast(const pair* value) { return vint{} + load_bits<int32_t>(value); }

// A packed matrix of `inner` rows: row k of panel p is at (p inner + k) kPanel. Columns beyond the matrix are zero.
template <class M>
struct Panels {
  M* data;
  int64_t inner;

  M* at(int64_t column, int64_t row) const { return data + (column / kPanel<M> * inner + row) * kPanel<M>; }
  Panels rows_from(int64_t row) const { return {at(0, row), inner}; }
};

// ---- packing

// Packs a matrix of `inner` rows of `columns` elements, multiplied by `factor`.
template <class T, class M = math_t<T>>
void pack(const T* from, int64_t stride, int64_t columns, M factor, Panels<M> to) {
  for (int64_t row = 0; row < to.inner; ++row) {
    const T* const source = from + row * stride;
    int64_t column = 0;
    for (; column + kLanes<M> <= columns; column += kLanes<M>)
      store(load(source + column) * factor, to.at(column, row) + column % kPanel<M>);
    if (column < columns) {
      store(load(source + column, int(columns - column)) * factor, to.at(column, row) + column % kPanel<M>);
      column += kLanes<M>;
    }
    if (column < whole_panels<M>(columns)) store(vec<M>{}, to.at(column, row) + column % kPanel<M>);
  }
}

// Packs a matrix with two neighbouring rows as one row of pairs. An odd last row is paired with zeros.
inline void pack_pairs(const bf16* from, int64_t stride, int64_t rows, int64_t columns, Panels<pair> to) {
  constexpr int L = kLanes<pair>;
  for (int64_t row = 0; row < rows; row += 2) {
    const bf16 *const first = from + row * stride, *const second = row + 1 < rows ? first + stride : nullptr;
    const auto at = [&](int64_t column) { return to.at(column, row / 2) + column % kPanel<pair>; };
    for_vectors<float>(columns, [&](int64_t column, auto n) {
      store(paired(halves(first + column, n), second ? halves(second + column, n) : vhalves{}), at(column));
    });
    const int64_t next = round_up(columns, L);
    if (next < whole_panels<pair>(columns)) store(vint{}, at(next));
  }
}

// Packs the transpose of a matrix of `columns` rows of `inner` elements.
template <class T, class M = math_t<T>>
void pack_transposed(const T* from, int64_t stride, int64_t columns, Panels<M> to) {
  constexpr int L = kLanes<M>;
  for (int64_t column = 0; column < whole_panels<M>(columns); column += L) {
    for (int64_t row = 0; row < to.inner; row += L) {
      const int elements = int(to.inner - row < L ? to.inner - row : L);
      vec<M> block[L];
      for (int i = 0; i < L; ++i) {
        const T* const source = from + (column + i) * stride + row;
        block[i] = column + i >= columns ? vec<M>{} : elements == L ? load(source) : load(source, elements);
      }
      transpose(block);
      for (int i = 0; i < elements; ++i) store(block[i], to.at(column, row + i) + column % kPanel<M>);
    }
  }
}

// ---- shared by all products

// What a product does with the values already in its result: it overwrites them, is added to them, or is added to them
// after each row is multiplied by its factor.
enum class Onto { nothing, sums, scaled };

template <Onto what, class M>
inline void put(vec<M> result, M* to, const M* factor) {
  if constexpr (what == Onto::sums) result += load(to);
  if constexpr (what == Onto::scaled) result = fma(load(to), broadcast(factor), result);
  store(result, to);
}

// The prefetches that tiles issue while they compute: each cache line that is read next, once, spread evenly over the
// tiles' steps. They come after the loads of these steps: a core can wait for some 16 cache lines at a time, and if
// prefetches took all of these places, the loads would wait for memory too.
struct Ahead {
  static constexpr int64_t kLine = 64, kPart = 1 << 12;  // kLine: bytes; `step` and `due`: lines times kPart
  const char* from;
  int64_t step;
  int64_t due = 0;

  static Ahead of_bytes(const void* from, int64_t bytes_a_step) {
    return {static_cast<const char*>(from), bytes_a_step * (kPart / kLine)};
  }
  template <int locality = 2>  // __builtin_prefetch's: 3 is the first-level cache, 2 the second
  void fetch(int64_t steps) {
    for (due += steps * step; due >= kPart; due -= kPart, from += kLine) __builtin_prefetch(from, 0, locality);
  }
  // The steps from one fetch to the next: counting in every step would take registers, and long intervals would request
  // too many lines at once.
  int64_t undisturbed() const { return step <= kPart / 8 ? 64 : 8; }
  // The prefetches left after `steps` steps.
  Ahead after(int64_t steps) const { return {from + steps * step / kPart * kLine, step}; }
  // The prefetches of a tile of `count` of the `rows` rows, from `row` on, in proportion to its share of the work.
  Ahead share(int64_t row, int64_t count, int64_t rows, int64_t steps) const {
    return {from + steps * step / kPart * row / rows * kLine, step * count / rows};
  }
};
// Like Ahead, but fetches `width` bytes of each row; rows are `stride` bytes apart.
struct RowsAhead {
  const char* from;
  int64_t stride, width, step;  // step: lines that a step of a tile fetches, times Ahead::kPart
  int64_t at = 0, due = 0;

  static int64_t lines(int64_t width) { return divide_up(width, Ahead::kLine); }
  // steps: how many steps the prefetches of all rows are spread over.
  template <class T>
  static RowsAhead of(const T* from, int64_t stride, int64_t rows, int64_t width, int64_t steps) {
    constexpr int64_t kBytes = sizeof(T);
    const int64_t step = Ahead::kPart * rows * lines(width * kBytes) / steps;
    return {reinterpret_cast<const char*>(from), stride * kBytes, width * kBytes, step};
  }
  void fetch(int64_t steps) {
    for (due += steps * step; due >= Ahead::kPart; due -= Ahead::kPart) {
      __builtin_prefetch(from + at, 0, 2);
      at += Ahead::kLine;
      if (at >= width) at = 0, from += stride;
    }
  }
  int64_t undisturbed() const { return step <= Ahead::kPart / 8 ? 64 : 8; }
  RowsAhead share(int64_t row, int64_t count, int64_t rows, int64_t steps) const {
    const int64_t before = steps * step / Ahead::kPart * row / rows;
    if (!before) return {from, stride, width, step * count / rows};  // also where there are no lines
    return {from + before / lines(width) * stride, stride, width, step * count / rows,
            before % lines(width) * Ahead::kLine};
  }
};
// Prefetches of a panel and of rows at a time.
struct BothAhead {
  Ahead panel;
  RowsAhead rows;
  void fetch(int64_t steps) { panel.fetch(steps), rows.fetch(steps); }
  int64_t undisturbed() const { return least(panel.undisturbed(), rows.undisturbed()); }
  BothAhead share(int64_t row, int64_t count, int64_t all, int64_t steps) const {
    return {panel.share(row, count, all, steps), rows.share(row, count, all, steps)};
  }
};
struct NothingAhead {
  static int64_t undisturbed() { return 1 << 10; }
  void fetch(int64_t) {}
  NothingAhead after(int64_t) const { return {}; }
  NothingAhead share(int64_t, int64_t, int64_t, int64_t) const { return {}; }
};

}  // namespace fastbert::cpu::FB_ISA
