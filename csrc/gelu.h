// GELU and its derivative, for the loops of cpu/loops/ on vectors and the kernels of cuda/ on floats.
//
//   gelu(v)  = max(v, 0) - a tail(a),      a = |v|;  tail(a) = 1 - Phi(a), or its tanh approximation
//   gelu'(v) = d or, for v > 0, 1 - d,     d = tail(a) - a slope(a),  slope = -tail'
//
// The usual v (1 + erf(v / sqrt 2)) / 2 cancels for v < 0: at v = -5 it has lost every digit. This form keeps the
// relative error below 6 epsilon (erf, fp32) down to results of 1e-38, has no branch, and computes the density
// exp(-a²/2), which the derivative needs too.
#pragma once

#if defined(__CUDACC__) || defined(FB_CUDA_ON_CPU)
#define FB_IN_KERNEL
#endif

#ifdef FB_IN_KERNEL

#include "cuda/mma.cuh"  // ptx

#define FB_INLINE static __device__ __forceinline__

namespace fastbert::cuda {

FB_INLINE float fma(float a, float b, float c) { return fmaf(a, b, c); }
FB_INLINE float absolute(float v) { return fabsf(v); }
FB_INLINE float lesser(float a, float b) { return a < b ? a : b; }
FB_INLINE float greater(float a, float b) { return a > b ? a : b; }
FB_INLINE float at_most(float a, float b) { return fminf(a, b); }  // b if a is NaN

template <class V>
FB_INLINE V splat(double value) {
  return static_cast<V>(value);
}

// p / q to 2 ulp, for 1 <= q < 2^126. The exact division takes a dozen instructions.
FB_INLINE float divide(float p, float q) { return __fdividef(p, q); }

FB_INLINE float exp_nonpositive(float x) { return expf(x); }
FB_INLINE float exp2_roughly(float x) { return ptx::exp2_approx(x); }

// exp(-a²/2); the rounding error of the exponent is corrected.
FB_INLINE float gaussian(float a) {
  const float half = -0.5f * a, exponent = half * a, y = expf(exponent);
  return fmaf(y, fmaf(half, a, -exponent), y);
}

#else

#include "cpu/loops/simd.h"

#define FB_INLINE static inline

namespace fastbert::cpu::FB_ISA {

template <class V>
FB_INLINE V divide(V p, V q) {
  return p / q;
}
template <class V>
FB_INLINE V at_most(V a, V b) {
  return lesser(b, a);
}

#endif

// tail(a) and slope(a) for the same a >= 0.
template <class V>
struct Tail {
  V tail, slope;
};

// 1 - Phi(a) is exp(-a²/2) times a rational minimax fit (Remez) of erfcx(a / sqrt 2) / 2 on [0, 14], relative error
// 2^-27.4. All coefficients are positive, so nothing cancels.
template <class V>
FB_INLINE Tail<V> normal_tail(V a) {
  V p = splat<V>(4.07761316e-3);
  p = fma(p, a, splat<V>(4.03725745e-2));
  p = fma(p, a, splat<V>(1.82461889e-1));
  p = fma(p, a, splat<V>(4.37250984e-1));
  p = fma(p, a, splat<V>(0.5));
  V q = splat<V>(1.02209317e-2);
  q = fma(q, a, splat<V>(1.01205847e-1));
  q = fma(q, a, splat<V>(4.67429256e-1));
  q = fma(q, a, splat<V>(1.19929097));
  q = fma(q, a, splat<V>(1.67238693));
  q = fma(q, a, splat<V>(1));
  const V density = gaussian(a);
  return {density * divide(p, q), density * splat<V>(0.3989422804014327)};
}

// (1 - tanh(u)) / 2 = w / (1 + w), w = exp(-2u), u = sqrt(2 / pi) (a + 0.044715 a³).
template <class V>
FB_INLINE Tail<V> tanh_tail(V a) {
  const V cubic = splat<V>(0.044715) * a * a, one = splat<V>(1);
  const V w = exp_nonpositive(splat<V>(-1.5957691216057308) * a * (cubic + one));
  const V tail = divide(w, one + w);
  return {tail, splat<V>(1.5957691216057308) * fma(cubic, splat<V>(3), one) * tail * (one - tail)};
}

#ifndef FB_IN_KERNEL
FB_INLINE Tail<vdouble> normal_tail(vdouble a) {
  vdouble tail;
  for (int i = 0; i < kLanes<double>; ++i) tail[i] = 0.5 * __builtin_erfc(a[i] * 0.70710678118654752440);
  return {tail, gaussian(a) * 0.3989422804014327};
}
#endif

// Both tails are 0 from this a on. The vectors' exponential gives 0 earlier than CUDA's, which has denormal results.
#ifdef FB_IN_KERNEL
template <class V>
constexpr double kTailsEnd = 14.5;
#else
template <class V>
constexpr double kTailsEnd = 13.25;
template <>
inline constexpr double kTailsEnd<vdouble> = 40;
#endif

// |v|, clamped so that the polynomials do not overflow. NaN stays NaN.
template <class V>
FB_INLINE V magnitude(V v) {
  return lesser(splat<V>(kTailsEnd<V>), absolute(v));
}

template <bool kTanh, class V>
FB_INLINE Tail<V> tail_of(V a) {
  if constexpr (kTanh) {
    return tanh_tail(a);
  } else {
    return normal_tail(a);
  }
}

template <bool kTanh, class V>
FB_INLINE V gelu(V v) {
  const V a = magnitude(v);
  return fma(-a, tail_of<kTanh>(a).tail, greater(splat<V>(0), v));
}

template <bool kTanh, class V>
FB_INLINE V gelu_derivative(V v) {
  const V a = magnitude(v);
  const Tail<V> t = tail_of<kTanh>(a);
  const V d = fma(-a, t.slope, t.tail);
  return v > 0 ? splat<V>(1) - d : d;
}

// ---- for 16-bit results: fewer instructions, and no division

// The coefficients are minimax fits (Lawson's iteration) on [0, 10]. That of the highest power comes first.
template <class V, int N>
FB_INLINE V polynomial(const float (&coefficients)[N], V a) {
  V sum = splat<V>(coefficients[0]);
#ifdef FB_IN_KERNEL
#pragma unroll
#else
#pragma GCC unroll 8
#endif
  for (int i = 1; i < N; ++i) sum = fma(sum, a, splat<V>(coefficients[i]));
  return sum;
}

// 1 - Phi(a) to 2^-12.8, as a power of 2. Beyond a = 10 the exponent keeps falling, to -157 at 14.5, where it gives 0.
template <class V>
FB_INLINE V short_tail(V a) {
  constexpr float kExponent[] = {-7.48657158e-7f, 3.34116594e-5f,  -6.40464947e-4f, 7.01594772e-3f,
                                 -4.99956049e-2f, -4.63506490e-1f, -1.14883220f,    -1.00018799f};
  return exp2_roughly(polynomial(kExponent, a));
}

// GELU, for a result that will be rounded to T.
template <class T, bool kTanh, class V>
FB_INLINE V gelu_for(V v) {
  if constexpr (kTanh || sizeof(T) != 2) {
    return gelu<kTanh>(v);
  } else {
    const V a = at_most(absolute(v), splat<V>(kTailsEnd<V>));
    return fma(-a, short_tail(a), greater(splat<V>(0), v));
  }
}

#ifdef FB_IN_KERNEL

// gelu'(-a) / tail(a) = 1 - a phi(a) / (1 - Phi(a)), to 2^-13.8 of 1 + a².
FB_INLINE float short_ratio(float a) {
  constexpr float kRatio[] = {-3.97982012e-6f, 1.50111184e-4f,  -2.35331943e-3f, 2.01878510e-2f,
                              -1.05792895e-1f, -6.40900731e-1f, -7.96450794e-1f, 9.99929786e-1f};
  return polynomial(kRatio, a);
}

// The derivative, for use where everything computed from it will be rounded to T.
template <class T, bool kTanh>
FB_INLINE float gelu_derivative_for(float v) {
  if constexpr (kTanh || sizeof(T) == 4) return gelu_derivative<kTanh>(v);
  const float a = magnitude(v), d = short_tail(a) * short_ratio(a);
  return v > 0 ? 1 - d : d;
}

#endif

}  // namespace
