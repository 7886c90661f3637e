// Matrix products of int8 numbers with int32 sums. Sums are exact: any order and any instruction set gives the same.
//
// A row of the left factor consists of groups of 32 bits: two int16, or four uint8 (VNNI, and plain C++) that hold the
// int8 + kOffset. One instruction multiplies a group with as many numbers of each channel and adds up the products.
// A tile of the result, a few rows by one panel of channels, is accumulated in registers.
#pragma once

#include "product.h"

namespace fastbert::cpu::FB_ISA {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__)

using Left8 = uint8_t;
constexpr int kOffset = 128;

// Loads four int8 weights of each channel.
inline vint load_group(const int8_t* weights) { return load_bits<vint>(weights); }

// sums + the four products of each lane.
inline vint dot(vint left, vint weights, vint sums) {
#ifdef __AVX512VNNI__
  return (vint)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)left, (__m512i)weights);
#elif defined(__AVXVNNI__)
  return (vint)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)left, (__m256i)weights);
#else
  for (int i = 0; i < 4; ++i) sums += (left >> (8 * i) & 255) * (weights << (24 - 8 * i) >> 24);
  return sums;
#endif
}

#else

using Left8 = int16_t;
constexpr int kOffset = 0;

#ifdef __AVX512F__
inline vint load_group(const int8_t* weights) { return (vint)_mm512_cvtepi8_epi16(load_bits<__m256i>(weights)); }
inline vint dot(vint left, vint weights, vint sums) {
  return sums + (vint)_mm512_madd_epi16((__m512i)left, (__m512i)weights);
}
#else
inline vint load_group(const int8_t* weights) { return (vint)_mm256_cvtepi8_epi16(load_bits<__m128i>(weights)); }
inline vint dot(vint left, vint weights, vint sums) {
  return sums + (vint)_mm256_madd_epi16((__m256i)left, (__m256i)weights);
}
#endif

#endif

constexpr int kGroup = 4 / sizeof(Left8);

constexpr int64_t whole_groups(int64_t inner) { return round_up(inner, kGroup); }

// The layout of the left factor: how many numbers a row takes, where a row begins, and where in it the i-th number is.
// For the matrix unit rows are stored in tiles (TileRows).
constexpr int64_t kTileBytes = kTileSteps * 4;
constexpr int64_t left8_stride(int64_t inner) { return kTiles ? round_up(inner, kTileBytes) : whole_groups(inner); }
constexpr int64_t left8_row(int64_t row, int64_t stride) {
  return kTiles ? row / kTileRows * kTileRows * stride + row % kTileRows * kTileBytes : row * stride;
}
constexpr int64_t left8_at(int64_t i) { return kTiles ? i / kTileBytes * kTileBytes * kTileRows + i % kTileBytes : i; }

template <int rows>
inline void tile8(const Left8* a, int64_t stride, const int8_t* b, int64_t inner, int32_t* c, int64_t c_stride,
                  Ahead ahead) {
  constexpr int L = kLanes<float>;
  TileLeft<rows, false, pair> left_rows({reinterpret_cast<const pair*>(a), stride / kGroup});
  vint sums[rows][2]{};
  for (int64_t k = 0, end; k < inner; k = end) {
    end = least(k + ahead.undisturbed() * kGroup, inner);
    for (int64_t step = k; step < end; step += kGroup, b += 2 * L * kGroup, left_rows.advance()) {
      const vint first = load_group(b), second = load_group(b + L * kGroup);
#pragma GCC unroll 12
      for (int row = 0; row < rows; ++row) {
        const vint left = broadcast(left_rows.at(row));
        sums[row][0] = dot(left, first, sums[row][0]);
        sums[row][1] = dot(left, second, sums[row][1]);
      }
    }
    ahead.fetch(end - k);
  }
#pragma GCC unroll 12
  for (int row = 0; row < rows; ++row)
    for (int half = 0; half < 2; ++half)
      __builtin_memcpy(c + row * c_stride + half * L, &sums[row][half], sizeof(vint));
}

// c (rows, a panel) = a (rows, inner) times a panel of b; inner is a multiple of kGroup. Meanwhile a panel at `next` is
// prefetched. On the matrix unit a begins at the first row of a tile, and c has room for whole tiles.
inline void product8(int64_t rows, int64_t inner, const Left8* a, int64_t stride, const int8_t* b, int32_t* c,
                     int64_t c_stride, const void* next) {
  if constexpr (kTiles) {  // tiles take four int8 as one element
    const auto fours = [](const void* data) { return static_cast<const int32_t*>(data); };
    return tile_product<Onto::nothing>(rows, inner / 4, TileRows<true, int32_t>{fours(a), stride / 4}, fours(b),
                                       reinterpret_cast<float*>(c), c_stride, nullptr,
                                       Ahead::of_bytes(next, 4 * kPanel<float>));
  }
  const Ahead ahead = Ahead::of_bytes(next, kPanel<float>);
  for_tiles(rows, [&](auto count, int64_t row) {
    tile8<count>(a + row * stride, stride, b, inner, c + row * c_stride, c_stride,
                 ahead.share(row, count, rows, inner));
  });
}

}  // namespace fastbert::cpu::FB_ISA
