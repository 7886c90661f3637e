// Dense layers on few rows. Other products first arrange all weights in memory; here they are read once and as they
// are: the vectors of both factors lie along the inner dimension, where both are contiguous. A tile is a few rows by
// four channels; while the tiles of four channels are computed, the weights of the next four are prefetched.
#include "../../few_rows.h"

#include "panels.h"

namespace fastbert::cpu::FB_ISA {

namespace {

constexpr int kChannels = 4;
#ifdef __AVX512F__
constexpr int kRows = 6;  // 24 sums, in 32 vector registers
#else
constexpr int kRows = 3;
#endif

// ---- the sums of lanes

// Lane i is the sum of lanes i and i ^ half: of b where i has the bit `half`, else of a.
template <int half, class V>
inline V added(V a, V b) {
  constexpr int L = kWidth<V>;
  return chosen(a, b, [](int i) { return i & half ? i + L : i; }) +
         chosen(a, b, [](int i) { return (i & half ? i + L : i) ^ half; });
}

// The sums of 2 * half vectors of as many lanes.
template <int half, class V>
inline V tree(const V (&of)[2 * half]) {
  V sums[half];
  for (int i = 0; i < half; ++i) sums[i] = added<half>(of[i], of[i + half]);
  if constexpr (half > 1)
    return tree<half / 2>(sums);
  else
    return sums[0];
}

// The sum of each of n vectors, in a vector of n lanes; n is a power of two. Lanes half a vector apart are added first,
// then those a quarter apart, and so on, so the bits of a sum do not depend on n.
template <int n, class V>
inline auto sums_of(const V (&of)[n]) {
  if constexpr (n == kWidth<V>) {
    return tree<n / 2>(of);
  } else {
    const auto add = [](auto a, auto b) { return a + b; };
    decltype(halved(of[0], add)) halves[n];
    for (int i = 0; i < n; ++i) halves[i] = halved(of[i], add);
    return sums_of<n>(halves);
  }
}

// ---- tiles

// Four channels, of which `count` exist; the last one takes the place of those that do not.
template <class T, class Y>
struct Channels {
  const T* weight[kChannels];
  vfloat bias;  // repeated for each row that a vector holds
  int count;

  Channels(const FewRows& op, int64_t inner, int64_t channel)
      : bias{}, count(int(least<int64_t>(kChannels, op.channels - channel))) {
    for (int i = 0; i < kChannels; ++i)
      weight[i] = static_cast<const T*>(op.weight) + (channel + least(i, count - 1)) * inner;
    if (op.bias)
      bias = reordered(load(static_cast<const Y*>(op.bias) + channel, count), [](int i) { return i % kChannels; });
  }

  // Stores one row after another from sums, which has a lane for each of their channels.
  template <class V>
  void store_rows(V sums, Y* y, int64_t stride) const {
    Y whole[kLanes<float>];
    store(widened(sums + load_bits<V>(&bias)), whole);
    for (int row = 0; row < kWidth<V> / kChannels; ++row) {
      Y* const to = y + row * stride;
      const Y* const from = whole + row * kChannels;
      count == kChannels ? __builtin_memcpy(to, from, kChannels * sizeof(Y))  // a constant is faster
                         : __builtin_memcpy(to, from, count * sizeof(Y));
    }
  }
};

// Calls f(row, their sums) for as many rows at a time as a vector has room for.
template <int rows, class F>
inline void add_lanes(const vfloat (*sums)[kChannels], const F& f, int row = 0) {
  constexpr int kMost = kLanes<float> / kChannels, kNow = rows >= kMost ? kMost : rows >= 2 ? 2 : 1;
  vfloat of[kNow * kChannels];
  for (int i = 0; i < kNow * kChannels; ++i) of[i] = sums[i / kChannels][i % kChannels];
  f(row, sums_of<kNow * kChannels>(of));
  if constexpr (rows > kNow) add_lanes<rows - kNow>(sums + kNow, f, row + kNow);
}

// ahead: prefetches, by __builtin_prefetch's `locality`.
template <int rows, int locality, class T, class Y>
inline void tile(const Channels<T, Y>& channels, const T* x, int64_t inner, Y* y, int64_t stride, Ahead& ahead) {
  vfloat sums[rows][kChannels]{};
  for_vectors<float>(inner, [&](int64_t i, auto n) {
    vec<either<kSame<T, pair>, pair, float>> weight[kChannels];
#pragma GCC unroll 4
    for (int channel = 0; channel < kChannels; ++channel) weight[channel] = load(channels.weight[channel] + i, n);
#pragma GCC unroll 6
    for (int row = 0; row < rows; ++row) {
      const auto factor = load(x + row * inner + i, n);
#pragma GCC unroll 4
      for (int channel = 0; channel < kChannels; ++channel)
        sums[row][channel] = fma(factor, weight[channel], sums[row][channel]);
    }
    ahead.fetch<locality>(1);
  });
  add_lanes<rows>(sums, [&](int row, auto of) { channels.store_rows(of, y + row * stride, stride); });
}

// T: what factors are multiplied in; Y: the type of bias and result.
template <int locality, class T, class Y>
void run(const FewRows& op, int64_t channel, int64_t channel_end) {
  const int64_t inner = op.inner * int64_t(sizeof(Y)) / int64_t(sizeof(T));
  const int64_t bytes_a_step = kChannels * kLanes<float> * int64_t(sizeof(T));  // of the channels' weights
  for (; channel < channel_end; channel += kChannels) {
    const Channels<T, Y> channels(op, inner, channel);
    const bool is_last = channel + kChannels >= channel_end;
    const void* const next = is_last && op.next ? op.next : channels.weight[0] + kChannels * inner;
    Ahead ahead = Ahead::of_bytes(next, bytes_a_step);
    const int64_t all_rows_step = ahead.step;
    int64_t row = 0;
    const auto run_tiles = [&](auto count) {
      ahead.step = all_rows_step * count / op.rows;
      for (; row + count <= op.rows; row += count)
        tile<count, locality>(channels, static_cast<const T*>(op.x) + row * inner, inner,
                              static_cast<Y*>(op.y) + row * op.channels + channel, op.channels, ahead);
    };
    run_tiles(Slot<kRows>{}), run_tiles(Slot<least(kRows, 4)>{}), run_tiles(Slot<2>{}), run_tiles(Slot<1>{});
  }
}

template <class T, class Y>
void run(const FewRows& op, int64_t channel, int64_t channel_end) {
  op.near ? run<3, T, Y>(op, channel, channel_end) : run<2, T, Y>(op, channel, channel_end);
}

}  // namespace

int64_t few_rows_width() { return kChannels; }

void few_rows(const FewRows& op, int64_t channel, int64_t channel_end) {
  if (takes_pairs(op.dtype, op.inner)) return run<pair, bf16>(op, channel, channel_end);
  for_dtype_up_to_f32(op.dtype, [&](auto element) {
    using T = decltype(element);
    run<T, T>(op, channel, channel_end);
  });
}

}  // namespace fastbert::cpu::FB_ISA
