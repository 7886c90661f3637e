// Products on the matrix unit, of pairs of bf16, and of int8, four to an element. A block of the result is two by two
// tiles: four tiles of factors are loaded for four multiplications, as many as keep the unit busy.
#pragma once

#include "panels.h"
#include "tiles.h"

namespace fastbert::cpu::FB_ISA {

// Sums of tiles, which pass through here as floats; where four int8 are an element, their bits are an int32_t's.
template <Onto what, class E>
inline void put_sums(const float* from, float* to, const float* factor) {
  if constexpr (kSame<E, pair>) return put<what>(load(from), to, factor);
  vint sums = load_bits<vint>(from);
  if constexpr (what == Onto::sums) sums += load_bits<vint>(to);
  __builtin_memcpy(to, &sums, sizeof sums);
}

// c (rows, a panel) = a (rows, inner) b, of at most two tiles of rows. E: pairs, or an int32_t for four int8.
template <Onto what, bool both, class E, class A>
void tile_block(int64_t rows, const E* a, int64_t stride, const E* b, int64_t inner, float* c, int64_t c_stride,
                const float* factors, A ahead) {
  constexpr int64_t R = kTileRows, L = kTileColumns, kSteps = kTileSteps;
  vint room[R];
  tile_zero<0>(), tile_zero<1>();
  if constexpr (both) tile_zero<2>(), tile_zero<3>();
  for (int64_t k = 0; k < inner; k += kSteps) {
    const int64_t steps = least(kSteps, inner - k);
    ahead.fetch(steps);
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
      put_sums<what, E>(sums + row * 2 * L + i, c + row * c_stride + i, factors + row);
}

// The same of any number of rows.
constexpr int64_t kRowsAtOnce = 2 * kTileRows;
template <Onto what, class E, class A>
void tile_product(int64_t rows, int64_t inner, const E* a, int64_t stride, const E* b, float* c, int64_t c_stride,
                  const float* factors, A ahead) {
  for (int64_t row = 0; row < rows; row += kRowsAtOnce) {
    const int64_t here = least(kRowsAtOnce, rows - row);
    const auto block = here > kTileRows ? tile_block<what, true, E, A> : tile_block<what, false, E, A>;
    block(here, a + row * stride, stride, b, inner, c + row * c_stride, c_stride, factors + row,
          ahead.share(row, here, rows, inner));
  }
}

// A matrix of at most kTurned rows and columns, a column's elements being neighbours, as rows that are kTurned apart,
// in whole vectors.
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

// c (rows, whole panels) = a (rows, inner) b, where a lies across: some of its rows are turned for all columns. inner:
// at most kTurned.
template <Onto what>
void tile_product_across(int64_t rows, int64_t columns, int64_t inner, const pair* a, int64_t stride, Panels<pair> b,
                         float* c, int64_t c_stride) {
  alignas(64) pair turned[kTurned * kTurned];
  for (int64_t row = 0; row < rows; row += kTurned) {
    const int64_t here = least(kTurned, rows - row);
    turn(a + row, stride, here, inner, turned);
    for (int64_t column = 0; column < columns; column += kPanel<pair>)
      tile_product<what>(here, inner, turned, kTurned, b.at(column, 0), c + row * c_stride + column, c_stride, nullptr,
                         NothingAhead{});
  }
}

}  // namespace fastbert::cpu::FB_ISA
