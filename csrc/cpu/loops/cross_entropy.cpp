// Cross-entropy of x W^T + bias. Logits are computed for some classes at a time; what is kept is each row's largest,
// its sum of exponentials and, if the gradient is needed, its logits in T. Then each row gets its loss, and the
// gradient, softmax - onehot, overwrites its logits (an online softmax: Milakov & Gimelshein, "Online normalizer
// calculation for softmax", 2018).
//
// Bytes moved: the weights once, x from the cache once for each task. For the gradient, logits are written once, then
// read and overwritten once; without it they are never in memory.
#include "../../cross_entropy.h"

#include "logits.h"

namespace fastbert::cpu::FB_ISA {

namespace {

// Rounds logits to T, so that the loss is computed from the same numbers as the gradient.
template <class T, class V>
V rounded_to(V v) {
  T whole[kWidth<V>];
  store(v, whole);
  return load(whole);
}

// What is kept of a row's logits in some classes: the largest, and the sum of exp(logit - largest).
template <class M>
struct Part {
  M high, total;
};

template <class T, class E>
Part<sum_t<E>> part_of(const Logits<E>& logits, int64_t row, int64_t classes, T* kept) {
  using M = sum_t<E>;
  using V = vec<M>;
  M* const sums = logits.row(row);
  V most[kSlots], total[kSlots]{};
  for (V& part : most) part = splat<V>(-__builtin_inf());
  for_vectors_in_slots<M>(classes, [&](int64_t i, auto n, auto slot) {
    const V v = rounded_to<T>(logits.at(row, i));
    store(v, sums + i);
    if (kept) store(v, kept + i, n);
    most[slot] = greater(most[slot], or_fill(v, n, -__builtin_inf()));
  });
  const M high = largest(most), base = base_of(high);
  for_vectors_in_slots<M>(classes, [&](int64_t i, auto n, auto slot) {
    total[slot] += or_fill(exp_nonpositive(load(sums + i) - base), n, 0);
  });
  return {high, sum(total)};
}

// T: the type of the logits. E and W: the types of a step of x and of a step of the weights.
template <class T, class E, class W>
void logits_of(const CrossEntropy& op, int64_t steps, int64_t task, int64_t row_begin, int64_t row_end, void* memory) {
  using M = sum_t<E>;
  const int64_t first = task * Logits<E>::kClasses, classes = least(Logits<E>::kClasses, op.classes - first);
  Logits<E> logits(memory, steps);
  logits.pack(static_cast<const W*>(op.weight) + first * steps, static_cast<const M*>(op.bias), first, classes);
  for (int64_t begin = row_begin; begin < row_end; begin += Logits<E>::kRows) {
    const int64_t rows = least(Logits<E>::kRows, row_end - begin);
    logits.multiply(static_cast<const E*>(op.x) + begin * steps, rows);
    for (int64_t at = 0; at < rows; ++at) {
      const int64_t row = begin + at, label = op.labels[row] - first;
      T* const kept = op.dlogits ? static_cast<T*>(op.dlogits) + row * op.stride + first : nullptr;
      static_cast<Part<M>*>(op.parts)[task * op.rows + row] = part_of<T>(logits, at, classes, kept);
      if (label >= 0 && label < classes) static_cast<M*>(op.targets)[row] = logits.row(at)[label];
    }
  }
}

template <class T, class M>
void gradient_of(T* logits, int64_t classes, int64_t label, M base, M factor) {
  const auto softmax = [&](vec<M> v) { return exp_nonpositive(v - base) * factor; };
  const vec<M> target = load(logits + label, 1);
  for_vectors<M>(classes, [&](int64_t i, auto n) { store(softmax(load(logits + i, n)), logits + i, n); });
  store(softmax(target) - 1, logits + label, 1);
}

template <class T>
void finish(const CrossEntropy& op, int64_t tasks, int64_t row) {
  using M = math_t<T>;
  T* const logits = op.dlogits ? static_cast<T*>(op.dlogits) + row * op.stride : nullptr;
  if (op.labels[row] < 0) {
    op.losses[row] = 0;
    if (logits) __builtin_memset(logits, 0, op.classes * sizeof(T));
    return;
  }
  const Part<M>* const part = static_cast<const Part<M>*>(op.parts) + row;
  Part<M> all{-M(__builtin_inf()), 0};
  for (int64_t task = 0; task < tasks; ++task)  // this may miss a NaN; the total has it
    if (part[task * op.rows].high > all.high) all.high = part[task * op.rows].high;
  const M base = base_of(all.high);
  for (int64_t task = 0; task < tasks; ++task) {
    const Part<M>& each = part[task * op.rows];
    all.total += each.total * exp_nonpositive(splat<vec<M>>(each.high - base))[0];
  }
  op.losses[row] = double(base) - double(static_cast<const M*>(op.targets)[row]) + __builtin_log(double(all.total));
  if (logits) gradient_of(logits, op.classes, op.labels[row], base, 1 / all.total);
}

}  // namespace

bool cross_entropy_takes_pairs(DType dtype, int64_t inner) { return takes_pairs(dtype, inner); }

CrossEntropyRoom cross_entropy_room(DType dtype, int64_t inner) {
  CrossEntropyRoom room{};
  for_factors(dtype, inner, [&](int64_t steps, auto, auto x, auto) {
    using E = decltype(x);
    room = {Logits<E>::kClasses, Logits<E>::bytes(steps), sizeof(Part<sum_t<E>>)};
  });
  return room;
}

void cross_entropy_logits(const CrossEntropy& op, int64_t task, int64_t begin, int64_t end, void* scratch) {
  for_factors(op.dtype, op.inner, [&](int64_t steps, auto element, auto x, auto weight) {
    logits_of<decltype(element), decltype(x), decltype(weight)>(op, steps, task, begin, end, scratch);
  });
}

void cross_entropy_rows(const CrossEntropy& op, int64_t tasks, int64_t begin, int64_t end) {
  for_dtype(op.dtype, [&](auto element) {
    for (int64_t row = begin; row < end; ++row) finish<decltype(element)>(op, tasks, row);
  });
}

}  // namespace fastbert::cpu::FB_ISA
