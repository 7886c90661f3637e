// LayerNorm of x, or of dropout(x + x_bias) + residual. The caller splits rows over threads.
//
// A row is read once, into a buffer of fp32 in the first-level cache, and walked there. The mean is kept between the
// row's ends, so that a constant row gives exactly the bias, and what rounding left of it is taken off in a second walk,
// so that a large offset costs no digits. The saved mean is rounded too: the backward takes off what is left again.
//
// Bytes moved: forward x, residual and y once; backward dy, x, residual, dx and dresidual once.
#include "../layer_norm.h"

#include "philox.h"

namespace fastbert::cpu::FB_SET {

namespace {

template <class M>
M square_root(M v) {
  return sizeof(M) == 8 ? M(__builtin_sqrt(v)) : M(__builtin_sqrtf(float(v)));
}

// The buffers of one row, in scratch.
template <class M>
struct Buffers {
  M *z, *g;
  uint16_t* bits;

  Buffers(void* scratch, int64_t channels)
      : z(static_cast<M*>(scratch)), g(z + channels), bits(reinterpret_cast<uint16_t*>(g + channels)) {}
};

// The vector of z at channel i.
template <class T, class R, class N>
auto sum_at(const LayerNorm& op, const T* x, const R* residual, const uint16_t* bits, int64_t i, N n) {
  using M = math_t<T>;
  auto v = load(x + i, n);
  if (op.x_bias) v += load(static_cast<const M*>(op.x_bias) + i, n);
  if (op.drop.threshold) v = keep(v, bits + i, op.drop);
  if (residual) v += load(residual + i, n);
  return v;
}

template <class T>
const T* at_row(const void* rows, int64_t row, int64_t channels) {
  return rows ? static_cast<const T*>(rows) + row * channels : nullptr;
}
template <class T>
T* at_row(void* rows, int64_t row, int64_t channels) {
  return rows ? static_cast<T*>(rows) + row * channels : nullptr;
}

// ---- forward

template <class T, class R, class Y>
void forward(const LayerNorm& op, void* ys, int64_t begin, int64_t end, void* scratch) {
  using M = math_t<T>;
  using V = vec<M>;
  const int64_t C = op.channels;
  const Buffers<M> buffers(scratch, C);
  const M *weight = static_cast<const M*>(op.weight), *bias = static_cast<const M*>(op.bias);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = at_row<T>(op.x, row, C);
    const R* residual = at_row<R>(op.residual, row, C);
    Y* y = at_row<Y>(ys, row, C);
    if (op.drop.threshold) row_bits(buffers.bits, C, uint64_t(row), op.drop.key);

    V total[kSlots]{}, low = splat<V>(__builtin_inf()), high = -low;
    for_vectors_in_slots<M>(C, [&](int64_t i, auto n, auto slot) {
      const V z = sum_at(op, x, residual, buffers.bits, i, n);
      store(z, buffers.z + i, n);
      total[slot] += or_fill(z, n, 0);
      low = lesser(or_fill(z, n, __builtin_inf()), low);
      high = greater(or_fill(z, n, -__builtin_inf()), high);
    });
    M mean = sum(total) / M(C);
    mean = mean < smallest(low) ? smallest(low) : mean > largest(high) ? largest(high) : mean;

    V first[kSlots]{}, second[kSlots]{};
    for_vectors_in_slots<M>(C, [&](int64_t i, auto n, auto slot) {
      const V d = or_fill(load(buffers.z + i, n) - mean, n, 0);
      first[slot] += d;
      second[slot] = fma(d, d, second[slot]);
    });
    const M left = sum(first) / M(C), variance = sum(second) / M(C) - left * left;
    const M rstd = M(1) / square_root((variance > 0 || variance != variance ? variance : M(0)) + M(op.eps));
    for_vectors<M>(C, [&](int64_t i, auto n) {
      const V normal = (load(buffers.z + i, n) - mean - left) * rstd;
      store(fma(normal, load(weight + i, n), load(bias + i, n)), y + i, n);
    });
    static_cast<M*>(op.mean)[row] = mean + left;
    static_cast<M*>(op.rstd)[row] = rstd;
  }
}

// ---- backward: with g = dy weight and n = (z - mean) rstd, dz = rstd (g - mean(g) - n mean(g n)); dresidual = dz,
// dx = dropout(dz), and the columns' sums dweight = sum(dy n), dbias = sum(dy), dx_bias = sum(dx)

template <class V, class M, class N>
void accumulate(M* sums, int64_t i, N n, V v) {
  store(load(sums + i, n) + v, sums + i, n);
}

template <class T, class R, class Y>
void backward(const LayerNorm& op, const LayerNormGradients& gradients, int64_t begin, int64_t end, void* scratch) {
  using M = math_t<T>;
  using V = vec<M>;
  const int64_t C = op.channels;
  const Buffers<M> buffers(scratch, C);
  const M* weight = static_cast<const M*>(op.weight);
  M *dweight = static_cast<M*>(gradients.dweight), *dbias = static_cast<M*>(gradients.dbias);
  M* dx_bias = static_cast<M*>(gradients.dx_bias);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = at_row<T>(op.x, row, C);
    const R* residual = at_row<R>(op.residual, row, C);
    const Y* dy = at_row<Y>(gradients.dy, row, C);
    T* dx = at_row<T>(gradients.dx, row, C);
    R* dresidual = at_row<R>(gradients.dresidual, row, C);
    const M mean = static_cast<const M*>(op.mean)[row], rstd = static_cast<const M*>(op.rstd)[row];
    if (op.drop.threshold) row_bits(buffers.bits, C, uint64_t(row), op.drop.key);

    V centered[kSlots]{}, g_total[kSlots]{}, product[kSlots]{};
    for_vectors_in_slots<M>(C, [&](int64_t i, auto n, auto slot) {
      const V c = or_fill(sum_at(op, x, residual, buffers.bits, i, n) - mean, n, 0);
      const V g = load(dy + i, n) * load(weight + i, n);
      store(c, buffers.z + i, n);
      store(g, buffers.g + i, n);
      centered[slot] += c;
      g_total[slot] += g;
      product[slot] = fma(g, c, product[slot]);
    });
    const M left = sum(centered) / M(C), g_mean = sum(g_total) / M(C);
    const M along = (sum(product) / M(C) - left * g_mean) * rstd * rstd;
    for_vectors<M>(C, [&](int64_t i, auto n) {
      const V c = load(buffers.z + i, n) - left;
      const V dz = (fma(c, splat<V>(-along), load(buffers.g + i, n)) - g_mean) * rstd;
      const V dropped = op.drop.threshold ? keep(dz, buffers.bits + i, op.drop) : dz;
      store(dropped, dx + i, n);
      if (dresidual) store(dz, dresidual + i, n);
      if (dx_bias) accumulate(dx_bias, i, n, dropped);
      if (!dweight) return;
      const V dys = load(dy + i, n);
      accumulate(dweight, i, n, dys * (c * rstd));
      accumulate(dbias, i, n, dys);
    });
  }
}

// Calls f with values of the element types of x, residual and y.
template <class F>
void for_types(const LayerNorm& op, F&& f) {
  for_dtype(op.x_type, [&](auto x) {
    if (!op.residual || op.residual_type == op.x_type) return f(x, x, x);
    if constexpr (sizeof(x) != 8)
      for_dtype(op.residual_type, [&](auto residual) {  // two different types promote to fp32
        if constexpr (sizeof(residual) != 8) f(x, residual, float{});
      });
  });
}

}  // namespace

int64_t layer_norm_scratch(int64_t channels) {
  return 2 * channels * int64_t(sizeof(double)) + row_bits_room(channels) * int64_t(sizeof(uint16_t));
}

void layer_norm_fwd(const LayerNorm& op, void* y, int64_t begin, int64_t end, void* scratch) {
  for_types(op, [&](auto x, auto residual, auto out) {
    forward<decltype(x), decltype(residual), decltype(out)>(op, y, begin, end, scratch);
  });
}

void layer_norm_bwd(const LayerNorm& op, const LayerNormGradients& gradients, int64_t begin, int64_t end,
                    void* scratch) {
  for_types(op, [&](auto x, auto residual, auto out) {
    backward<decltype(x), decltype(residual), decltype(out)>(op, gradients, begin, end, scratch);
  });
}

}  // namespace fastbert::cpu::FB_SET
