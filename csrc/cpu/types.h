// Element types of the loops: how a run of them becomes fp32 and back. fp64 stays fp64.
#pragma once

#include <stdint.h>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "../dtype.h"

namespace fastbert::cpu::FB_SET {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// The type that arithmetic on T is done in.
template <class T>
struct Math {
  using type = float;
};
template <>
struct Math<double> {
  using type = double;
};
template <class T>
using math_t = typename Math<T>::type;

inline void load(const float* src, float* dst, int n) { __builtin_memcpy(dst, src, n * sizeof(float)); }
inline void load(const double* src, double* dst, int n) { __builtin_memcpy(dst, src, n * sizeof(double)); }
inline void store(const float* src, float* dst, int n) { load(src, dst, n); }
inline void store(const double* src, double* dst, int n) { load(src, dst, n); }

inline void load(const bf16* src, float* dst, int n) {
  for (int i = 0; i < n; ++i) dst[i] = __builtin_bit_cast(float, uint32_t(src[i].bits) << 16);
}

inline void store(const float* src, bf16* dst, int n) {
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, src[i]);
    const uint32_t nearest_even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    dst[i].bits = uint16_t(src[i] == src[i] ? nearest_even : 0x7fc0);
  }
}

#ifdef __F16C__

inline void load(const f16* src, float* dst, int n) {
  int i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
  for (; i < n; ++i) dst[i] = _cvtsh_ss(src[i].bits);
}

inline void store(const float* src, f16* dst, int n) {
  int i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < n; ++i) dst[i].bits = _cvtss_sh(src[i], _MM_FROUND_TO_NEAREST_INT);
}

#else

inline void load(const f16* src, float* dst, int n) {
  for (int i = 0; i < n; ++i) dst[i] = __builtin_bit_cast(__fp16, src[i].bits);
}

inline void store(const float* src, f16* dst, int n) {
  for (int i = 0; i < n; ++i) dst[i].bits = __builtin_bit_cast(uint16_t, static_cast<__fp16>(src[i]));
}

#endif

// Calls f with a value of the element type that dtype names.
template <class F>
inline void for_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32: return f(float{});
    case DType::f64: return f(double{});
    case DType::bf16: return f(bf16{});
    case DType::f16: return f(f16{});
  }
}

}  // namespace fastbert::cpu::FB_SET
