// A processor's matrix unit (Intel's AMX). A tile is 16 rows of 64 bytes. One instruction multiplies a tile of the left
// factor, whose rows are 16 steps of four bytes (two bf16, or four int8), with a tile of the right factor, 16 steps of
// 16 columns as in packed panels, and adds the products to a tile of 16 x 16 sums.
//
// If FB_TILES is defined, plain C++ does the same, for the sanitizers.
#pragma once

#include "simd.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define FB_AMX
#endif

namespace fastbert::cpu::FB_ISA {

#if defined(FB_AMX) || defined(FB_TILES)
constexpr bool kTiles = true;
#else
constexpr bool kTiles = false;
#endif

constexpr int64_t kTileRows = 16, kTileSteps = 16, kTileColumns = 16;

// ---- instructions; tile numbers are compile-time constants

#ifdef FB_AMX

inline void tiles_begin() {  // all eight at full size
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } whole{};
  whole.palette = 1;
  for (int tile = 0; tile < 8; ++tile) whole.row_bytes[tile] = 64, whole.rows[tile] = kTileRows;
  asm volatile("ldtilecfg %0" ::"m"(whole));
}
inline void tiles_end() { asm volatile("tilerelease"); }

template <int tile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
template <int tile>
inline void tile_load(const void* from, int64_t apart) {  // apart: bytes from row to row
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(apart), "i"(tile) : "memory");
}
template <int tile>
inline void tile_store(void* to, int64_t apart) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(apart), "i"(tile) : "memory");
}
// sums += left x right, for bf16 (numbers below 2^-126 count as 0) and for uint8 x int8.
template <int sums, int left, int right>
inline void tile_dot(pair) {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(right));
}
template <int sums, int left, int right>
inline void tile_dot(int32_t) {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(right));
}

#elif defined(FB_TILES)

inline thread_local int32_t plain_tiles[8][kTileRows][16];

inline void tiles_begin() {}
inline void tiles_end() { __builtin_memset(plain_tiles, 255, sizeof plain_tiles); }

template <int tile>
inline void tile_zero() {
  __builtin_memset(plain_tiles[tile], 0, sizeof plain_tiles[tile]);
}
template <int tile>
inline void tile_load(const void* from, int64_t apart) {
  for (int64_t row = 0; row < kTileRows; ++row)
    __builtin_memcpy(plain_tiles[tile][row], static_cast<const char*>(from) + row * apart, 64);
}
template <int tile>
inline void tile_store(void* to, int64_t apart) {
  for (int64_t row = 0; row < kTileRows; ++row)
    __builtin_memcpy(static_cast<char*>(to) + row * apart, plain_tiles[tile][row], 64);
}
inline void add_products(uint32_t left, uint32_t right, float& sum) {
  const auto number = [](uint32_t bits) { return __builtin_bit_cast(float, bits & 0xffff0000u); };
  sum = __builtin_fmaf(number(left << 16), number(right << 16), sum);
  sum = __builtin_fmaf(number(left), number(right), sum);
}
inline void add_products(uint32_t left, uint32_t right, int32_t& sum) {
  for (int shift = 0; shift < 32; shift += 8) sum += int32_t(left >> shift & 255) * int8_t(right >> shift & 255);
}
template <int sums, int left, int right, class E>
inline void tile_dot(E) {
  using S = either<kSame<E, pair>, float, int32_t>;
  for (int64_t row = 0; row < kTileRows; ++row)
    for (int64_t step = 0; step < kTileSteps; ++step)
      for (int64_t column = 0; column < kTileColumns; ++column) {
        S sum = __builtin_bit_cast(S, plain_tiles[sums][row][column]);
        add_products(plain_tiles[left][row][step], plain_tiles[right][step][column], sum);
        plain_tiles[sums][row][column] = __builtin_bit_cast(int32_t, sum);
      }
}

#else  // never called

inline void tiles_begin() {}
inline void tiles_end() {}
template <int>
void tile_zero();
template <int>
void tile_load(const void*, int64_t);
template <int>
void tile_store(void*, int64_t);
template <int, int, int, class E>
void tile_dot(E);

#endif

// Lives while a thread multiplies in tiles, at most one per thread: the constructor configures the thread's tiles, the
// destructor releases them.
class Tiles {
 public:
  explicit Tiles(bool wanted) : wanted_(kTiles && wanted) {
    if (wanted_) tiles_begin();
  }
  ~Tiles() {
    if (wanted_) tiles_end();
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  const bool wanted_;
};

// ---- tiles from matrices in memory, whose elements E have four bytes

// Loads a tile from `rows` rows of n elements. Anything smaller than a tile is first copied to `room` and zero-padded.
template <int tile, class E>
inline void load_tile(const E* from, int64_t stride, int64_t rows, int64_t n, vint (&room)[kTileRows]) {
  if (rows == kTileRows && n == kTileSteps) return tile_load<tile>(from, stride * int64_t(sizeof(E)));
  for (int64_t row = 0; row < kTileRows; ++row) room[row] = row < rows ? load(from + row * stride, int(n)) : vint{};
  tile_load<tile>(room, sizeof(vint));
}

}  // namespace fastbert::cpu::FB_ISA
