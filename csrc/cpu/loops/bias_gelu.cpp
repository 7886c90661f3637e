// y = gelu(x + bias) on [rows, channels], and its backward; bias may be nullptr. The caller splits rows over threads.
//
// Bytes moved: forward x and y once; backward dy, x and dx once. dbias is accumulated in one row of fp32 (fp64 for f64)
// in the L1 cache.
#include "../../bias_gelu.h"

#include "../../gelu.h"

namespace fastbert::cpu::FB_ISA {

namespace {

// ---- forward

template <bool kBias, class V, class M, class N>
V add_bias(V v, const M* bias, int64_t i, N n) {
  if constexpr (kBias) v += load(bias + i, n);
  return v;
}

template <bool kTanh, bool kBias, class T>
void forward(const T* x, const math_t<T>* bias, T* y, int64_t rows, int64_t channels) {
  for (int64_t row = 0; row < rows; ++row, x += channels, y += channels)
    for_vectors<math_t<T>>(channels, [&](int64_t i, auto n) {
      store(gelu_for<T, kTanh>(add_bias<kBias>(load(x + i, n), bias, i, n)), y + i, n);
    });
}

// ---- backward: dx = dy gelu'(x + bias), dbias[c] += sum of dx[:, c]

template <bool kTanh, bool kBias, class T>
void backward(const T* dy, const T* x, const math_t<T>* bias, T* dx, math_t<T>* dbias, int64_t rows, int64_t channels) {
  for (int64_t row = 0; row < rows; ++row, dy += channels, x += channels, dx += channels)
    for_vectors<math_t<T>>(channels, [&](int64_t i, auto n) {
      const auto d = load(dy + i, n) * gelu_derivative<kTanh>(add_bias<kBias>(load(x + i, n), bias, i, n));
      store(d, dx + i, n);
      store(load(dbias + i, n) + d, dbias + i, n);
    });
}

}  // namespace

void bias_gelu_fwd(const void* x, const void* bias, void* y, int64_t rows, int64_t channels, DType dtype, bool tanh) {
  for_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const auto loop = tanh   ? bias ? forward<true, true, T> : forward<true, false, T>
                      : bias ? forward<false, true, T>
                             : forward<false, false, T>;
    loop(static_cast<const T*>(x), static_cast<const math_t<T>*>(bias), static_cast<T*>(y), rows, channels);
  });
}

void bias_gelu_bwd(const void* dy, const void* x, const void* bias, void* dx, void* dbias, int64_t rows,
                   int64_t channels, DType dtype, bool tanh) {
  for_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    using M = math_t<T>;
    const auto loop = tanh   ? bias ? backward<true, true, T> : backward<true, false, T>
                      : bias ? backward<false, true, T>
                             : backward<false, false, T>;
    loop(static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<const M*>(bias), static_cast<T*>(dx),
         static_cast<M*>(dbias), rows, channels);
  });
}

}  // namespace fastbert::cpu::FB_ISA
