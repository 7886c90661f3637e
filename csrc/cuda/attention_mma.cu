// attention in 16-bit types on tensor cores by mma.sync: kernels for short sequences, in which a warp handles a whole
// head, and the launchers for the kernels of attention_kernels.cuh.
#include "attention_kernels.cuh"

namespace fastbert::cuda {

namespace {

// For sequences of up to 32 tokens, one warp handles a whole head. The only empty rows and columns of a tile are those
// by which the sequence is shorter than 32, and no warp waits for another. The backward has such a kernel too.
constexpr int kShortWarps = 4;

template <class T, int kWidth, bool kDropout>
__global__ void __launch_bounds__(32 * kShortWarps, 4)
    attention_short_fwd_kernel(Attention a, T* __restrict__ out,  // [T, H, D]
                               float* __restrict__ lse) {         // [H, T]
  constexpr int kMatrix = kShort * kWidth / 8;
  if (is_unused<T, kWidth>()) return;
  if (fill_uncovered(a, out, int64_t(a.heads) * a.D, lse)) return;
  const int warp = threadIdx.x / 32;
  const int64_t index = int64_t(blockIdx.x) * kShortWarps + warp;
  if (index >= int64_t(a.heads) * a.sequences) return;
  const Work work = place_of(a, 1, int(index));
  const Head<T> head(a, work);
  const int length = head.bounds.length;
  const Key key = kDropout ? site_key(a.drop) : Key{};
  FB_TILES(shared);
  Chunk* const queries = reinterpret_cast<Chunk*>(shared) + 3 * kMatrix * warp;
  Chunk *const keys = queries + kMatrix, *const values = keys + kMatrix;
  copy_by_warp<kShort, kWidth>(queries, head.q, a.D);
  copy_by_warp<kShort, kWidth>(keys, head.k, a.D);
  copy_by_warp<kShort, kWidth>(values, head.v, a.D);
  commit_copies();
  wait_for_copies<0>();
  __syncwarp();

  for (int row = 0; row < length; row += 16) {
    Operand<kWidth, true> q[1];
    float s[1][kShort / 8][4], sum[1][kWidth / 8][4] = {}, largest[2] = {-FLT_MAX, -FLT_MAX}, total[2] = {};
    std::conditional_t<kDropout, KeepSome<1>, KeepAll> keep;
    q[0].load(queries, row);
    times_transposed<T>(ByWarp{}, s, q, keys, 0);
    if (length < kShort) hide(s[0], 0, length);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weigh(s[0], half, a.scale * kLog2e, largest[half], total[half], sum[0]);
      if constexpr (kDropout) {
        const int query = row + 8 * half + lane() / 4;
        const Words bits = attention_bits(key, 0, lane() % 4, query, work.head, work.sequence);
        keep.bytes[0][half] = kept_bytes(bits, a.drop.threshold);
      }
    }
    add_product<T, kWidth>(ByWarp{}, sum, s, values, 0, keep);
    finish<T, kWidth>(a, head, work, row, sum[0], largest, total, queries, row, out, lse);
  }
}

// The backward for up to 32 tokens: a block is one warp, which handles a whole head of a sequence and computes all
// three gradients. This is its shared memory.
template <class T, int kWidth>
struct ShortBackward {
  static constexpr int kMatrix = kShort * kWidth / 8;
  Chunk queries[kMatrix], keys[kMatrix], values[kMatrix], douts[kMatrix], results[16 * kWidth / 8];
  float statistics[kQuantities][kShort];
  uint32_t mask[kShort / 2][4];
};

template <class T, int kWidth, bool kDropout>
__global__ void __launch_bounds__(32) attention_short_bwd_kernel(Attention a, const T* __restrict__ dout,  // [T, H, D]
                                                                 const T* __restrict__ out,                // [T, H, D]
                                                                 const float* __restrict__ lse,            // [H, T]
                                                                 T* __restrict__ dqkv) {  // [T, 3, H, D]
  if (is_unused<T, kWidth>()) return;
  const int64_t columns = int64_t(a.heads) * a.D;
  if (fill_uncovered(a, dqkv, 3 * columns, nullptr)) return;
  const Work work = place_of(a, 1, int(blockIdx.x));
  const Head<T> head(a, work);
  const int length = head.bounds.length, g = lane() / 4, t = lane() % 4;
  const int64_t first_element = head.bounds.start * columns + work.head * a.D;
  const Key key = kDropout ? site_key(a.drop) : Key{};
  FB_DYNAMIC_SHARED(bytes);
  ShortBackward<T, kWidth>& shared = *reinterpret_cast<ShortBackward<T, kWidth>*>(bytes);
  copy_by_warp<kShort, kWidth>(shared.queries, head.q, a.D);
  copy_by_warp<kShort, kWidth>(shared.keys, head.k, a.D);
  copy_by_warp<kShort, kWidth>(shared.values, head.v, a.D);
  copy_by_warp<kShort, kWidth>(shared.douts, Rows<T>{dout + first_element, columns, length}, a.D);
  commit_copies();
  // Zeros for queries after the last one: they make the weights of these queries 0.
  for (int i = 0; i < kQuantities; ++i) shared.statistics[i][lane()] = 0;
  for (int i = lane(); i < kShort * 2; i += 32) shared.mask[i / 4][i % 4] = 0;
  wait_for_copies<0>();
  __syncwarp();
  T* const rows = dqkv + 3 * columns * head.bounds.start + work.head * a.D;
  float s[1][kShort / 8][4], dp[1][kShort / 8][4];

  for (int row = 0; row < length; row += 16) {  // rows are queries
    Operand<kWidth, true> left[1];
    float dq[1][kWidth / 8][4] = {}, row_lse[2] = {}, delta[2], total[2] = {};
    unsigned kept[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = row + 8 * half + g;
      const bool inside = query < length;
      delta[half] = delta_of<T, kWidth>(shared.douts, query, out + first_element + query * columns, inside, a.D);
      if (inside) row_lse[half] = lse[work.head * a.tokens + head.bounds.start + query];
      if (kDropout) {
        kept[half] = kept_of(attention_bits(key, 0, t, query, work.head, work.sequence), a.drop.threshold);
        const uint32_t both = kept[half] | __shfl_down_sync(kAllLanes, kept[half], 4) >> 4;  // as in make_mask
        if (g % 2 == 0) shared.mask[query / 2][t] = both;
      }
    }
    left[0].load(shared.queries, row);
    times_transposed<T>(ByWarp{}, s, left, shared.keys, 0);
    left[0].load(shared.douts, row);
    times_transposed<T>(ByWarp{}, dp, left, shared.values, 0);
    if (length < kShort) hide(s[0], 0, length);
    differentiate_rows<kDropout>(s[0], dp[0], a, Exponent(row_lse[0], row_lse[1], a.scale), row_lse, delta, kept, 0,
                                 total);
    add_product<T, kWidth>(ByWarp{}, dq, s, shared.keys, 0);
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = row + 8 * half + g;
      inverse[half] = 1 / sum_of_row(total[half]);
      if (t == 0 && query < length) {
        shared.statistics[kLse][query] = row_lse[half];
        shared.statistics[kDelta][query] = delta[half];
        shared.statistics[kInverseSum][query] = inverse[half];
      }
    }
    store<T, kWidth>(dq[0], inverse[0] * a.scale, inverse[1] * a.scale, shared.results, 0, rows, 3 * columns, row,
                     length, a.D);
  }

  __syncwarp();
  const float* const of_queries[kQuantities] = {shared.statistics[kLse], shared.statistics[kDelta],
                                                shared.statistics[kInverseSum]};
  const Exponent exponent(of_queries[kLse][lane()], 0, a.scale);
  for (int row = 0; row < length; row += 16) {  // rows are keys
    Operand<kWidth, true> left[1];
    float dk[1][kWidth / 8][4] = {}, dv[1][kWidth / 8][4] = {};
    left[0].load(shared.keys, row);
    times_transposed<T>(ByWarp{}, s, left, shared.queries, 0);
    left[0].load(shared.values, row);
    times_transposed<T>(ByWarp{}, dp, left, shared.douts, 0);
    differentiate_columns<kDropout>(s[0], dp[0], a, exponent, of_queries, 0, shared.mask[0] + g / 2,
                                    kept_bit(row / 8, g % 2) - 4);
    add_product<T, kWidth>(ByWarp{}, dv, s, shared.douts, 0);
    add_product<T, kWidth>(ByWarp{}, dk, dp, shared.queries, 0);
    store<T, kWidth>(dk[0], a.scale, a.scale, shared.results, 0, rows + columns, 3 * columns, row, length, a.D);
    store<T, kWidth>(dv[0], 1, 1, shared.results, 0, rows + 2 * columns, 3 * columns, row, length, a.D);
  }
}

// ---- launchers

template <class T, int kWidth, bool kDropout>
const char* short_forward(const Attention& a, void* out, float* lse, void* stream) {
  const int64_t blocks = fill_blocks(a) + divide_up(int64_t(a.heads) * a.sequences, kShortWarps);
  if (blocks > INT32_MAX / kShortWarps) return "attention: too many heads and sequences for one launch";
  constexpr size_t kBytes = 3 * kShortWarps * kShort * kWidth * sizeof(T);
  return launch(attention_short_fwd_kernel<T, kWidth, kDropout>, dim3(blocks), dim3(32 * kShortWarps), kBytes, stream,
                a, static_cast<T*>(out), lse);
}

template <class T, int kWidth, bool kDropout>
const char* forward(const Attention& a, void* out, float* lse, void* stream) {
  if constexpr (kWidth <= 64)
    if (a.longest <= kShort) return short_forward<T, kWidth, kDropout>(a, out, lse, stream);
  constexpr int kRowTiles = kWidth > 64 || (kWidth == 64 && kDropout) ? 1 : 2;
  const Plan plan = plan_by(ByWarp{}, a, {16 * kRowTiles, kWidth / 8, Stream<ByWarp, kWidth, T>::chunks(false)});
  return run(a, plan, fill_blocks(a), stream, attention_fwd_kernel<ByWarp, T, kWidth, kRowTiles, kDropout>,
             static_cast<T*>(out), lse);
}

template <class T, int kWidth, bool kDropout>
const char* backward(const Attention& a, const void* dout, const void* out, const float* lse, void* dqkv, float* room,
                     void* stream) {
  if constexpr (kWidth <= 64)
    if (a.longest <= kShort) {
      const int64_t blocks = fill_blocks(a) + int64_t(a.heads) * a.sequences;
      if (blocks > INT32_MAX) return "attention: too many heads and sequences for one launch";
      return launch(attention_short_bwd_kernel<T, kWidth, kDropout>, dim3(blocks), dim3(32),
                    sizeof(ShortBackward<T, kWidth>), stream, a, static_cast<const T*>(dout),
                    static_cast<const T*>(out), lse, static_cast<T*>(dqkv));
    }
  return long_backward<ByWarp, T, kWidth, kDropout>(a, dout, out, lse, dqkv, room, stream);
}

// Calls f with a value of the element type, with the head size in shared memory, and with whether there is dropout.
template <class F>
const char* for_variant(const Attention& a, const F& f) {
  return for_element_and_dropout(a, [&](auto element, auto dropout) {
    if (a.D <= 32) return f(element, std::integral_constant<int, 32>{}, dropout);
    if (a.D <= 64) return f(element, std::integral_constant<int, 64>{}, dropout);
    return f(element, std::integral_constant<int, 128>{}, dropout);
  });
}

}  // namespace

// sm_75 takes head sizes up to 64 only: with heads padded to 128 and two streamed tiles, the kernel for dK and dV needs
// 98.5 KiB of shared memory, and sm_75 has 64.
bool mma_takes(const Attention& a) {
  const bool is_half = a.dtype == DType::f16 || (a.dtype == DType::bf16 && major_architecture() > 7);
  const int largest = major_architecture() > 7 ? kAttentionLargest : 64;
  return is_half && a.D % 8 == 0 && a.D <= largest && a.scale > 0;
}

const char* mma_fwd(const Attention& a, void* out, float* lse, void* stream) {
  return for_variant(a, [&](auto element, auto width, auto dropout) {
    return forward<decltype(element), width(), dropout()>(a, out, lse, stream);
  });
}

const char* mma_bwd(const Attention& a, const void* dout, const void* out, const float* lse, void* dqkv, float* room,
                    void* stream) {
  return for_variant(a, [&](auto element, auto width, auto dropout) {
    return backward<decltype(element), width(), dropout()>(a, dout, out, lse, dqkv, room, stream);
  });
}

}  // namespace fastbert::cuda
