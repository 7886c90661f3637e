// The maximum of x W^T + bias over the rows of each sequence. A task takes some classes and all rows; it computes the
// logits of one block of rows at a time and updates the maxima with them.
//
// Bytes moved: the weights once, x from the cache once for each task, y and rows once. The backward reads one row of W
// and one of x for each nonzero gradient; gradients are first grouped by token.
#include "../../linear_max.h"

#include "logits.h"

namespace fastbert::cpu::FB_ISA {

namespace {

constexpr int64_t kTerms = 64;  // terms of a gradient in one chain of sums

template <class M>
using vplaces = decltype(vec<M>{} <= vec<M>{});  // a vector of as many integers of the same size
template <class M>
using Place = decltype(vplaces<M>{}[0] + 0);

// ---- forward

template <class E>
struct Scratch {
  using M = sum_t<E>;
  Logits<E> logits;
  M* best;
  Place<M>* places;

  Scratch(void* memory, int64_t steps) : logits(memory, steps) {
    best = logits.behind(), places = reinterpret_cast<Place<M>*>(best + Logits<E>::kClasses);
  }
  static int64_t bytes(int64_t steps) { return Logits<E>::bytes(steps) + 2 * Logits<E>::kClasses * int64_t(sizeof(M)); }
};

// Whether v takes the place of the best value so far. A NaN is larger than any number; of equal values the first is
// kept.
template <class V>
auto exceeds(V v, V best) {
  return ~(v <= best) & (best == best);
}

// Updates the maxima with row `at` of a block, which is row `row` of x.
template <bool first, class E>
void compare(int64_t at, int64_t row, int64_t columns, const Scratch<E>& to) {
  using M = sum_t<E>;
  using Places = vplaces<M>;
  for (int64_t i = 0; i < columns; i += kLanes<M>) {
    const vec<M> v = to.logits.at(at, i), best = load(to.best + i);
    const Places here = Places{} + Place<M>(row), wins = first ? ~Places{} : exceeds(v, best);
    store(wins ? v : best, to.best + i);
    const Places before = load_bits<Places>(to.places + i), after = wins ? here : before;
    __builtin_memcpy(to.places + i, &after, sizeof after);
  }
}

template <class T, class E>
void finish(const LinearMax& op, int64_t sequence, int64_t first, int64_t classes, const Scratch<E>& from) {
  using M = sum_t<E>;
  const int64_t at = sequence * op.classes + first;
  const bool empty = op.bounds[sequence] == op.bounds[sequence + 1];
  T* const y = static_cast<T*>(op.y) + at;
  for_vectors<M>(classes, [&](int64_t i, auto n) {
    store(empty ? splat<vec<M>>(-__builtin_inf()) : load(from.best + i), y + i, n);
  });
  for (int64_t i = 0; op.rows && i < classes; ++i) op.rows[at + i] = empty ? -1 : int32_t(from.places[i]);
}

// T: the type of y. E and W: the types of a step of x and of a step of the weights.
template <class T, class E, class W>
void forward(const LinearMax& op, int64_t steps, int64_t first, int64_t classes, void* memory) {
  Scratch<E> scratch(memory, steps);
  const int64_t columns = whole_panels<E>(classes), last = op.bounds[op.sequences];
  const E* const x = static_cast<const E*>(op.x);
  scratch.logits.pack(static_cast<const W*>(op.weight) + first * steps, static_cast<const sum_t<E>*>(op.bias), first,
                      classes);
  for (int64_t sequence = 0, begin = 0, end = 0; sequence < op.sequences; ++sequence) {  // begin, end: rows with logits
    for (int64_t row = op.bounds[sequence]; row < op.bounds[sequence + 1]; ++row) {
      if (row >= end) {
        begin = row, end = least(last, row + Logits<E>::kRows);
        scratch.logits.multiply(x + begin * steps, end - begin);
      }
      const auto step = row == op.bounds[sequence] ? compare<true, E> : compare<false, E>;
      step(row - begin, row, columns, scratch);
    }
    finish<T>(op, sequence, first, classes, scratch);
  }
}

// ---- the maxima of logits in memory

template <class T>
void maxima(const Maxima& op, int64_t first, int64_t end) {
  float best[kMaximaColumns];
  for (int64_t sequence = 0; sequence < op.sequences; ++sequence) {
    for (int64_t i = 0; i < end - first; ++i) best[i] = -__builtin_inff();
    for (int64_t row = op.bounds[sequence]; row < op.bounds[sequence + 1]; ++row) {
      const float* const logits = op.logits + row * op.stride + first;
      for_vectors<float>(end - first, [&](int64_t i, auto n) {
        const vfloat v = load(logits + i, n), known = load(best + i, n);
        store(exceeds(v, known) ? v : known, best + i, n);
      });
    }
    T* const y = static_cast<T*>(op.y) + sequence * op.classes + first;
    for_vectors<float>(end - first, [&](int64_t i, auto n) { store(load(best + i, n), y + i, n); });
  }
}

// ---- backward: dx[row[b, v]] += dy[b, v] W[v], dweight[v] = sum of dy[b, v] x[row[b, v]]

inline float number(const bf16* x) { return load(x, 1)[0]; }
inline float number(const f16* x) { return load(x, 1)[0]; }
template <class M>
inline M number(const M* x) {
  return *x;
}

// The sum of rows times factors, in chains of kTerms terms: a single chain would lose precision.
template <class M>
struct Sums {
  M *total, *chain;
  int64_t channels, terms = 0;

  Sums(void* scratch, int64_t channels_)
      : total(static_cast<M*>(scratch)), chain(total + channels_), channels(channels_) {
    __builtin_memset(total, 0, 2 * channels * sizeof(M));
  }
  template <class T>
  void add(const T* row, M factor) {
    const vec<M> times = splat<vec<M>>(factor);
    for_vectors<M>(channels,
                   [&](int64_t i, auto n) { store(fma(times, load(row + i, n), load(chain + i, n)), chain + i, n); });
    if (++terms % kTerms) return;
    for_vectors<M>(channels, [&](int64_t i, auto n) {
      store(load(total + i, n) + load(chain + i, n), total + i, n);
      store(vec<M>{}, chain + i, n);
    });
  }
  template <class T>
  void write(T* to) const {
    for_vectors<M>(channels, [&](int64_t i, auto n) { store(load(total + i, n) + load(chain + i, n), to + i, n); });
  }
};

// Whether dy[at] is nonzero and belongs to a row of x.
template <class T>
bool counts(const LinearMaxGradients& op, int64_t at) {
  return op.rows[at] >= 0 && op.rows[at] < op.tokens && number(static_cast<const T*>(op.dy) + at) != 0;
}

// starts[t] is first the number of gradients of the tokens before t, where the entries of t begin. Filling the entries
// moves it to where they end, which is where those of t + 1 begin, so starts is shifted by one in the end.
template <class T>
void group(const LinearMaxGradients& op, int64_t* starts, int64_t* entries) {
  const int64_t all = op.sequences * op.classes;
  for (int64_t at = 0; at < all; ++at) starts[counts<T>(op, at) ? op.rows[at] + 1 : 0] += 1;
  starts[0] = 0;
  for (int64_t token = 0; token < op.tokens; ++token) starts[token + 1] += starts[token];
  for (int64_t at = 0; at < all; ++at)
    if (counts<T>(op, at)) entries[starts[op.rows[at]]++] = at;
  for (int64_t token = op.tokens; token > 0; --token) starts[token] = starts[token - 1];
  starts[0] = 0;
}

template <class T>
void gradient_of_x(const LinearMaxGradients& op, const int64_t* starts, const int64_t* entries, int64_t token,
                   void* scratch) {
  Sums<math_t<T>> sums(scratch, op.inner);
  for (int64_t i = starts[token]; i < starts[token + 1]; ++i)
    sums.add(static_cast<const T*>(op.weight) + entries[i] % op.classes * op.inner,
             number(static_cast<const T*>(op.dy) + entries[i]));
  sums.write(static_cast<T*>(op.dx) + token * op.inner);
}

template <class T>
void gradient_of_weight(const LinearMaxGradients& op, int64_t index, void* scratch) {
  using M = math_t<T>;
  Sums<M> sums(scratch, op.inner);
  for (int64_t at = index; at < op.sequences * op.classes; at += op.classes)
    if (counts<T>(op, at))
      sums.add(static_cast<const M*>(op.x) + op.rows[at] * op.inner, number(static_cast<const T*>(op.dy) + at));
  sums.write(static_cast<T*>(op.dweight) + index * op.inner);
}

}  // namespace

bool linear_max_takes_pairs(DType dtype, int64_t inner) { return takes_pairs(dtype, inner); }

int64_t linear_max_width(DType dtype) {
  return dtype == DType::f64 ? Logits<double>::kClasses : Logits<float>::kClasses;
}

int64_t linear_max_scratch(int64_t inner, DType dtype) {
  int64_t bytes = 0;
  for_factors(dtype, inner, [&](int64_t steps, auto, auto x, auto) { bytes = Scratch<decltype(x)>::bytes(steps); });
  return bytes;
}

void linear_max_fwd(const LinearMax& op, int64_t first, int64_t end, void* scratch) {
  for_factors(op.dtype, op.inner, [&](int64_t steps, auto element, auto x, auto weight) {
    forward<decltype(element), decltype(x), decltype(weight)>(op, steps, first, end - first, scratch);
  });
}

void maxima_of_logits(const Maxima& op, int64_t first, int64_t end) {
  for_dtype_up_to_f32(op.dtype, [&](auto element) { maxima<decltype(element)>(op, first, end); });
}

void linear_max_group(const LinearMaxGradients& op, int64_t* starts, int64_t* entries) {
  for_dtype(op.dtype, [&](auto element) { group<decltype(element)>(op, starts, entries); });
}

void linear_max_dx(const LinearMaxGradients& op, const int64_t* starts, const int64_t* entries, int64_t first,
                   int64_t end, void* scratch) {
  for_dtype(op.dtype, [&](auto element) {
    for (int64_t token = first; token < end; ++token)
      gradient_of_x<decltype(element)>(op, starts, entries, token, scratch);
  });
}

void linear_max_dweight(const LinearMaxGradients& op, int64_t first, int64_t end, void* scratch) {
  for_dtype(op.dtype, [&](auto element) {
    for (int64_t index = first; index < end; ++index) gradient_of_weight<decltype(element)>(op, index, scratch);
  });
}

}  // namespace fastbert::cpu::FB_ISA
