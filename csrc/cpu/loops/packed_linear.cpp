// Computes a block of y = gelu(x W^T + bias) with packed W, or without GELU with packed x: its sums are accumulated in
// scratch, then one pass turns them into y while they are in the cache.
#include "../../packed_linear.h"

#include "../../gelu.h"
#include "product_int8.h"

namespace fastbert::cpu::FB_ISA {

namespace {

// Rows in a block: a multiple of every tile height. With more rows, panels are read less often; with tiles this matters
// most, and there the second-level cache has room for the rows.
constexpr int64_t kRows = kTiles ? 288 : 144;
constexpr int64_t kInner = 256;                                  // steps in one chain of float sums
constexpr int64_t kColumns = (kTiles ? 8 : 16) * kPanel<float>;  // columns that are finished at once
constexpr int64_t kStride = kColumns + 16;  // row stride of sums: a power of two would use few sets of the cache
constexpr int64_t kNear = kInner + 16;      // row stride of copied rows of x (nearby), for the same reason

bool in_pairs(Weights weights) { return kPairs && weights == Weights::bf16; }

// How many numbers of each channel one step of a product takes.
int64_t group_of(Weights weights) { return weights == Weights::s8 ? kGroup : in_pairs(weights) ? 2 : 1; }
int64_t steps(const PackedLinear& op) { return divide_up(op.inner, group_of(op.weights)); }

// ---- rows of x as the products take them

// The largest magnitude of a row, or an infinity or NaN if it has one. Magnitudes are compared by their bits, which
// have the same order, with infinity and then NaN last.
template <class T>
float largest_magnitude(const T* x, int64_t elements) {
  using Bits = either<sizeof(T) == 2, uint16_t, int32_t>;
  typedef FB_VECTOR(Bits, FB_VECTOR_BYTES) V;
  constexpr int64_t kInLane = 4 / sizeof(T);
  V most[kSlots]{};
  const auto take = [&](V bits, int slot) {
    bits &= Bits(sizeof(T) == 2 ? 0x7fff : 0x7fffffff);
    most[slot] = most[slot] > bits ? most[slot] : bits;
  };
  const pair* const lanes_of_x = reinterpret_cast<const pair*>(x);  // lanes of four bytes, aligned to two
  for_vectors_in_slots<float>(
      elements / kInLane, [&](int64_t i, auto n, auto slot) { take(reinterpret<V>(load(lanes_of_x + i, n)), slot); });
  if (elements % kInLane) {
    V last{};
    __builtin_memcpy(&last, x + elements - 1, sizeof(T));
    take(last, 0);
  }
  for (int slot = 1; slot < kSlots; ++slot) take(most[slot], 0);
  vint lanes = reinterpret<vint>(most[0]);
  if constexpr (sizeof(T) == 2) {
    const vint low = lanes & 0xffff, high = lanes >> 16;
    lanes = low > high ? low : high;
  }
  const Bits bits = Bits(largest(lanes));
  T value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return load(&value, 1)[0];
}

// Stores the lowest bits of each lane.
inline void store_left(vint v, Left8* to, Whole) {
  if constexpr (sizeof(Left8) == 1) {
    const vbytes bytes = low_bytes(reinterpret<vuint>(v));
    __builtin_memcpy(to, &bytes, sizeof bytes);
  } else {
    const vhalves halves = low_halves(reinterpret<vuint>(v));
    __builtin_memcpy(to, &halves, sizeof halves);
  }
}
inline void store_left(vint v, Left8* to, int n) {
  for (int i = 0; i < n; ++i) to[i] = Left8(v[i]);
}

// Writes the int8 nearest to x times a factor, ties to even, plus kOffset: the lowest bits of the float sum below.
// Returns the factor that turns these int8 back into x. It is NaN for a row with a NaN or an infinity, which no int8 is
// near. A row of numbers below 2^-100 becomes zeros.
template <class T>
float quantise_row(const T* x, int64_t inner, Left8* to) {
  const float high = largest_magnitude(x, inner);
  const bool finite = high * 0 == 0, zero = !finite || high < 0x1p-100f;
  const float factor = 127 / high;
  for_vectors<float>(zero ? 0 : inner, [&](int64_t i, auto n) {
    store_left(reinterpret<vint>(load(x + i, n) * factor + (kShift + kOffset)), to + left8_at(i), n);
  });
  for (int64_t i = zero ? 0 : inner; i < whole_groups(inner); ++i) to[left8_at(i)] = kOffset;
  return !finite ? __builtin_nanf("") : zero ? 0 : high / 127;
}

// Copies a row of an odd number of bf16 and appends a zero.
void put_pairs(const void* x, int64_t inner, pair* to) {
  to[inner / 2] = {};
  __builtin_memcpy(to, x, inner * sizeof(bf16));
}

// ---- sums

// Steps of a panel in the type that is multiplied: the panel itself, or floats in `room` converted from bf16.
template <class E>
E* multiplied(const E* panel, int64_t, float*) {
  return const_cast<E*>(panel);
}
[[maybe_unused]] inline float* multiplied(const bf16* panel, int64_t steps, float* room) {
  convert(panel, steps * kPanel<float>, room);
  return room;
}

// Whether steps of rows of x are copied: if a tile's rows would share one set of the first-level cache and exceed its
// eight ways.
constexpr bool kMayCopy = kTile > 8;
template <class E>
bool is_copied(int64_t stride, int64_t rows, int64_t steps) {
  return kMayCopy && rows > 8 && steps && stride * int64_t(sizeof(E)) % 4096 == 0;
}

// Some steps of rows of x: in x itself or copied to `room`.
template <class E>
Left<false, E> nearby(const E* x, int64_t stride, int64_t rows, int64_t steps, void* room) {
  if (!is_copied<E>(stride, rows, steps)) return {x, stride};
  E* const to = static_cast<E*>(room);
  for (int64_t row = 0; row < rows; ++row) __builtin_memcpy(to + row * kNear, x + row * stride, steps * sizeof(E));
  return {to, kNear};
}

// The share of a column's panel in the prefetches of `width` steps of `rows` rows, beside `steps` steps of the panel.
template <class E>
RowsAhead share_of_rows(const E* next, int64_t stride, int64_t rows, int64_t width, int64_t column, int64_t columns,
                        int64_t steps) {
  const int64_t row = rows * column / columns, end = rows * least(column + kPanel<float>, columns) / columns;
  return RowsAhead::of(next + row * stride, stride, end - row, width, steps);
}

// The prefetches during the panel of a column: `panel` and, if rows are copied, the panel's share of the `width` steps
// of x that are copied next, because the copy would wait for memory. On the matrix unit only `panel`: its loop has no
// registers left for both.
template <class E>
auto with_rows(Ahead panel, const E* next, int64_t stride, int64_t rows, int64_t width, int64_t column, int64_t columns,
               int64_t steps) {
  if constexpr (kMayCopy && !(kTiles && kSame<E, pair>)) {
    if (!is_copied<E>(stride, rows, steps)) return BothAhead{panel, {}};
    return BothAhead{panel, share_of_rows(next, stride, rows, width, column, columns, steps)};
  } else {
    return panel;
  }
}

// The factors of a block's product. W: the type of a channel's step: float, pair, or bf16, which is converted to float
// one part of a panel at a time, once for all rows.
template <class W>
struct Factors {
  using E = either<kSame<W, bf16>, float, W>;
  int64_t all, stride;  // steps of a row of x; from one row to the next
  const E* x;
  const W* weight;

  Factors(const PackedLinear& op, int64_t row, int64_t channel)
      : all(steps(op)),
        stride(op.left ? all : op.x_stride / group_of(op.weights)),
        x(static_cast<const E*>(op.left ? op.left : op.x) + row * stride),
        weight(static_cast<const W*>(op.weight) + channel * all) {}

  const W* panel_at(int64_t column, int64_t k) const { return weight + column * all + k * kPanel<float>; }
  int64_t inner_at(int64_t k) const { return least(kInner, all - k); }
  int64_t after(int64_t k) const { return all - k > kInner ? k + kInner : 0; }  // the next steps, 0 after the last
};

// Computes the sums of a block in float. ahead_of(column, k): the prefetches during a panel's steps from k on.
template <class W, class F>
void add_products(const Factors<W>& factors, int64_t rows, int64_t channels, float* sums, const F& ahead_of) {
  using E = typename Factors<W>::E;
  float *const near = sums + kRows * kStride, *const room = near + kRows * kNear;
  for (int64_t k = 0; k == 0 || k < factors.all; k += kInner) {
    const int64_t inner = factors.inner_at(k);
    const Left<false, E> left = nearby(factors.x + k, factors.stride, rows, inner, near);
    for (int64_t column = 0; column < channels; column += kPanel<float>) {
      auto ahead = ahead_of(column, k);
      using A = decltype(ahead);
      const bool narrow = channels - column <= kLanes<float>;
      const auto add = narrow ? k ? product<Onto::sums, false, E, A, 1> : product<Onto::nothing, false, E, A, 1>
                       : k    ? product<Onto::sums, false, E, A>
                              : product<Onto::nothing, false, E, A>;
      add(rows, kPanel<float>, inner, left, {multiplied(factors.panel_at(column, k), inner, room), inner},
          sums + column, kStride, nullptr, ahead);
    }
  }
}

// The same, prefetching the panel that is read next, and rows of x that are copied next.
template <class W>
void multiply(const PackedLinear& op, int64_t row, int64_t rows, int64_t channel, int64_t channels, float* sums) {
  constexpr int64_t kWidth = kPanel<float>;
  const Factors<W> factors(op, row, channel);
  add_products(factors, rows, channels, sums, [&](int64_t column, int64_t k) {
    const int64_t then = factors.after(k);
    const bool last = column + kWidth >= channels;
    const W* const next = !last     ? factors.panel_at(column + kWidth, k)
                          : then    ? factors.panel_at(0, then)
                          : op.next ? static_cast<const W*>(op.next)
                                    : factors.panel_at(channels, 0);
    return with_rows(Ahead::of_bytes(next, kWidth * int64_t(sizeof(W))), factors.x + then, factors.stride, rows,
                     factors.inner_at(then), column, channels, factors.inner_at(k));
  });
}

// The same, prefetching the next steps of rows of x, then op.next.
void multiply_turned(const PackedLinear& op, int64_t row, int64_t rows, int64_t channel, int64_t channels,
                     float* sums) {
  const Factors<float> factors(op, row, channel);
  add_products(factors, rows, channels, sums, [&](int64_t column, int64_t k) {
    const int64_t then = factors.after(k);
    const float* const next = then ? factors.x + then : op.next ? static_cast<const float*>(op.next) : factors.x;
    return share_of_rows(next, factors.stride, rows, factors.inner_at(then), column, channels, factors.inner_at(k));
  });
}

void multiply8(const PackedLinear& op, int64_t row, int64_t rows, int64_t channel, int64_t channels, int32_t* sums) {
  const int64_t inner = whole_groups(op.inner), stride = left8_stride(op.inner);
  const Left8* const left = static_cast<const Left8*>(op.left) + left8_row(row, stride);
  const auto panel_at = [&](int64_t column) { return static_cast<const int8_t*>(op.weight) + column * inner; };
  for (int64_t end = channel + channels; channel < end; channel += kPanel<float>, sums += kPanel<float>) {
    const int64_t after = channel + kPanel<float>;
    product8(rows, inner, left, stride, panel_at(channel), sums, kStride,
             after < end || !op.next ? panel_at(after) : op.next);
  }
}

// ---- from sums to y

// sums_of(r) returns the sums of row r as a function of the channel, so that per-row values stay in registers.
template <Gelu kGelu, class T, class F>
void finish(const PackedLinear& op, int64_t row, int64_t rows, int64_t channel, int64_t channels, const F& sums_of) {
  const float* const bias = op.bias ? static_cast<const float*>(op.bias) + channel : nullptr;
  for (int64_t r = 0; r < rows; ++r) {
    T* const y = static_cast<T*>(op.y) + (row + r) * op.y_stride + channel;
    const auto sum_at = sums_of(r);
    for_vectors<float>(channels, [&](int64_t i, auto n) {
      vfloat v = sum_at(i, n);
      if (bias) v += load(bias + i, n);
      if constexpr (kGelu != Gelu::none) v = gelu_for<T, kGelu == Gelu::tanh>(v);
      store(v, y + i, n);
    });
  }
}

template <class T, class F>
void finish(const PackedLinear& op, int64_t row, int64_t rows, int64_t channel, int64_t channels, const F& sums_of) {
  if (op.gelu == Gelu::none) return finish<Gelu::none, T>(op, row, rows, channel, channels, sums_of);
  if (op.gelu == Gelu::erf) return finish<Gelu::erf, T>(op, row, rows, channel, channels, sums_of);
  finish<Gelu::tanh, T>(op, row, rows, channel, channels, sums_of);
}

template <class T>
void float_block(const PackedLinear& op, int64_t row, int64_t rows, int64_t channel, int64_t channels, float* sums) {
  const auto add_up = op.weights == Weights::f32 ? multiply<float> : multiply<either<kPairs, pair, bf16>>;
  add_up(op, row, rows, channel, channels, sums);
  finish<T>(op, row, rows, channel, channels,
            [&](int64_t r) { return [sums = sums + r * kStride](int64_t i, auto n) { return load(sums + i, n); }; });
}

// Stores the sums of a block turned: those of a row in one channel of y, those of a channel in one row.
void store_turned(const PackedLinear& op, int64_t row, int64_t rows, int64_t channel, int64_t channels,
                  const float* sums) {
  constexpr int L = kLanes<float>;
  static_assert(kRows % L == 0);  // so that the rows of a last block are read from sums, but not stored
  for (int64_t c = 0; c < channels; c += L)
    for_vectors<float>(rows, [&](int64_t r, auto n) {
      vfloat block[L];
      for (int i = 0; i < L; ++i) block[i] = load(sums + (r + i) * kStride + c);
      transpose(block);
      const vfloat bias = op.bias ? load(static_cast<const float*>(op.bias) + row + r, n) : vfloat{};
      float* const y = static_cast<float*>(op.y) + (channel + c) * op.y_stride + row + r;
      for (int i = 0; i < least<int64_t>(L, channels - c); ++i)
        store(op.bias ? block[i] + bias : block[i], y + i * op.y_stride, n);
    });
}

template <class T>
void int8_block(const PackedLinear& op, int64_t row, int64_t rows, int64_t channel, int64_t channels, int32_t* sums) {
  multiply8(op, row, rows, channel, channels, sums);
  const float* const scale = op.scale + channel;
  int32_t offsets[kColumns];  // what kOffset adds to the sums of each channel
  for_vectors<float>(kOffset ? channels : 0, [&](int64_t i, auto n) {
    const vint sum = __builtin_convertvector(load(scale + op.channels + i, n), vint) * kOffset;
    __builtin_memcpy(offsets + i, &sum, sizeof sum);
  });
  finish<T>(op, row, rows, channel, channels, [&](int64_t r) {
    return
        [sums = sums + r * kStride, scale, offsets = &offsets[0], of_row = op.left_scale[row + r]](int64_t i, auto n) {
          vint exact = load(sums + i);
          if constexpr (kOffset) exact -= load(offsets + i);
          return __builtin_convertvector(exact, vfloat) * (load(scale + i, n) * of_row);
        };
  });
}

}  // namespace

int64_t packed_width() { return kPanel<float>; }
int64_t packed_group(Weights weights) { return group_of(weights); }
int64_t packed_rows() { return kRows; }
int64_t packed_rows_a_panel(Weights weights) { return kTiles && weights != Weights::f32 ? 96 : 16; }
int64_t packed_fewest_rows(Weights weights, int64_t bytes) {
  constexpr int64_t kFewest = 64, kMeanwhile = 1 << 16;  // bytes that memory delivers while the matrix unit takes a row
  const bool slower = FB_VECTOR_BYTES == 32 || (weights == Weights::bf16 && !kTiles);  // docs/packed_linear.md
  if (slower) return int64_t(1) << 62;
  const int64_t rows = kTiles && weights != Weights::f32 ? bytes / kMeanwhile : 0;
  return rows > kFewest ? rows : kFewest;
}

int64_t packed_left_bytes(int64_t inner, DType x_dtype, Weights weights) {
  if (weights == Weights::s8) return left8_stride(inner) * int64_t(sizeof(Left8));
  if (in_pairs(weights)) return inner % 2 ? (inner + 1) * int64_t(sizeof(bf16)) : 0;
  return x_dtype == DType::f32 ? 0 : inner * int64_t(sizeof(float));
}

void packed_left(const PackedLinear& op, int64_t begin, int64_t end) {
  for_dtype_up_to_f32(op.x_dtype, [&](auto element) {
    using T = decltype(element);
    for (int64_t row = begin; row < end; ++row) {
      const T* const x = static_cast<const T*>(op.x) + row * op.x_stride;
      if (op.weights == Weights::s8) {
        Left8* const to = static_cast<Left8*>(op.left) + left8_row(row, left8_stride(op.inner));
        op.left_scale[row] = quantise_row(x, op.inner, to);
      } else if (in_pairs(op.weights)) {
        put_pairs(x, op.inner, static_cast<pair*>(op.left) + row * steps(op));
      } else {
        convert(x, op.inner, static_cast<float*>(op.left) + row * op.inner);
      }
    }
  });
}

void pack_weight(const float* weight, int64_t stride, bool across, int64_t inner, int64_t channels, float* packed) {
  constexpr int64_t kRowsAtOnce = 16, kWidth = kPanel<float>;  // row by row, panels may share a set of the cache
  const Panels<float> panels{packed, inner};
  if (!across) return pack_transposed(weight, stride, channels, panels);
  for (int64_t row = 0; row < inner; row += kRowsAtOnce)
    for (int64_t channel = 0; channel < channels; channel += kWidth)
      pack(weight + row * stride + channel, stride, least(kWidth, channels - channel), 1.0f,
           Panels<float>{panels.at(channel, row), least(kRowsAtOnce, inner - row)});
}

int64_t packed_scratch() { return (kRows * (kStride + kNear) + kInner * kPanel<float>)*int64_t(sizeof(float)); }

void packed_linear(const PackedLinear& op, int64_t row, int64_t row_end, int64_t channel, int64_t channel_end,
                   void* scratch) {
  const Tiles tiles(in_pairs(op.weights) || op.weights == Weights::s8);
  for_dtype_up_to_f32(op.y_dtype, [&](auto element) {
    using T = decltype(element);
    PackedLinear part = op;
    for (; channel < channel_end; channel += kColumns) {
      part.next = channel + kColumns < channel_end ? nullptr : op.next;
      const int64_t rows = row_end - row, channels = least(kColumns, channel_end - channel);
      if (op.weights == Weights::s8)
        int8_block<T>(part, row, rows, channel, channels, static_cast<int32_t*>(scratch));
      else
        float_block<T>(part, row, rows, channel, channels, static_cast<float*>(scratch));
    }
  });
}

int64_t turned_rows() { return kTurnedTiles * kTile; }

void turned_linear(const PackedLinear& op, int64_t row, int64_t row_end, void* scratch) {
  float* const sums = static_cast<float*>(scratch);
  for (int64_t channel = 0; channel < op.channels; channel += kColumns) {
    const int64_t rows = row_end - row, channels = least(kColumns, op.channels - channel);
    multiply_turned(op, row, rows, channel, channels, sums);
    store_turned(op, row, rows, channel, channels, sums);
  }
}

}  // namespace fastbert::cpu::FB_ISA
