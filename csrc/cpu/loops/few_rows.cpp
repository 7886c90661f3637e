// Dense layers on few rows. The time of such a product is that of reading the weights, so they are read once and as
// they are: the vectors of both factors lie along the inner dimension, where both are contiguous. A tile is a few rows
// by four channels; while the tiles of four channels are computed, the weights of the next four are prefetched.
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

typedef FB_VECTOR(float, 16) vfour;

// The sum of each of the four vectors.
inline vfour sums_of(const vfloat (&of)[kChannels]) {
  vfour parts[kChannels];
  for (int i = 0; i < kChannels; ++i) parts[i] = folded_to_16_bytes(of[i], [](auto a, auto b) { return a + b; });
  transpose(parts);
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// Four channels, of which `count` exist; the last one takes the place of those that do not.
template <class T, class Y>
struct Channels {
  const T* weight[kChannels];
  vfloat bias;
  int count;

  Channels(const FewRows& op, int64_t inner, int64_t channel)
      : bias{}, count(int(least<int64_t>(kChannels, op.channels - channel))) {
    for (int i = 0; i < kChannels; ++i)
      weight[i] = static_cast<const T*>(op.weight) + (channel + least(i, count - 1)) * inner;
    if (op.bias) bias = load(static_cast<const Y*>(op.bias) + channel, count);
  }
  void store_row(vfour sums, Y* y) const {
    vfloat whole{};
    __builtin_memcpy(&whole, &sums, sizeof sums);
    count == kChannels ? store(whole + bias, y, kChannels) : store(whole + bias, y, count);  // a constant is faster
  }
};

template <int rows, class T, class Y>
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
    ahead.fetch(1);
  });
#pragma GCC unroll 6
  for (int row = 0; row < rows; ++row) channels.store_row(sums_of(sums[row]), y + row * stride);
}

// T: what factors are multiplied in; Y: the type of bias and result.
template <class T, class Y>
void run(const FewRows& op, int64_t channel, int64_t channel_end) {
  const int64_t inner = op.inner * int64_t(sizeof(Y)) / int64_t(sizeof(T));
  const int64_t bytes_a_step = kChannels * kLanes<float> * int64_t(sizeof(T));  // of the channels' weights
  for (; channel < channel_end; channel += kChannels) {
    const Channels<T, Y> channels(op, inner, channel);
    Ahead ahead = Ahead::of_bytes(channels.weight[0] + kChannels * inner, bytes_a_step);
    const int64_t all_rows_step = ahead.step;
    int64_t row = 0;
    const auto run_tiles = [&](auto count) {
      ahead.step = all_rows_step * count / op.rows;
      for (; row + count <= op.rows; row += count)
        tile<count>(channels, static_cast<const T*>(op.x) + row * inner, inner,
                    static_cast<Y*>(op.y) + row * op.channels + channel, op.channels, ahead);
    };
    run_tiles(Slot<kRows>{}), run_tiles(Slot<least(kRows, 4)>{}), run_tiles(Slot<2>{}), run_tiles(Slot<1>{});
  }
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
