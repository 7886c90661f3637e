// relative_attention: attention whose scores also depend on the distance of query and key, on ordinary multiply-adds.
//
// As in attention_plain.cu, a block owns 32 rows and takes 32 columns a step, a warp has 4 of the rows, and a lane has
// one of the columns. Such a tile of pairs has 63 diagonals: row r and column c meet on diagonal r - c + 31. Diagonals
// have vectors as well, which are gathered into shared memory like those of the columns:
//
//                  rows       columns   diagonals
//   forward, dQ    queries    keys      distances: rows of the tables
//   dK, dV         keys       queries   distances
//   tables         distances  queries   keys
//
// A score is the sum of three dot products, Q K, Q Pk and K Pq, of the vectors of the pair's row, column and diagonal.
// So no tensor with a number for each token and distance, or for each two tokens, is ever in global memory. Every
// kernel computes a dot product as the same sum of four chains of multiply-adds: with one chain each, the rounding
// errors of a score's three products would be more than half of the result's error.
//
// Gradients of the tables: a block owns 32 distances of one head and goes through all pairs at these distances in a
// group of sequences. It writes one sum for each distance; another kernel adds up the groups and the distances of each
// slot. The groups depend on shapes alone and every sum has a fixed order, so there are no atomics and the bits repeat.
//
// Bound by shared memory: 1.5 loads per multiply-add in scores with both tables. On tensor cores, a warp would multiply
// its 16 queries by the 80 rows of the tables that a tile of 64 keys can need, and add the product to Q K, shifted by
// one column per row, through 5 KiB of shared memory per warp; likewise for the keys, and the other way round for
// gradients.
#include <algorithm>

#include "attention_plain.cuh"
#include "relative_attention.h"

namespace fastbert::cuda {

namespace {

using namespace plain;

constexpr int kDiagonals = 2 * kBlock - 1;
constexpr int kChains = 4;  // per dot product

// ---- vectors of D numbers in shared memory, and their products

// OfRows: one vector for each of the warp's rows. OfColumn: the vector of the lane's column, the same for all rows.
struct OfRows {
  const float* first;
  int stride;
  __device__ __forceinline__ float at(int r, int column) const { return first[r * stride + column]; }
};
struct OfColumn {
  const float* first;
  __device__ __forceinline__ float at(int, int column) const { return first[column]; }
};

// row: the warp's first row within the block.
__device__ __forceinline__ OfRows of_rows(const float* tile, int row, int D) { return {tile + row * (D | 1), D | 1}; }
__device__ __forceinline__ OfColumn of_column(const float* tile, int D) { return {tile + lane() * (D | 1)}; }
__device__ __forceinline__ OfRows of_diagonals(const float* tile, int row, int D) {
  return of_rows(tile, row - lane() + kBlock - 1, D);
}

template <class X, class Y>
__device__ __forceinline__ void multiply(float (&products)[kRows], const X& x, const Y& y, int D) {
  float chains[kChains][kRows] = {};
  int column = 0;
#pragma unroll 1
  for (; column + kChains <= D; column += kChains)
#pragma unroll
    for (int i = 0; i < kChains; ++i)
#pragma unroll
      for (int r = 0; r < kRows; ++r) chains[i][r] = fmaf(x.at(r, column + i), y.at(r, column + i), chains[i][r]);
#pragma unroll 1
  for (; column < D; ++column)
#pragma unroll
    for (int r = 0; r < kRows; ++r) chains[0][r] = fmaf(x.at(r, column), y.at(r, column), chains[0][r]);
#pragma unroll
  for (int r = 0; r < kRows; ++r) products[r] = (chains[0][r] + chains[1][r]) + (chains[2][r] + chains[3][r]);
}

// sums[r] += the weights of row r times the vectors of their diagonals; lane l holds the weights for column l.
__device__ __forceinline__ void add_diagonals(Sums& sums, const float (&weights)[kRows], const float* tile, int row,
                                              int D) {
  for (int i = 0; i < kBlock + kRows - 1; ++i) {  // diagonal row + i
    float weight[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int column = r + kBlock - 1 - i;
      weight[r] = __shfl_sync(kAllLanes, weights[r], column & 31);
      if (column < 0 || column >= kBlock) weight[r] = 0;
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (lane() + 32 * c >= D) break;
      const float x = tile[(row + i) * (D | 1) + lane() + 32 * c];
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r][c] = fmaf(weight[r], x, sums[r][c]);
    }
  }
}

// Reads `count` vectors into a tile; from(i) is the address of the i-th one, or nullptr for zeros.
template <class F>
__device__ __forceinline__ void gather(float* tile, int count, int D, const F& from) {
  for (int i = int(threadIdx.x) / 32; i < count; i += kWarps) {
    const auto* const vector = from(i);
    for (int column = lane(); column < D; column += 32)
      tile[i * (D | 1) + column] = vector ? to_float(vector[column]) : 0;
  }
}

// ---- tables

// The tables of one head.
template <class T>
struct Tables {
  const RelativePositions& positions;
  const T *keys, *queries;  // the vector of slot 0, or nullptr
  const float* bias;
  int64_t stride;  // from one slot to the next

  __device__ Tables(const RelativePositions& p, const Attention& a, int head)
      : positions(p), stride(int64_t(a.heads) * a.D) {
    keys = p.keys ? static_cast<const T*>(p.keys) + head * a.D : nullptr;
    queries = p.queries ? static_cast<const T*>(p.queries) + head * a.D : nullptr;
    bias = p.bias ? p.bias + int64_t(head) * p.width : nullptr;
  }
  __device__ __forceinline__ int slot(int distance) const {
    const int place = within(distance, -positions.farthest, positions.farthest) + positions.farthest;
    return within(positions.slots[place], 0, positions.width - 1);
  }
  __device__ __forceinline__ const T* vector(const T* table, int distance) const {
    return table + slot(distance) * stride;
  }
  // The score of a pair. qk: query times key; qp and kp: query and key, each times its row of the tables.
  __device__ __forceinline__ float score(float qk, float qp, float kp, float scale, int distance) const {
    const float score = __fmul_rn(__fadd_rn(__fadd_rn(qk, qp), kp), scale);
    return bias ? __fadd_rn(score, bias[slot(distance)]) : score;
  }
};

// A tile of pairs whose diagonals are distances. kRowsAreQueries: rows are queries and columns are keys; otherwise it
// is the other way round.
template <class T, bool kRowsAreQueries>
struct Pairs {
  const Attention& a;
  const Tables<T>& tables;
  const Head<T>& head;
  float* diagonals;  // [kDiagonals, D | 1], in shared memory
  int step;          // the tile's first column

  __device__ __forceinline__ int distance(int row, int column) const {
    const int rows_ahead = head.first + row - step - column;
    return kRowsAreQueries ? rows_ahead : -rows_ahead;
  }

  // The scores of the warp's rows with the lane's column. All threads of the block have to call this. If there are both
  // tables, `diagonals` keeps the rows of the one that the gradient of the tile's rows needs: keys for dQ, queries for
  // dK.
  __device__ __forceinline__ void scores(float (&scores)[kRows], const float* rows, const float* columns) const {
    const OfRows row = of_rows(rows, head.row, a.D);
    const OfColumn column = of_column(columns, a.D);
    float qk[kRows], qp[kRows], kp[kRows];
    multiply(qk, row, column, a.D);
    if constexpr (kRowsAreQueries) {
      multiply_by(kp, tables.queries, column);
      multiply_by(qp, tables.keys, row);
    } else {
      multiply_by(qp, tables.keys, column);
      multiply_by(kp, tables.queries, row);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      scores[r] = tables.score(qk[r], qp[r], kp[r], a.scale, distance(head.row + r, lane()));
  }

 private:
  template <class X>
  __device__ __forceinline__ void multiply_by(float (&products)[kRows], const T* table, const X& x) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) products[r] = 0;
    if (!table) return;
    __syncthreads();  // until here the previous diagonals are still read
    gather(diagonals, kDiagonals, a.D, [&](int i) {
      const int apart = distance(i, kBlock - 1);
      return abs(apart) < head.bounds.length ? tables.vector(table, apart) : nullptr;  // no pair is farther apart
    });
    __syncthreads();
    multiply(products, x, of_diagonals(diagonals, head.row, a.D), a.D);
  }
};

// ---- forward

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    relative_attention_fwd_kernel(Attention a, RelativePositions positions, T* __restrict__ out,  // [T, H, D]
                                  float* __restrict__ lse,                                        // [H, T]
                                  int parts) {
  if (fill_uncovered(a, out, int64_t(a.heads) * a.D, lse)) return;
  const Work work = work_of(a, parts);
  const Head<T> head(a, work);
  const Tables<T> tables(positions, a, work.head);
  const int D = a.D, tile = kBlock * (D | 1), length = head.bounds.length;
  if (head.first >= length) return;
  const Key site = a.drop.threshold ? site_key(a.drop) : Key{};
  FB_DYNAMIC_SHARED(shared);
  float *const queries = reinterpret_cast<float*>(shared), *const keys = queries + tile, *const values = keys + tile;
  Pairs<T, true> pairs{a, tables, head, values + tile, 0};
  head.q.read(queries, head.first);

  Sums sums = {};
  float largest[kRows], total[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) largest[r] = -FLT_MAX;  // not -inf: -inf - -inf is NaN
  for (int step = 0; step < length; step += kBlock) {
    __syncthreads();
    head.k.read(keys, step), head.v.read(values, step);
    __syncthreads();
    float weights[kRows];
    pairs.step = step;
    pairs.scores(weights, queries, keys);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float score = step + lane() < length ? weights[r] : -INFINITY;
      weights[r] = weight_of(score, largest[r], total[r], sums[r]);
      if (a.drop.threshold && !keeps(a, site, head.first + head.row + r, step + lane(), work)) weights[r] = 0;
    }
    add(sums, weights, values, D);
  }
  store_out(a, head, work, sums, largest, total, out, lse);
}

// ---- backward of qkv: the formulas of attention_kernels.cuh. In addition, dQ gets scale dS Pk and dK gets scale dS^T
// Pq, with each pair's row of the tables

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    relative_attention_bwd_queries_kernel(Attention a, RelativePositions positions,
                                          const T* __restrict__ dout,     // [T, H, D]
                                          const T* __restrict__ out,      // [T, H, D]
                                          const float* __restrict__ lse,  // [H, T]
                                          T* __restrict__ dqkv,           // [T, 3, H, D]: dQ is written
                                          Statistics statistics, int parts) {
  if (fill_uncovered(a, dqkv, 3 * int64_t(a.heads) * a.D, nullptr)) return;
  const Work work = work_of(a, parts);
  const Head<T> head(a, work);
  const Tables<T> tables(positions, a, work.head);
  const int D = a.D, tile = kBlock * (D | 1), length = head.bounds.length;
  if (head.first >= length) return;
  const Key site = a.drop.threshold ? site_key(a.drop) : Key{};
  FB_DYNAMIC_SHARED(shared);
  float *const queries = reinterpret_cast<float*>(shared), *const douts = queries + tile;
  float *const keys = douts + tile, *const values = keys + tile;
  Pairs<T, true> pairs{a, tables, head, values + tile, 0};
  head.q.read(queries, head.first), head.of(dout, work).read(douts, head.first);
  __syncthreads();

  Sums dq = {};
  float offset[kRows], delta[kRows], total[kRows] = {};
  row_statistics(a, head, work, out, douts, lse, offset, delta);
  for (int step = 0; step < length; step += kBlock) {
    __syncthreads();
    head.k.read(keys, step), head.v.read(values, step);
    __syncthreads();
    float scores[kRows], ds[kRows];
    pairs.step = step;
    pairs.scores(scores, queries, keys);
    dot(ds, douts + head.row * (D | 1), values, D);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float weight = step + lane() < length ? expf(__fsub_rn(scores[r], offset[r])) : 0;
      float factor = a.drop.keep_scale;
      if (a.drop.threshold && !keeps(a, site, head.first + head.row + r, step + lane(), work)) factor = 0;
      total[r] += weight;
      ds[r] = weight * (ds[r] * factor - delta[r]);
    }
    add(dq, ds, keys, D);
    if (tables.keys) add_diagonals(dq, ds, pairs.diagonals, head.row, D);
  }
  store_dq(a, head, work, dq, total, offset, delta, statistics, dqkv);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    relative_attention_bwd_keys_kernel(Attention a, RelativePositions positions,
                                       const T* __restrict__ dout,  // [T, H, D]
                                       T* __restrict__ dqkv,        // [T, 3, H, D]: dK and dV are written
                                       Statistics statistics, int parts) {
  const Work work = work_of(a, parts);
  const Head<T> head(a, work);
  const Tables<T> tables(positions, a, work.head);
  const int D = a.D, tile = kBlock * (D | 1), length = head.bounds.length;
  if (head.first >= length) return;
  const Key site = a.drop.threshold ? site_key(a.drop) : Key{};
  const Rows<T> grads = head.of(dout, work);
  FB_DYNAMIC_SHARED(shared);
  float *const keys = reinterpret_cast<float*>(shared), *const values = keys + tile;
  float *const queries = values + tile, *const douts = queries + tile;
  Pairs<T, false> pairs{a, tables, head, douts + tile, 0};
  head.k.read(keys, head.first), head.v.read(values, head.first);

  Sums dk = {}, dv = {};
  for (int step = 0; step < length; step += kBlock) {
    __syncthreads();
    head.q.read(queries, step), grads.read(douts, step);
    __syncthreads();
    const QueryRow query(statistics, head.bounds, work, step + lane());
    float weights[kRows], ds[kRows];
    pairs.step = step;
    pairs.scores(weights, keys, queries);
    dot(ds, values + head.row * (D | 1), douts, D);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float weight = query.weight(weights[r]);
      float factor = a.drop.keep_scale;
      if (a.drop.threshold && !keeps(a, site, query.place, head.first + head.row + r, work)) factor = 0;
      weights[r] = weight * factor;
      ds[r] = weight * (ds[r] * factor - query.delta);
    }
    add(dv, weights, douts, D);
    add(dk, ds, queries, D);
    if (tables.queries) add_diagonals(dk, ds, pairs.diagonals, head.row, D);
  }
  store_dk_dv(a, head, work, dk, dv, dqkv);
}

// ---- backward of the tables

// The sums for each group of sequences, head and distance; distances begin at 1 - longest.
struct Partials {
  float *keys, *queries, *bias;  // [groups, H, distances, D], the same, [groups, H, distances]; nullptr if not wanted
  int64_t sequences;             // per group
  int groups;
  int64_t distances;

  __device__ __forceinline__ int64_t place(const Attention& a, int group, int head, int distance) const {
    return (int64_t(group) * a.heads + head) * distances + distance;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    relative_attention_bwd_distances_kernel(Attention a, RelativePositions positions,
                                            const T* __restrict__ dout,  // [T, H, D]
                                            Statistics statistics, Partials partials, int parts) {
  const Work share = place_of(a, parts, int(blockIdx.x));  // share.sequence is a group of sequences here
  const Tables<T> tables(positions, a, share.head);
  const int D = a.D, tile = kBlock * (D | 1), nearest = share.part * kBlock - (a.longest - 1);
  const Key site = a.drop.threshold ? site_key(a.drop) : Key{};
  FB_DYNAMIC_SHARED(shared);
  float *const columns = reinterpret_cast<float*>(shared), *const diagonals = columns + tile;
  float *const for_queries = diagonals + 2 * tile, *const for_keys = for_queries + (tables.keys ? tile : 0);
  if (tables.keys) gather(for_queries, kBlock, D, [&](int r) { return tables.vector(tables.keys, nearest + r); });
  if (tables.queries) gather(for_keys, kBlock, D, [&](int r) { return tables.vector(tables.queries, nearest + r); });

  Sums dkeys = {}, dqueries = {};
  float dbias[kRows] = {};
  const int64_t first = share.sequence * partials.sequences;
  const int last = int(min(first + partials.sequences, int64_t(a.sequences)));
  for (int sequence = int(first); sequence < last; ++sequence) {
    const Work work{share.part, share.head, sequence};
    const Head<T> head(a, work);
    const Rows<T> grads = head.of(dout, work);
    const int length = head.bounds.length;
    // Diagonal d belongs to key step - nearest + 31 - d.
    const auto key_of = [&](const Rows<T>& rows, int step) {
      return [=](int d) {
        const int key = step - nearest + kBlock - 1 - d;
        return key >= 0 && key < length ? rows.first + key * rows.stride : nullptr;
      };
    };
    for (int step = max(0, nearest); step < min(length, length + nearest + kBlock - 1); step += kBlock) {
      float dp[kRows], qk[kRows], qp[kRows] = {}, kp[kRows] = {};
      __syncthreads();
      grads.read(columns, step), gather(diagonals, kDiagonals, D, key_of(head.v, step));
      __syncthreads();
      multiply(dp, of_column(columns, D), of_diagonals(diagonals, head.row, D), D);
      __syncthreads();
      head.q.read(columns, step), gather(diagonals, kDiagonals, D, key_of(head.k, step));
      __syncthreads();
      multiply(qk, of_column(columns, D), of_diagonals(diagonals, head.row, D), D);
      if (tables.keys) multiply(qp, of_column(columns, D), of_rows(for_queries, head.row, D), D);
      if (tables.queries) multiply(kp, of_diagonals(diagonals, head.row, D), of_rows(for_keys, head.row, D), D);

      const QueryRow query(statistics, head.bounds, work, step + lane());
      float ds[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int distance = nearest + head.row + r, key = query.place - distance;
        const float weight = query.weight(tables.score(qk[r], qp[r], kp[r], a.scale, distance));
        const bool is_pair = key >= 0 && key < length;
        float factor = a.drop.keep_scale;
        if (a.drop.threshold && is_pair && !keeps(a, site, query.place, key, work)) factor = 0;
        ds[r] = is_pair ? weight * (dp[r] * factor - query.delta) : 0;
        dbias[r] += ds[r];
      }
      if (partials.keys) add(dkeys, ds, columns, D);
      if (partials.queries) add_diagonals(dqueries, ds, diagonals, head.row, D);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int distance = share.part * kBlock + int(threadIdx.x) / 32 * kRows + r;
    const float bias = sum_of_warp(dbias[r]);
    if (distance >= partials.distances) continue;
    const int64_t place = partials.place(a, share.sequence, share.head, distance);
    if (partials.keys) store(dkeys[r], a.scale, partials.keys + place * D, D);
    if (partials.queries) store(dqueries[r], a.scale, partials.queries + place * D, D);
    if (partials.bias && lane() == 0) partials.bias[place] = bias;
  }
}

// A block adds up the distances of one slot, for one head. Its warps split the distances, 32 at a time.
template <class T>
__global__ void __launch_bounds__(kThreads)
    relative_attention_bwd_slots_kernel(Attention a, RelativePositions positions, RelativeGradients gradients,
                                        Partials partials) {
  const int slot = int(blockIdx.x) / a.heads, head = int(blockIdx.x) % a.heads, warp = int(threadIdx.x) / 32, D = a.D;
  const Tables<T> tables(positions, a, head);
  float dkeys[kColumns] = {}, dqueries[kColumns] = {}, dbias = 0;
  const int distances = int(partials.distances);
  for (int first = 32 * warp; first < distances; first += 32 * kWarps) {
    const int mine = first + lane();
    const bool counts = mine < distances && tables.slot(mine - (a.longest - 1)) == slot;
    for (int group = 0; partials.bias && counts && group < partials.groups; ++group)
      dbias += partials.bias[partials.place(a, group, head, mine)];
    for (unsigned found = __ballot_sync(kAllLanes, counts); found; found &= found - 1)
      for (int group = 0; group < partials.groups; ++group) {
        const int64_t vector = partials.place(a, group, head, first + __ffs(found) - 1) * D;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          const int column = lane() + 32 * i;
          if (partials.keys && column < D) dkeys[i] += partials.keys[vector + column];
          if (partials.queries && column < D) dqueries[i] += partials.queries[vector + column];
        }
      }
  }

  constexpr int kSums = 2 * kAttentionLargest + 1;  // per warp: dkeys, dqueries, dbias
  FB_SHARED(float, sums, kWarps* kSums);
  float* const mine = sums + warp * kSums;
  store(dkeys, 1, mine, D), store(dqueries, 1, mine + kAttentionLargest, D);
  dbias = sum_of_warp(dbias);
  if (lane() == 0) mine[kSums - 1] = dbias;
  __syncthreads();
  const auto total = [&](int i) {
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += sums[w * kSums + i];
    return sum;
  };
  const int64_t vector = (int64_t(slot) * a.heads + head) * D;
  for (int i = threadIdx.x; i < D; i += kThreads) {
    if (gradients.keys) static_cast<T*>(gradients.keys)[vector + i] = from_float<T>(total(i));
    if (gradients.queries) static_cast<T*>(gradients.queries)[vector + i] = from_float<T>(total(kAttentionLargest + i));
  }
  if (gradients.bias && threadIdx.x == 0) gradients.bias[int64_t(head) * positions.width + slot] = total(kSums - 1);
}

// ---- launchers

int64_t distances_of(const Attention& a) { return std::max<int64_t>(0, 2 * int64_t(a.longest) - 1); }

// Sequences per group: so many that the blocks just fill a large GPU, because each group takes scratch memory.
int64_t sequences_of_group(const Attention& a) {
  constexpr int64_t kBlocks = 1024;
  const int64_t blocks = std::max<int64_t>(1, divide_up(distances_of(a), kBlock) * a.heads);
  return divide_up(std::max(1, a.sequences), std::max<int64_t>(1, kBlocks / blocks));
}
int groups_of(const Attention& a) { return int(divide_up(a.sequences, sequences_of_group(a))); }

Partials partials_in(float* room, const Attention& a, const RelativeGradients& gradients) {
  const int64_t count = int64_t(groups_of(a)) * a.heads * distances_of(a);
  Partials partials{nullptr, nullptr, nullptr, sequences_of_group(a), groups_of(a), distances_of(a)};
  if (gradients.keys) partials.keys = room, room += count * a.D;
  if (gradients.queries) partials.queries = room, room += count * a.D;
  if (gradients.bias) partials.bias = room;
  return partials;
}

// How many tiles of kBlock rows the diagonals need.
int diagonal_tiles(const RelativePositions& positions) { return positions.keys || positions.queries ? 2 : 0; }

template <class T>
const char* run_tables(const Attention& a, const RelativePositions& positions, const T* dout,
                       const RelativeGradients& gradients, const Statistics& statistics, const Partials& partials,
                       void* stream) {
  const int parts = int(divide_up(partials.distances, kBlock));
  const int64_t blocks = int64_t(parts) * a.heads * partials.groups, slots = int64_t(positions.width) * a.heads;
  if (std::max({partials.distances + kBlock, blocks, slots}) > INT32_MAX)
    return "too many distances, slots and heads for one launch";
  const int tiles = 3 + (positions.keys != nullptr) + (positions.queries != nullptr);
  if (blocks > 0)
    if (const char* error =
            launch(relative_attention_bwd_distances_kernel<T>, dim3(blocks), dim3(kThreads),
                   tiles * kBlock * (a.D | 1) * sizeof(float), stream, a, positions, dout, statistics, partials, parts))
      return error;
  if (slots == 0) return nullptr;
  return launch(relative_attention_bwd_slots_kernel<T>, dim3(slots), dim3(kThreads), 0, stream, a, positions, gradients,
                partials);
}

}  // namespace

int64_t relative_attention_room(const Attention& a, const RelativeGradients& gradients) {
  const int64_t of_distance = (gradients.keys ? a.D : 0) + (gradients.queries ? a.D : 0) + (gradients.bias ? 1 : 0);
  return attention_statistics(a) + groups_of(a) * a.heads * distances_of(a) * of_distance;
}

const char* relative_attention_fwd(const Attention& a, const RelativePositions& positions, void* out, float* lse,
                                   void* stream) {
  return for_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    return run(a, fill_blocks(a), 3 + diagonal_tiles(positions), stream, relative_attention_fwd_kernel<T>, positions,
               static_cast<T*>(out), lse);
  });
}

const char* relative_attention_bwd(const Attention& a, const RelativePositions& positions, const void* dout,
                                   const void* out, const float* lse, void* dqkv, const RelativeGradients& gradients,
                                   float* room, void* stream) {
  const Statistics statistics = statistics_in(room, a);
  const Partials partials = partials_in(room + attention_statistics(a), a, gradients);
  const int tiles = 4 + diagonal_tiles(positions);
  return for_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    const T* const douts = static_cast<const T*>(dout);
    T* const result = static_cast<T*>(dqkv);
    const char* error = run(a, fill_blocks(a), tiles, stream, relative_attention_bwd_queries_kernel<T>, positions,
                            douts, static_cast<const T*>(out), lse, result, statistics);
    if (!error)
      error = run(a, 0, tiles, stream, relative_attention_bwd_keys_kernel<T>, positions, douts, result, statistics);
    if (error || !gradients.any()) return error;
    return run_tables(a, positions, douts, gradients, statistics, partials, stream);
  });
}

}  // namespace fastbert::cuda
