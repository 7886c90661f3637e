// attention in 16-bit types on tensor cores (mma.sync), for head sizes that are multiples of 8; they are computed as
// 32, 64 or 128, filled up with zeros.
//
// A block of up to 8 warps owns a tile of rows; a warp owns 16 or 32 of them, from the first product to the last:
// scores never leave its registers, for the accumulator of one product is, rounded, the A operand of the next. The
// other side of the sequence arrives by cp.async in tiles of 64 rows, two ahead (one, where shared memory is small). If
// two blocks that hold all of it fit on a multiprocessor (S <= 384 at D = 64 on sm_90), it stays there for all tiles of
// rows that the block works on; else three tiles rotate.
//
// Dropout in the forward and for dQ costs one Philox call for the 16 scores of a row that a thread holds
// (fastbert/random.py). For dK and dV rows are keys and the accumulator is transposed, so one call's bits belong to
// many threads: the block computes a tile's bits together, 64 x 64 of them in shared memory.
//
// Bytes moved: forward Q, K, V, out and 4 a row for lse; K and V once more, from L2, for every further block of the
// same head. Backward: the kernel of dQ reads qkv, out, dout and lse, that of dK and dV qkv and dout; each writes its
// part of dqkv. Both compute the scores, 7 products instead of 5: no sum crosses blocks, so there are no atomics and
// the order of every sum is fixed.
#include <algorithm>
#include <type_traits>

#include "attention_tiles.cuh"

namespace fastbert::cuda {

namespace {

constexpr int kThreads = 256;
constexpr float kLog2e = 1.4426950408889634f;
// exp(score scale - maximum) is exp2 of one fused multiply-add. Where |score scale| is larger than this, that leaves a
// residue at the maximum, because the maximum was rounded: subtract it first.
constexpr float kLargeScore = 1024;

// ---- forward

// A step of softmax over blocks of keys, for row g (half 0) or g + 8 (half 1) of a warp's 16: the scores become weights
// relative to the largest score so far, and what has been summed up before shrinks where that has grown.
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

template <class T, int kWidth, int kRowTiles, bool kDropout>
__global__ void __launch_bounds__(kThreads) attention_fwd_kernel(Attention a, T* __restrict__ out,  // [T, H, D]
                                                                 float* __restrict__ lse,           // [H, T]
                                                                 int parts, int slots) {
  if (is_unused<T, kWidth>()) return;
  constexpr bool kHeld = kWidth < 64 || (kWidth == 64 && kRowTiles == 1);
  if (fill_uncovered(a, out, int64_t(a.heads) * a.D, lse)) return;
  const Work work = work_of(a, parts);
  const Head<T> head(a, work);
  const int length = head.bounds.length, rows_of_warp = 16 * kRowTiles, rows_of_block = blockDim.x / 32 * rows_of_warp;
  const int g = lane() / 4, t = lane() % 4, warp_row = int(threadIdx.x) / 32 * rows_of_warp;
  const float scale = a.scale * kLog2e;
  const Key key = kDropout ? site_key(a.drop) : Key{};
  FB_DYNAMIC_SHARED(shared);
  Chunk* const queries = reinterpret_cast<Chunk*>(shared);
  Stream<kWidth, T> stream(queries + rows_of_block * kWidth / 8, head.k, head.v, a.D, slots);

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
    for (int i = 0; i < kRowTiles; ++i) largest[i][0] = largest[i][1] = -FLT_MAX;  // -inf less -inf is NaN

    for (int step = 0; step < stream.tiles; ++step) {
      if (!arrived) stream.next(step);
      if (first + warp_row >= length) continue;  // a warp without rows still takes part in copies and barriers
      if (step == 0) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) q[i].load(queries, warp_row + 16 * i);
      }
      float s[kRowTiles][kTile / 8][4];
      std::conditional_t<kDropout, KeepSome<kRowTiles>, KeepAll> keep;
      times_transposed<T>(s, q, stream.k_or_q_tile(step), 0);
      if ((step + 1) * kTile > length) hide(s, step * kTile, length);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          weigh(s[i], half, scale, largest[i][half], total[i][half], sum[i]);
          if constexpr (kDropout) {
            const int query = first + warp_row + 16 * i + 8 * half + g;
            const Words bits = attention_bits(key, step, t, query, work.head, work.sequence);
            keep.bytes[i][half] = kept_bytes(bits, a.drop.threshold);
          }
        }
      add_product<T, kWidth>(sum, s, stream.v_or_do_tile(step), 0, keep);
    }

    if (first + warp_row >= length) continue;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
      finish<T, kWidth>(a, head, work, first + warp_row + 16 * i, sum[i], largest[i], total[i], queries,
                        warp_row + 16 * i, out, lse);
  }
}

// Of sequences of up to 32 tokens a warp has a whole head, so that a tile has no empty rows or columns but for those of
// 32 that the sequence does not have, and no warp waits for another. The backward has such a kernel too.
constexpr int kShort = 32, kShortWarps = 4;

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
  FB_DYNAMIC_SHARED(shared);
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
    times_transposed<T>(s, q, keys, 0);
    if (length < kShort) hide(s, 0, length);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weigh(s[0], half, a.scale * kLog2e, largest[half], total[half], sum[0]);
      if constexpr (kDropout) {
        const int query = row + 8 * half + lane() / 4;
        const Words bits = attention_bits(key, 0, lane() % 4, query, work.head, work.sequence);
        keep.bytes[0][half] = kept_bytes(bits, a.drop.threshold);
      }
    }
    add_product<T, kWidth>(sum, s, values, 0, keep);
    finish<T, kWidth>(a, head, work, row, sum[0], largest, total, queries, row, out, lse);
  }
}

// ---- backward: with P = exp(S - lse) / its row's sum, F the dropout factors and delta = rowsum(dO O):
// dP = dO V^T, dS = P (F dP - delta), dQ = scale dS K, dK = scale dS^T Q, dV = (P F)^T dO.
// A row of P sums up to 1 but for lse's rounding: dQ's kernel finds the sum and passes its inverse on.

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

// exp(score scale - lse) as exp2 of one multiply-add; where lse is large, of the difference, which is taken first.
struct Exponent {
  bool large;
  float of_score, of_lse;

  // lse: of the columns or rows that a lane looks at
  __device__ __forceinline__ Exponent(float lse, float other_lse, float scale)
      : large(__any_sync(kAllLanes, fmaxf(fabsf(lse), fabsf(other_lse)) > kLargeScore)),
        of_score(large ? kLog2e : scale * kLog2e),
        of_lse(large ? 0 : kLog2e) {}
};

// The scores of a warp's 16 queries, and dP, become dS but for the factor 1 / total, of which a part is added up here.
// column: the first of the tile, of which `kept` has the bits.
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

// The same where rows are keys: the scores become P F and dP becomes dS. statistics: of the tile's queries. pairs: the
// words of make_mask for the lane's column pair, of which bits `bit` and `bit` + 16 are its keys, 4 higher those of
// even queries.
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

template <class T, int kWidth, bool kDropout>
__global__ void __launch_bounds__(kThreads)
    attention_bwd_queries_kernel(Attention a, const T* __restrict__ dout,  // [T, H, D]
                                 const T* __restrict__ out,                // [T, H, D]
                                 const float* __restrict__ lse,            // [H, T]
                                 T* __restrict__ dqkv,                     // [T, 3, H, D]: dQ of it
                                 Statistics statistics, int parts, int slots) {
  if (is_unused<T, kWidth>()) return;
  constexpr int kPart = kTile * 32 / kWidth;  // keys at a time: as many as registers allow
  constexpr bool kHeld = kWidth < 64 || !kDropout;
  constexpr int kUnroll = kWidth > 64 ? 1 : kTile / kPart;
  const int64_t columns = int64_t(a.heads) * a.D;
  if (fill_uncovered(a, dqkv, 3 * columns, nullptr)) return;
  const Work work = work_of(a, parts);
  const Head<T> head(a, work);
  const int length = head.bounds.length, rows_of_block = blockDim.x / 32 * 16;
  const int g = lane() / 4, t = lane() % 4, warp_row = int(threadIdx.x) / 32 * 16;
  const int64_t first_element = head.bounds.start * columns + work.head * a.D;
  const Rows<T> grads{dout + first_element, columns, length};
  const Key key = kDropout ? site_key(a.drop) : Key{};
  FB_DYNAMIC_SHARED(shared);
  Chunk *const queries = reinterpret_cast<Chunk*>(shared), *const douts = queries + rows_of_block * kWidth / 8;
  Stream<kWidth, T> stream(douts + rows_of_block * kWidth / 8, head.k, head.v, a.D, slots);

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
      if (first + warp_row >= length) continue;
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
        times_transposed<T>(s, q, stream.k_or_q_tile(step), part);
        times_transposed<T>(dp, grad, stream.v_or_do_tile(step), part);
        if ((step + 1) * kTile > length) hide(s, step * kTile + part, length);
        differentiate_rows<kDropout>(s[0], dp[0], a, exponent, row_lse, delta, kept, part, total);
        add_product<T, kWidth>(dq, s, stream.k_or_q_tile(step), part);
      }
    }

    if (first + warp_row >= length) continue;
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

// The bits of a tile of queries against the 64 keys of a block, 16 for a query and column pair, as kept_of leaves them.
// Two queries share a word, mask[query / 2][pair], the second 4 bits lower, so that the lanes of a warp read from
// different banks.
constexpr int kMask = 2 * kTile;  // words

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

template <class T, int kWidth, bool kDropout>
__global__ void __launch_bounds__(kThreads)
    attention_bwd_keys_kernel(Attention a, const T* __restrict__ dout,  // [T, H, D]
                              T* __restrict__ dqkv,                     // [T, 3, H, D]: dK and dV of it
                              Statistics statistics, int parts, int slots) {
  if (is_unused<T, kWidth>()) return;
  constexpr int kPart = kWidth > 32 ? 16 : 64;  // queries at a time
  constexpr bool kHeld = kWidth < 64 || (kWidth == 64 && !kDropout);
  constexpr int kUnroll = kWidth > 64 ? 1 : kTile / kPart;
  const Work work = work_of(a, parts);
  const Head<T> head(a, work);
  const int64_t columns = int64_t(a.heads) * a.D;
  const int length = head.bounds.length, rows_of_block = blockDim.x / 32 * 16;
  const int g = lane() / 4, t = lane() % 4, warp_row = int(threadIdx.x) / 32 * 16;
  const Rows<T> grads{dout + head.bounds.start * columns + work.head * a.D, columns, length};
  const Key key = kDropout ? site_key(a.drop) : Key{};
  FB_DYNAMIC_SHARED(shared);
  Chunk *const keys = reinterpret_cast<Chunk*>(shared), *const values = keys + rows_of_block * kWidth / 8;
  uint32_t* const masks = reinterpret_cast<uint32_t*>(values + rows_of_block * kWidth / 8);  // [2][blocks][kMask]
  const int blocks = rows_of_block / kTile, mask_size = kDropout ? blocks * kMask : 0;
  Stream<kWidth, T> stream(reinterpret_cast<Chunk*>(masks + 2 * mask_size), head.q, grads, a.D, slots);
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
      if (first + warp_row >= length) continue;
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
        times_transposed<T>(s, k, stream.k_or_q_tile(step), part);
        times_transposed<T>(dp, v, stream.v_or_do_tile(step), part);
        differentiate_columns<kDropout>(s[0], dp[0], a, exponent, of_queries, part, pairs, bit);
        add_product<T, kWidth>(dv, s, stream.v_or_do_tile(step), part);
        add_product<T, kWidth>(dk, dp, stream.k_or_q_tile(step), part);
      }
    }

    if (first + warp_row >= length) continue;
    T* const rows = dqkv + 3 * columns * head.bounds.start + columns + work.head * a.D;
    store<T, kWidth>(dk[0], a.scale, a.scale, keys, warp_row, rows, 3 * columns, first + warp_row, length, a.D);
    store<T, kWidth>(dv[0], 1, 1, values, warp_row, rows + columns, 3 * columns, first + warp_row, length, a.D);
  }
}

// Of up to 32 tokens: a warp, which is a block, has a whole head of a sequence, and computes all three gradients.
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
  // Behind the last row no weight counts.
  for (int i = 0; i < kQuantities; ++i) shared.statistics[i][lane()] = 0;
  for (int i = lane(); i < kShort * 2; i += 32) shared.mask[i / 4][i % 4] = 0;
  wait_for_copies<0>();
  __syncwarp();
  T* const rows = dqkv + 3 * columns * head.bounds.start + work.head * a.D;
  float s[1][kShort / 8][4], dp[1][kShort / 8][4];

  for (int row = 0; row < length; row += 16) {  // of queries
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
    times_transposed<T>(s, left, shared.keys, 0);
    left[0].load(shared.douts, row);
    times_transposed<T>(dp, left, shared.values, 0);
    if (length < kShort) hide(s, 0, length);
    differentiate_rows<kDropout>(s[0], dp[0], a, Exponent(row_lse[0], row_lse[1], a.scale), row_lse, delta, kept, 0,
                                 total);
    add_product<T, kWidth>(dq, s, shared.keys, 0);
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
  for (int row = 0; row < length; row += 16) {  // of keys
    Operand<kWidth, true> left[1];
    float dk[1][kWidth / 8][4] = {}, dv[1][kWidth / 8][4] = {};
    left[0].load(shared.keys, row);
    times_transposed<T>(s, left, shared.queries, 0);
    left[0].load(shared.values, row);
    times_transposed<T>(dp, left, shared.douts, 0);
    differentiate_columns<kDropout>(s[0], dp[0], a, exponent, of_queries, 0, shared.mask[0] + g / 2,
                                    kept_bit(row / 8, g % 2) - 4);
    add_product<T, kWidth>(dv, s, shared.douts, 0);
    add_product<T, kWidth>(dk, dp, shared.queries, 0);
    store<T, kWidth>(dk[0], a.scale, a.scale, shared.results, 0, rows + columns, 3 * columns, row, length, a.D);
    store<T, kWidth>(dv[0], 1, 1, shared.results, 0, rows + 2 * columns, 3 * columns, row, length, a.D);
  }
}

// ---- launchers

struct Plan {
  int warps;     // of a block
  int parts;     // blocks of a head
  int slots;     // streamed tiles that shared memory has room for
  size_t bytes;  // of shared memory
};

// row_chunks: chunks of shared memory for each row of the block; tile_chunks: for a streamed tile.
Plan plan_of(const Attention& a, int rows_of_warp, int row_chunks, int tile_chunks) {
  constexpr int kReserved = 1 << 10;  // of a multiprocessor's shared memory, by the driver, for each block
  const int tiles = (a.longest + kTile - 1) / kTile, limit = shared_memory_limit(), half = (limit - kReserved) / 2;
  const auto of_rows = [&](int warps) { return warps * rows_of_warp * row_chunks * 16; };
  // As many tiles as leave room for a second block, which computes while the first one waits: all, for then they are
  // read once, or two or three that rotate. Where no second one fits, those of one block.
  const auto slots_of = [&](int warps) {
    const auto slots_in = [&](int bytes) {
      const int room = (bytes - of_rows(warps)) / (tile_chunks * 16);
      return tiles <= room ? tiles : std::min(kRotating, room);
    };
    const int slots = slots_in(half), least = std::min(tiles, 2);
    return slots >= least ? slots : std::max(slots_in(limit), least);
  };
  const auto bytes_of = [&](int warps) { return of_rows(warps) + slots_of(warps) * tile_chunks * 16; };
  // At least 64 rows; more, up to 8 warps, where a sequence has them. But 4 warps where a multiprocessor has room for
  // two such blocks: they balance uneven work better than one block twice as large.
  int warps = 64 / rows_of_warp;
  while (warps < 8 && a.longest > warps * rows_of_warp && bytes_of(2 * warps) <= limit &&
         (warps < 4 || bytes_of(warps) > half))
    warps *= 2;
  const int row_tiles = (a.longest + warps * rows_of_warp - 1) / (warps * rows_of_warp);
  const int64_t heads = std::max<int64_t>(1, int64_t(a.heads) * a.sequences);
  const int64_t wanted = (4 * multiprocessors() + heads - 1) / heads;
  const int parts = slots_of(warps) >= tiles ? int(std::min<int64_t>(row_tiles, wanted)) : row_tiles;
  return {warps, parts, slots_of(warps), size_t(bytes_of(warps))};
}

// other_blocks: at the end of the grid, behind those that compute.
template <class... Params, class... Args>
const char* run(const Attention& a, const Plan& plan, int64_t other_blocks, void* stream, void (*kernel)(Params...),
                Args... args) {
  const int64_t blocks = other_blocks + int64_t(plan.parts) * a.heads * a.sequences;
  if (blocks == 0) return nullptr;
  if (blocks > INT32_MAX) return "attention: too many heads and sequences for one launch";
  return launch(kernel, dim3(blocks), dim3(32 * plan.warps), plan.bytes, stream, a, args..., plan.parts, plan.slots);
}

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
  const Plan plan = plan_of(a, 16 * kRowTiles, kWidth / 8, Stream<kWidth, T>::chunks(false));
  return run(a, plan, fill_blocks(a), stream, attention_fwd_kernel<T, kWidth, kRowTiles, kDropout>,
             static_cast<T*>(out), lse);
}

template <class T, int kWidth, bool kDropout>
const char* backward(const Attention& a, const void* dout, const void* out, const float* lse, void* dqkv, float* room,
                     void* stream) {
  const Statistics statistics = statistics_in(room, a);
  const T* const douts = static_cast<const T*>(dout);
  T* const gradients = static_cast<T*>(dqkv);
  if constexpr (kWidth <= 64)
    if (a.longest <= kShort) {
      const int64_t blocks = fill_blocks(a) + int64_t(a.heads) * a.sequences;
      if (blocks > INT32_MAX) return "attention: too many heads and sequences for one launch";
      return launch(attention_short_bwd_kernel<T, kWidth, kDropout>, dim3(blocks), dim3(32),
                    sizeof(ShortBackward<T, kWidth>), stream, a, douts, static_cast<const T*>(out), lse, gradients);
    }
  const Plan queries = plan_of(a, 16, 2 * kWidth / 8, Stream<kWidth, T>::chunks(false));
  const char* const error = run(a, queries, fill_blocks(a), stream, attention_bwd_queries_kernel<T, kWidth, kDropout>,
                                douts, static_cast<const T*>(out), lse, gradients, statistics);
  if (error) return error;
  const int mask = kDropout ? 1 : 0;  // a chunk a row: 4 pairs x 64 queries x 16 bits x 2 buffers for 64 rows
  const Plan keys = plan_of(a, 16, 2 * kWidth / 8 + mask, Stream<kWidth, T>::chunks(true));
  return run(a, keys, 0, stream, attention_bwd_keys_kernel<T, kWidth, kDropout>, douts, gradients, statistics);
}

// Calls f with a value of the element type, the head size in shared memory, and whether anything is dropped.
template <class F>
const char* for_variant(const Attention& a, const F& f) {
  const auto of_width = [&](auto element, auto width) {
    return a.drop.threshold ? f(element, width, std::true_type{}) : f(element, width, std::false_type{});
  };
  const auto of_type = [&](auto element) {
    if (a.D <= 32) return of_width(element, std::integral_constant<int, 32>{});
    if (a.D <= 64) return of_width(element, std::integral_constant<int, 64>{});
    return of_width(element, std::integral_constant<int, 128>{});
  };
  return a.dtype == DType::bf16 ? of_type(__nv_bfloat16{}) : of_type(__half{});
}

}  // namespace

// The dK and dV of 128 columns with two streamed tiles take 98.5 KiB of shared memory; sm_75 has 64.
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
