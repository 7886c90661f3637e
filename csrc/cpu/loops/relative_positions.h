// The part of a score that depends on the distance between query i and key j: A[i, w] + B[j, w] + t[w], where
// A = scale Q Pk^T, B = scale K Pq^T and w is the slot of i - j. It is computed for blocks of attention that stay in
// the caches. With pairs of bf16, scores are multiplied by scale last, so here all three are divided by it.
//
// Distances, in order, become columns: neighbouring distances with the same slot share one. The part of A that a band
// of queries needs is then a product with a few more columns than there are keys. From one key to the next, a row's
// column increases by one or, within a shared column, stays the same, so mostly whole vectors are added as they lie in
// memory. B is computed for bands of keys and transposed in registers.
//
// What all of attention uses comes first: Room, Rows, Block.
#pragma once

#include "../../attention.h"
#include "product.h"

namespace fastbert::cpu::FB_ISA {

// Divides a task's memory into parts aligned to 64 bytes. With nullptr it only adds up how much they take.
class Room {
 public:
  explicit Room(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class E>
  E* take(int64_t elements) {
    char* const part = memory_ ? memory_ + used_ : nullptr;
    used_ += round_up(elements * int64_t(sizeof(E)), 64);
    return reinterpret_cast<E*>(part);
  }
  int64_t used() const { return used_; }

 private:
  char* const memory_;
  int64_t used_ = 0;
};

// Rows of a tensor of any type, `stride` elements apart.
struct Rows {
  const void* data;
  int64_t stride;
  DType dtype;

  Rows from(int64_t row) const {
    const int64_t bytes = dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
    return {static_cast<const char*>(data) + row * stride * bytes, stride, dtype};
  }
  // Calls f(data) with data of the tensor's type. M: its type of arithmetic.
  template <class M, class F>
  void typed(const F& f) const {
    if constexpr (kSame<M, double>)
      f(static_cast<const double*>(data));
    else
      for_dtype_up_to_f32(dtype, [&](auto element) { f(static_cast<const decltype(element)*>(data)); });
  }
};
inline Rows rows_of(const AttentionHead& a, const void* data) { return {data, a.stride, a.dtype}; }
inline Rows rows_of(const PositionTable& table) { return {table.data, table.stride, table.dtype}; }

// Copies rows of T, or a block of them, to contiguous rows of M, multiplied by a factor.
template <class T, class M>
void load_rows(const T* from, int64_t stride, int64_t rows, int64_t columns, M factor, M* to) {
  for (int64_t row = 0; row < rows; ++row)
    for_vectors<M>(columns, [&](int64_t i, auto n) {
      store(load(from + row * stride + i, n) * factor, to + row * columns + i, n);
    });
}

// A block of queries and keys, with a number for each pair of them: its score, or the score's gradient.
template <class M>
struct Block {
  int64_t query, queries, key, keys;
  M* pairs;
  int64_t stride;  // from query to query; each row ends with room for a whole vector

  M* at(int64_t row, int64_t column) const { return pairs + row * stride + column; }
};

// Takes the place of Relative in plain attention.
struct NoPositions {
  template <class... Arguments>
  NoPositions(const Arguments&...) {}
  template <class... Arguments>
  void add(const Arguments&...) const {}
  template <class... Arguments>
  void differentiate(const Arguments&...) const {}
};

// ---- access by column

// The elements row[column[0]], row[column[1]], ...; from one to the next, columns increase by 0 or 1.
template <class M>
inline vec<M> spread(const M* row, const int32_t* column, Whole) {
  constexpr int L = kLanes<M>;
  if (column[L - 1] - column[0] == L - 1) return load(row + column[0]);
  vec<M> v;
  for (int i = 0; i < L; ++i) v[i] = row[column[i]];
  return v;
}
template <class M>
inline vec<M> spread(const M* row, const int32_t* column, int n) {
  vec<M> v{};
  for (int i = 0; i < n; ++i) v[i] = row[column[i]];
  return v;
}

// The adjoint of spread: adds v's elements to row[column[0]], row[column[1]], ...
template <class M>
inline void collect(vec<M> v, M* row, const int32_t* column, Whole) {
  constexpr int L = kLanes<M>;
  if (column[L - 1] - column[0] == L - 1) return store(load(row + column[0]) + v, row + column[0]);
  for (int i = 0; i < L; ++i) row[column[i]] += v[i];
}
template <class M>
inline void collect(vec<M> v, M* row, const int32_t* column, int n) {
  for (int i = 0; i < n; ++i) row[column[i]] += v[i];
}

// ---- one task's positions

// N: how the factors of scores are multiplied, Widened or Paired (attention_factors.h).
template <class N>
class Relative {
  using M = typename N::M;
  using E = typename N::E;
  using V = vec<M>;
  static constexpr int64_t L = kLanes<M>;
  static constexpr int64_t kBand = (4 * kTile % L ? 8 : 4) * kTile;  // A's queries or B's keys: whole tiles and vectors
  static constexpr int64_t kAcross = 256;  // keys that a band of A takes at a time; B's queries are no more
  static constexpr int64_t kStride = whole_panels<M>(kAcross + kBand) + kPanel<M> + 16;  // + 16: no power of two
  static_assert(kBand % L == 0 && kAcross >= kAttentionQueries && kPanel<E> == kPanel<M>);

 public:
  Relative(const AttentionHead& a, Room& room) : a_(a), r_(*a.positions) {
    band_ = room.take<M>(kBand * kStride), keys_ = room.take<E>(kBand * inner_);
    steps_ = room.take<M>(kAcross + kBand);
  }

  // Adds to the scores. queries: [queries, D], as N::put_rows writes them.
  void add(const Block<M>& block, const E* queries) const {
    if (r_.keys)
      for_bands_of_queries(block,
                           [&](const Block<M>& part) { add_a(part, queries + (part.query - block.query) * inner_); });
    if (r_.queries) for_bands_of_keys(block, [&](const Block<M>& part) { add_b(part); });
    if (r_.bias) add_bias(block);
  }

  // Adds to the gradients of queries, keys and tables, given those of scores. The gradients of queries and of Pq lack
  // the factor scale, those of keys and of Pk lack it where N scales late. queries: of the block, times N's factor;
  // keys: of the sequence. dqueries and dkeys: rows of whole panels.
  void differentiate(const Block<M>& block, Panels<M> queries, Panels<M> keys, M* dqueries, M* dkeys) const {
    const int64_t panels = whole_panels<M>(a_.D);
    if (r_.keys) {
      for_bands_of_queries(block, [&](const Block<M>& part) {
        const int64_t row = part.query - block.query;
        differentiate_a(part, queries.rows_from(row), dqueries + row * panels);
      });
    }
    if (r_.queries) {
      for_bands_of_keys(block, [&](const Block<M>& part) {
        differentiate_b(part, keys.rows_from(part.key), dkeys + part.key * panels);
      });
    }
    if (r_.dbias) for_bands_of_queries(block, [&](const Block<M>& part) { differentiate_bias(part); });
  }

 private:
  template <class F>
  static void for_bands_of_queries(const Block<M>& block, const F& f) {
    for (int64_t key = 0; key < block.keys; key += kAcross)
      for (int64_t row = 0; row < block.queries; row += kBand)
        f(Block<M>{block.query + row, least(kBand, block.queries - row), block.key + key,
                   least(kAcross, block.keys - key), block.at(row, key), block.stride});
  }
  template <class F>
  static void for_bands_of_keys(const Block<M>& block, const F& f) {
    for (int64_t key = 0; key < block.keys; key += kBand)
      f(Block<M>{block.query, block.queries, block.key + key, least(kBand, block.keys - key), block.at(0, key),
                 block.stride});
  }

  // The columns that a band needs, from the beginning of a panel on.
  struct Columns {
    int64_t first, count;
  };
  static Columns columns_of(const int32_t* column, int64_t rows, int64_t across) {
    const int64_t first = column[1 - rows] / kPanel<M> * kPanel<M>;
    return {first, column[across - 1] + 1 - first};
  }
  // The columns of the band's first row, beginning with its first key or query; each further row's begin one earlier.
  const int32_t* by_key(const Block<M>& band) const { return r_.by_key + (r_.longest - 1 + band.key - band.query); }
  const int32_t* by_query(const Block<M>& band) const { return r_.by_query + (r_.longest - 1 + band.query - band.key); }

  Panels<E> from_column(const void* panels, int64_t first) const {
    const Panels<E> all{static_cast<E*>(const_cast<void*>(panels)), inner_};
    return {all.at(first, 0), inner_};
  }
  static Panels<M> from_row(const void* panels, int64_t first, int64_t inner) {
    return Panels<M>{static_cast<M*>(const_cast<void*>(panels)), inner}.rows_from(first);
  }

  void add_a(const Block<M>& band, const E* queries) const {
    const int32_t* const column = by_key(band);
    const Columns columns = columns_of(column, band.queries, band.keys);
    product<Onto::nothing>(band.queries, columns.count, inner_, Left<false, E>{queries, inner_},
                           from_column(r_.keys, columns.first), band_, kStride);
    for (int64_t row = 0; row < band.queries; ++row) {
      const M* const from = band_ + row * kStride - columns.first;
      for_vectors<M>(band.keys, [&](int64_t i, auto n) {
        M* const to = band.at(row, i);
        store(load(to, n) + spread<M>(from, column - row + i, n), to, n);
      });
    }
  }

  void add_b(const Block<M>& band) const {
    const int32_t* const column = by_query(band);
    const Columns columns = columns_of(column, band.keys, band.queries);
    N::put_rows(rows_of(a_, a_.k).from(band.key), band.keys, a_.D, 1, keys_);
    product<Onto::nothing>(band.keys, columns.count, inner_, Left<false, E>{keys_, inner_},
                           from_column(r_.queries, columns.first), band_, kStride);
    for (int64_t i = 0; i < band.queries; i += L) {
      for (int64_t j = 0; j < band.keys; j += L) {
        const int queries = int(least(L, band.queries - i)), keys = int(least(L, band.keys - j));
        V turned[L];
        for (int64_t k = 0; k < L; ++k) {
          const M* const from = band_ + (j + k) * kStride - columns.first;
          const int32_t* const at = column - (j + k) + i;
          turned[k] = k >= keys ? V{} : queries == L ? spread<M>(from, at, Whole{}) : spread<M>(from, at, queries);
        }
        transpose(turned);
        for (int row = 0; row < queries; ++row) store(load(band.at(i + row, j)) + turned[row], band.at(i + row, j));
      }
    }
  }

  void add_bias(const Block<M>& block) const {
    for (int64_t row = 0; row < block.queries; ++row) {
      const M* const bias = static_cast<const M*>(r_.bias) + (r_.longest - 1 + block.key - block.query - row);
      for_vectors<M>(block.keys, [&](int64_t i, auto n) {
        store(load(block.at(row, i), n) + load(bias + i, n), block.at(row, i), n);
      });
    }
  }

  void clear_band(int64_t rows, int64_t columns) const {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < columns; i += L) store(V{}, band_ + row * kStride + i);
  }

  // Adds to the gradients of the two factors of A or B, given those of their product in band_, rows by columns.
  void propagate(int64_t rows, Columns columns, Panels<M> left, const void* table, M* dleft, void* dtable) const {
    const int64_t panels = whole_panels<M>(a_.D);
    product<Onto::sums>(rows, a_.D, columns.count, Left<false, M>{band_, kStride},
                        from_row(table, columns.first, r_.columns), dleft, panels);
    if (dtable)
      product<Onto::sums>(columns.count, a_.D, rows, Left<true, M>{band_, kStride}, left,
                          static_cast<M*>(dtable) + columns.first * panels, panels);
  }

  void differentiate_a(const Block<M>& band, Panels<M> queries, M* dqueries) const {
    const int32_t* const column = by_key(band);
    const Columns columns = columns_of(column, band.queries, band.keys);
    clear_band(band.queries, columns.count);
    for (int64_t row = 0; row < band.queries; ++row) {
      M* const to = band_ + row * kStride - columns.first;
      for_vectors<M>(band.keys,
                     [&](int64_t i, auto n) { collect<M>(load(band.at(row, i), n), to, column - row + i, n); });
    }
    propagate(band.queries, columns, queries, r_.key_rows, dqueries, r_.dkeys);
  }

  void differentiate_b(const Block<M>& band, Panels<M> keys, M* dkeys) const {
    const int32_t* const column = by_query(band);
    const Columns columns = columns_of(column, band.keys, band.queries);
    clear_band(band.keys, columns.count);
    for (int64_t i = 0; i < band.queries; i += L) {
      for (int64_t j = 0; j < band.keys; j += L) {
        const int queries = int(least(L, band.queries - i)), keys_here = int(least(L, band.keys - j));
        V turned[L];
        for (int row = 0; row < L; ++row) turned[row] = row < queries ? load(band.at(i + row, j)) : V{};
        transpose(turned);
        for (int64_t k = 0; k < keys_here; ++k) {
          M* const to = band_ + (j + k) * kStride - columns.first;
          const int32_t* const at = column - (j + k) + i;
          queries == L ? collect<M>(turned[k], to, at, Whole{}) : collect<M>(turned[k], to, at, queries);
        }
      }
    }
    propagate(band.keys, columns, keys, r_.query_rows, dkeys, r_.dqueries);
  }

  // Sums are made within a band first: one sum over all queries would lose precision.
  void differentiate_bias(const Block<M>& band) const {
    const int64_t steps = band.queries + band.keys - 1;
    for (int64_t i = 0; i < steps; ++i) steps_[i] = 0;
    for (int64_t row = 0; row < band.queries; ++row) {
      M* const to = steps_ + (band.queries - 1 - row);
      for_vectors<M>(band.keys,
                     [&](int64_t i, auto n) { store(load(to + i, n) + load(band.at(row, i), n), to + i, n); });
    }
    M* const sums = static_cast<M*>(r_.dbias) + (r_.longest - 1 + band.key - band.query - band.queries + 1);
    for (int64_t i = 0; i < steps; ++i) sums[i] += steps_[i];
  }

  const AttentionHead& a_;
  const cpu::Positions& r_;
  const int64_t inner_ = N::steps(a_.D);
  M *band_, *steps_;
  E* keys_;
};

}  // namespace fastbert::cpu::FB_ISA
