// Matrix products of blocks that stay in the caches. Every element of the result is one chain of fused multiply-adds in
// the order of the inner dimension (on the matrix unit, a chain of sums of a few products each), so its bits depend on
// neither its neighbours nor the number of threads. A value that is already in the result is added at the end, because
// one chain through all blocks would lose precision. (The matrix unit instead starts from the existing sums: what that
// loses is small beside bf16's rounding, and int8 sums are exact.)
//
// A tile of the result, a few rows by one panel of the right factor or by the first vector of one, is accumulated in
// registers.
#pragma once

#include "tile_product.h"

namespace fastbert::cpu::FB_ISA {

// The left factor. The elements of a row are contiguous or, with `across`, the elements of a column.
template <bool across, class E>
struct Left {
  const E* data;
  int64_t stride;

  const E* at(int64_t row) const { return across ? data + row : data + row * stride; }
  void advance() { data += across ? stride : 1; }  // to the next k
};

// Rows of the left factor for a tile: pointers to every fourth row, as the next three are one to three strides away.
// From one pointer compilers would compute an offset for each row, and with 12 rows they keep one in a vector register:
// moving it back in each step took up to 2 % of the time of a product (Zen 4). Across, rows are neighbours, and one
// pointer does.
template <int rows, bool across, class E>
struct TileLeft {
  static constexpr int kApart = across ? rows : 4;
  Left<across, E> from[divide_up(rows, kApart)];

  explicit TileLeft(Left<across, E> left) {
    for (int row = 0; row < rows; row += kApart) {
      from[row / kApart] = {left.at(row), left.stride};
      if constexpr (!across) asm("" : "+r"(from[row / kApart].data));  // hides what the pointers have in common
    }
  }
  const E* at(int row) const { return from[row / kApart].at(row % kApart); }
  void advance() {
    for (Left<across, E>& left : from) left.advance();
  }
};

template <int rows, int vectors, Onto what, bool across, class E, class A = NothingAhead, class M = sum_t<E>>
inline void tile(Left<across, E> a, const E* b, int64_t inner, M* c, int64_t stride, const M* factors, A ahead = {}) {
  using V = vec<M>;
  constexpr int L = kLanes<E>;
  TileLeft<rows, across, E> left_rows(a);
  V sums[rows][vectors]{};
  for (int64_t k = 0, end; k < inner; k = end) {
    end = least(k + ahead.undisturbed(), inner);
    for (int64_t step = k; step < end; ++step, b += 2 * L, left_rows.advance()) {
      const vec<E> right[2]{load(b), vectors == 2 ? load(b + L) : vec<E>{}};
#pragma GCC unroll 12
      for (int row = 0; row < rows; ++row) {
        const vec<E> left = broadcast(left_rows.at(row));
#pragma GCC unroll 2
        for (int half = 0; half < vectors; ++half) sums[row][half] = fma(left, right[half], sums[row][half]);
      }
    }
    ahead.fetch(end - k);
  }
#pragma GCC unroll 12
  for (int row = 0; row < rows; ++row)
#pragma GCC unroll 2
    for (int half = 0; half < vectors; ++half) put<what>(sums[row][half], c + row * stride + half * L, factors + row);
}

// Calls f(count, row) for each tile of `count` rows; count is a compile-time constant. A tile of two rows takes as long
// as one of four, so where tiles have up to six rows, eight or nine rows become two tiles of four, not six and two.
template <int most = kTile, class F>
inline void for_tiles(int64_t rows, const F& f) {
  int64_t row = 0;
  const auto run = [&](auto count) {
    for (; row + count <= rows && (count != 6 || (rows - row) / 2 != 4); row += count) f(count, row);
  };
  if constexpr (most != kTile) run(Slot<most>{});
  run(Slot<kTile>{}), run(Slot<4>{}), run(Slot<2>{}), run(Slot<1>{});
}

// Rows of a tile one vector wide: enough sums to hide a multiply-add's latency. Not more than in other tiles where the
// rows would share one set of the first-level cache and exceed its eight ways.
constexpr int kNarrowTile = 12;

// c (rows, whole panels) = a (rows, inner) times the first `inner` rows of b. ahead: the prefetches during each panel.
// vectors: 1 if only the first vector of each panel is wanted; that of c beside it may or may not be written.
template <Onto what, bool across, class E, class A = NothingAhead, int vectors = 2>
void product(int64_t rows, int64_t columns, int64_t inner, Left<across, E> a, Panels<E> b, sum_t<E>* c, int64_t stride,
             const sum_t<E>* factors = nullptr, A ahead = {}) {
  if constexpr (kTiles && kSame<E, pair> && across) {
    static_assert(what != Onto::scaled);
    return tile_product_across<what>(rows, columns, inner, a.data, a.stride, b, c, stride);
  }
  for (int64_t column = 0; column < columns; column += kPanel<E>) {
    const E* const panel = b.at(column, 0);
    if constexpr (kTiles && kSame<E, pair>) {
      tile_product<what>(rows, inner, TileRows<false, pair>{a.data, a.stride}, panel, c + column, stride, factors,
                         ahead);
    } else {
      const auto run = [&](auto count, int64_t row) {
        const Left<across, E> left{a.at(row), a.stride};
        tile<count, vectors, what>(left, panel, inner, c + row * stride + column, stride, factors + row,
                                   ahead.share(row, count, rows, inner));
      };
      if (vectors == 1 && a.stride * int64_t(sizeof(E)) % 4096 != 0)
        for_tiles<kNarrowTile>(rows, run);
      else
        for_tiles(rows, run);
    }
  }
}

}  // namespace fastbert::cpu::FB_ISA
