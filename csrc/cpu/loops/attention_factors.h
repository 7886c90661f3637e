// The two ways in which attention multiplies: Widened converts elements of any type to the type of arithmetic M, Paired
// multiplies bf16 in pairs without conversion. Scores, their gradients and all sums have type M either way. Where they
// become left factors, Widened uses them unchanged and Paired rounds them to pairs in the same memory.
#pragma once

#include "../../attention.h"
#include "product.h"
#include "relative_positions.h"

namespace fastbert::cpu::FB_ISA {

constexpr int64_t kKeys = 512;  // keys in a block

// P F (`weights`) and dS (`scores`) for one vector of scores.
template <class M>
struct BothGradients {
  vec<M> weights, scores;
};

// P (`weights`) and dO V^T (`scores`) of a block, which put_gradients replaces row by row with P F and dS.
template <class M>
struct GradientBlock {
  M *weights, *scores;
  int64_t stride, rows, keys;
};

// The left factors of the backward: (P F)^T, dS^T and dS.
template <class E>
struct LeftGradients {
  Left<true, E> weights, scores;
  Left<false, E> along;
};

template <class M_>
struct Widened {
  using M = M_;
  using E = M;  // elements of the factors

  static int64_t steps(int64_t inner) { return inner; }  // of a product's inner dimension
  // Queries are multiplied by scale before they are multiplied with keys.
  static M query_factor(const AttentionHead& a) { return M(a.scale); }
  static M late_scale(const AttentionHead&) { return 1; }  // factor of scores after the product
  static vec<M> scaled(vec<M> score, M) { return score; }
  static vec<M> weight(vec<M> difference, M) { return exp_nonpositive(difference); }  // e^(difference x late scale)

  static void pack_across(Rows from, int64_t rows, Panels<E> to) {
    from.typed<M>([&](auto* data) { pack_transposed(data, from.stride, rows, to); });
  }
  static void pack_along(Rows from, int64_t /*rows*/, int64_t D, M factor, Panels<M> to) {
    from.typed<M>([&](auto* data) { pack(data, from.stride, D, factor, to); });
  }
  static void put_rows(Rows from, int64_t rows, int64_t D, M factor, M* to) {
    from.typed<M>([&](auto* data) { load_rows(data, from.stride, rows, D, factor, to); });
  }

  static void put_weights(vec<M> weights, M* row, int64_t i) { store(weights, row + i); }
  static void end_weights(M*, int64_t) {}
  static Left<false, E> weights(const M* rows, int64_t stride) { return {rows, stride}; }

  static constexpr int64_t kAlongRoom = 0;

  // gradients_of(row) returns a function of i: P F and dS for the vector of the row that begins there. The functions of
  // two neighbouring rows can be used at a time.
  template <class F>
  static LeftGradients<E> put_gradients(const GradientBlock<M>& b, E*, const F& gradients_of) {
    for (int64_t row = 0; row < b.rows; ++row) {
      const auto gradients = gradients_of(row);
      M *const weights = b.weights + row * b.stride, *const scores = b.scores + row * b.stride;
      for (int64_t i = 0; i < b.keys; i += kLanes<M>) {
        const BothGradients<M> both = gradients(i);
        store(both.weights, weights + i), store(both.scores, scores + i);
      }
    }
    return {{b.weights, b.stride}, {b.scores, b.stride}, {b.scores, b.stride}};
  }
};

// For even D, where scores can be scaled after the product (can_scale_late). They may then overflow where scaled ones
// would not, as torch's do.
struct Paired {
  using M = float;
  using E = pair;

  static int64_t steps(int64_t inner) { return (inner + 1) / 2; }
  static float query_factor(const AttentionHead&) { return 1; }
  static float late_scale(const AttentionHead& a) { return float(a.scale); }
  static vfloat scaled(vfloat score, float scale) { return score * scale; }
  static vfloat weight(vfloat difference, float scale) { return exp2_roughly(difference * (scale * kLog2e)); }

  static void pack_across(Rows from, int64_t rows, Panels<pair> to) {
    pack_transposed<pair, pair>(static_cast<const pair*>(from.data), from.stride / 2, rows, to);
  }
  static void pack_along(Rows from, int64_t rows, int64_t D, float, Panels<pair> to) {
    pack_pairs(static_cast<const bf16*>(from.data), from.stride, rows, D, to);
  }
  static void put_rows(Rows from, int64_t rows, int64_t D, float, pair* to) {
    const bf16* const data = static_cast<const bf16*>(from.data);
    for (int64_t row = 0; row < rows; ++row)
      __builtin_memcpy(to + row * D / 2, data + row * from.stride, D * sizeof(bf16));
  }

  static void put_weights(vfloat weights, float* row, int64_t i) { store(weights, reinterpret_cast<bf16*>(row) + i); }
  static void end_weights(float* row, int64_t keys) {
    if (keys % 2) reinterpret_cast<bf16*>(row)[keys] = {};
  }
  static Left<false, pair> weights(const float* rows, int64_t stride) {
    return {reinterpret_cast<const pair*>(rows), stride};
  }

  static constexpr int64_t kAlong = kKeys / 2 + 8;  // row stride, not a power of two
  static constexpr int64_t kAlongRoom = kAttentionQueries * kAlong;

  // Two rows become one row of pairs of queries. The gradients of scores are also written to `along`, as two rows of
  // pairs of keys.
  template <class F>
  static LeftGradients<pair> put_gradients(const GradientBlock<float>& b, pair* along, const F& gradients_of) {
    for (int64_t row = 0; row < b.rows; row += 2) {
      const bool alone = row + 1 == b.rows;
      const auto of_first_row = gradients_of(row),
                 of_second_row = gradients_of(alone ? row : row + 1);  // alone: not called
      pair* const weights = reinterpret_cast<pair*>(b.weights + row * b.stride);
      pair* const scores = reinterpret_cast<pair*>(b.scores + row * b.stride);
      bf16* const first_row = reinterpret_cast<bf16*>(along + row * kAlong);
      bf16* const second_row = reinterpret_cast<bf16*>(along + (row + 1) * kAlong);
      for (int64_t i = 0; i < b.keys; i += kLanes<float>) {
        const BothGradients<float> first = of_first_row(i), second = alone ? BothGradients<float>{} : of_second_row(i);
        const vhalves of_first = rounded(first.scores), of_second = rounded(second.scores);
        store(of_first, first_row + i), store(of_second, second_row + i);
        store(paired(of_first, of_second), scores + i);
        store(paired(rounded(first.weights), rounded(second.weights)), weights + i);
      }
      if (b.keys % 2) first_row[b.keys] = second_row[b.keys] = {};
    }
    const auto pairs = [](const float* data) { return reinterpret_cast<const pair*>(data); };
    return {{pairs(b.weights), 2 * b.stride}, {pairs(b.scores), 2 * b.stride}, {along, kAlong}};
  }
};
static_assert(kAttentionQueries % 2 == 0 && kKeys % 2 == 0 && kAttentionQueries / 2 <= kTurned);

template <class T>
struct Type {
  using type = T;
};

// Calls f(Widened or Paired, Type of the relative positions).
template <class F>
void for_products(const AttentionHead& a, const F& f) {
  const auto with = [&](auto factors) {
    if (a.positions) return f(factors, Type<Relative<decltype(factors)>>{});
    f(factors, Type<NoPositions>{});
  };
  if constexpr (kPairs) {
    const bool plain = !a.positions && can_scale_late(a.scale) && takes_pairs(a.dtype, a.D);
    if (plain || (a.positions && a.positions->pairs)) return with(Paired{});
  }
  for_math(a.dtype, [&](auto zero) { with(Widened<decltype(zero)>{}); });
}

}  // namespace fastbert::cpu::FB_ISA
