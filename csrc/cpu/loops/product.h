// Matrix products between blocks that stay in the caches. Every element is a chain of fused multiply-adds in the order
// of the inner dimension, so its bits depend on neither its neighbours nor the number of threads. What is there already
// is added at the end: one chain through all blocks would lose digits.
//
// Elements are floats, doubles, or pairs of bf16, neighbours in the inner dimension, which one instruction multiplies
// and adds to a float; then the inner dimension is counted in pairs.
//
// The right factor is packed into panels of a few columns, so that a row of one is a few whole vectors; a tile of the
// result, a few rows of such a panel, is added up in registers.
#pragma once

#include "tiles.h"

namespace fastbert::cpu::FB_ISA {

template <class M>
constexpr int64_t kPanel = 2 * kLanes<M>;  // columns
#ifdef __AVX512F__
constexpr int kTile = 12;  // rows: 24 sums in 32 registers
#else
constexpr int kTile = 6;  // 12 in 16
#endif

// Whether pairs are multiplied faster than floats; in plain C++ they are not, but tests run them so.
#if defined(__AVX512BF16__) || (FB_VECTOR_BYTES == 64 && !defined(__AVX512F__))
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

// Whether rows of so many elements are taken in pairs; else they are in the type of arithmetic.
inline bool takes_pairs(DType dtype, int64_t inner) { return kPairs && dtype == DType::bf16 && inner % 2 == 0; }

template <class E>
using sum_t = either<kSame<E, pair>, float, E>;

// sums + the products of both numbers of a pair, the second first. To the instruction numbers below 2^-126 are 0.
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
  return (columns + kPanel<M> - 1) / kPanel<M> * kPanel<M>;
}

template <class M>
inline vec<M> broadcast(const M* value) {
  return *value - vec<M>{};  // which no number changes, and compilers leave out
}
inline vint broadcast(const pair* value) { return vint{} + load_bits<int32_t>(value); }

// A packed matrix of `inner` rows: row k of panel p is at (p inner + k) kPanel. What is beyond its columns is zero.
template <class M>
struct Panels {
  M* data;
  int64_t inner;

  M* at(int64_t column, int64_t row) const { return data + (column / kPanel<M> * inner + row) * kPanel<M>; }
  Panels rows_from(int64_t row) const { return {at(0, row), inner}; }
};

// ---- packing

// The matrix itself: `inner` rows of `columns` elements, times `factor`.
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

// The matrix itself, its rows in pairs; an odd one's neighbour is zeros.
inline void pack_pairs(const bf16* from, int64_t stride, int64_t rows, int64_t columns, Panels<pair> to) {
  constexpr int L = kLanes<pair>;
  for (int64_t row = 0; row < rows; row += 2) {
    const bf16 *const first = from + row * stride, *const second = row + 1 < rows ? first + stride : nullptr;
    const auto at = [&](int64_t column) { return to.at(column, row / 2) + column % kPanel<pair>; };
    for_vectors<float>(columns, [&](int64_t column, auto n) {
      store(paired(halves(first + column, n), second ? halves(second + column, n) : vhalves{}), at(column));
    });
    const int64_t next = (columns + L - 1) / L * L;
    if (next < whole_panels<pair>(columns)) store(vint{}, at(next));
  }
}

template <class V>
constexpr int kWidth = sizeof(V) / sizeof(V{}[0]);

// The lanes of a and b from `first` on, in turn.
template <class V>
inline V alternate(V a, V b, int first) {
  V result;
#if defined(__GNUC__) && !defined(__clang__)
  decltype(a < b) lanes;
  for (int i = 0; i < kWidth<V>; ++i) lanes[i] = first + i / 2 + i % 2 * kWidth<V>;
  result = __builtin_shuffle(a, b, lanes);
#else
  for (int i = 0; i < kWidth<V>; ++i) result[i] = (i % 2 ? b : a)[first + i / 2];
#endif
  return result;
}

// Each round takes vectors that are half of all apart; after log2 of them, rows are columns.
template <class V>
inline void transpose(V (&rows)[kWidth<V>]) {
  constexpr int L = kWidth<V>;
  for (int round = 1; round < L; round *= 2) {
    V next[L];
    for (int i = 0; i < L / 2; ++i) {
      next[2 * i] = alternate(rows[i], rows[i + L / 2], 0);
      next[2 * i + 1] = alternate(rows[i], rows[i + L / 2], L / 2);
    }
    for (int i = 0; i < L; ++i) rows[i] = next[i];
  }
}

// The transpose of a matrix of `columns` rows of `inner` elements.
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

// ---- products

// What becomes of what is there: a product overwrites it, is added to it, or to that times a factor of its row.
enum class Onto { nothing, sums, scaled };

// The left factor: a row's elements are neighbours, or (`across`) a column's.
template <bool across, class E>
struct Left {
  const E* data;
  int64_t stride;

  const E* at(int64_t row) const { return across ? data + row : data + row * stride; }
  int64_t apart() const { return (across ? 1 : stride) * int64_t(sizeof(E)); }  // bytes from row to row
  int64_t step() const { return (across ? stride : 1) * int64_t(sizeof(E)); }   // and from k to k
};

// Where a tile's rows are at one k. One address for three rows: compilers, which would keep one for each, run out of
// registers.
template <int rows>
class TileRows {
 public:
  TileRows(const void* first, int64_t apart) : apart_(apart) {
    for (int i = 0; i < kCount; ++i) first_[i] = static_cast<const char*>(first) + 3 * i * apart;
  }
  template <class E>
  const E* at(int row) const {
    return reinterpret_cast<const E*>(first_[row / 3] + row % 3 * apart_);
  }
  void advance(int64_t bytes) {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      first_[i] += bytes;
      asm("" : "+r"(first_[i]));  // so that they are not computed from each other
    }
  }

 private:
  static constexpr int kCount = (rows + 2) / 3;
  const char* first_[kCount];
  const int64_t apart_;
};

// What tiles ask memory for while they compute: what is read next, a little in each of their steps.
struct Ahead {
  const char* from;
  int64_t step;

  void fetch(int64_t k) const { __builtin_prefetch(from + k * step, 0, 2); }
  void fetch(int64_t k, int64_t steps) const {
    for (int64_t at = k * step; at < (k + steps) * step; at += 64) __builtin_prefetch(from + at, 0, 2);
  }
  Ahead after(int64_t steps) const { return {from + steps * step, step}; }
};
struct NothingAhead {
  void fetch(int64_t) const {}
  void fetch(int64_t, int64_t) const {}
  NothingAhead after(int64_t) const { return {}; }
};

template <Onto what, class M>
inline void put(vec<M> result, M* to, const M* factor) {
  if constexpr (what == Onto::sums) result += load(to);
  if constexpr (what == Onto::scaled) result = fma(load(to), broadcast(factor), result);
  store(result, to);
}

template <int rows, Onto what, bool across, class E, class A = NothingAhead, class M = sum_t<E>>
inline void tile(Left<across, E> a, const E* b, int64_t inner, M* c, int64_t stride, const M* factors, A ahead = {}) {
  using V = vec<M>;
  constexpr int L = kLanes<E>;
  V sums[rows][2]{};
  TileRows<rows> left_rows(a.data, a.apart());
  for (int64_t k = 0; k < inner; ++k, b += 2 * L, left_rows.advance(a.step())) {
    const vec<E> first = load(b), second = load(b + L);
    ahead.fetch(k);
#pragma GCC unroll 12
    for (int row = 0; row < rows; ++row) {
      const vec<E> left = broadcast(left_rows.template at<E>(row));
      sums[row][0] = fma(left, first, sums[row][0]);
      sums[row][1] = fma(left, second, sums[row][1]);
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < rows; ++row)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) put<what>(sums[row][half], c + row * stride + half * L, factors + row);
}

// Calls f(count, row) for tiles of rows; count is known when compiling.
template <class F>
inline void for_tiles(int64_t rows, const F& f) {
  int64_t row = 0;
  const auto run = [&](auto count) {
    for (; row + count <= rows; row += count) f(count, row);
  };
  run(Slot<kTile>{}), run(Slot<4>{}), run(Slot<2>{}), run(Slot<1>{});
}

// The rows that are multiplied with a panel at once.
template <class E>
constexpr int64_t kRowsAtOnce = kTiles && (kSame<E, pair> || kSame<E, int32_t>) ? 2 * kTileRows : kTile;

// The same of at most two tiles of rows, on the matrix unit. E: pairs, or an int32_t for four int8, whose sums are
// integers in the place of floats.
template <Onto what, bool both, class E, class A>
void tile_block(int64_t rows, const E* a, int64_t stride, const E* b, int64_t inner, float* c, int64_t c_stride,
                const float* factors, A ahead) {
  constexpr int64_t R = kTileRows, L = kTileColumns, kSteps = kTileSteps;
  vint room[R];
  tile_zero<0>(), tile_zero<1>();
  if constexpr (both) tile_zero<2>(), tile_zero<3>();
  for (int64_t k = 0; k < inner; k += kSteps) {
    const int64_t steps = least(kSteps, inner - k);
    ahead.fetch(k, steps);
    load_tile<6>(b + k * 2 * L, 2 * L, steps, L, room), load_tile<7>(b + k * 2 * L + L, 2 * L, steps, L, room);
    load_tile<4>(a + k, stride, least(R, rows), steps, room);
    tile_dot<0, 4, 6>(E{}), tile_dot<1, 4, 7>(E{});
    if constexpr (both) {
      load_tile<5>(a + R * stride + k, stride, rows - R, steps, room);
      tile_dot<2, 5, 6>(E{}), tile_dot<3, 5, 7>(E{});
    }
  }
  const auto store_all = [](float* to, int64_t to_stride) {
    const int64_t apart = to_stride * int64_t(sizeof(float));
    tile_store<0>(to, apart), tile_store<1>(to + L, apart);
    if constexpr (both) tile_store<2>(to + R * to_stride, apart), tile_store<3>(to + R * to_stride + L, apart);
  };
  if (what == Onto::nothing && rows % R == 0) return store_all(c, c_stride);
  alignas(64) float sums[2 * R * 2 * L];
  store_all(sums, 2 * L);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < 2 * L; i += L)
      put<what>(load(sums + row * 2 * L + i), c + row * c_stride + i, factors + row);
}

// With one panel of b.
template <Onto what, class E, class A>
void tile_product(int64_t rows, int64_t inner, const E* a, int64_t stride, const E* b, float* c, int64_t c_stride,
                  const float* factors, A ahead) {
  for (int64_t row = 0; row < rows; row += kRowsAtOnce<E>, ahead = ahead.after(inner)) {
    const int64_t here = least(kRowsAtOnce<E>, rows - row);
    const auto block = here > kTileRows ? tile_block<what, true, E, A> : tile_block<what, false, E, A>;
    block(here, a + row * stride, stride, b, inner, c + row * c_stride, c_stride, factors + row, ahead);
  }
}

// At most kTurned rows and columns of a matrix, a column's elements being neighbours, as rows of kTurned, in whole
// vectors.
constexpr int64_t kTurned = 4 * kTileRows;
inline void turn(const pair* from, int64_t stride, int64_t rows, int64_t columns, pair* to) {
  constexpr int64_t L = kLanes<pair>;
  for (int64_t row = 0; row < rows; row += L) {
    for (int64_t column = 0; column < columns; column += L) {
      vint block[L];
      for (int64_t i = 0; i < L; ++i)
        block[i] = column + i < columns ? some(from + (column + i) * stride + row, least(L, rows - row)) : vint{};
      transpose(block);
      for (int64_t i = 0; i < L; ++i) store(block[i], to + (row + i) * kTurned + column);
    }
  }
}

// Turned parts of the left factor, each with all columns.
template <Onto what>
void tile_product_across(int64_t rows, int64_t columns, int64_t inner, const pair* a, int64_t stride, Panels<pair> b,
                         float* c, int64_t c_stride, const float* factors) {
  alignas(64) pair turned[kTurned * kTurned];
  for (int64_t row = 0; row < rows; row += kTurned) {
    for (int64_t k = 0; k == 0 || k < inner; k += kTurned) {
      const int64_t here = least(kTurned, rows - row), steps = least(kTurned, inner - k);
      turn(a + k * stride + row, stride, here, steps, turned);
      const auto add = k ? tile_product<Onto::sums, pair, NothingAhead> : tile_product<what, pair, NothingAhead>;
      for (int64_t column = 0; column < columns; column += kPanel<pair>)
        add(here, steps, turned, kTurned, b.at(column, k), c + row * c_stride + column, c_stride, factors + row, {});
    }
  }
}

// c (rows, whole panels) = a (rows, inner) b, from its first `inner` rows. ahead: of the tiles of one panel.
template <Onto what, bool across, class E, class A = NothingAhead>
void product(int64_t rows, int64_t columns, int64_t inner, Left<across, E> a, Panels<E> b, sum_t<E>* c, int64_t stride,
             const sum_t<E>* factors = nullptr, A ahead = {}) {
  if constexpr (kTiles && kSame<E, pair> && across)
    return tile_product_across<what>(rows, columns, inner, a.data, a.stride, b, c, stride, factors);
  for (int64_t column = 0; column < columns; column += kPanel<E>) {
    if constexpr (kTiles && kSame<E, pair> && !across) {
      tile_product<what>(rows, inner, a.data, a.stride, b.at(column, 0), c + column, stride, factors, ahead);
      continue;
    }
    A next = ahead;
    for_tiles(rows, [&](auto count, int64_t row) {
      tile<count, what>(Left<across, E>{a.at(row), a.stride}, b.at(column, 0), inner, c + row * stride + column, stride,
                        factors + row, next);
      next = next.after(inner);
    });
  }
}

}  // namespace fastbert::cpu::FB_ISA
