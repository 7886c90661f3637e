// y = gelu(x + bias) on [rows, channels].
//
// The caller splits rows over threads. A row is taken in blocks small enough for the first-level cache: convert to
// fp32, one loop of plain arithmetic that the compiler turns into vectors (see gelu.h), convert back. The loops have no
// shuffles and no reassociation, so the leftover of a row gets the same bits as its vectors do.
//
// Bytes moved: x and y once.
#include "../bias_gelu.h"

#include "../gelu.h"
#include "types.h"

namespace fastbert::cpu::FB_SET {

namespace {

constexpr int kBlock = 256;

// ---- forward

template <bool kTanh, class T>
void forward(const T* x, const math_t<T>* bias, T* y, int64_t rows, int64_t channels) {
  for (int64_t row = 0; row < rows; ++row, x += channels, y += channels) {
    for (int64_t start = 0; start < channels; start += kBlock) {
      const int n = channels - start < kBlock ? int(channels - start) : kBlock;
      math_t<T> block[kBlock];
      load(x + start, block, n);
      for (int i = 0; i < n; ++i) block[i] = gelu<kTanh>(block[i] + bias[start + i]);
      store(block, y + start, n);
    }
  }
}

}  // namespace

void bias_gelu_fwd(const void* x, const void* bias, void* y, int64_t rows, int64_t channels, DType dtype, bool tanh) {
  for_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const auto loop = tanh ? forward<true, T> : forward<false, T>;
    loop(static_cast<const T*>(x), static_cast<const math_t<T>*>(bias), static_cast<T*>(y), rows, channels);
  });
}

}  // namespace fastbert::cpu::FB_SET
