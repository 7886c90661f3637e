// LayerNorm of one row that is in the L1 cache as fp32 (or fp64).
//
// The caller computes the mean from the elements' differences to the first one, so a constant row gives exactly the
// bias. The second pass corrects the rounding error of that mean, so a large offset costs no precision. The saved mean
// is rounded once more; the backward corrects that error too.
#pragma once

#include "simd.h"

namespace fastbert::cpu::FB_ISA {

// ---- forward: y = (z - mean) rstd weight + bias

template <class M, class Y>
inline void normalize(const M* z, M mean, int64_t channels, M eps, const M* weight, const M* bias, Y* y, M& saved_mean,
                      M& saved_rstd) {
  using V = vec<M>;
  V first[kSlots]{}, second[kSlots]{};
  for_vectors_in_slots<M>(channels, [&](int64_t i, auto n, auto slot) {
    const V d = or_fill(load(z + i, n) - mean, n, 0);
    first[slot] += d;
    second[slot] = fma(d, d, second[slot]);
  });
  const M correction = sum(first) / M(channels), variance = sum(second) / M(channels) - correction * correction;
  const M rstd = M(1 / __builtin_sqrt(double((variance < 0 ? M(0) : variance) + eps)));
  const V scale = splat<V>(rstd), shift = splat<V>(-correction * rstd);
  for_vectors<M>(channels, [&](int64_t i, auto n) {
    const V normal = fma(load(z + i, n) - mean, scale, shift);
    store(fma(normal, load(weight + i, n), load(bias + i, n)), y + i, n);
  });
  saved_mean = mean + correction;
  saved_rstd = rstd;
}

// ---- backward: with g = dy weight and n = (z - mean) rstd, dz = rstd (g - mean(g) - n mean(g n))

// The sums of c = z - mean, of g and of g c, from the first pass over a row.
template <class M>
struct RowSums {
  using V = vec<M>;
  V c[kSlots]{}, g[kSlots]{}, gc[kSlots]{};

  template <class N>
  void add(V c_, V g_, N n, int slot) {
    c_ = or_fill(c_, n, 0);
    c[slot] += c_;
    g[slot] += g_;
    gc[slot] = fma(g_, c_, gc[slot]);
  }
};

// Computes dz of a row in the second pass.
template <class M>
struct RowGradient {
  using V = vec<M>;
  M mean, rstd, correction, g_mean, minus_gn_mean;  // minus_gn_mean: -mean(g n)

  RowGradient(const RowSums<M>& sums, M mean_, M rstd_, int64_t channels)
      : mean(mean_), rstd(rstd_), correction(sum(sums.c) / M(channels)), g_mean(sum(sums.g) / M(channels)) {
    minus_gn_mean = -(sum(sums.gc) / M(channels) - correction * g_mean) * rstd;
  }

  V normal(V z) const { return fma(z - mean, splat<V>(rstd), splat<V>(-correction * rstd)); }
  V dz(V normal, V g) const { return (fma(normal, splat<V>(minus_gn_mean), g) - g_mean) * rstd; }
};

template <class V, class M, class N>
inline void accumulate(M* sums, int64_t i, N n, V v) {
  store(load(sums + i, n) + v, sums + i, n);
}

}  // namespace fastbert::cpu::FB_ISA
