// Included before all else in the loops of csrc/cpu/loops, this file lets them be compiled for AVX2 as if for AVX-512:
// it defines the compiler's macros for the instruction sets, and the intrinsics that the loops use. So all of their
// code runs on every x86 processor that users have, but for what the compiler and the processor make of an intrinsic.
//
// FB_AVX512_ON_CPU says which sets: 1 AVX-512 alone, 2 VNNI too, 3 BF16 too, 4 AMX's tiles too, whose instructions
// tests/amx_on_cpu emulates. The semantics are those of Intel's Software Developer's Manual, volume 2.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace avx512_on_cpu {

template <class T>
struct Lanes {
  typedef T type __attribute__((vector_size(64)));
};
template <class T>
using lanes = typename Lanes<T>::type;
typedef uint16_t halves __attribute__((vector_size(32)));
typedef uint8_t bytes __attribute__((vector_size(16)));

// f, a function of AVX2, for both halves of each argument.
template <class V, class Half, class F, class... Vs>
inline V by_halves(F f, Vs... arguments) {
  struct Two {
    Half half[2];
  };
  const auto half = [](auto v, int i) { return __builtin_bit_cast(Two, v).half[i]; };
  return __builtin_bit_cast(V, Two{f(half(arguments, 0)...), f(half(arguments, 1)...)});
}
#define FB_BY_HALVES(name, type)                                                                             \
  inline __m512##type name(auto... v) {                                                                      \
    return by_halves<__m512##type, __m256##type>([](auto... half) { return _mm256_##name(half...); }, v...); \
  }
FB_BY_HALVES(fmadd_ps, )
FB_BY_HALVES(fmadd_pd, d)
FB_BY_HALVES(min_ps, )
FB_BY_HALVES(min_pd, d)
FB_BY_HALVES(max_ps, )
FB_BY_HALVES(max_pd, d)
FB_BY_HALVES(mul_epu32, i)
FB_BY_HALVES(madd_epi16, i)

// ---- conversions

template <class T, class V>
inline T converted(V v) {
  return __builtin_convertvector(v, T);
}
inline __m512i cvtepu16_epi32(__m256i v) { return (__m512i)converted<lanes<uint32_t>>((halves)v); }
inline __m512i cvtepu8_epi32(__m128i v) { return (__m512i)converted<lanes<uint32_t>>((bytes)v); }
inline __m256i cvtepi32_epi16(__m512i v) { return (__m256i)converted<halves>((lanes<uint32_t>)v); }
inline __m128i cvtepi32_epi8(__m512i v) { return (__m128i)converted<bytes>((lanes<uint32_t>)v); }
inline __m512i cvtepi8_epi16(__m256i v) {
  typedef int8_t from __attribute__((vector_size(32)));
  return (__m512i)converted<lanes<int16_t>>((from)v);
}
inline __m512 cvtph_ps(__m256i v) {
  const __m256 two[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))};
  return __builtin_bit_cast(__m512, two);
}
inline __m256i cvtps_ph(__m512 v, int) {  // to nearest
  __m256 two[2];
  memcpy(two, &v, sizeof v);
  return _mm256_set_m128i(_mm256_cvtps_ph(two[1], 0), _mm256_cvtps_ph(two[0], 0));
}

// ---- lanes

inline __m512i set1_epi32(int value) { return (__m512i)(lanes<int32_t>{} + value); }
inline __m512 set1_ps(float value) { return (__m512)(value - lanes<float>{}); }
inline __m512i srli_epi64(__m512i v, int count) { return (__m512i)((lanes<uint64_t>)v >> count); }
inline __m512i slli_epi64(__m512i v, int count) { return (__m512i)((lanes<uint64_t>)v << count); }
inline __m512i mask_blend_epi32(__mmask16 mask, __m512i unset, __m512i set) {
  auto a = (lanes<int32_t>)unset;
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) a[i] = ((lanes<int32_t>)set)[i];
  return (__m512i)a;
}
inline __m512i maskz_loadu_epi32(__mmask16 mask, const void* from) {
  lanes<int32_t> v{};
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) memcpy(reinterpret_cast<char*>(&v) + 4 * i, static_cast<const char*>(from) + 4 * i, 4);
  return (__m512i)v;
}
inline __mmask16 not_less(__m512 a, __m512 b) {  // true for NaN
  __mmask16 mask = 0;
  for (int i = 0; i < 16; ++i) mask |= __mmask16(!(a[i] < b[i]) << i);
  return mask;
}
inline __m512 above_floor(__m512 v) {
  return by_halves<__m512, __m256>([](__m256 half) { return _mm256_sub_ps(half, _mm256_floor_ps(half)); }, v);
}
inline __m512 maskz_scalef_ps(__mmask16 mask, __m512 v, __m512 exponent) {
  for (int i = 0; i < 16; ++i) v[i] = mask >> i & 1 ? v[i] * __builtin_exp2f(__builtin_floorf(exponent[i])) : 0;
  return v;
}

// ---- products

// sums + the four products of each lane, of unsigned and signed bytes.
inline __m512i dpbusd_epi32(__m512i sums, __m512i left, __m512i right) {
  auto s = (lanes<int32_t>)sums;
  for (int i = 0; i < 32; i += 8) s += ((lanes<int32_t>)left >> i & 255) * ((lanes<int32_t>)right << (24 - i) >> 24);
  return (__m512i)s;
}

// Numbers below 2^-126 are 0.
inline __m512 flushed(lanes<uint32_t> bits) {
  const auto small = (lanes<uint32_t>)((bits & 0x7f800000) == 0);
  return (__m512)(bits & ~(small & 0x7fffffff));
}
inline __m512 dpbf16_ps(__m512 sums, lanes<uint32_t> a, lanes<uint32_t> b) {
  const auto add = [](lanes<uint32_t> a, lanes<uint32_t> b, __m512 sums) {
    return flushed((lanes<uint32_t>)fmadd_ps(flushed(a), flushed(b), sums));
  };
  const uint32_t high = 0xffff0000;
  return add(a << 16, b << 16, add(a & high, b & high, flushed((lanes<uint32_t>)sums)));
}
inline halves cvtneps_pbh(__m512 v) {
  const auto bits = (lanes<uint32_t>)flushed((lanes<uint32_t>)v);
  const auto rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return converted<halves>((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
}

template <class V>
inline __m512 zextps(V v) {
  __m512 r{};
  __builtin_memcpy(&r, &v, sizeof v);
  return r;
}

}  // namespace avx512_on_cpu

#define _mm512_fmadd_ps avx512_on_cpu::fmadd_ps
#define _mm512_fmadd_pd avx512_on_cpu::fmadd_pd
#define _mm512_min_ps avx512_on_cpu::min_ps
#define _mm512_min_pd avx512_on_cpu::min_pd
#define _mm512_max_ps avx512_on_cpu::max_ps
#define _mm512_max_pd avx512_on_cpu::max_pd
#define _mm512_mul_epu32 avx512_on_cpu::mul_epu32
#define _mm512_madd_epi16 avx512_on_cpu::madd_epi16
#define _mm512_cvtepu16_epi32 avx512_on_cpu::cvtepu16_epi32
#define _mm512_cvtepu8_epi32 avx512_on_cpu::cvtepu8_epi32
#define _mm512_cvtepi32_epi16 avx512_on_cpu::cvtepi32_epi16
#define _mm512_cvtepi32_epi8 avx512_on_cpu::cvtepi32_epi8
#define _mm512_cvtepi8_epi16 avx512_on_cpu::cvtepi8_epi16
#define _mm512_cvtph_ps avx512_on_cpu::cvtph_ps
#define _mm512_zextps256_ps512 avx512_on_cpu::zextps
#define _mm512_zextps128_ps512 avx512_on_cpu::zextps
#define _mm512_set1_epi32 avx512_on_cpu::set1_epi32
#define _mm512_set1_ps avx512_on_cpu::set1_ps
#define _mm512_mask_blend_epi32 avx512_on_cpu::mask_blend_epi32
#define _mm512_maskz_loadu_epi32 avx512_on_cpu::maskz_loadu_epi32
#define _mm512_maskz_scalef_ps avx512_on_cpu::maskz_scalef_ps
#define _mm512_dpbusd_epi32 avx512_on_cpu::dpbusd_epi32
#define _mm512_cvtneps_pbh avx512_on_cpu::cvtneps_pbh
#define _mm512_dpbf16_ps(sums, a, b) \
  avx512_on_cpu::dpbf16_ps(sums, (avx512_on_cpu::lanes<uint32_t>)(a), (avx512_on_cpu::lanes<uint32_t>)(b))
// These are macros already where the compiler does not optimise.
#undef _mm512_cvtps_ph
#undef _mm512_srli_epi64
#undef _mm512_slli_epi64
#undef _mm512_cmp_ps_mask
#undef _mm512_reduce_ps
#define _mm512_cvtps_ph avx512_on_cpu::cvtps_ph
#define _mm512_srli_epi64 avx512_on_cpu::srli_epi64
#define _mm512_slli_epi64 avx512_on_cpu::slli_epi64
#define _mm512_cmp_ps_mask(a, b, which) avx512_on_cpu::not_less(a, b)  // which: _CMP_NLT_UQ
#define _mm512_reduce_ps(v, how) avx512_on_cpu::above_floor(v)         // how: _MM_FROUND_TO_NEG_INF

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#if FB_AVX512_ON_CPU >= 2
#define __AVX512VNNI__ 1
#endif
#if FB_AVX512_ON_CPU >= 3
#define __AVX512BF16__ 1
#endif
#if FB_AVX512_ON_CPU >= 4
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#endif
