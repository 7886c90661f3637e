// Attention of one head of one sequence: softmax(Q K^T scale) V, forward and backward.
//
// Keys and values are packed once. Then come blocks of queries; the forward takes them through blocks of keys, so that
// scores stay in the cache (with an online softmax: Milakov & Gimelshein, "Online normalizer calculation for softmax",
// 2018), the backward twice, because it adds up the weights of all before it uses them. Relative positions, where there
// are any, add to the scores of a block and get their gradients.
#include "../../attention.h"

#include "philox.h"
#include "product.h"
#include "relative_positions.h"

namespace fastbert::cpu::FB_ISA {

namespace {

constexpr int64_t kQueries = kAttentionQueries;
constexpr int64_t kKeys = 512;  // a multiple of 16 kGroups, for the dropout's counters
static_assert(kKeys % (16 * kGroups) == 0);

float logarithm(float v) { return __builtin_logf(v); }
double logarithm(double v) { return __builtin_log(v); }

// Of scores: a power of two would put every row into the same sets of the cache.
template <class M>
int64_t row_stride(int64_t keys) {
  return whole_panels<M>(keys) + 16;
}

template <class T>
const T* row_of(const void* data, int64_t stride, int64_t row) {
  return static_cast<const T*>(data) + row * stride;
}

// Rows of M, of whole panels, as rows of T, times factor(row).
template <class T, class M, class F>
void store_rows(const M* from, int64_t rows, int64_t columns, T* to, int64_t stride, const F& factor) {
  for (int64_t row = 0; row < rows; ++row) {
    const M* const source = from + row * whole_panels<M>(columns);
    const M by = factor(row);
    for_vectors<M>(columns, [&](int64_t i, auto n) { store(load(source + i, n) * by, to + row * stride + i, n); });
  }
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

template <class M>
struct ForwardRoom {
  Panels<M> keys, values;
  M *queries, *scores, *sums, *factors;
  uint8_t* bits;

  ForwardRoom(const AttentionHead& a, Room& room) {
    const int64_t block = least(kKeys, a.keys), panels = whole_panels<M>(a.D);
    keys = {room.take<M>(a.D * whole_panels<M>(a.keys)), a.D};
    values = {room.take<M>(a.keys * panels), a.keys};
    queries = room.take<M>(kQueries * a.D), sums = room.take<M>(kQueries * panels);
    scores = room.take<M>(kQueries * row_stride<M>(block));
    factors = room.take<M>(kQueries);
    bits = room.take<uint8_t>(a.drop.threshold ? key_bits_room(block) : 0);
  }
};

// What earlier blocks of keys left behind of a row: the largest score, and the sum of weights relative to it.
template <class M>
struct SoFar {
  M high, total;
};

// Replaces a row's scores with a block of keys by exp(score - the largest so far), or 0 where dropped. Returns what the
// sums of earlier blocks have to be multiplied by.
template <bool kDrop, class M>
M weigh(M* scores, int64_t keys, const uint8_t* bits, const Dropout& drop, SoFar<M>& so_far) {
  using V = vec<M>;
  const Dropout unscaled{drop.key, drop.threshold, 1};  // the end of a row multiplies by keep_scale
  V most[kSlots];
  for (V& part : most) part = splat<V>(-__builtin_inf());
  for_vectors_in_slots<M>(keys, [&](int64_t i, auto n, auto slot) {
    most[slot] = greater(most[slot], or_fill(load(scores + i, n), n, -__builtin_inf()));
  });
  M high = largest(greater(greater(most[0], most[1]), greater(most[2], most[3])));
  if (!(high > so_far.high) && high == high) high = so_far.high;
  const M base = high > -M(__builtin_inf()) || high != high ? high : M(0);  // where all are -inf
  V total[kSlots]{};
  for_vectors_in_slots<M>(keys, [&](int64_t i, auto n, auto slot) {
    V weight = exp_nonpositive(load(scores + i, n) - base);
    total[slot] += or_fill(weight, n, 0);
    if constexpr (kDrop) weight = keep(weight, bits + i, unscaled);
    store(weight, scores + i, n);
  });
  const M factor = exp_nonpositive(splat<V>(so_far.high - base))[0];
  so_far = {high, so_far.total * factor + sum(total)};
  return factor;
}

template <bool kDrop, class P, class T>
void forward(const AttentionHead& a, int64_t first, int64_t last, void* out, int64_t out_stride, void* lse,
             void* memory) {
  using M = math_t<T>;
  Room all(memory);
  const ForwardRoom<M> room(a, all);
  const P positions(a, all);
  const int64_t D = a.D, panels = whole_panels<M>(D), stride = row_stride<M>(least(kKeys, a.keys));
  pack_transposed(row_of<T>(a.k, a.stride, 0), a.stride, a.keys, room.keys);
  pack(row_of<T>(a.v, a.stride, 0), a.stride, D, M(1), room.values);
  for (int64_t query = first; query < last; query += kQueries) {
    const int64_t rows = least(kQueries, last - query);
    load_rows(row_of<T>(a.q, a.stride, query), a.stride, rows, D, M(a.scale), room.queries);
    SoFar<M> so_far[kQueries];
    for (int64_t row = 0; row < rows; ++row) so_far[row] = {-M(__builtin_inf()), 0};
    for_blocks(a.keys, [&](int64_t key, int64_t keys) {
      const Panels<M> block{room.keys.at(key, 0), D};
      product<Onto::nothing>(rows, keys, D, Left<false, M>{room.queries, D}, block, room.scores, stride);
      positions.add(Block<M>{query, rows, key, keys, room.scores, stride}, room.queries);
      for (int64_t row = 0; row < rows; ++row) {
        if (kDrop) make_bits(a, query + row, key, keys, room.bits);
        room.factors[row] = weigh<kDrop>(room.scores + row * stride, keys, room.bits, a.drop, so_far[row]);
      }
      const auto add = key ? product<Onto::scaled, false, M> : product<Onto::nothing, false, M>;
      add(rows, D, keys, {room.scores, stride}, room.values.rows_from(key), room.sums, panels, room.factors, {});
    });
    for (int64_t row = 0; row < rows; ++row)
      static_cast<M*>(lse)[query + row] = so_far[row].high + logarithm(so_far[row].total);
    store_rows(room.sums, rows, D, static_cast<T*>(out) + query * out_stride, out_stride,
               [&](int64_t row) { return M(a.drop.keep_scale) / so_far[row].total; });
  }
}

// ---- backward: with P = exp(S - lse), F the dropout factors and delta = rowsum(dO O): dV = (P F)^T dO,
// dS = P (dO V^T F - delta), dQ = scale dS K, dK = scale dS^T Q

template <class M>
struct BackwardRoom {
  Panels<M> across_keys, across_values, keys, queries, grads;
  M *left_queries, *left_grads, *scores, *dp, *dqueries, *dkeys, *dvalues;
  uint8_t* bits;

  BackwardRoom(const AttentionHead& a, Room& room) {
    const int64_t panels = whole_panels<M>(a.D), wide = a.D * whole_panels<M>(a.keys);
    across_keys = {room.take<M>(wide), a.D}, across_values = {room.take<M>(wide), a.D};
    keys = {room.take<M>(a.keys * panels), a.keys};
    queries = {room.take<M>(kQueries * panels), kQueries}, grads = {room.take<M>(kQueries * panels), kQueries};
    left_queries = room.take<M>(kQueries * a.D), left_grads = room.take<M>(kQueries * a.D);
    scores = room.take<M>(kQueries * row_stride<M>(a.keys)), dp = room.take<M>(kQueries * row_stride<M>(a.keys));
    dqueries = room.take<M>(kQueries * panels);
    dkeys = room.take<M>(a.keys * panels), dvalues = room.take<M>(a.keys * panels);
    bits = room.take<uint8_t>(a.drop.threshold ? key_bits_room(least(kKeys, a.keys)) : 0);
  }
};

template <class T>
math_t<T> dot(const T* a, const T* b, int64_t columns) {
  vec<math_t<T>> total{};
  for_vectors<math_t<T>>(columns, [&](int64_t i, auto n) { total = fma(load(a + i, n), load(b + i, n), total); });
  return sum(total);
}

// Replaces scores by P; lse is rounded, so what they sum up to, which is returned, need not be 1.
template <class M>
M exponentiate(M* scores, int64_t keys, M lse) {
  using V = vec<M>;
  V total[kSlots]{};
  for_vectors_in_slots<M>(keys, [&](int64_t i, auto n, auto slot) {
    const V p = exp_nonpositive(load(scores + i, n) - lse);
    store(p, scores + i, n);
    total[slot] += or_fill(p, n, 0);
  });
  return sum(total);
}

// Replaces P by P F and dp by dS, after P is multiplied by `rescale`.
template <bool kDrop, class M>
void differentiate(M* p, M* dp, int64_t keys, const uint8_t* bits, const Dropout& drop, M rescale, M delta) {
  using V = vec<M>;
  for_vectors<M>(keys, [&](int64_t i, auto n) {
    const V weight = load(p + i, n) * rescale;
    V factor = splat<V>(1);
    if constexpr (kDrop) factor = keep(factor, bits + i, drop);
    store(weight * factor, p + i, n);
    store(weight * (load(dp + i, n) * factor - delta), dp + i, n);
  });
}

template <bool kDrop, class P, class T>
void backward(const AttentionHead& a, const void* dout, const void* out, int64_t out_stride, const void* lse, void* dq,
              void* dk, void* dv, void* memory) {
  using M = math_t<T>;
  Room all(memory);
  const BackwardRoom<M> room(a, all);
  const P positions(a, all);
  const int64_t D = a.D, panels = whole_panels<M>(D), stride = row_stride<M>(a.keys);
  pack_transposed(row_of<T>(a.k, a.stride, 0), a.stride, a.keys, room.across_keys);
  pack_transposed(row_of<T>(a.v, a.stride, 0), a.stride, a.keys, room.across_values);
  pack(row_of<T>(a.k, a.stride, 0), a.stride, D, M(1), room.keys);
  for (int64_t query = 0; query < a.keys; query += kQueries) {
    const int64_t rows = least(kQueries, a.keys - query);
    const T *const q = row_of<T>(a.q, a.stride, query), *const grad = row_of<T>(dout, out_stride, query);
    const T* const result = row_of<T>(out, out_stride, query);
    load_rows(q, a.stride, rows, D, M(a.scale), room.left_queries);
    load_rows(grad, out_stride, rows, D, M(1), room.left_grads);
    const Panels<M> queries{room.queries.data, rows}, grads{room.grads.data, rows};
    pack(q, a.stride, D, M(a.scale), queries);
    pack(grad, out_stride, D, M(1), grads);
    M total[kQueries]{}, delta[kQueries];
    for (int64_t row = 0; row < rows; ++row) delta[row] = dot(grad + row * out_stride, result + row * out_stride, D);
    for_blocks(a.keys, [&](int64_t key, int64_t keys) {
      const Left<false, M> left_queries{room.left_queries, D}, left_grads{room.left_grads, D};
      M *const scores = room.scores + key, *const dp = room.dp + key;
      product<Onto::nothing>(rows, keys, D, left_queries, Panels<M>{room.across_keys.at(key, 0), D}, scores, stride);
      positions.add(Block<M>{query, rows, key, keys, scores, stride}, room.left_queries);
      product<Onto::nothing>(rows, keys, D, left_grads, Panels<M>{room.across_values.at(key, 0), D}, dp, stride);
      for (int64_t row = 0; row < rows; ++row)
        total[row] += exponentiate(scores + row * stride, keys, static_cast<const M*>(lse)[query + row]);
    });
    for_blocks(a.keys, [&](int64_t key, int64_t keys) {
      M *const p = room.scores + key, *const dp = room.dp + key;
      for (int64_t row = 0; row < rows; ++row) {
        if (kDrop) make_bits(a, query + row, key, keys, room.bits);
        differentiate<kDrop>(p + row * stride, dp + row * stride, keys, room.bits, a.drop, M(1) / total[row],
                             delta[row]);
      }
      const auto across = query ? product<Onto::sums, true, M> : product<Onto::nothing, true, M>;
      across(keys, D, rows, {p, stride}, grads, room.dvalues + key * panels, panels, nullptr, {});
      across(keys, D, rows, {dp, stride}, queries, room.dkeys + key * panels, panels, nullptr, {});
      const auto along = key ? product<Onto::sums, false, M> : product<Onto::nothing, false, M>;
      along(rows, D, keys, {dp, stride}, room.keys.rows_from(key), room.dqueries, panels, nullptr, {});
      const Block<M> gradients{query, rows, key, keys, dp, stride};
      positions.differentiate(gradients, queries, room.keys, room.dqueries, room.dkeys);
    });
    store_rows(room.dqueries, rows, D, static_cast<T*>(dq) + query * a.stride, a.stride,
               [&](int64_t) { return M(a.scale); });
  }
  const auto as_it_is = [](int64_t) { return M(1); };
  store_rows(room.dkeys, a.keys, D, static_cast<T*>(dk), a.stride, as_it_is);
  store_rows(room.dvalues, a.keys, D, static_cast<T*>(dv), a.stride, as_it_is);
}

template <template <class> class Parts>
int64_t room_of(const AttentionHead& a) {
  Room room(nullptr);
  for_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    const Parts<math_t<T>> parts(a, room);
    if (a.positions) Relative<T>(a, room);
  });
  return room.used();
}

}  // namespace

int64_t attention_fwd_room(const AttentionHead& a) { return room_of<ForwardRoom>(a); }

int64_t attention_bwd_room(const AttentionHead& a) { return room_of<BackwardRoom>(a); }

void attention_fwd(const AttentionHead& a, int64_t first, int64_t last, void* out, int64_t out_stride, void* lse,
                   void* room) {
  for_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    using P = Relative<T>;
    const bool drops = a.drop.threshold;
    const auto run = a.positions ? drops ? forward<true, P, T> : forward<false, P, T>
                     : drops     ? forward<true, NoPositions, T>
                                 : forward<false, NoPositions, T>;
    run(a, first, last, out, out_stride, lse, room);
  });
}

void attention_bwd(const AttentionHead& a, const void* dout, const void* out, int64_t out_stride, const void* lse,
                   void* dq, void* dk, void* dv, void* room) {
  for_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    using P = Relative<T>;
    const bool drops = a.drop.threshold;
    const auto run = a.positions ? drops ? backward<true, P, T> : backward<false, P, T>
                     : drops     ? backward<true, NoPositions, T>
                                 : backward<false, NoPositions, T>;
    run(a, dout, out, out_stride, lse, dq, dk, dv, room);
  });
}

// ---- the tables of relative positions

PositionRoom position_room(int64_t columns, int64_t D, DType dtype) {
  PositionRoom room;
  for_dtype(dtype, [&](auto element) {
    using M = math_t<decltype(element)>;
    room = {D * whole_panels<M>(columns) * int64_t(sizeof(M)), columns * whole_panels<M>(D) * int64_t(sizeof(M))};
  });
  return room;
}

void pack_positions(const PositionTable& table, double factor, void* across, void* rows, void* room) {
  for_dtype(table.dtype, [&](auto element) {
    using T = decltype(element);
    using M = math_t<T>;
    M* const gathered = static_cast<M*>(room);
    for (int64_t column = 0; column < table.columns; ++column)
      load_rows(row_of<T>(table.data, table.stride, table.slot[column]), 0, 1, table.D, M(factor),
                gathered + column * table.D);
    pack_transposed(gathered, table.D, table.columns, Panels<M>{static_cast<M*>(across), table.D});
    if (rows) pack(gathered, table.D, table.D, M(1), Panels<M>{static_cast<M*>(rows), table.columns});
  });
}

void add_up_positions(const void* const* parts, int64_t count, double factor, const PositionTable& table, void* room) {
  for_dtype(table.dtype, [&](auto element) {
    using T = decltype(element);
    using M = math_t<T>;
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
    store_rows(sums, table.slots, table.D, static_cast<T*>(const_cast<void*>(table.data)), table.stride,
               [&](int64_t) { return M(factor); });
  });
}

}  // namespace fastbert::cpu::FB_ISA
