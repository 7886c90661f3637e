// LayerNorm of x, or of dropout(x + x_bias) + residual. The caller splits rows over threads.
//
// A row is read from memory once and processed in the L1 cache as fp32 (fp64 for f64), in a buffer unless x alone has
// that type (layer_norm_row.h).
//
// Bytes moved: forward x, residual and y once; backward dy, x, residual, dx and dresidual once.
#include "../../layer_norm.h"

#include "layer_norm_row.h"
#include "philox.h"

namespace fastbert::cpu::FB_ISA {

namespace {

enum class Sum { none, plain, dropout };  // z is x; x + x_bias + residual; dropout(x + x_bias) + residual

// The rows of z. The fields of LayerNorm are copied: otherwise the compiler would reload them after each store, which
// might alias them.
template <Sum kSum, class T, class R>
struct Rows {
  using M = math_t<T>;
  static constexpr bool kBuffered = kSum != Sum::none || sizeof(T) != sizeof(M);
  const T* xs;
  const R* residuals;
  const M* x_bias;
  const int64_t channels;
  const Dropout drop;
  M* const buffer;       // [channels]
  uint16_t* const bits;  // [row_bits_room(channels)]
  const T* x = nullptr;
  const R* residual = nullptr;

  Rows(const LayerNorm& op, void* scratch)
      : xs(static_cast<const T*>(op.x)),
        residuals(static_cast<const R*>(op.residual)),
        x_bias(static_cast<const M*>(op.x_bias)),
        channels(op.channels),
        drop(op.drop),
        buffer(static_cast<M*>(scratch)),
        bits(reinterpret_cast<uint16_t*>(buffer + channels)) {}

  void start(int64_t row) {
    x = xs + row * channels;
    if (kSum != Sum::none) residual = residuals + row * channels;
    if (kSum == Sum::dropout) row_bits(bits, channels, uint64_t(row), drop.key);
  }

  template <class N>
  vec<M> at(int64_t i, N n) const {
    auto v = load(x + i, n);
    if constexpr (kSum != Sum::none) v += load(x_bias + i, n);
    if constexpr (kSum == Sum::dropout) v = keep(v, bits + i, drop);
    if constexpr (kSum != Sum::none) v += load(residual + i, n);
    return v;
  }

  M first() const { return channels < kLanes<M> ? at(0, int(channels))[0] : at(0, Whole{})[0]; }

  // Stores v, the result of at(), for later passes, unless it is x itself.
  template <class N>
  void keep_for_later(vec<M> v, int64_t i, N n) const {
    if constexpr (kBuffered) store(v, buffer + i, n);
  }
  const M* stored() const {
    if constexpr (kBuffered) {
      return buffer;
    } else {
      return x;
    }
  }
};

// ---- forward

template <Sum kSum, class T, class R, class Y>
void forward(const LayerNorm& op, void* ys, int64_t begin, int64_t end, void* scratch) {
  using M = math_t<T>;
  using V = vec<M>;
  Rows<kSum, T, R> rows(op, scratch);
  const int64_t C = op.channels;
  const M *const weight = static_cast<const M*>(op.weight), *const bias = static_cast<const M*>(op.bias);
  M *const means = static_cast<M*>(op.mean), *const rstds = static_cast<M*>(op.rstd);
  const M eps = M(op.eps);
  Y* y = static_cast<Y*>(ys) + begin * C;
  for (int64_t row = begin; row < end; ++row, y += C) {
    rows.start(row);
    const M* const z = rows.stored();
    const M shift = rows.first();
    V total[kSlots]{};
    for_vectors_in_slots<M>(C, [&](int64_t i, auto n, auto slot) {
      const V v = rows.at(i, n);
      rows.keep_for_later(v, i, n);
      total[slot] += or_fill(v - shift, n, 0);
    });
    normalize(z, shift + sum(total) / M(C), C, eps, weight, bias, y, means[row], rstds[row]);
  }
}

// ---- backward: dresidual = dz, dx = dropout(dz), and sums over the rows: dweight = sum(dy n), dbias = sum(dy),
// dx_bias = sum(dx)

template <Sum kSum, class T, class R, class Y>
void backward(const LayerNorm& op, const LayerNormGradients& gradients, int64_t begin, int64_t end, void* scratch) {
  using M = math_t<T>;
  using V = vec<M>;
  Rows<kSum, T, R> rows(op, scratch);
  const int64_t C = op.channels;
  const M* const weight = static_cast<const M*>(op.weight);
  const M *const means = static_cast<const M*>(op.mean), *const rstds = static_cast<const M*>(op.rstd);
  M *const dweight = static_cast<M*>(gradients.dweight), *const dbias = static_cast<M*>(gradients.dbias);
  M* const dx_bias = static_cast<M*>(gradients.dx_bias);
  const Y* dy = static_cast<const Y*>(gradients.dy) + begin * C;
  constexpr bool kShared = kSum == Sum::plain && kSame<T, R>;  // dx equals dresidual and is not written
  T* dx = kShared ? nullptr : static_cast<T*>(gradients.dx) + begin * C;
  R* dresidual = kSum == Sum::none ? nullptr : static_cast<R*>(gradients.dresidual) + begin * C;
  for (int64_t row = begin; row < end; ++row, dy += C) {
    const M mean = means[row], rstd = rstds[row];
    rows.start(row);
    const M* const z = rows.stored();
    RowSums<M> sums;
    for_vectors_in_slots<M>(C, [&](int64_t i, auto n, auto slot) {
      const V v = rows.at(i, n);
      rows.keep_for_later(v, i, n);
      sums.add(v - mean, load(dy + i, n) * load(weight + i, n), n, slot);
    });
    const RowGradient<M> row_gradient(sums, mean, rstd, C);
    for_vectors<M>(C, [&](int64_t i, auto n) {
      const V dys = load(dy + i, n), normal = row_gradient.normal(load(z + i, n));
      const V dz = row_gradient.dz(normal, dys * load(weight + i, n));
      accumulate(dweight, i, n, dys * normal);
      accumulate(dbias, i, n, dys);
      V dropped = dz;
      if constexpr (kSum == Sum::dropout) dropped = keep(dz, rows.bits + i, rows.drop);
      if constexpr (!kShared) store(dropped, dx + i, n);
      if constexpr (kSum != Sum::none) {
        store(dz, dresidual + i, n);
        accumulate(dx_bias, i, n, dropped);
      }
    });
    if (!kShared) dx += C;
    if (kSum != Sum::none) dresidual += C;
  }
}

template <Sum kSum>
struct SumOf {
  static constexpr Sum value = kSum;
};

// Calls f with the kind of sum and values of the element types of x, residual and y.
template <class F>
void for_types(const LayerNorm& op, F&& f) {
  for_dtype(op.x_type, [&](auto x) {
    if (!op.residual) return f(SumOf<Sum::none>{}, x, x, x);
    const auto for_sum = [&](auto residual, auto y) {
      if (op.drop.threshold) return f(SumOf<Sum::dropout>{}, x, residual, y);
      return f(SumOf<Sum::plain>{}, x, residual, y);
    };
    if (op.residual_type == op.x_type) return for_sum(x, x);
    if constexpr (sizeof(x) != 8)
      for_dtype_up_to_f32(op.residual_type, [&](auto residual) {  // two different types promote to fp32
        if constexpr (!kSame<decltype(x), decltype(residual)>) for_sum(residual, float{});
      });
  });
}

}  // namespace

int64_t layer_norm_scratch(int64_t channels) {
  return channels * int64_t(sizeof(double)) + row_bits_room(channels) * int64_t(sizeof(uint16_t));
}

void layer_norm_fwd(const LayerNorm& op, void* y, int64_t begin, int64_t end, void* scratch) {
  for_types(op, [&](auto sum, auto x, auto residual, auto out) {
    forward<decltype(sum)::value, decltype(x), decltype(residual), decltype(out)>(op, y, begin, end, scratch);
  });
}

void layer_norm_bwd(const LayerNorm& op, const LayerNormGradients& gradients, int64_t begin, int64_t end,
                    void* scratch) {
  for_types(op, [&](auto sum, auto x, auto residual, auto out) {
    backward<decltype(sum)::value, decltype(x), decltype(residual), decltype(out)>(op, gradients, begin, end, scratch);
  });
}

}  // namespace fastbert::cpu::FB_ISA
