// Vectors of the instruction set that the loops are compiled for. They are the compilers' vector types, whose operators
// compute and compare lane by lane; this file adds what they lack. Arithmetic on bf16 and f16 is done in fp32.
//
// The last elements of a row are loaded into a whole vector too, so every element goes through the same instructions.
#pragma once

#include <stdint.h>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "../../division.h"
#include "../../dtype.h"

namespace fastbert::cpu::FB_ISA {

#ifdef __AVX512F__
#define FB_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define FB_VECTOR_BYTES 32
#else
#define FB_VECTOR_BYTES 16
#endif

// ---- types

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <bool condition, class A, class B>
struct Either {
  using type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using type = B;
};
template <bool condition, class A, class B>
using either = typename Either<condition, A, B>::type;

// ---- elements

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct pair {  // neighbours in the inner dimension, which matrix products take together
  bf16 first, second;
};

// Arithmetic on T is done in math_t<T>, kLanes<T> elements at a time.
template <class T>
using math_t = either<kSame<T, double>, double, float>;

template <class T>
constexpr int kLanes = FB_VECTOR_BYTES / sizeof(math_t<T>);

// Calls f with a value of the element type that dtype names, which is not f64.
template <class F>
inline void for_dtype_up_to_f32(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32: return f(float{});
    case DType::bf16: return f(bf16{});
    case DType::f16: return f(f16{});
    case DType::f64: return;
  }
}

// The same for any dtype.
template <class F>
inline void for_dtype(DType dtype, F&& f) {
  dtype == DType::f64 ? f(double{}) : for_dtype_up_to_f32(dtype, f);
}

// The same with a value of the type of arithmetic.
template <class F>
inline void for_math(DType dtype, F&& f) {
  dtype == DType::f64 ? f(double{}) : f(float{});
}

// ---- vectors

#define FB_VECTOR(element, bytes) element __attribute__((vector_size(bytes)))
typedef FB_VECTOR(float, FB_VECTOR_BYTES) vfloat;
typedef FB_VECTOR(double, FB_VECTOR_BYTES) vdouble;
typedef FB_VECTOR(int32_t, FB_VECTOR_BYTES) vint;
typedef FB_VECTOR(uint32_t, FB_VECTOR_BYTES) vuint;
typedef FB_VECTOR(uint16_t, FB_VECTOR_BYTES / 2) vhalves;  // this and vbytes: as many elements as a vfloat
typedef FB_VECTOR(uint8_t, FB_VECTOR_BYTES / 4) vbytes;

template <class M>
using vec = either<kSame<M, double>, vdouble, either<kSame<M, pair>, vint, vfloat>>;

template <class V, class P>
inline V load_bits(const P* src) {
  V v;
  __builtin_memcpy(&v, src, sizeof(V));
  return v;
}

template <class V, class W>
inline V reinterpret(W w) {
  static_assert(sizeof(V) == sizeof(W));
  return (V)w;
}

// Conversions to lanes of another width. Without intrinsics, compilers make 5 to 40 instructions of some of them.
#if defined(__AVX512F__)
inline vuint widen(vhalves v) { return (vuint)_mm512_cvtepu16_epi32((__m256i)v); }
inline vuint widen(vbytes v) { return (vuint)_mm512_cvtepu8_epi32((__m128i)v); }
inline vhalves low_halves(vuint v) { return (vhalves)_mm512_cvtepi32_epi16((__m512i)v); }
inline vbytes low_bytes(vuint v) { return (vbytes)_mm512_cvtepi32_epi8((__m512i)v); }
#else
#ifdef __AVX2__
inline vuint widen(vhalves v) { return (vuint)_mm256_cvtepu16_epi32((__m128i)v); }
inline vuint widen(vbytes v) { return (vuint)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(__builtin_bit_cast(int64_t, v))); }
#else
inline vuint widen(vhalves v) { return __builtin_convertvector(v, vuint); }
inline vuint widen(vbytes v) { return __builtin_convertvector(v, vuint); }
#endif
inline vhalves low_halves(vuint v) { return __builtin_convertvector(v, vhalves); }
inline vbytes low_bytes(vuint v) { return __builtin_convertvector(low_halves(v), vbytes); }
#endif

// v as the first lanes; the others are 0. (Through memory, a load would wait until two stores have arrived there.)
template <class V>
inline vfloat widened(V v) {
  if constexpr (kSame<V, vfloat>) return v;
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 32) return (vfloat)_mm512_zextps256_ps512((__m256)v);
  if constexpr (sizeof(V) == 16) return (vfloat)_mm512_zextps128_ps512((__m128)v);
#elif defined(__AVX2__)
  if constexpr (sizeof(V) == 16) return (vfloat)_mm256_zextps128_ps256((__m128)v);
#endif
}

inline vfloat load(const float* src) { return load_bits<vfloat>(src); }
inline vdouble load(const double* src) { return load_bits<vdouble>(src); }
inline vfloat load(const bf16* src) { return reinterpret<vfloat>(widen(load_bits<vhalves>(src)) << 16); }

inline vint load(const pair* src) { return load_bits<vint>(src); }
inline vint load(const int32_t* src) { return load_bits<vint>(src); }

inline void store(vint v, pair* dst) { __builtin_memcpy(dst, &v, sizeof v); }
inline void store(vfloat v, float* dst) { __builtin_memcpy(dst, &v, sizeof v); }
inline void store(vdouble v, double* dst) { __builtin_memcpy(dst, &v, sizeof v); }
#ifdef __AVX512BF16__
inline vhalves rounded(vfloat v) { return (vhalves)_mm512_cvtneps_pbh((__m512)v); }  // results below 2^-126 become 0
#else
inline vhalves rounded(vfloat v) {
  const vuint bits = reinterpret<vuint>(v), nearest_even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return low_halves(v == v ? nearest_even : vuint{} + 0x7fc0);
}
#endif
inline void store(vhalves v, bf16* dst) { __builtin_memcpy(dst, &v, sizeof v); }
inline void store(vfloat v, bf16* dst) { store(rounded(v), dst); }

// Lanes with bf16 `first` in the low half and `second` in the high half.
inline vint paired(vhalves first, vhalves second) { return (vint)(widen(first) | widen(second) << 16); }

#if defined(__AVX512F__)
inline vfloat load(const f16* src) { return (vfloat)_mm512_cvtph_ps(load_bits<__m256i>(src)); }
inline void store(vfloat v, f16* dst) {
  const __m256i halves = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
  __builtin_memcpy(dst, &halves, sizeof halves);
}
#elif defined(__F16C__)
inline vfloat load(const f16* src) { return (vfloat)_mm256_cvtph_ps(load_bits<__m128i>(src)); }
inline void store(vfloat v, f16* dst) {
  const __m128i halves = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
  __builtin_memcpy(dst, &halves, sizeof halves);
}
#else
inline vfloat load(const f16* src) {
  vfloat v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = __builtin_bit_cast(_Float16, src[i].bits);
  return v;
}
inline void store(vfloat v, f16* dst) {
  for (int i = 0; i < kLanes<float>; ++i) dst[i].bits = __builtin_bit_cast(uint16_t, static_cast<_Float16>(v[i]));
}
#endif

// Passed instead of a number of elements: a whole vector, known at compile time.
struct Whole {};

template <class T>
inline auto load(const T* src, Whole) {
  return load(src);
}
template <class T>
inline auto load(const T* src, int n) {
#if defined(__AVX512F__) && !defined(__SANITIZE_ADDRESS__)  // ASan does not check masked loads
  if constexpr (sizeof(T) == 4)
    return reinterpret<decltype(load(src))>(_mm512_maskz_loadu_epi32(__mmask16((1u << n) - 1), src));
#endif
  T whole[kLanes<T>]{};
  __builtin_memcpy(whole, src, n * sizeof(T));
  return load(whole);
}
inline vhalves halves(const bf16* src, Whole) { return load_bits<vhalves>(src); }
inline vhalves halves(const bf16* src, int n) {
  vhalves v{};
  __builtin_memcpy(&v, src, n * sizeof(bf16));
  return v;
}
template <class V, class T>
inline void store(V v, T* dst, Whole) {
  store(v, dst);
}
template <class V, class T>
inline void store(V v, T* dst, int n) {
  T whole[kLanes<T>];
  store(v, whole);
  __builtin_memcpy(dst, whole, n * sizeof(T));
}

// Calls f(i, n) for each vector of a row, which begins at element i; n is Whole or, at the end, the elements left.
template <class M, class F>
inline void for_vectors(int64_t elements, F&& f) {
  int64_t i = 0;
  for (; i + kLanes<M> <= elements; i += kLanes<M>) f(i, Whole{});
  if (i < elements) f(i, int(elements - i));
}

// Converts a row of one type to another that has the same type of arithmetic.
template <class From, class To>
inline void convert(const From* from, int64_t elements, To* to) {
  for_vectors<math_t<From>>(elements, [&](int64_t i, auto n) { store(load(from + i, n), to + i, n); });
}

// A reduction over a row has kSlots independent accumulators, whose shorter chains are faster and more exact.
constexpr int kSlots = 4;
template <int i>
struct Slot {
  constexpr operator int() const { return i; }
};

// Calls f(i, n, slot) for each vector of a row.
template <class M, class F>
inline void for_vectors_in_slots(int64_t elements, F&& f) {
  constexpr int64_t L = kLanes<M>;
  int64_t i = 0;
  for (; i + kSlots * L <= elements; i += kSlots * L)
    f(i, Whole{}, Slot<0>{}), f(i + L, Whole{}, Slot<1>{}), f(i + 2 * L, Whole{}, Slot<2>{}),
        f(i + 3 * L, Whole{}, Slot<3>{});
  for (; i + L <= elements; i += L) f(i, Whole{}, Slot<0>{});
  if (i < elements) f(i, int(elements - i), Slot<1>{});
}

// v in the first n lanes, fill in the others.
template <class V>
inline V or_fill(V v, Whole, double) {
  return v;
}
template <class V>
inline V or_fill(V v, int n, double fill) {
  using Lanes = decltype(v == v);
  Lanes lane{};
  for (int i = 0; i < int(sizeof(V) / sizeof v[0]); ++i) lane[i] = i;
  return lane < Lanes{} + n ? v : V{} + decltype(v[0] + 0)(fill);
}

// ---- arithmetic

template <class N>
constexpr N least(N a, N b) {
  return a < b ? a : b;
}

template <class V>
inline V splat(double value) {
  using M = decltype(V{}[0] + 0);
  return V{} + M(value);
}

// fma; lesser is a < b ? a : b and greater is a > b ? a : b, so a NaN in b is returned.
#if defined(__AVX512F__) || defined(__FMA__)
#ifdef __AVX512F__
#define FB_INTRINSIC(name) _mm512_##name
typedef __m512 native_float;
typedef __m512d native_double;
#else
#define FB_INTRINSIC(name) _mm256_##name
typedef __m256 native_float;
typedef __m256d native_double;
#endif
inline vfloat fma(vfloat a, vfloat b, vfloat c) {
  return (vfloat)FB_INTRINSIC(fmadd_ps)((native_float)a, (native_float)b, (native_float)c);
}
inline vdouble fma(vdouble a, vdouble b, vdouble c) {
  return (vdouble)FB_INTRINSIC(fmadd_pd)((native_double)a, (native_double)b, (native_double)c);
}
inline vfloat lesser(vfloat a, vfloat b) { return (vfloat)FB_INTRINSIC(min_ps)((native_float)a, (native_float)b); }
inline vfloat greater(vfloat a, vfloat b) { return (vfloat)FB_INTRINSIC(max_ps)((native_float)a, (native_float)b); }
inline vdouble lesser(vdouble a, vdouble b) {
  return (vdouble)FB_INTRINSIC(min_pd)((native_double)a, (native_double)b);
}
inline vdouble greater(vdouble a, vdouble b) {
  return (vdouble)FB_INTRINSIC(max_pd)((native_double)a, (native_double)b);
}
#else
inline vfloat fma(vfloat a, vfloat b, vfloat c) {
  vfloat r;
  for (int i = 0; i < kLanes<float>; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
}
inline vdouble fma(vdouble a, vdouble b, vdouble c) {
  vdouble r;
  for (int i = 0; i < kLanes<double>; ++i) r[i] = __builtin_fma(a[i], b[i], c[i]);
  return r;
}
template <class V>
inline V lesser(V a, V b) {
  return a < b ? a : b;
}
template <class V>
inline V greater(V a, V b) {
  return a > b ? a : b;
}
#endif

inline vfloat absolute(vfloat v) { return reinterpret<vfloat>(reinterpret<vint>(v) & 0x7fffffff); }
inline vdouble absolute(vdouble v) { return v < 0 ? -v : v; }

template <class V>
constexpr int kWidth = sizeof(V) / sizeof(V{}[0]);

// The lanes of v in another order: lane i is v[from(i)].
template <class V, class F>
inline V reordered(V v, F from) {
  V result;
#if defined(__GNUC__) && !defined(__clang__)
  decltype(v < v) lanes;
  for (int i = 0; i < kWidth<V>; ++i) lanes[i] = from(i);
  result = __builtin_shuffle(v, lanes);
#else
  for (int i = 0; i < kWidth<V>; ++i) result[i] = v[from(i)];
#endif
  return result;
}

// Lane i is that of number from(i) among the lanes of a and then those of b.
template <class V, class F>
inline V chosen(V a, V b, F from) {
  constexpr int L = kWidth<V>;
  V result;
#if defined(__GNUC__) && !defined(__clang__)
  decltype(a < b) lanes;
  for (int i = 0; i < L; ++i) lanes[i] = from(i);
  result = __builtin_shuffle(a, b, lanes);
#else
  for (int i = 0; i < L; ++i) result[i] = from(i) < L ? a[from(i)] : b[from(i) - L];
#endif
  return result;
}

// Interleaves the lanes of a and b: a[first], b[first], a[first + 1], b[first + 1], ...
template <class V>
inline V alternate(V a, V b, int first) {
  return chosen(a, b, [=](int i) { return first + i / 2 + i % 2 * kWidth<V>; });
}

// Transposes L vectors of L lanes: each of log2(L) rounds interleaves vectors i and i + L / 2.
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

// A vector of half as many lanes: f combines the two halves.
template <class V, class F>
inline auto halved(V v, F f) {
  using M = decltype(v[0] + 0);
  typedef FB_VECTOR(M, sizeof(V) / 2) Half;
  Half halves[2];
  __builtin_memcpy(halves, &v, sizeof v);
  return f(halves[0], halves[1]);
}

// Reduces the lanes to one number in the same way.
template <class V, class F>
inline auto folded(V v, F f) {
  using M = decltype(v[0] + 0);
  if constexpr (sizeof(V) > 16)
    return folded(halved(v, f), f);
  else if constexpr (sizeof(M) == 8)
    return f(M(v[0]), M(v[1]));
  else
    return f(f(M(v[0]), M(v[2])), f(M(v[1]), M(v[3])));
}

// Sum and largest of the lanes, in one fixed order. A NaN makes a sum NaN, but not always the largest.
template <class V>
inline auto sum(V v) {
  return folded(v, [](auto a, auto b) { return a + b; });
}
template <class V>
inline auto sum(const V (&slots)[kSlots]) {
  return sum((slots[0] + slots[1]) + (slots[2] + slots[3]));
}
template <class V>
inline auto largest(V v) {
  return folded(v, [](auto a, auto b) { return a > b ? a : b; });
}
template <class V>
inline auto largest(const V (&slots)[kSlots]) {
  return largest(greater(greater(slots[0], slots[1]), greater(slots[2], slots[3])));
}

// What is subtracted from numbers before exp, given their largest: `high` itself, or 0 if it is -inf or NaN.
template <class M>
inline M base_of(M high) {
  return high > -M(__builtin_inf()) ? high : M(0);
}

// p · 2^n, where shifted = n + 1.5 · 2^23, so that n is in its low bits; 0 for n = -127.
inline vfloat scale_exp2(vfloat p, vfloat shifted) {
  return p * reinterpret<vfloat>((reinterpret<vint>(shifted) + 127) << 23);
}

// (2^f - 1) / f for |f| <= 1/2: a minimax fit, which gives 2^f a relative error of 2^-28.9.
inline vfloat exp2_slope(vfloat f) {
  vfloat p = splat<vfloat>(1.535336196e-4);
  p = fma(p, f, splat<vfloat>(1.339887385e-3));
  p = fma(p, f, splat<vfloat>(9.618436918e-3));
  p = fma(p, f, splat<vfloat>(5.550332367e-2));
  p = fma(p, f, splat<vfloat>(2.402264774e-1));
  return fma(p, f, splat<vfloat>(6.931471825e-1));
}

constexpr float kShift = 0x1.8p23f, kLog2e = 0x1.715476p0f;

// exp(x) for x <= 0; 0 below -87.6; NaN stays NaN. The relative error |x| 2^-24 is harmless in a softmax: where |x| is
// large, the weight exp(x) is small.
inline vfloat exp_nonpositive(vfloat x) {
  x = greater(splat<vfloat>(-88), x);
  const vfloat shifted = fma(x, splat<vfloat>(kLog2e), splat<vfloat>(kShift));
  const vfloat f = fma(x, splat<vfloat>(kLog2e), kShift - shifted);
  return scale_exp2(fma(exp2_slope(f), f, splat<vfloat>(1)), shifted);
}
inline vdouble exp_nonpositive(vdouble x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = __builtin_exp(x[i]);
  return x;
}

// 2^x for x <= 0, or above 0 by rounding, where the result becomes bf16 anyway: relative error 2^-18, exact for x = 0;
// 0 below -126; NaN stays NaN. The polynomial is the minimax fit among those that are 1 at f = 0.
inline vfloat exp2_roughly(vfloat x) {
#ifdef __AVX512F__
  const vfloat f = (vfloat)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
#else
  x = greater(splat<vfloat>(-126.5), x);
  const vfloat shifted = x - 0.5f + kShift, f = x - (shifted - kShift);
#endif
  vfloat p = splat<vfloat>(1.3425154e-2);
  p = fma(p, f, splat<vfloat>(5.2245374e-2));
  p = fma(p, f, splat<vfloat>(2.4127856e-1));
  p = fma(p, f, splat<vfloat>(6.9304516e-1));
  p = fma(p, f, splat<vfloat>(1));
#ifdef __AVX512F__
  const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.f), _CMP_NLT_UQ);  // true for NaN
  return (vfloat)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)x);                          // p 2^floor(x)
#else
  return scale_exp2(p, shifted);
#endif
}

// exp(-a²/2) for 0 <= a <= 13.25; 0 from 13.24 on. The rounding error of the square is corrected.
inline vfloat gaussian(vfloat a) {
  const vfloat square = a * a, lost = fma(a, a, -square);
  const vfloat factor = splat<vfloat>(-kLog2e / 2), rest = splat<vfloat>(-9.629815e-9);  // -log2(e) / 2 in two parts
  const vfloat shifted = fma(square, factor, splat<vfloat>(kShift));
  const vfloat f = fma(lost, factor, fma(square, rest, fma(square, factor, kShift - shifted)));
  return scale_exp2(fma(exp2_slope(f), f, splat<vfloat>(1)), shifted);
}
inline vdouble gaussian(vdouble a) { return exp_nonpositive(-0.5 * a * a); }

}  // namespace fastbert::cpu::FB_ISA
