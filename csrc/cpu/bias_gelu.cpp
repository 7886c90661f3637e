// y = gelu(x + bias) on [rows, channels], and its backward. The caller splits rows over threads.
//
// Bytes moved: forward x and y once; backward dy, x and dx once. dbias is added up in a row of fp32 that stays in the
// first-level cache.
#include "../bias_gelu.h"

#include "../gelu.h"

namespace fastbert::cpu::FB_SET {

namespace {

// ---- forward

template <bool kTanh, class T>
void forward(const T* x, const math_t<T>* bias, T* y, int64_t rows, int64_t channels) {
  for (int64_t row = 0; row < rows; ++row, x += channels, y += channels)
    for_vectors<math_t<T>>(channels, [&](int64_t i, auto n) {
      store(gelu<kTanh>(load(x + i, n) + load(bias + i, n)), y + i, n);
    });
}

// ---- backward: dx = dy gelu'(x + bias), dbias[c] += sum of dx[:, c]

template <bool kTanh, class T>
void backward(const T* dy, const T* x, const math_t<T>* bias, T* dx, math_t<T>* dbias, int64_t rows, int64_t channels) {
  for (int64_t row = 0; row < rows; ++row, dy += channels, x += channels, dx += channels)
    for_vectors<math_t<T>>(channels, [&](int64_t i, auto n) {
      const auto d = load(dy + i, n) * gelu_derivative<kTanh>(load(x + i, n) + load(bias + i, n));
      store(d, dx + i, n);
      if (dbias) store(load(dbias + i, n) + d, dbias + i, n);
    });
}

}  // namespace

void bias_gelu_fwd(const void* x, const void* bias, void* y, int64_t rows, int64_t channels, DType dtype, bool tanh) {
  for_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const auto loop = tanh ? forward<true, T> : forward<false, T>;
    loop(static_cast<const T*>(x), static_cast<const math_t<T>*>(bias), static_cast<T*>(y), rows, channels);
  });
}

void bias_gelu_bwd(const void* dy, const void* x, const void* bias, void* dx, void* dbias, int64_t rows,
                   int64_t channels, DType dtype, bool tanh) {
  for_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    using M = math_t<T>;
    const auto loop = tanh ? backward<true, T> : backward<false, T>;
    loop(static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<const M*>(bias), static_cast<T*>(dx),
         static_cast<M*>(dbias), rows, channels);
  });
}

}  // namespace fastbert::cpu::FB_SET
