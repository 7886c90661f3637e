// The logits x W^T + bias of all rows and some classes, without the product in memory: the weights of the classes are
// packed once, then blocks of rows are multiplied, whose logits stay in the cache. A logit's bits depend only on its
// row and class.
#pragma once

#include "product.h"

namespace fastbert::cpu::FB_ISA {

// Calls f(steps of the inner dimension, and a value of each type: of elements, of a step of x, of a step of W).
template <class F>
void for_factors(DType dtype, int64_t inner, const F& f) {
  if constexpr (kPairs)
    if (takes_pairs(dtype, inner)) return f(inner / 2, bf16{}, pair{}, pair{});
  for_dtype(dtype, [&](auto element) { f(inner, element, math_t<decltype(element)>{}, element); });
}

template <class E>
class Logits {
 public:
  using M = sum_t<E>;
  static constexpr int64_t kRows = 144;  // of a block: a multiple of every tile height
  static constexpr int64_t kClasses = 8 * kPanel<E>;
  static constexpr int64_t kStride = kClasses + 16;  // a power of two would use only few sets of the cache

  // steps: the inner dimension, counted in E. memory: bytes(steps) bytes, aligned to E's size.
  Logits(void* memory, int64_t steps) : weights_{static_cast<E*>(memory), steps} {
    sums_ = reinterpret_cast<M*>(weights_.data + steps * kClasses), bias_ = sums_ + kRows * kStride;
  }
  static int64_t bytes(int64_t steps) {
    return steps * kClasses * int64_t(sizeof(E)) + (kRows * kStride + kClasses) * int64_t(sizeof(M));
  }
  M* behind() const { return bias_ + kClasses; }

  // weight: the row of the first class. bias: the biases of all classes, or null.
  template <class W>
  void pack(const W* weight, const M* bias, int64_t first, int64_t classes) {
    pack_transposed<W, E>(weight, weights_.inner, classes, weights_);
    classes_ = classes;
    for (int64_t i = 0; i < whole_panels<E>(classes); ++i) bias_[i] = bias && i < classes ? bias[first + i] : 0;
  }

  // Multiplies at most kRows rows of x. Then at(row, i) is a vector of logits, with the bias, from the i-th class on,
  // up to the end of the last panel.
  void multiply(const E* x, int64_t rows) const {
    constexpr int64_t kChain = 256;  // steps in one chain of sums
    const int64_t steps = weights_.inner;
    for (int64_t k = 0; k == 0 || k < steps; k += kChain) {
      const auto add = k ? product<Onto::sums, false, E> : product<Onto::nothing, false, E>;
      add(rows, classes_, least(kChain, steps - k), {x + k, steps}, weights_.rows_from(k), sums_, kStride, nullptr, {});
    }
  }
  vec<M> at(int64_t row, int64_t i) const { return load(sums_ + row * kStride + i) + load(bias_ + i); }
  M* row(int64_t row) const { return sums_ + row * kStride; }

 private:
  const Tiles tiles_{kSame<E, pair>};
  Panels<E> weights_;
  M *sums_, *bias_;
  int64_t classes_ = 0;
};

}  // namespace fastbert::cpu::FB_ISA
