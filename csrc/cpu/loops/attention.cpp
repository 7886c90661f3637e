// Attention of one head of one sequence: softmax(Q K^T scale) V, forward and backward.
//
// Keys and values are packed once, then queries are processed in blocks. The forward takes each through blocks of keys,
// so that scores stay in the cache (with an online softmax: Milakov & Gimelshein, "Online normalizer calculation for
// softmax", 2018). The backward goes through the keys twice, because it needs the sum of a row's weights before it uses
// them. Relative positions, if there are any, add to the scores of a block and receive their gradients.
#include "attention_factors.h"
#include "philox.h"

namespace fastbert::cpu::FB_ISA {

namespace {

constexpr int64_t kQueries = kAttentionQueries;
static_assert(kKeys % (16 * kGroups) == 0);  // for the dropout's counters

float logarithm(float v) { return __builtin_logf(v); }
double logarithm(double v) { return __builtin_log(v); }

// Stride of the rows of scores. A power of two would put every row into the same sets of the cache. After the keys of a
// row there is room for a whole vector: rows are read and written in whole vectors, the last of which is part garbage.
template <class M>
int64_t row_stride(int64_t keys) {
  return whole_panels<M>(keys) + 16;
}

template <class T>
T* writable(const T* data) {
  return const_cast<T*>(data);
}

// Writes rows of M, which are whole panels, to a tensor, multiplied by factor(row).
template <class M, class F>
void store_rows(const M* from, int64_t rows, int64_t columns, Rows to, const F& factor) {
  to.typed<M>([&](auto* data) {
    for (int64_t row = 0; row < rows; ++row) {
      const M* const source = from + row * whole_panels<M>(columns);
      auto* const target = writable(data) + row * to.stride;
      const M by = factor(row);
      for_vectors<M>(columns, [&](int64_t i, auto n) { store(load(source + i, n) * by, target + i, n); });
    }
  });
}

void make_bits(const AttentionHead& a, int64_t query, int64_t first_key, int64_t keys, uint8_t* bits) {
  attention_bits(bits, first_key, keys, uint32_t(query), uint32_t(a.head), uint32_t(a.sequence), a.drop.key);
}

// Calls f(first key, keys) for blocks of keys.
template <class F>
void for_blocks(int64_t keys, const F& f) {
  for (int64_t key = 0; key < keys; key += kKeys) f(key, least(kKeys, keys - key));
}

// ---- forward

template <class N, class P>
struct ForwardRoom {
  using M = typename N::M;
  using E = typename N::E;
  Panels<E> keys, values;
  E* queries;
  M *scores, *sums, *factors;
  uint8_t* bits;

  ForwardRoom(const AttentionHead& a, Room& room) {
    const int64_t block = least(kKeys, a.keys), panels = whole_panels<M>(a.D), across = N::steps(a.D);
    keys = {room.take<E>(across * whole_panels<M>(a.keys)), across};
    values = {room.take<E>(N::steps(a.keys) * panels), N::steps(a.keys)};
    queries = room.take<E>(kQueries * across), sums = room.take<M>(kQueries * panels);
    scores = room.take<M>(kQueries * row_stride<M>(block));
    factors = room.take<M>(kQueries);
    bits = room.take<uint8_t>(a.drop.threshold ? key_bits_room(block) : 0);
  }
};

// What a row keeps of earlier blocks of keys: the largest score, before the late scale, and the sum of weights relative
// to it.
template <class M>
struct SoFar {
  M high, total;
};

// Replaces a row's scores for one block of keys by e^((score - the largest so far) x late scale), or 0 where dropped.
// Returns the factor for the sums of earlier blocks. A NaN spreads to the whole row through its sum of weights.
template <bool kDrop, class N>
typename N::M weigh(typename N::M* scores, int64_t keys, typename N::M late_scale, const uint8_t* bits,
                    const Dropout& drop, SoFar<typename N::M>& so_far) {
  using M = typename N::M;
  using V = vec<M>;
  const Dropout unscaled{drop.key, drop.threshold, 1};  // keep_scale is applied to the finished row
  V most[kSlots];
  for (V& part : most) part = splat<V>(-__builtin_inf());
  for_vectors_in_slots<M>(keys, [&](int64_t i, auto n, auto slot) {
    most[slot] = greater(most[slot], or_fill(load(scores + i), n, -__builtin_inf()));
  });
  const M here = largest(most), high = here > so_far.high ? here : so_far.high, base = base_of(high);
  V total[kSlots]{};
  for_vectors_in_slots<M>(keys, [&](int64_t i, auto n, auto slot) {
    V weight = N::weight(load(scores + i) - base, late_scale);
    total[slot] += or_fill(weight, n, 0);
    if constexpr (kDrop) weight = keep(weight, bits + i, unscaled);
    N::put_weights(weight, scores, i);
  });
  N::end_weights(scores, keys);
  const M rescale = so_far.total > 0 ? N::weight(splat<V>(so_far.high - base), late_scale)[0] : 0;
  so_far = {high, so_far.total * rescale + sum(total)};
  return rescale;
}

// A product whose sums are chains of at most kChain steps. With all keys of a block in one, the largest error sometimes
// exceeds the accuracy rule (docs/attention.md). What bf16 loses that way is small beside its rounding.
template <Onto what, class E>
void in_chains(int64_t rows, int64_t columns, int64_t steps, Left<false, E> a, Panels<E> b, sum_t<E>* c, int64_t stride,
               const sum_t<E>* factors) {
  constexpr int64_t kChain = kSame<E, pair> ? kKeys : kKeys / 2;
  product<what>(rows, columns, least(kChain, steps), a, b, c, stride, factors);
  for (int64_t step = kChain; step < steps; step += kChain)
    product<Onto::sums>(rows, columns, least(kChain, steps - step), Left<false, E>{a.data + step, a.stride},
                        b.rows_from(step), c, stride);
}

template <class N, class P>
void forward(const AttentionHead& a, int64_t first, int64_t last, Rows out, void* lse, void* memory) {
  using M = typename N::M;
  using E = typename N::E;
  Room all(memory);
  const ForwardRoom<N, P> room(a, all);
  const Tiles tiles(kSame<E, pair>);
  const P positions(a, all);
  const int64_t D = a.D, panels = whole_panels<M>(D), stride = row_stride<M>(least(kKeys, a.keys));
  const M scale = N::late_scale(a);
  const auto weigh_row = a.drop.threshold ? weigh<true, N> : weigh<false, N>;
  N::pack_across(rows_of(a, a.k), a.keys, room.keys);
  N::pack_along(rows_of(a, a.v), a.keys, D, 1, room.values);
  for (int64_t query = first; query < last; query += kQueries) {
    const int64_t rows = least(kQueries, last - query);
    N::put_rows(rows_of(a, a.q).from(query), rows, D, N::query_factor(a), room.queries);
    SoFar<M> so_far[kQueries];
    for (int64_t row = 0; row < rows; ++row) so_far[row] = {-M(__builtin_inf()), 0};
    for_blocks(a.keys, [&](int64_t key, int64_t keys) {
      const Panels<E> block{room.keys.at(key, 0), room.keys.inner};
      const Left<false, E> queries{room.queries, block.inner};
      product<Onto::nothing>(rows, keys, block.inner, queries, block, room.scores, stride);
      positions.add(Block<M>{query, rows, key, keys, room.scores, stride}, room.queries);
      for (int64_t row = 0; row < rows; ++row) {
        if (a.drop.threshold) make_bits(a, query + row, key, keys, room.bits);
        M* const scores = room.scores + row * stride;
        room.factors[row] = weigh_row(scores, keys, scale, room.bits, a.drop, so_far[row]);
      }
      const auto add = key ? in_chains<Onto::scaled, E> : in_chains<Onto::nothing, E>;
      add(rows, D, N::steps(keys), N::weights(room.scores, stride), room.values.rows_from(N::steps(key)), room.sums,
          panels, room.factors);
    });
    for (int64_t row = 0; row < rows; ++row)
      static_cast<M*>(lse)[query + row] = so_far[row].high * scale + logarithm(so_far[row].total);
    store_rows(room.sums, rows, D, out.from(query),
               [&](int64_t row) { return M(a.drop.keep_scale) / so_far[row].total; });
  }
}

// ---- backward: with P = exp(S - lse), F the dropout factors and delta = rowsum(dO O): dV = (P F)^T dO,
// dS = P (dO V^T F - delta), dQ = scale dS K, dK = scale dS^T Q

// The factors of relative positions in the backward, in the type of arithmetic even where the rest is in pairs of bf16.
template <class N, class P>
struct WideFactors {
  using M = typename N::M;
  static constexpr bool kNeeded = !kSame<P, NoPositions> && !kSame<typename N::E, M>;
  Panels<M> keys{}, queries{};
  M* scores = nullptr;  // the gradients of a block's scores
  int64_t stride = 0;

  WideFactors(const AttentionHead& a, Room& room) {
    if constexpr (!kNeeded) return;
    const int64_t panels = whole_panels<M>(a.D);
    stride = row_stride<M>(least(kKeys, a.keys)), scores = room.take<M>(kQueries * stride);
    keys = {room.take<M>(a.keys * panels), a.keys}, queries = {room.take<M>(kQueries * panels), kQueries};
  }

  void pack_keys(const AttentionHead& a) const {
    if constexpr (kNeeded) Widened<M>::pack_along(rows_of(a, a.k), a.keys, a.D, 1, keys);
  }
  void pack_queries(const AttentionHead& a, int64_t query, int64_t rows) {
    queries.inner = rows;
    if constexpr (kNeeded) Widened<M>::pack_along(rows_of(a, a.q).from(query), rows, a.D, 1, queries);
  }
};

template <class N, class P>
struct BackwardRoom {
  using M = typename N::M;
  using E = typename N::E;
  Panels<E> across_keys, across_values, keys, queries, grads;
  E *left_queries, *left_grads, *along;
  M *scores, *dp, *dqueries, *dkeys, *dvalues;
  uint8_t* bits;  // dropout bits of two queries
  WideFactors<N, P> wide;

  BackwardRoom(const AttentionHead& a, Room& room) : wide(a, room) {
    const int64_t panels = whole_panels<M>(a.D), across = N::steps(a.D), all = across * whole_panels<M>(a.keys);
    across_keys = {room.take<E>(all), across}, across_values = {room.take<E>(all), across};
    keys = {room.take<E>(N::steps(a.keys) * panels), N::steps(a.keys)};
    const int64_t rows = N::steps(kQueries);
    queries = {room.take<E>(rows * panels), rows}, grads = {room.take<E>(rows * panels), rows};
    left_queries = room.take<E>(kQueries * across), left_grads = room.take<E>(kQueries * across);
    along = room.take<E>(N::kAlongRoom);
    scores = room.take<M>(kQueries * row_stride<M>(a.keys)), dp = room.take<M>(kQueries * row_stride<M>(a.keys));
    dqueries = room.take<M>(kQueries * panels);
    dkeys = room.take<M>(a.keys * panels), dvalues = room.take<M>(a.keys * panels);
    bits = room.take<uint8_t>(a.drop.threshold ? 2 * key_bits_room(least(kKeys, a.keys)) : 0);
  }
};

// products[i]: row i of a times row i of b. Both have one type.
template <class M>
void dot_rows(Rows a, Rows b, int64_t rows, int64_t columns, M* products) {
  a.typed<M>([&](auto* of_a) {
    const auto* const of_b = static_cast<decltype(of_a)>(b.data);
    for (int64_t row = 0; row < rows; ++row) {
      const auto *const left = of_a + row * a.stride, *const right = of_b + row * b.stride;
      vec<M> total{};
      for_vectors<M>(columns, [&](int64_t i, auto n) { total = fma(load(left + i, n), load(right + i, n), total); });
      products[row] = sum(total);
    }
  });
}

// Replaces scores by P and returns the sum of P, which need not be 1 because lse is rounded.
template <class N, class M = typename N::M>
M exponentiate(M* scores, int64_t keys, M scale, M lse) {
  using V = vec<M>;
  V total[kSlots]{};
  for_vectors_in_slots<M>(keys, [&](int64_t i, auto n, auto slot) {
    const V p = N::weight(N::scaled(load(scores + i), scale) - lse, 1);
    store(p, scores + i);
    total[slot] += or_fill(p, n, 0);
  });
  return sum(total);
}

// P F and dS of one vector, from dp and from P, which is first multiplied by `rescale`.
template <bool kDrop, class M>
BothGradients<M> differentiate(vec<M> p, vec<M> dp, const uint8_t* bits, const Dropout& drop, M rescale, M delta) {
  const vec<M> weight = p * rescale;
  vec<M> factor = splat<vec<M>>(1);
  if constexpr (kDrop) factor = keep(factor, bits, drop);
  return {weight * factor, weight * (dp * factor - delta)};
}

// What a block's P and dO V^T are turned into gradients with.
template <class N>
struct ForGradients {
  using M = typename N::M;
  const AttentionHead& a;
  int64_t query, key;
  const M *total, *delta;  // of each row
  uint8_t* bits;           // room for the dropout bits of two rows
  typename N::E* along;
  M* wide;  // where dS is written in M too, if it is needed
  int64_t wide_stride;
};

template <bool kDrop, bool kWide, class N>
LeftGradients<typename N::E> put_gradients(const GradientBlock<typename N::M>& block, const ForGradients<N>& with) {
  using M = typename N::M;
  const int64_t room = key_bits_room(least(kKeys, with.a.keys));
  return N::put_gradients(block, with.along, [&](int64_t row) {
    uint8_t* const bits = with.bits + row % 2 * room;
    if (kDrop) make_bits(with.a, with.query + row, with.key, block.keys, bits);
    const M *const p = block.weights + row * block.stride, *const dp = block.scores + row * block.stride;
    M* const wide = kWide ? with.wide + row * with.wide_stride : nullptr;
    const M rescale = M(1) / with.total[row], delta = with.delta[row];
    return [=, drop = with.a.drop](int64_t i) {
      const auto both = differentiate<kDrop, M>(load(p + i), load(dp + i), bits + i, drop, rescale, delta);
      if constexpr (kWide) store(both.scores, wide + i);
      return both;
    };
  });
}

template <class N, class P>
void backward(const AttentionHead& a, Rows dout, Rows out, const void* lse, void* dq, void* dk, void* dv,
              void* memory) {
  using M = typename N::M;
  using E = typename N::E;
  Room all(memory);
  BackwardRoom<N, P> room(a, all);
  const Tiles tiles(kSame<E, pair>);
  const P positions(a, all);
  const int64_t D = a.D, panels = whole_panels<M>(D), stride = row_stride<M>(a.keys), across = N::steps(D);
  WideFactors<N, P>& wide = room.wide;
  constexpr bool kWide = WideFactors<N, P>::kNeeded;
  const auto put_block = a.drop.threshold ? put_gradients<true, kWide, N> : put_gradients<false, kWide, N>;
  N::pack_across(rows_of(a, a.k), a.keys, room.across_keys);
  N::pack_across(rows_of(a, a.v), a.keys, room.across_values);
  N::pack_along(rows_of(a, a.k), a.keys, D, 1, room.keys);
  wide.pack_keys(a);
  for (int64_t query = 0; query < a.keys; query += kQueries) {
    const int64_t rows = least(kQueries, a.keys - query);
    const Rows q = rows_of(a, a.q).from(query), grad = dout.from(query);
    N::put_rows(q, rows, D, N::query_factor(a), room.left_queries);
    N::put_rows(grad, rows, D, 1, room.left_grads);
    const Panels<E> queries{room.queries.data, N::steps(rows)}, grads{room.grads.data, N::steps(rows)};
    N::pack_along(q, rows, D, N::query_factor(a), queries);
    N::pack_along(grad, rows, D, 1, grads);
    wide.pack_queries(a, query, rows);
    M total[kQueries]{}, delta[kQueries];
    dot_rows(grad, out.from(query), rows, D, delta);
    for_blocks(a.keys, [&](int64_t key, int64_t keys) {
      const Left<false, E> left_queries{room.left_queries, across}, left_grads{room.left_grads, across};
      M *const scores = room.scores + key, *const dp = room.dp + key;
      const Panels<E> across_keys{room.across_keys.at(key, 0), across},
          across_values{room.across_values.at(key, 0), across};
      product<Onto::nothing>(rows, keys, across, left_queries, across_keys, scores, stride);
      positions.add(Block<M>{query, rows, key, keys, scores, stride}, room.left_queries);
      product<Onto::nothing>(rows, keys, across, left_grads, across_values, dp, stride);
      for (int64_t row = 0; row < rows; ++row) {
        const M sum = static_cast<const M*>(lse)[query + row];
        total[row] += exponentiate<N>(scores + row * stride, keys, N::late_scale(a), sum);
      }
    });
    for_blocks(a.keys, [&](int64_t key, int64_t keys) {
      const GradientBlock<M> block{room.scores + key, room.dp + key, stride, rows, keys};
      const ForGradients<N> with{.a = a,
                                 .query = query,
                                 .key = key,
                                 .total = total,
                                 .delta = delta,
                                 .bits = room.bits,
                                 .along = room.along,
                                 .wide = wide.scores,
                                 .wide_stride = wide.stride};
      const LeftGradients<E> left = put_block(block, with);
      const auto across = query ? product<Onto::sums, true, E> : product<Onto::nothing, true, E>;
      across(keys, D, queries.inner, left.weights, grads, room.dvalues + key * panels, panels, nullptr, {});
      across(keys, D, queries.inner, left.scores, queries, room.dkeys + key * panels, panels, nullptr, {});
      const auto along = key ? in_chains<Onto::sums, E> : in_chains<Onto::nothing, E>;
      along(rows, D, N::steps(keys), left.along, room.keys.rows_from(N::steps(key)), room.dqueries, panels, nullptr);
      if constexpr (kWide)
        positions.differentiate({query, rows, key, keys, wide.scores, wide.stride}, wide.queries, wide.keys,
                                room.dqueries, room.dkeys);
      else
        positions.differentiate(Block<M>{query, rows, key, keys, room.dp + key, stride}, queries, room.keys,
                                room.dqueries, room.dkeys);
    });
    store_rows(room.dqueries, rows, D, rows_of(a, dq).from(query), [&](int64_t) { return M(a.scale); });
  }
  store_rows(room.dkeys, a.keys, D, rows_of(a, dk), [&](int64_t) { return N::late_scale(a); });
  store_rows(room.dvalues, a.keys, D, rows_of(a, dv), [](int64_t) { return M(1); });
}

template <template <class...> class Parts>
int64_t room_of(const AttentionHead& a) {
  Room room(nullptr);
  for_products(a, [&](auto factors, auto positions) {
    using P = typename decltype(positions)::type;
    const Parts<decltype(factors), P> parts(a, room);
    if (a.positions) P(a, room);
  });
  return room.used();
}

}  // namespace

int64_t attention_fwd_room(const AttentionHead& a) { return room_of<ForwardRoom>(a); }

int64_t attention_bwd_room(const AttentionHead& a) { return room_of<BackwardRoom>(a); }

void attention_fwd(const AttentionHead& a, int64_t first, int64_t last, void* out, int64_t out_stride, void* lse,
                   void* room) {
  for_products(a, [&](auto factors, auto positions) {
    using N = decltype(factors);
    using P = typename decltype(positions)::type;
    forward<N, P>(a, first, last, Rows{out, out_stride, a.dtype}, lse, room);
  });
}

void attention_bwd(const AttentionHead& a, const void* dout, const void* out, int64_t out_stride, const void* lse,
                   void* dq, void* dk, void* dv, void* room) {
  for_products(a, [&](auto factors, auto positions) {
    using N = decltype(factors);
    using P = typename decltype(positions)::type;
    const Rows grads{dout, out_stride, a.dtype}, result{out, out_stride, a.dtype};
    backward<N, P>(a, grads, result, lse, dq, dk, dv, room);
  });
}

// ---- the tables of relative positions

PositionRoom position_room(int64_t columns, int64_t D, DType dtype) {
  PositionRoom room;
  for_math(dtype, [&](auto zero) {
    using M = decltype(zero);
    room = {D * whole_panels<M>(columns) * int64_t(sizeof(M)), columns * whole_panels<M>(D) * int64_t(sizeof(M))};
  });
  return room;
}

void pack_positions(const PositionTable& table, double factor, void* across, void* rows, void* room) {
  for_math(table.dtype, [&](auto zero) {
    using M = decltype(zero);
    M* const gathered = static_cast<M*>(room);
    for (int64_t column = 0; column < table.columns; ++column)
      Widened<M>::put_rows(rows_of(table).from(table.slot[column]), 1, table.D, M(factor), gathered + column * table.D);
    if (across) pack_transposed(gathered, table.D, table.columns, Panels<M>{static_cast<M*>(across), table.D});
    if (rows) pack(gathered, table.D, table.D, M(1), Panels<M>{static_cast<M*>(rows), table.columns});
  });
}

bool positions_in_pairs(DType dtype, int64_t D) { return takes_pairs(dtype, D); }

void pack_position_pairs(const PositionTable& table, void* across, void* room) {
  if constexpr (kPairs) {
    bf16* const gathered = static_cast<bf16*>(room);
    for (int64_t column = 0; column < table.columns; ++column)
      __builtin_memcpy(gathered + column * table.D, rows_of(table).from(table.slot[column]).data,
                       table.D * sizeof(bf16));
    Paired::pack_across(Rows{gathered, table.D, DType::bf16}, table.columns,
                        Panels<pair>{static_cast<pair*>(across), table.D / 2});
  }
}

void add_up_positions(const void* const* parts, int64_t count, double factor, const PositionTable& table, void* room) {
  for_math(table.dtype, [&](auto zero) {
    using M = decltype(zero);
    const int64_t panels = whole_panels<M>(table.D);
    M* const sums = static_cast<M*>(room);
    for (int64_t i = 0; i < table.slots * panels; ++i) sums[i] = 0;
    for (int64_t column = 0; column < table.columns; ++column) {
      M* const to = sums + table.slot[column] * panels;
      for (int64_t part = 0; part < count; ++part) {
        const M* const from = static_cast<const M*>(parts[part]) + column * panels;
        for (int64_t i = 0; i < panels; ++i) to[i] += from[i];
      }
    }
    store_rows(sums, table.slots, table.D, rows_of(table), [&](int64_t) { return M(factor); });
  });
}

}  // namespace fastbert::cpu::FB_ISA
