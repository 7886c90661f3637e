// The places of the visible tokens of a (batch, seqlen) mask; and copies of rows out of the padded batch and back, as
// bytes.
//
// The plan takes two launches. In count_rows_kernel, a warp counts the tokens of a row of the mask. In
// place_tokens_kernel, a block has a share of the rows: it adds up the counts of all rows and of the rows before its
// own, and writes its tokens' places in order, by ballots. To add up, at most 1024 blocks read 8 bytes a row each, from
// the L2 cache. No host synchronisation.
//
// pack is a gather. unpack is a gather too: invert_kernel first writes token + 1 for each row of the output that has a
// token, among zeros. So each row of the output is written once, with a token or with zeros. Rows are copied 16, 8, 4,
// 2 or 1 bytes at a time, the most that divides their size and the addresses; a warp copies neighbouring pieces, and a
// thread has up to four loads in flight.
//
// Bytes moved: the plan reads the mask twice, and writes 8 bytes per place. pack and unpack read the tokens once, write
// the output once, and move 8 bytes per index; unpack moves 24 more bytes per row of the output.
#include "common.cuh"
#include "padding.h"

namespace fastbert::cuda {

namespace {

constexpr int kWarps = 8;  // per block

template <class T, class F>
__device__ __forceinline__ T over_warp(T value, const F& f) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value = f(value, __shfl_xor_sync(~0u, value, lanes));
  return value;
}

// ---- the plan

enum Flags { kStartsHidden = 1, kInterrupted = 2 };

__global__ void __launch_bounds__(32 * kWarps)
    count_rows_kernel(const uint8_t* __restrict__ visible,  // [batch, seqlen]
                      int32_t* __restrict__ rows,           // [batch, 2]: how many are visible, and Flags
                      int64_t batch, int64_t seqlen) {
  const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= batch) return;
  int count = 0, first = INT32_MAX, last = -1;
#pragma unroll 4
  for (int64_t s = threadIdx.x % 32; s < seqlen; s += 32)
    if (visible[row * seqlen + s]) ++count, last = int(s), first = first < int(s) ? first : int(s);
  count = over_warp(count, [](int a, int b) { return a + b; });
  first = over_warp(first, [](int a, int b) { return a < b ? a : b; });
  last = over_warp(last, [](int a, int b) { return a > b ? a : b; });
  if (threadIdx.x % 32) return;
  rows[2 * row] = count;
  rows[2 * row + 1] =
      (seqlen > 0 && first > 0 ? kStartsHidden : 0) | (count && last - first >= count ? kInterrupted : 0);
}

// The totals of all rows; before: the number of tokens in the rows before a block's.
struct Totals {
  int before, tokens, longest, flags;
};

__device__ __forceinline__ Totals totals_of(const int32_t* rows, int64_t batch, int64_t first) {
  Totals totals{};
#pragma unroll 4
  for (int64_t row = threadIdx.x; row < batch; row += blockDim.x) {
    const int count = rows[2 * row];
    totals.before += row < first ? count : 0;
    totals.tokens += count;
    totals.longest = count > totals.longest ? count : totals.longest;
    totals.flags |= rows[2 * row + 1];
  }
  const auto merge = [](Totals& a, const Totals& b) {
    a.before += b.before, a.tokens += b.tokens;
    a.longest = b.longest > a.longest ? b.longest : a.longest;
    a.flags |= b.flags;
  };
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    merge(totals, {__shfl_xor_sync(~0u, totals.before, lanes), __shfl_xor_sync(~0u, totals.tokens, lanes),
                   __shfl_xor_sync(~0u, totals.longest, lanes), __shfl_xor_sync(~0u, totals.flags, lanes)});
  FB_SHARED(Totals, warps, kWarps);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = totals;
  __syncthreads();
  totals = warps[0];
  for (int w = 1; w < kWarps; ++w) merge(totals, warps[w]);
  return totals;
}

__global__ void __launch_bounds__(32 * kWarps) place_tokens_kernel(PaddingPlan plan, int64_t share) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t begin = blockIdx.x * share, end = begin + share < plan.batch ? begin + share : plan.batch;
  const Totals totals = totals_of(plan.rows, plan.batch, begin);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    plan.cu_seqlens[0] = 0;
    plan.facts[0] = totals.tokens, plan.facts[1] = totals.longest;
    plan.facts[2] = !(totals.flags & kStartsHidden), plan.facts[3] = !(totals.flags & kInterrupted);
  }
  int64_t seen = totals.before;  // visible tokens before the row
  for (int64_t row = begin; row < end; ++row) {
    const int count = plan.rows[2 * row];
    if (row % kWarps == warp) {
      if (lane == 0) plan.cu_seqlens[row + 1] = int32_t(seen + count);
      int64_t next = seen;
      for (int64_t first = 0; first < plan.seqlen; first += 32) {
        const int64_t place = row * plan.seqlen + first + lane;
        const bool inside = first + lane < plan.seqlen, sees = inside && plan.visible[place];
        const unsigned all = __ballot_sync(~0u, sees);
        const int64_t rank = next + __popc(all & ((1u << lane) - 1));  // visible tokens before this place
        if (inside) plan.places[sees ? rank : totals.tokens + place - rank] = place;
        next += __popc(all);
      }
    }
    seen += count;
  }
}

// ---- pack, unpack

// token_of[row] = the row's token + 1. Indices beyond the rows are ignored.
__global__ void __launch_bounds__(32 * kWarps) invert_kernel(const int64_t* __restrict__ indices,  // [tokens]
                                                             int64_t* __restrict__ token_of,       // [rows]
                                                             int64_t tokens, int64_t rows) {
  const int64_t token = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (token >= tokens) return;
  const int64_t row = indices[token];
  if (0 <= row && row < rows) token_of[row] = token + 1;
}

constexpr int kInFlight = 4;

// y[row] = x[from[row] - kOffset], zeros if x has no such row. Threads count pieces over all rows.
template <class Piece, int kOffset>
__global__ void __launch_bounds__(32 * kWarps) gather_kernel(const Piece* __restrict__ x,       // [sources, pieces]
                                                             const int64_t* __restrict__ from,  // [rows]
                                                             Piece* __restrict__ y,             // [rows, pieces]
                                                             int64_t rows, int64_t sources, int64_t pieces) {
  const int64_t first = int64_t(blockIdx.x) * blockDim.x * kInFlight + threadIdx.x, all = rows * pieces;
  Piece got[kInFlight];
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    const int64_t at = first + k * int64_t(blockDim.x), row = at / pieces;
    const int64_t source = at < all ? from[row] - kOffset : -1;
    got[k] = 0 <= source && source < sources ? x[source * pieces + at - row * pieces] : Piece{};
  }
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    const int64_t at = first + k * int64_t(blockDim.x);
    if (at < all) y[at] = got[k];
  }
}

template <int kOffset>
const char* gather(const void* x, const int64_t* from, void* y, int64_t rows, int64_t sources, int64_t bytes,
                   void* stream) {
  const auto with_pieces = [&](auto piece) {
    using Piece = decltype(piece);
    const int64_t pieces = bytes / sizeof(Piece), blocks = divide_up(rows * pieces, 32 * kWarps * kInFlight);
    if (blocks > INT32_MAX) return "the tensor is too large for one launch";
    return launch(gather_kernel<Piece, kOffset>, dim3(blocks), dim3(32 * kWarps), 0, stream,
                  static_cast<const Piece*>(x), from, static_cast<Piece*>(y), rows, sources, pieces);
  };
  const auto fits = [&](int size) { return bytes % size == 0 && is_aligned(x, size) && is_aligned(y, size); };
  if (fits(16)) return with_pieces(Vec<uint32_t, 4>{});
  if (fits(8)) return with_pieces(Vec<uint32_t, 2>{});
  if (fits(4)) return with_pieces(uint32_t{});
  return fits(2) ? with_pieces(uint16_t{}) : with_pieces(uint8_t{});
}

}  // namespace

// ---- launchers

const char* padding_places(const PaddingPlan& plan, void* stream) {
  constexpr int64_t kMostBlocks = 1024;
  if (plan.batch) {
    const dim3 blocks(divide_up(plan.batch, kWarps));
    if (const char* error = launch(count_rows_kernel, blocks, dim3(32 * kWarps), 0, stream, plan.visible, plan.rows,
                                   plan.batch, plan.seqlen))
      return error;
  }
  const int64_t share = plan.batch > kMostBlocks ? divide_up(plan.batch, kMostBlocks) : 1;
  const int64_t blocks = plan.batch ? divide_up(plan.batch, share) : 1;
  return launch(place_tokens_kernel, dim3(blocks), dim3(32 * kWarps), 0, stream, plan, share);
}

const char* padding_pack(const void* x, const int64_t* from, void* y, int64_t rows, int64_t sources, int64_t bytes,
                         void* stream) {
  return gather<0>(x, from, y, rows, sources, bytes, stream);
}

const char* padding_unpack(const void* x, const int64_t* indices, int64_t* token_of, void* y, int64_t tokens,
                           int64_t rows, int64_t bytes, void* stream) {
  const int64_t blocks = divide_up(tokens, 32 * kWarps);
  if (blocks > INT32_MAX) return "the tensor is too large for one launch";
  if (blocks)
    if (const char* error =
            launch(invert_kernel, dim3(blocks), dim3(32 * kWarps), 0, stream, indices, token_of, tokens, rows))
      return error;
  return gather<1>(x, token_of, y, rows, tokens, bytes, stream);
}

}  // namespace fastbert::cuda
