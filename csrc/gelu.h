// GELU of one number: the same text for the loops of cpu/ and the kernels of cuda/.
//
//   gelu(v) = max(v, 0) - a tail(a),  a = |v|;  tail(a) = 1 - Phi(a), or its tanh approximation
//
// The usual v (1 + erf(v / sqrt 2)) / 2 cancels for v < 0: at v = -5 it has lost every digit. This form keeps the
// relative error below 6 epsilon (erf, fp32) down to results of 1e-38, has no branch, and passes through the density
// exp(-v²/2), which the derivative needs too.
//
// Functions are static: each instruction set and each CUDA file must keep its own copy.
#pragma once

#ifdef __CUDACC__
#define FB_INLINE static __device__ __forceinline__
#else
#define FB_INLINE static inline
#endif

namespace fastbert {

FB_INLINE float absolute(float v) { return __builtin_fabsf(v); }

// p / q to 2 ulp on CUDA, where the exact division is a dozen instructions; 1 <= q < 2^126.
FB_INLINE float divide(float p, float q) {
#ifdef __CUDA_ARCH__
  return __fdividef(p, q);
#else
  return p / q;
#endif
}

// exp(x + dx) for x <= 0 and dx tiny: the rounding error of a large exponent comes as dx. 0 where exp(x) < 2^-126.
FB_INLINE float exp_sum(float x, float dx) {
#ifdef __CUDA_ARCH__
  const float y = expf(x);
  return fmaf(y, dx, y);
#else
  // Cody and Waite: exp(x) = 2^n exp(r), n = round(x / ln 2). Adding 1.5 · 2^23 leaves n in the low bits. At -88, n is
  // -127 and the exponent field of 2^n is 0. Conditions are written so that NaN falls through.
  constexpr float kShift = 0x1.8p23f, kLog2e = 0x1.715476p0f, kLn2Hi = 0x1.62e4p-1f, kLn2Lo = 0x1.7f7d1cp-20f;
  x = -88.f > x ? -88.f : x;
  const float shifted = __builtin_fmaf(x, kLog2e, kShift);
  const float n = shifted - kShift;
  const float r = __builtin_fmaf(n, -kLn2Lo, __builtin_fmaf(n, -kLn2Hi, x)) + dx;
  // (exp(r) - 1 - r) / r²: minimax for the relative error of exp(r), 2^-28.3, on |r| <= ln(2) / 2.
  float p = 1.38146132e-3f;
  p = __builtin_fmaf(p, r, 8.36870982e-3f);
  p = __builtin_fmaf(p, r, 4.16683874e-2f);
  p = __builtin_fmaf(p, r, 1.66665207e-1f);
  p = __builtin_fmaf(p, r, 4.99999935e-1f);
  p = __builtin_fmaf(p, r * r, r) + 1.f;
  const unsigned bits = (__builtin_bit_cast(unsigned, shifted) + 127u) << 23;
  return p * __builtin_bit_cast(float, bits);
#endif
}

// 1 - Phi(a), a >= 0: exp(-a²/2) times a rational minimax fit (Remez) of erfcx(a / sqrt 2) / 2 on [0, 14], relative
// error 2^-27.4. All coefficients are positive, so nothing cancels; beyond 14 the tail is 0 in fp32.
FB_INLINE float normal_tail(float a) {
  const float half = -0.5f * a, exponent = half * a;
  const float density = exp_sum(exponent, __builtin_fmaf(half, a, -exponent));
  float p = 4.07761316e-3f;
  p = __builtin_fmaf(p, a, 4.03725745e-2f);
  p = __builtin_fmaf(p, a, 1.82461889e-1f);
  p = __builtin_fmaf(p, a, 4.37250984e-1f);
  p = __builtin_fmaf(p, a, 0.5f);
  float q = 1.02209317e-2f;
  q = __builtin_fmaf(q, a, 1.01205847e-1f);
  q = __builtin_fmaf(q, a, 4.67429256e-1f);
  q = __builtin_fmaf(q, a, 1.19929097f);
  q = __builtin_fmaf(q, a, 1.67238693f);
  q = __builtin_fmaf(q, a, 1.f);
  return density * divide(p, q);
}

// (1 - tanh(u)) / 2 = w / (1 + w), w = exp(-2u), u = sqrt(2 / pi) (a + 0.044715 a³).
FB_INLINE float tanh_tail(float a) {
  const float w = exp_sum(-1.59576912f * a * __builtin_fmaf(0.044715f, a * a, 1.f), 0.f);
  return divide(w, 1.f + w);
}

#ifndef __CUDACC__
static inline double absolute(double v) { return __builtin_fabs(v); }

static inline double normal_tail(double a) { return 0.5 * __builtin_erfc(a * 0.70710678118654752440); }

static inline double tanh_tail(double a) {
  const double w = __builtin_exp(-1.59576912160573071176 * a * (1.0 + 0.044715 * a * a));
  return w / (1.0 + w);
}
#endif

// Both tails are 0 from 40 on, in double too; stopping there keeps inf out of the polynomials. NaN passes through.
template <bool kTanh, class T>
FB_INLINE T gelu(T v) {
  const T magnitude = absolute(v);
  const T a = T(40) < magnitude ? T(40) : magnitude;
  const T tail = kTanh ? tanh_tail(a) : normal_tail(a);
  return (v > 0 ? v : T(0)) - a * tail;
}

}  // namespace fastbert
