// Philox4x32-7 with one counter in each lane, and the layouts of random bits that fastbert/random.py specifies.
#pragma once

#include "../../dropout.h"
#include "simd.h"

namespace fastbert::cpu::FB_ISA {

constexpr int kGroups = kLanes<float>;  // counters at a time

// high and low: the two halves of the 64-bit products of a's lanes and m.
inline void multiply(vuint a, uint32_t m, vuint& high, vuint& low) {
#if defined(__AVX512F__)
  const __m512i v = (__m512i)a, factor = _mm512_set1_epi32(int(m));
  const __m512i even = _mm512_mul_epu32(v, factor), odd = _mm512_mul_epu32(_mm512_srli_epi64(v, 32), factor);
  high = (vuint)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
  low = (vuint)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
#elif defined(__AVX2__)
  const __m256i v = (__m256i)a, factor = _mm256_set1_epi32(int(m));
  const __m256i even = _mm256_mul_epu32(v, factor), odd = _mm256_mul_epu32(_mm256_srli_epi64(v, 32), factor);
  high = (vuint)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  low = (vuint)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
#else
  for (int i = 0; i < kGroups; ++i) {
    const uint64_t product = uint64_t(a[i]) * m;
    high[i] = uint32_t(product >> 32), low[i] = uint32_t(product);
  }
#endif
}

struct Words {
  vuint word[4];
};

// The counters are (group + lane, c1, c2, c3).
inline Words philox(uint32_t group, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
  vuint a{}, b = vuint{} + c1, c = vuint{} + c2, d = vuint{} + c3;
  for (int i = 0; i < kGroups; ++i) a[i] = group + uint32_t(i);
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 7; ++round, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
    vuint high0, low0, high1, low1;
    multiply(a, 0xD2511F53, high0, low0);
    multiply(c, 0xCD9E8D57, high1, low1);
    a = high1 ^ b ^ k0, b = low1, c = high0 ^ d ^ k1, d = low0;
  }
  return {{a, b, c, d}};
}

// Room for the bits of a row, in elements: they are written for whole vectors of counters.
constexpr int64_t row_bits_room(int64_t channels) { return round_up(channels, 8 * kGroups); }
constexpr int64_t key_bits_room(int64_t keys) { return round_up(keys, 16 * kGroups); }

// Writes 16 random bits for each channel of a token.
inline void row_bits(uint16_t* bits, int64_t channels, uint64_t token, uint64_t key) {
  for (int64_t channel = 0; channel < channels; channel += 8 * kGroups) {
    const Words words = philox(uint32_t(channel / 8), uint32_t(token), uint32_t(token >> 32), 0, key);
    for (int four = 0; four < kGroups / 4; ++four) {  // counters
      typedef FB_VECTOR(uint32_t, 16) Four;
      Four word[4];  // little-endian: a word has the 16 bits of two neighbouring channels
      for (int i = 0; i < 4; ++i)
        __builtin_memcpy(&word[i], reinterpret_cast<const Four*>(&words.word[i]) + four, sizeof(Four));
      transpose(word);
      __builtin_memcpy(bits + channel + 32 * four, word, sizeof word);
    }
  }
}

// Writes a random byte for each key of a query; first_key is a multiple of 16 kGroups. In a block of 64 keys, which has
// four counters, bytes 2j and 2j + 1 of counter c are for keys 8j + 2c and 8j + 2c + 1.
inline void attention_bits(uint8_t* bits, int64_t first_key, int64_t keys, uint32_t query, uint32_t head,
                           uint32_t sequence, uint64_t key) {
  for (int64_t first = 0; first < keys; first += 16 * kGroups) {
    const Words words = philox(uint32_t((first_key + first) / 16), query, head, sequence, key);
    for (int word = 0; word < 4; ++word) {
      typedef FB_VECTOR(uint16_t, FB_VECTOR_BYTES) Halves;
      // Of four counters the low halves, which are for j = 2 word, then the high ones.
      const Halves pairs =
          reordered(reinterpret<Halves>(words.word[word]), [](int i) { return i / 8 * 8 + i % 4 * 2 + i % 8 / 4; });
      for (int block = 0; block < kGroups / 4; ++block)
        __builtin_memcpy(bits + first + 64 * block + 16 * word, reinterpret_cast<const char*>(&pairs) + 16 * block, 16);
    }
  }
}

inline vuint widen(const uint16_t* bits) { return widen(load_bits<vhalves>(bits)); }
inline vuint widen(const uint8_t* bits) { return widen(load_bits<vbytes>(bits)); }

// v · keep_scale where an element's bits are at least the threshold, else 0.
template <class Bits>
inline vfloat keep(vfloat v, const Bits* bits, const Dropout& drop) {
  const vuint wide = widen(bits);
  return reinterpret<vfloat>(reinterpret<vint>(v * float(drop.keep_scale)) & (wide >= drop.threshold));
}
template <class Bits>
inline vdouble keep(vdouble v, const Bits* bits, const Dropout& drop) {
  for (int i = 0; i < kLanes<double>; ++i) v[i] = bits[i] >= drop.threshold ? v[i] * drop.keep_scale : 0;
  return v;
}

}  // namespace fastbert::cpu::FB_ISA
