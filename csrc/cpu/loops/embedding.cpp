// The sum of a token's table rows, LayerNorm, dropout. The caller splits tokens over threads.
//
// Bytes moved: forward the tables' rows and y once; backward the rows, dy and dz once.
#include "../../embedding.h"

#include "layer_norm_row.h"
#include "philox.h"

namespace fastbert::cpu::FB_ISA {

namespace {

template <class T>
const T* row_of(const Embedding::Lookup& lookup, int64_t token, int64_t channels) {
  return static_cast<const T*>(lookup.table) + lookup.ids[token] * channels;
}

// The table rows of one token.
template <class T>
struct TableRows {
  const T *word, *position, *token_type;

  TableRows(const Embedding& op, int64_t token)
      : word(row_of<T>(op.lookups[0], token, op.channels)),
        position(row_of<T>(op.lookups[1], token, op.channels)),
        token_type(op.lookups[2].table ? row_of<T>(op.lookups[2], token, op.channels) : nullptr) {}

  template <class N>
  auto at(int64_t i, N n) const {
    const auto z = load(word + i, n) + load(position + i, n);
    return token_type ? z + load(token_type + i, n) : z;
  }
};

// ---- forward

template <class T>
void forward(const Embedding& op, T* y, int64_t begin, int64_t end, math_t<T>* buffer) {
  using M = math_t<T>;
  using V = vec<M>;
  const int64_t C = op.channels;
  uint16_t* const bits = reinterpret_cast<uint16_t*>(buffer + C);
  for (int64_t token = begin; token < end; ++token) {
    const TableRows<T> rows(op, token);
    const M shift = C < kLanes<M> ? rows.at(0, int(C))[0] : rows.at(0, Whole{})[0];
    V total[kSlots]{};
    for_vectors_in_slots<M>(C, [&](int64_t i, auto n, auto slot) {
      const V z = rows.at(i, n);
      store(z, buffer + i, n);
      total[slot] += or_fill(z - shift, n, 0);
    });
    T* const row = y + token * C;
    const M mean = shift + sum(total) / M(C);
    M &saved_mean = static_cast<M*>(op.mean)[token], &saved_rstd = static_cast<M*>(op.rstd)[token];
    const M *weight = static_cast<const M*>(op.weight), *bias = static_cast<const M*>(op.bias);
    if (op.drop.threshold == 0) {
      normalize(buffer, mean, C, M(op.eps), weight, bias, row, saved_mean, saved_rstd);
      continue;
    }
    normalize(buffer, mean, C, M(op.eps), weight, bias, buffer, saved_mean, saved_rstd);
    row_bits(bits, C, uint64_t(token), op.drop.key);
    for_vectors<M>(C, [&](int64_t i, auto n) { store(keep(load(buffer + i, n), bits + i, op.drop), row + i, n); });
  }
}

// ---- backward: dz, the gradient of the sum of the tables' rows; dweight = sum(dy n), dbias = sum(dy)

template <class T>
void backward(const Embedding& op, const EmbeddingGradients& gradients, int64_t begin, int64_t end, math_t<T>* buffer) {
  using M = math_t<T>;
  using V = vec<M>;
  const int64_t C = op.channels;
  M* const dys = buffer + C;
  uint16_t* const bits = reinterpret_cast<uint16_t*>(buffer + 2 * C);
  const M* const weight = static_cast<const M*>(op.weight);
  M *const dweight = static_cast<M*>(gradients.dweight), *const dbias = static_cast<M*>(gradients.dbias);
  for (int64_t token = begin; token < end; ++token) {
    const TableRows<T> rows(op, token);
    const T* const dy = static_cast<const T*>(gradients.dy) + token * C;
    M* const dz = static_cast<M*>(gradients.dz) + token * C;
    const M mean = static_cast<const M*>(op.mean)[token], rstd = static_cast<const M*>(op.rstd)[token];
    for_vectors<M>(C, [&](int64_t i, auto n) { store(load(dy + i, n), dys + i, n); });
    if (op.drop.threshold) {
      row_bits(bits, C, uint64_t(token), op.drop.key);
      for_vectors<M>(C, [&](int64_t i, auto n) { store(keep(load(dys + i, n), bits + i, op.drop), dys + i, n); });
    }
    RowSums<M> sums;
    for_vectors_in_slots<M>(C, [&](int64_t i, auto n, auto slot) {
      const V z = rows.at(i, n);
      store(z, buffer + i, n);
      sums.add(z - mean, load(dys + i, n) * load(weight + i, n), n, slot);
    });
    const RowGradient<M> row_gradient(sums, mean, rstd, C);
    for_vectors<M>(C, [&](int64_t i, auto n) {
      const V d = load(dys + i, n), normal = row_gradient.normal(load(buffer + i, n));
      store(row_gradient.dz(normal, d * load(weight + i, n)), dz + i, n);
      accumulate(dweight, i, n, d * normal);
      accumulate(dbias, i, n, d);
    });
  }
}

}  // namespace

int64_t embedding_scratch(int64_t channels) {
  return 2 * channels * int64_t(sizeof(double)) + row_bits_room(channels) * int64_t(sizeof(uint16_t));
}

void embedding_fwd(const Embedding& op, void* y, int64_t begin, int64_t end, void* scratch) {
  for_dtype(op.dtype, [&](auto element) {
    using T = decltype(element);
    forward<T>(op, static_cast<T*>(y), begin, end, static_cast<math_t<T>*>(scratch));
  });
}

void embedding_bwd(const Embedding& op, const EmbeddingGradients& gradients, int64_t begin, int64_t end,
                   void* scratch) {
  for_dtype(op.dtype, [&](auto element) {
    using T = decltype(element);
    backward<T>(op, gradients, begin, end, static_cast<math_t<T>*>(scratch));
  });
}

void embedding_row(const void* dz, const int64_t* tokens, int64_t count, int64_t channels, DType dtype, void* row,
                   void* scratch) {
  for_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    using M = math_t<T>;
    M* const total = static_cast<M*>(scratch);
    const auto of = [&](int64_t i) { return static_cast<const M*>(dz) + tokens[i] * channels; };
    for_vectors<M>(channels, [&](int64_t i, auto n) { store(load(of(0) + i, n), total + i, n); });
    for (int64_t token = 1; token < count; ++token) {
      const M* const next = of(token);
      for_vectors<M>(channels, [&](int64_t i, auto n) { accumulate(total, i, n, load(next + i, n)); });
    }
    for_vectors<M>(channels, [&](int64_t i, auto n) { store(load(total + i, n), static_cast<T*>(row) + i, n); });
  });
}

}  // namespace fastbert::cpu::FB_ISA
