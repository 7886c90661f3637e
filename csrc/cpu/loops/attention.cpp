// The loops between attention's matrix products, on tiles of scores that stay in the L2 cache.
#include "../../attention.h"

#include "philox.h"

namespace fastbert::cpu::FB_ISA {

namespace {

float logarithm(float v) { return __builtin_logf(v); }
double logarithm(double v) { return __builtin_log(v); }

template <class M>
M* row_of(void* scores, const AttentionTile& tile, int64_t row) {
  return static_cast<M*>(scores) + row * tile.stride;
}

void make_bits(const AttentionTile& tile, int64_t row) {
  attention_bits(tile.bits, tile.keys, uint32_t(tile.first_query + row), uint32_t(tile.head), uint32_t(tile.sequence),
                 tile.drop.key);
}

// ---- forward

template <bool kDrop, class M>
void softmax(const AttentionTile& tile, void* scores, M* lse, M* factors) {
  using V = vec<M>;
  const Dropout unscaled{tile.drop.key, tile.drop.threshold, 1};  // the factors contain keep_scale
  const int64_t keys = tile.keys;
  const uint8_t* const bits = tile.bits;
  for (int64_t row = 0; row < tile.queries; ++row) {
    M* const s = row_of<M>(scores, tile, row);
    V high[kSlots];
    for (V& part : high) part = splat<V>(-__builtin_inf());
    for_vectors_in_slots<M>(keys, [&](int64_t i, auto n, auto slot) {
      high[slot] = greater(high[slot], or_fill(load(s + i, n), n, -__builtin_inf()));
    });
    const M maximum = largest(greater(greater(high[0], high[1]), greater(high[2], high[3])));
    if (kDrop) make_bits(tile, row);
    V total[kSlots]{};
    for_vectors_in_slots<M>(keys, [&](int64_t i, auto n, auto slot) {
      V weight = exp_nonpositive(load(s + i, n) - maximum);
      total[slot] += or_fill(weight, n, 0);
      if constexpr (kDrop) weight = keep(weight, bits + i, unscaled);
      store(weight, s + i, n);
    });
    const M weights = sum(total);
    lse[row] = maximum + logarithm(weights);
    factors[row] = M(tile.drop.keep_scale) / weights;
  }
}

// ---- backward

template <bool kDrop, class M>
void softmax_bwd(const AttentionTile& tile, void* scores, void* dps, const M* lse, const M* delta) {
  using V = vec<M>;
  const Dropout drop = tile.drop;
  const uint8_t* const bits = tile.bits;
  for (int64_t row = 0; row < tile.queries; ++row) {
    M *const s = row_of<M>(scores, tile, row), *const dp = row_of<M>(dps, tile, row);
    const M row_lse = lse[row], row_delta = delta[row];
    if (kDrop) make_bits(tile, row);
    // lse is rounded, so the weights of large scores do not sum up to 1: divide by their sum.
    V total[kSlots]{};
    for_vectors_in_slots<M>(tile.keys, [&](int64_t i, auto n, auto slot) {
      const V p = exp_nonpositive(load(s + i, n) - row_lse);
      store(p, s + i, n);
      total[slot] += or_fill(p, n, 0);
    });
    const M rescale = M(1) / sum(total);
    for_vectors<M>(tile.keys, [&](int64_t i, auto n) {
      const V p = load(s + i, n) * rescale;
      V factor = splat<V>(1);
      if constexpr (kDrop) factor = keep(factor, bits + i, drop);
      store(p * factor, s + i, n);
      store(p * (load(dp + i, n) * factor - row_delta), dp + i, n);
    });
  }
}

}  // namespace

int64_t attention_bits_room(int64_t keys) { return key_bits_room(keys); }

void attention_softmax(const AttentionTile& tile, void* scores, void* lse, void* factors, DType dtype) {
  const auto run = [&](auto zero) {
    using M = decltype(zero);
    const auto loop = tile.drop.threshold ? softmax<true, M> : softmax<false, M>;
    loop(tile, scores, static_cast<M*>(lse), static_cast<M*>(factors));
  };
  dtype == DType::f64 ? run(double{}) : run(float{});
}

void attention_softmax_bwd(const AttentionTile& tile, void* scores, void* dp, const void* lse, const void* delta,
                           DType dtype) {
  const auto run = [&](auto zero) {
    using M = decltype(zero);
    const auto loop = tile.drop.threshold ? softmax_bwd<true, M> : softmax_bwd<false, M>;
    loop(tile, scores, dp, static_cast<const M*>(lse), static_cast<const M*>(delta));
  };
  dtype == DType::f64 ? run(double{}) : run(float{});
}

// ---- rows of a head

void attention_dot(const void* a, const void* b, int64_t rows, int64_t columns, int64_t stride, void* delta,
                   DType dtype) {
  for_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    using M = math_t<T>;
    for (int64_t row = 0; row < rows; ++row) {
      const T *x = static_cast<const T*>(a) + row * stride, *y = static_cast<const T*>(b) + row * stride;
      vec<M> total{};
      for_vectors<M>(columns, [&](int64_t i, auto n) { total = fma(load(x + i, n), load(y + i, n), total); });
      static_cast<M*>(delta)[row] = sum(total);
    }
  });
}

void attention_load(const void* from, int64_t stride, int64_t rows, int64_t columns, void* to, DType dtype) {
  for_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    using M = math_t<T>;
    for (int64_t row = 0; row < rows; ++row) {
      const T* src = static_cast<const T*>(from) + row * stride;
      M* dst = static_cast<M*>(to) + row * columns;
      for_vectors<M>(columns, [&](int64_t i, auto n) { store(load(src + i, n), dst + i, n); });
    }
  });
}

void attention_store(const void* from, int64_t from_stride, const void* factors, int64_t rows, int64_t columns,
                     void* to, int64_t stride, DType dtype) {
  for_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    using M = math_t<T>;
    for (int64_t row = 0; row < rows; ++row) {
      const M* src = static_cast<const M*>(from) + row * from_stride;
      const M factor = factors ? static_cast<const M*>(factors)[row] : M(1);
      T* dst = static_cast<T*>(to) + row * stride;
      for_vectors<M>(columns, [&](int64_t i, auto n) { store(load(src + i, n) * factor, dst + i, n); });
    }
  });
}

}  // namespace fastbert::cpu::FB_ISA
