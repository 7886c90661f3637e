// attention in 16-bit types on tensor cores, for head sizes that are multiples of 8; they are padded with zeros to 32,
// 64 or 128. These are the kernels for sequences of more than 32 tokens, and for all sequences if D > 64. They multiply
// by warps, with mma.sync (attention_mma.cu), or, for heads padded to 64, by warpgroups (attention_wgmma.cu).
//
// A block of up to 8 warps owns a tile of rows. A warp owns 16 or 32 of them, from the first product to the last:
// scores never leave its registers, because the accumulator of one product, rounded, is the A operand of the next. The
// other side of the sequence is streamed by cp.async in tiles of 64 rows, two ahead (one where shared memory is small).
// All of it stays in shared memory, for all tiles of rows that a block works on, if there is room for that in each of
// the blocks that share a multiprocessor (with two: S <= 384 at D = 64 on sm_90). Otherwise two or three tiles rotate.
//
// Dropout in the forward and for dQ costs one Philox call for the 16 scores of a row that a thread holds
// (fastbert/random.py). For dK and dV, rows are keys and the accumulator is transposed, so one call's bits belong to
// many threads: the block computes a tile's bits together, 64 x 64 of them in shared memory.
//
// Bytes moved, forward: Q, K, V, out, and 4 bytes a row for lse; every further block of the same head reads K and V
// once more, from L2. Backward: the kernel for dQ reads qkv, out, dout and lse, the kernel for dK and dV reads qkv and
// dout; each writes its part of dqkv. Both compute the scores, so there are 7 products instead of 5. In return no sum
// crosses blocks: there are no atomics, and the order of every sum is fixed.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_tiles.cuh"

namespace fastbert::cuda {

namespace {

constexpr float kLog2e = 1.4426950408889634f;
// exp(score scale - maximum) is computed as exp2 of one fused multiply-add. Because score scale was rounded for the
// maximum, the exponent is then not exactly 0 at the maximum. Where |score scale| is larger than this, that error
// matters, and the maximum is subtracted first.
constexpr float kLargeScore = 1024;

// kMost: how many threads a block may have. kBlocks: how many such blocks have to fit into a multiprocessor's
// registers; 0: the compiler decides.
template <class By, bool kDropout, int kRowTiles>
struct Forward {
  static constexpr int kMost = 256, kBlocks = 0;
};
template <>
struct Forward<ByWarpgroup, false, 1> {
  static constexpr int kMost = 256, kBlocks = 2;
};
template <>
struct Forward<ByWarpgroup, true, 1> {
  static constexpr int kMost = 128, kBlocks = 3;
};
template <class By>
struct Backward {
  static constexpr int kMost = 256, kBlocksOfQueries = 0, kBlocksOfKeys = 0;
};
template <>
struct Backward<ByWarpgroup> {
  static constexpr int kMost = 128, kBlocksOfQueries = 3, kBlocksOfKeys = 2;
};

constexpr int kShort = 32;  // up to so many tokens there are separate kernels, for D <= 64 (attention_mma.cu)

// ---- forward

// A step of the online softmax over blocks of keys, for row g (half 0) or g + 8 (half 1) of a warp's 16. The scores
// become weights relative to the largest score so far; if that has grown, the sums so far are scaled down.
template <int kColumns, int kSums>
__device__ __forceinline__ void weigh(float (&s)[kColumns][4], int half, float scale, float& largest, float& total,
                                      float (&sum)[kSums][4]) {
  float maximum = largest;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) maximum = fmaxf(maximum, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
  maximum = largest_of_row(maximum);
  const float shrink = ptx::exp2_approx((largest - maximum) * scale);
  float offset = maximum * scale;
  if (fabsf(offset) > kLargeScore) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) s[j][2 * half] -= maximum, s[j][2 * half + 1] -= maximum;
    offset = 0;
  }
  largest = maximum;
  total *= shrink;
#pragma unroll
  for (int j = 0; j < kSums; ++j) sum[j][2 * half] *= shrink, sum[j][2 * half + 1] *= shrink;
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
#pragma unroll
    for (int low = 0; low < 2; ++low) {
      float& score = s[j][2 * half + low];
      score = ptx::exp2_approx(fmaf(score, scale, -offset));
      total += score;
    }
}

// Writes out and lse of a warp's 16 rows, from `row` of the sequence on.
template <class T, int kWidth>
__device__ __forceinline__ void finish(const Attention& a, const Head<T>& head, Work work, int row,
                                       const float (&sum)[kWidth / 8][4], const float (&largest)[2],
                                       const float (&total)[2], Chunk* tile, int tile_row, T* out, float* lse) {
  const int g = lane() / 4, t = lane() % 4, length = head.bounds.length;
  const int64_t stride = int64_t(a.heads) * a.D;
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float weights = sum_of_row(total[half]);
    factor[half] = (a.drop.threshold ? a.drop.keep_scale : 1) / weights;
    if (t == 0 && row + 8 * half + g < length)
      lse[work.head * a.tokens + head.bounds.start + row + 8 * half + g] =
          __fadd_rn(__fmul_rn(largest[half], a.scale), logf(weights));
  }
  T* const rows = out + head.bounds.start * stride + work.head * a.D;
  store<T, kWidth>(sum, factor[0], factor[1], tile, tile_row, rows, stride, row, length, a.D);
}

template <class By, class T, int kWidth, int kRowTiles, bool kDropout>
__global__ void __launch_bounds__(Forward<By, kDropout, kRowTiles>::kMost, Forward<By, kDropout, kRowTiles>::kBlocks)
    attention_fwd_kernel(Attention a, T* __restrict__ out,  // [T, H, D]
                         float* __restrict__ lse,           // [H, T]
                         int parts, int slots) {
  if (is_unused<T, kWidth>()) return;
  constexpr bool kHeld = !By::kIsGroup && (kWidth < 64 || (kWidth == 64 && kRowTiles == 1));
  if (fill_uncovered(a, out, int64_t(a.heads) * a.D, lse)) return;
  const Work work = work_of(a, parts);
  const Head<T> head(a, work);
  const int length = head.bounds.length, rows_of_warp = 16 * kRowTiles, rows_of_block = blockDim.x / 32 * rows_of_warp;
  const int g = lane() / 4, t = lane() % 4, warp = threadIdx.x / 32;
  const int group_row = warp / By::kWarps * By::kWarps * rows_of_warp;
  const auto row_of = [&](int i) { return group_row + 16 * (By::kWarps * i + warp % By::kWarps); };
  const float scale = a.scale * kLog2e;
  const Key key = kDropout ? site_key(a.drop) : Key{};
  FB_TILES(shared);
  Chunk* const queries = reinterpret_cast<Chunk*>(shared);
  Stream<By, kWidth, T> stream(queries + rows_of_block * kWidth / 8, head.k, head.v, a.D, slots);

  for (int tile = work.part; tile * rows_of_block < length; tile += parts) {
    const bool arrived = tile != work.part && stream.stays();
    if (tile != work.part) __syncthreads();
    const int first = tile * rows_of_block;
    for (int row = 0; row < rows_of_block; row += 64)
      copy<64, kWidth>(queries + row * kWidth / 8, head.q, first + row, a.D);
    stream.begin(arrived);

    Operand<kWidth, kHeld> q[kRowTiles];
    float sum[kRowTiles][kWidth / 8][4] = {}, largest[kRowTiles][2], total[kRowTiles][2] = {};
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) largest[i][0] = largest[i][1] = -FLT_MAX;  // not -inf: -inf - -inf is NaN

    for (int step = 0; step < stream.tiles; ++step) {
      if (!arrived) stream.next(step);
      if (first + group_row >= length) continue;  // warps without rows still take part in copies and barriers
      if (step == 0) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) q[i].load(queries, row_of(i));
      }
      float s[kRowTiles][kTile / 8][4];
      std::conditional_t<kDropout, KeepSome<kRowTiles>, KeepAll> keep;
      const auto to_weights = [&](int i) {
        if ((step + 1) * kTile > length) hide(s[i], step * kTile, length);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          weigh(s[i], half, scale, largest[i][half], total[i][half], sum[i]);
          if constexpr (kDropout) {
            const int query = first + row_of(i) + 8 * half + g;
            const Words bits = attention_bits(key, step, t, query, work.head, work.sequence);
            keep.bytes[i][half] = kept_bytes(bits, a.drop.threshold);
          }
        }
      };
      if constexpr (By::kIsGroup) {
        Packed weights[kRowTiles];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) start_times_transposed<T>(s[i], q[i], stream.k_or_q_tile(step));
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          ptx::wgmma_wait<kRowTiles - 1>();  // later rows' scores and earlier rows' sums may go on
          ptx::hold(s[i]);
          to_weights(i);
          weights[i] = packed<T>(s, i, keep);
          start_add_product<T, kWidth>(sum[i], weights[i], stream.v_or_do_tile(step));
        }
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) ptx::hold(sum[i]), weights[i].hold();
      } else {
        times_transposed<T>(By{}, s, q, stream.k_or_q_tile(step), 0);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) to_weights(i);
        add_product<T, kWidth>(By{}, sum, s, stream.v_or_do_tile(step), 0, keep);
      }
    }

    if (first + group_row >= length) continue;
    if constexpr (By::kIsGroup) ptx::sync_group(threadIdx.x / 128);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
      finish<T, kWidth>(a, head, work, first + row_of(i), sum[i], largest[i], total[i], queries, row_of(i), out, lse);
  }
}

// ---- backward: with P = exp(S - lse) / its row's sum, F the dropout factors and delta = rowsum(dO O):
// dP = dO V^T, dS = P (F dP - delta), dQ = scale dS K, dK = scale dS^T Q, dV = (P F)^T dO.
// A row of exp(S - lse) sums up to 1 except for the rounding of lse. The kernel for dQ computes the sum and passes its
// inverse on.

// delta of a row, computed by its four lanes from out in global and dout in shared memory.
template <class T, int kWidth>
__device__ __forceinline__ float delta_of(const Chunk* dout, int tile_row, const T* out, bool inside, int D) {
  float delta = 0;
  for (int chunk = lane() % 4; chunk * 8 < D; chunk += 4) {
    Vec<T, 8> o{}, d;
    if (inside) o = *reinterpret_cast<const Vec<T, 8>*>(out + chunk * 8);
    d = *reinterpret_cast<const Vec<T, 8>*>(dout + swizzle<kWidth>(tile_row, chunk));
#pragma unroll
    for (int e = 0; e < 8; ++e) delta = fmaf(to_float(o.at[e]), to_float(d.at[e]), delta);
  }
  return sum_of_row(delta);
}

// exp(score scale - lse) as exp2 of one multiply-add. Where lse is large, the difference is computed first, and exp2 is
// taken of that.
struct Exponent {
  bool large;
  float of_score, of_lse;

  // lse, other_lse: those of the lane's columns or rows; the whole warp makes the same choice
  __device__ __forceinline__ Exponent(float lse, float other_lse, float scale)
      : large(__any_sync(kAllLanes, fmaxf(fabsf(lse), fabsf(other_lse)) > kLargeScore)),
        of_score(large ? kLog2e : scale * kLog2e),
        of_lse(large ? 0 : kLog2e) {}
};

// Turns the scores of a warp's 16 queries, with dP, into dS without the factor 1 / total, and adds this part's weights
// to total. column: the first column within the tile whose bits are in `kept`.
template <bool kDropout, int kColumns>
__device__ __forceinline__ void differentiate_rows(float (&s)[kColumns][4], const float (&dp)[kColumns][4],
                                                   const Attention& a, const Exponent& exponent, const float (&lse)[2],
                                                   const float (&delta)[2], const unsigned (&kept)[2], int column,
                                                   float (&total)[2]) {
  if (exponent.large) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] = __fsub_rn(__fmul_rn(s[j][e], a.scale), lse[e / 2]);
  }
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int half = e / 2;
      const float weight = ptx::exp2_approx(fmaf(s[j][e], exponent.of_score, -lse[half] * exponent.of_lse));
      total[half] += weight;
      float factor = 1;
      if (kDropout) factor = kept[half] >> kept_bit(column / 8 + j, e % 2) & 1 ? a.drop.keep_scale : 0;
      s[j][e] = weight * (dp[j][e] * factor - delta[half]);
    }
}

// The same where rows are keys: the scores become P F, and dP becomes dS. statistics: of the tile's queries. pairs: the
// words of make_mask for the lane's column pair. In these, bits `bit` and `bit` + 16 belong to the lane's two keys and
// odd queries; the bits 4 places higher belong to even queries.
template <bool kDropout, int kColumns>
__device__ __forceinline__ void differentiate_columns(float (&s)[kColumns][4], float (&dp)[kColumns][4],
                                                      const Attention& a, const Exponent& exponent,
                                                      const float* const (&statistics)[kQuantities], int column,
                                                      const uint32_t* pairs, int bit) {
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    const int query = column + 8 * j + 2 * (lane() % 4);
    const uint32_t kept = kDropout ? pairs[query / 2 * 4] >> bit : 0;  // of both queries
#pragma unroll
    for (int low = 0; low < 2; ++low) {
      const float lse = statistics[kLse][query + low], delta = statistics[kDelta][query + low];
      const float inverse = statistics[kInverseSum][query + low], offset = lse * exponent.of_lse;
      if (exponent.large) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& score = s[j][2 * half + low];
          score = __fsub_rn(__fmul_rn(score, a.scale), lse);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float &score = s[j][2 * half + low], &gradient = dp[j][2 * half + low];
        const float weight = ptx::exp2_approx(fmaf(score, exponent.of_score, -offset)) * inverse;
        float factor = 1;
        if (kDropout) factor = kept >> (16 * half + 4 - 4 * low) & 1 ? a.drop.keep_scale : 0;
        score = weight * factor;
        gradient = weight * (gradient * factor - delta);
      }
    }
  }
}

template <class By, class T, int kWidth, bool kDropout>
__global__ void __launch_bounds__(Backward<By>::kMost, Backward<By>::kBlocksOfQueries)
    attention_bwd_queries_kernel(Attention a, const T* __restrict__ dout,  // [T, H, D]
                                 const T* __restrict__ out,                // [T, H, D]
                                 const float* __restrict__ lse,            // [H, T]
                                 T* __restrict__ dqkv,                     // [T, 3, H, D]: dQ is written
                                 Statistics statistics, int parts, int slots) {
  if (is_unused<T, kWidth>()) return;
  constexpr int kPart = By::kIsGroup ? kTile : kTile * 32 / kWidth;  // keys at a time: as many as registers allow
  constexpr bool kHeld = !By::kIsGroup && (kWidth < 64 || !kDropout);
  constexpr int kUnroll = kWidth > 64 ? 1 : kTile / kPart;
  const int64_t columns = int64_t(a.heads) * a.D;
  if (fill_uncovered(a, dqkv, 3 * columns, nullptr)) return;
  const Work work = work_of(a, parts);
  const Head<T> head(a, work);
  const int length = head.bounds.length, rows_of_block = blockDim.x / 32 * 16;
  const int g = lane() / 4, t = lane() % 4, warp_row = int(threadIdx.x) / 32 * 16;
  const int group_row = int(threadIdx.x) / (32 * By::kWarps) * By::kWarps * 16;
  const int64_t first_element = head.bounds.start * columns + work.head * a.D;
  const Rows<T> grads{dout + first_element, columns, length};
  const Key key = kDropout ? site_key(a.drop) : Key{};
  FB_TILES(shared);
  Chunk *const queries = reinterpret_cast<Chunk*>(shared), *const douts = queries + rows_of_block * kWidth / 8;
  Stream<By, kWidth, T> stream(douts + rows_of_block * kWidth / 8, head.k, head.v, a.D, slots);

  for (int tile = work.part; tile * rows_of_block < length; tile += parts) {
    const bool arrived = tile != work.part && stream.stays();
    if (tile != work.part) __syncthreads();
    const int first = tile * rows_of_block;
    for (int row = 0; row < rows_of_block; row += 64) {
      copy<64, kWidth>(queries + row * kWidth / 8, head.q, first + row, a.D);
      copy<64, kWidth>(douts + row * kWidth / 8, grads, first + row, a.D);
    }
    stream.begin(arrived);

    Operand<kWidth, kHeld> q[1], grad[1];
    float dq[1][kWidth / 8][4] = {}, row_lse[2] = {}, delta[2] = {}, total[2] = {};
    for (int step = 0; step < stream.tiles; ++step) {
      if (!arrived) stream.next(step);
      if (first + group_row >= length) continue;
      if (step == 0) {
        q[0].load(queries, warp_row), grad[0].load(douts, warp_row);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = first + warp_row + 8 * half + g;
          const bool inside = row < length;
          delta[half] =
              delta_of<T, kWidth>(douts, warp_row + 8 * half + g, out + first_element + row * columns, inside, a.D);
          if (inside) row_lse[half] = lse[work.head * a.tokens + head.bounds.start + row];
        }
      }
      const Exponent exponent(row_lse[0], row_lse[1], a.scale);
      unsigned kept[2] = {};
      if (kDropout)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int query = first + warp_row + 8 * half + g;
          kept[half] = kept_of(attention_bits(key, step, t, query, work.head, work.sequence), a.drop.threshold);
        }
#pragma unroll(kUnroll)
      for (int part = 0; part < kTile; part += kPart) {
        float s[1][kPart / 8][4], dp[1][kPart / 8][4];
        times_transposed_twice<T>(By{}, s, q, stream.k_or_q_tile(step), dp, grad, stream.v_or_do_tile(step), part);
        if ((step + 1) * kTile > length) hide(s[0], step * kTile + part, length);
        differentiate_rows<kDropout>(s[0], dp[0], a, exponent, row_lse, delta, kept, part, total);
        add_product<T, kWidth>(By{}, dq, s, stream.k_or_q_tile(step), part);
      }
    }

    if (first + group_row >= length) continue;
    if constexpr (By::kIsGroup) ptx::sync_group(threadIdx.x / 128);
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + warp_row + 8 * half + g;
      inverse[half] = 1 / sum_of_row(total[half]);
      if (t == 0 && row < length) {
        statistics.of(kLse, work.head, head.bounds, work.sequence)[row] = row_lse[half];
        statistics.of(kDelta, work.head, head.bounds, work.sequence)[row] = delta[half];
        statistics.of(kInverseSum, work.head, head.bounds, work.sequence)[row] = inverse[half];
      }
    }
    T* const rows = dqkv + 3 * columns * head.bounds.start + work.head * a.D;
    store<T, kWidth>(dq[0], inverse[0] * a.scale, inverse[1] * a.scale, queries, warp_row, rows, 3 * columns,
                     first + warp_row, length, a.D);
  }
}

// The dropout bits of a tile of queries and the 64 keys of a block: 16 bits for each query and column pair, in the
// layout of kept_of. Two queries share a word, mask[query / 2][pair], in which the second one's bits are 4 places
// lower, so that the lanes of a warp read from different banks.
constexpr int kMask = 2 * kTile;  // words
constexpr int kMaskChunks = 1;    // per row of the block: 64 rows need two masks of kMask words

__device__ __forceinline__ void make_mask(uint32_t* mask, const Attention& a, Key key, Work work, int query,
                                          int block) {
  for (int i = threadIdx.x; i < kMask; i += blockDim.x) {
    uint32_t word = 0;
#pragma unroll
    for (int low = 0; low < 2; ++low) {
      const Words bits = attention_bits(key, block, i % 4, query + i / 4 * 2 + low, work.head, work.sequence);
      word |= kept_of(bits, a.drop.threshold) >> 4 * low;
    }
    mask[i] = word;
  }
}

template <class By, class T, int kWidth, bool kDropout>
__global__ void __launch_bounds__(Backward<By>::kMost, Backward<By>::kBlocksOfKeys)
    attention_bwd_keys_kernel(Attention a, const T* __restrict__ dout,  // [T, H, D]
                              T* __restrict__ dqkv,                     // [T, 3, H, D]: dK and dV are written
                              Statistics statistics, int parts, int slots) {
  if (is_unused<T, kWidth>()) return;
  constexpr int kPart = kWidth > 32 && !By::kIsGroup ? 16 : 64;  // queries at a time
  constexpr bool kHeld = !By::kIsGroup && (kWidth < 64 || (kWidth == 64 && !kDropout));
  constexpr int kUnroll = kWidth > 64 ? 1 : kTile / kPart;
  const Work work = work_of(a, parts);
  const Head<T> head(a, work);
  const int64_t columns = int64_t(a.heads) * a.D;
  const int length = head.bounds.length, rows_of_block = blockDim.x / 32 * 16;
  const int g = lane() / 4, t = lane() % 4, warp_row = int(threadIdx.x) / 32 * 16;
  const int group_row = int(threadIdx.x) / (32 * By::kWarps) * By::kWarps * 16;
  const Rows<T> grads{dout + head.bounds.start * columns + work.head * a.D, columns, length};
  const Key key = kDropout ? site_key(a.drop) : Key{};
  FB_TILES(shared);
  Chunk *const keys = reinterpret_cast<Chunk*>(shared), *const values = keys + rows_of_block * kWidth / 8;
  uint32_t* const masks = reinterpret_cast<uint32_t*>(values + rows_of_block * kWidth / 8);  // [2][blocks][kMask]
  const int blocks = rows_of_block / kTile, mask_size = kDropout ? blocks * kMask : 0;
  Stream<By, kWidth, T> stream(reinterpret_cast<Chunk*>(masks + 2 * mask_size), head.q, grads, a.D, slots);
  stream.statistics[kLse] = statistics.of(kLse, work.head, head.bounds, work.sequence);
  stream.statistics[kDelta] = statistics.of(kDelta, work.head, head.bounds, work.sequence);
  stream.statistics[kInverseSum] = statistics.of(kInverseSum, work.head, head.bounds, work.sequence);

  for (int tile = work.part; tile * rows_of_block < length; tile += parts) {
    const bool arrived = tile != work.part && stream.stays();
    if (tile != work.part) __syncthreads();
    const int first = tile * rows_of_block;
    for (int row = 0; row < rows_of_block; row += 64) {
      copy<64, kWidth>(keys + row * kWidth / 8, head.k, first + row, a.D);
      copy<64, kWidth>(values + row * kWidth / 8, head.v, first + row, a.D);
    }
    stream.begin(arrived);

    Operand<kWidth, kHeld> k[1], v[1];
    float dk[1][kWidth / 8][4] = {}, dv[1][kWidth / 8][4] = {};
    for (int step = 0; step < stream.tiles; ++step) {
      uint32_t* const mask = masks + step % 2 * mask_size;
      if (kDropout)
        for (int block = 0; block < blocks; ++block)
          make_mask(mask + block * kMask, a, key, work, step * kTile, first / kTile + block);
      if (!arrived) {
        stream.next(step);
      } else if (kDropout) {
        __syncthreads();
      }
      if (first + group_row >= length) continue;
      if (step == 0) k[0].load(keys, warp_row), v[0].load(values, warp_row);
      const float* const tile_lse = stream.statistics_tile(step);
      const float* const of_queries[kQuantities] = {tile_lse, tile_lse + kTile, tile_lse + 2 * kTile};
      const Exponent exponent(tile_lse[lane()], tile_lse[lane() + 32], a.scale);
      // Keys g and g + 8 of this warp are in one block of 64, 16 bits apart in the words of the column pair g / 2.
      const uint32_t* const pairs = mask + warp_row / kTile * kMask + g % 8 / 2;
      const int bit = kept_bit(warp_row % kTile / 8, g % 2) - 4;
#pragma unroll(kUnroll)
      for (int part = 0; part < kTile; part += kPart) {
        float s[1][kPart / 8][4], dp[1][kPart / 8][4];
        times_transposed_twice<T>(By{}, s, k, stream.k_or_q_tile(step), dp, v, stream.v_or_do_tile(step), part);
        differentiate_columns<kDropout>(s[0], dp[0], a, exponent, of_queries, part, pairs, bit);
        add_products<T, kWidth>(By{}, dv, s, stream.v_or_do_tile(step), dk, dp, stream.k_or_q_tile(step), part);
      }
    }

    if (first + group_row >= length) continue;
    if constexpr (By::kIsGroup) ptx::sync_group(threadIdx.x / 128);
    T* const rows = dqkv + 3 * columns * head.bounds.start + columns + work.head * a.D;
    store<T, kWidth>(dk[0], a.scale, a.scale, keys, warp_row, rows, 3 * columns, first + warp_row, length, a.D);
    store<T, kWidth>(dv[0], 1, 1, values, warp_row, rows + columns, 3 * columns, first + warp_row, length, a.D);
  }
}

// ---- launchers

struct Plan {
  int warps;     // per block
  int parts;     // blocks per head
  int slots;     // streamed tiles that shared memory has room for
  size_t bytes;  // of shared memory per block
};

// What a block keeps in shared memory, in chunks: for each of its rows, and for each streamed tile.
struct Needs {
  int rows_of_warp, row_chunks, tile_chunks;
  int limit = shared_memory_limit();  // bytes per block

  // Bytes per block if a multiprocessor is to have room for so many blocks.
  int share(int blocks) const {
    constexpr int kReserved = 1 << 10;  // by the driver, per block
    return (limit + kReserved) / blocks - kReserved;
  }
  int of_rows(int warps) const { return warps * rows_of_warp * row_chunks * 16; }
  // How many tiles are kept so that a multiprocessor has room for `blocks` blocks, of which one computes while another
  // waits: all tiles, which are then read only once, or two or three that rotate. If there is not enough room for that,
  // as many as fit into the shared memory of one block.
  int slots(const Attention& a, int warps, int blocks) const {
    const int tiles = divide_up(a.longest, kTile);
    const auto slots_in = [&](int bytes) {
      const int room = (bytes - of_rows(warps)) / (tile_chunks * 16);
      return tiles <= room ? tiles : std::min(kRotating, room);
    };
    const int found = slots_in(share(blocks)), least = std::min(tiles, 2);
    return found >= least ? found : std::max(slots_in(limit), least);
  }
  int bytes(const Attention& a, int warps, int blocks) const {
    return of_rows(warps) + slots(a, warps, blocks) * tile_chunks * 16;
  }
};

inline Plan plan_of(const Attention& a, const Needs& needs, int warps, int blocks) {
  const int row_tiles = divide_up(a.longest, warps * needs.rows_of_warp), slots = needs.slots(a, warps, blocks);
  const int64_t heads = std::max<int64_t>(1, int64_t(a.heads) * a.sequences);
  const int64_t wanted = divide_up(4 * multiprocessors(), heads);
  const bool all_stay = slots * kTile >= a.longest;
  return {warps, all_stay ? int(std::min<int64_t>(row_tiles, wanted)) : row_tiles, slots,
          size_t(needs.bytes(a, warps, blocks))};
}

// By warps: a block has at least 64 rows; it has more, up to 8 warps, if sequences are long enough. But it keeps 4
// warps if a multiprocessor has room for two such blocks: they balance uneven work better than one block twice as
// large.
inline Plan plan_by(ByWarp, const Attention& a, const Needs& needs, int /*blocks*/ = 0) {
  const int half = needs.share(2), rows = needs.rows_of_warp;
  int warps = 64 / rows;
  while (warps < 8 && a.longest > warps * rows && needs.bytes(a, 2 * warps, 2) <= needs.limit &&
         (warps < 4 || needs.bytes(a, warps, 2) > half))
    warps *= 2;
  return plan_of(a, needs, warps, 2);
}
// By a warpgroup, with as many blocks on a multiprocessor as its registers have room for.
inline Plan plan_by(ByWarpgroup, const Attention& a, const Needs& needs, int blocks) {
  return plan_of(a, needs, ByWarpgroup::kWarps, blocks);
}

// other_blocks: the number of blocks at the end of the grid, after those that compute.
template <class... Params, class... Args>
const char* run(const Attention& a, const Plan& plan, int64_t other_blocks, void* stream, void (*kernel)(Params...),
                Args... args) {
  const int64_t blocks = other_blocks + int64_t(plan.parts) * a.heads * a.sequences;
  if (blocks == 0) return nullptr;
  if (blocks > INT32_MAX) return "attention: too many heads and sequences for one launch";
  return launch(kernel, dim3(blocks), dim3(32 * plan.warps), plan.bytes, stream, a, args..., plan.parts, plan.slots);
}

// The backward for calls that the kernels for short sequences do not take.
template <class By, class T, int kWidth, bool kDropout>
const char* long_backward(const Attention& a, const void* dout, const void* out, const float* lse, void* dqkv,
                          float* room, void* stream) {
  using Of = Backward<By>;
  using Tiles = Stream<By, kWidth, T>;
  constexpr int kChunks = 2 * kWidth / 8, kMask = kDropout ? kMaskChunks : 0;
  const Statistics statistics = statistics_in(room, a);
  const T* const douts = static_cast<const T*>(dout);
  T* const gradients = static_cast<T*>(dqkv);
  const Plan queries = plan_by(By{}, a, {16, kChunks, Tiles::chunks(false)}, Of::kBlocksOfQueries);
  const char* const error =
      run(a, queries, fill_blocks(a), stream, attention_bwd_queries_kernel<By, T, kWidth, kDropout>, douts,
          static_cast<const T*>(out), lse, gradients, statistics);
  if (error) return error;
  const Plan keys = plan_by(By{}, a, {16, kChunks + kMask, Tiles::chunks(true)}, Of::kBlocksOfKeys);
  return run(a, keys, 0, stream, attention_bwd_keys_kernel<By, T, kWidth, kDropout>, douts, gradients, statistics);
}

// Calls f with a value of the element type, and with whether there is dropout.
template <class F>
const char* for_element_and_dropout(const Attention& a, const F& f) {
  const auto of_type = [&](auto element) {
    return a.drop.threshold ? f(element, std::true_type{}) : f(element, std::false_type{});
  };
  return a.dtype == DType::bf16 ? of_type(__nv_bfloat16{}) : of_type(__half{});
}

}  // namespace

}  // namespace fastbert::cuda
