// Products on the matrix unit, of pairs of bf16 or of int8 with four numbers in an element. A block of the result is
// two by two tiles: four tiles of factors are loaded for four multiplications, which is enough to keep the unit busy.
#pragma once

#include "panels.h"
#include "tiles.h"

namespace fastbert::cpu::FB_ISA {

constexpr int64_t kBlockRows = 2 * kTileRows, kBlockColumns = 2 * kTileColumns;

// Rows of a left factor with elements E. Either the elements of a row are contiguous, and rows are `stride` apart; or
// (in_tiles) each tile is contiguous, row by row, and followed by the next tile of the same rows, which have `stride`
// elements each, a multiple of a tile's. Such tiles load faster. The tiles of the last rows are whole, too; what fills
// them does not matter.
template <bool in_tiles, class E>
struct TileRows {
  const E* data;
  int64_t stride;

  // The part that begins at `row` and `step`, where a tile begins.
  TileRows from(int64_t row, int64_t step) const {
    return {data + row * stride + step * (in_tiles ? kTileRows : 1), stride};
  }
  template <int tile>
  void load(int64_t rows, int64_t steps, vint (&room)[kTileRows]) const {
    if constexpr (in_tiles) return tile_load<tile>(data, kTileSteps * int64_t(sizeof(E)));
    load_tile<tile>(data, stride, rows, steps, room);
  }
};

// Loads or stores the four tiles of sums, or only the upper two.
template <bool both>
inline void load_sums(const float* from, int64_t stride) {
  const int64_t apart = stride * int64_t(sizeof(float));
  tile_load<0>(from, apart), tile_load<1>(from + kTileColumns, apart);
  if constexpr (!both) return;
  tile_load<2>(from + kTileRows * stride, apart), tile_load<3>(from + kTileRows * stride + kTileColumns, apart);
}
template <bool both>
inline void store_sums(float* to, int64_t stride) {
  const int64_t apart = stride * int64_t(sizeof(float));
  tile_store<0>(to, apart), tile_store<1>(to + kTileColumns, apart);
  if constexpr (!both) return;
  tile_store<2>(to + kTileRows * stride, apart), tile_store<3>(to + kTileRows * stride + kTileColumns, apart);
}

// The four multiplications of `steps` steps of a and b, or only the upper two.
template <bool both, bool in_tiles, class E>
[[gnu::always_inline]] inline void multiply_tiles(TileRows<in_tiles, E> a, int64_t rows, const E* b, int64_t steps,
                                                  vint (&room)[kTileRows]) {
  constexpr int64_t R = kTileRows, L = kTileColumns;
  load_tile<6>(b, 2 * L, steps, L, room), load_tile<7>(b + L, 2 * L, steps, L, room);
  a.template load<4>(both ? R : rows, steps, room);
  tile_dot<0, 4, 6>(E{}), tile_dot<1, 4, 7>(E{});
  if constexpr (!both) return;
  a.from(R, 0).template load<5>(rows - R, steps, room);
  tile_dot<2, 5, 6>(E{}), tile_dot<3, 5, 7>(E{});
}

// c (rows, a panel) = a (rows, inner) b, for at most two tiles of rows. E: pair, or int32_t for four int8, whose int32
// sums are passed as floats. With Onto::sums the tiles start from the sums in c. If a is in tiles, c has room for whole
// tiles. The loop must not store anything, not even a counter on the stack: loads of tiles wait for stores, and the
// product would take 1.15 times as long.
template <Onto what, bool both, bool in_tiles, class E, class A>
[[gnu::always_inline]] inline void tile_block(int64_t rows, TileRows<in_tiles, E> a, const E* b, int64_t inner,
                                              float* c, int64_t c_stride, const float* factors, A ahead) {
  constexpr int64_t R = kTileRows, L = kTileColumns, kSteps = kTileSteps;
  const bool whole = in_tiles || (what != Onto::scaled && rows % R == 0);
  alignas(64) float near[kBlockRows * kBlockColumns];
  vint room[R];
  if constexpr (what == Onto::sums) {
    if (!whole) {
      __builtin_memset(near, 0, sizeof near);
      for (int64_t row = 0; row < rows; ++row)
        __builtin_memcpy(near + row * kBlockColumns, c + row * c_stride, kBlockColumns * sizeof(float));
    }
    load_sums<both>(whole ? c : near, whole ? c_stride : kBlockColumns);
  } else {
    tile_zero<0>(), tile_zero<1>();
    if constexpr (both) tile_zero<2>(), tile_zero<3>();
  }
  for (; inner >= kSteps; inner -= kSteps, a = a.from(0, kSteps), b += kSteps * 2 * L) {
    multiply_tiles<both>(a, rows, b, kSteps, room);
    ahead.fetch(kSteps);
  }
  if (inner) multiply_tiles<both>(a, rows, b, inner, room), ahead.fetch(inner);
  if (whole) return store_sums<both>(c, c_stride);
  store_sums<both>(near, kBlockColumns);
  constexpr Onto how = what == Onto::scaled ? what : Onto::nothing;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < kBlockColumns; i += L)
      put<how>(load(near + row * kBlockColumns + i), c + row * c_stride + i, factors + row);
}

// The same for any number of rows.
template <Onto what, bool in_tiles, class E, class A>
void tile_blocks(int64_t rows, TileRows<in_tiles, E> a, const E* b, int64_t inner, float* c, int64_t c_stride,
                 const float* factors, A ahead) {
  for (int64_t row = 0; row < rows; row += kBlockRows) {
    const int64_t here = least(kBlockRows, rows - row);
    const auto part = a.from(row, 0);
    const A share = ahead.share(row, here, rows, inner);
    if (here > kTileRows)
      tile_block<what, true>(here, part, b, inner, c + row * c_stride, c_stride, factors + row, share);
    else
      tile_block<what, false>(here, part, b, inner, c + row * c_stride, c_stride, factors + row, share);
  }
}

// The same, one part of the inner dimension at a time, so that this part of two tiles of rows and of the panel stays in
// the first-level cache. A panel that is read only once is taken whole, unless a is in tiles, which is faster in parts
// even then. Whether there are parts may depend on the number of rows only where sums are resumed, which gives the same
// bits. Onto::scaled adds the first part to c times a factor, so that part is the same for any number of rows.
template <Onto what, bool in_tiles, class E, class A>
void tile_product(int64_t rows, int64_t inner, TileRows<in_tiles, E> a, const E* b, float* c, int64_t c_stride,
                  const float* factors, A ahead) {
  const int64_t part = in_tiles || what == Onto::scaled || rows > kBlockRows ? 128 : inner + 1;
  for (int64_t k = 0; k == 0 || k < inner; k += part, b += part * kBlockColumns) {
    const auto add = k ? tile_blocks<Onto::sums, in_tiles, E, A> : tile_blocks<what, in_tiles, E, A>;
    add(rows, a.from(0, k), b, least(part, inner - k), c, c_stride, factors, ahead.after(k));
  }
}

// Copies a matrix of at most kTurned rows and columns, whose columns are contiguous, to rows that are contiguous and
// kTurned elements apart. It writes whole vectors.
constexpr int64_t kTurned = 4 * kTileRows;
inline void turn(const pair* from, int64_t stride, int64_t rows, int64_t columns, pair* to) {
  constexpr int64_t L = kLanes<pair>;
  for (int64_t row = 0; row < rows; row += L) {
    for (int64_t column = 0; column < columns; column += L) {
      vint block[L];
      for (int64_t i = 0; i < L; ++i)
        block[i] = column + i < columns ? load(from + (column + i) * stride + row, int(least(L, rows - row))) : vint{};
      transpose(block);
      for (int64_t i = 0; i < L; ++i) store(block[i], to + (row + i) * kTurned + column);
    }
  }
}

// c (rows, whole panels) = a (rows, inner) b, where the columns of a are contiguous: kTurned of its rows at a time are
// made contiguous and serve all columns of b. inner: at most kTurned.
template <Onto what>
void tile_product_across(int64_t rows, int64_t columns, int64_t inner, const pair* a, int64_t stride, Panels<pair> b,
                         float* c, int64_t c_stride) {
  alignas(64) pair turned[kTurned * kTurned];
  for (int64_t row = 0; row < rows; row += kTurned) {
    const int64_t here = least(kTurned, rows - row);
    turn(a + row, stride, here, inner, turned);
    for (int64_t column = 0; column < columns; column += kPanel<pair>)
      tile_product<what>(here, inner, TileRows<false, pair>{turned, kTurned}, b.at(column, 0),
                         c + row * c_stride + column, c_stride, nullptr, NothingAhead{});
  }
}

}  // namespace fastbert::cpu::FB_ISA
