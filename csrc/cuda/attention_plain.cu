// attention without tensor cores: float32, and 16-bit types with a head size or a scale that attention_mma.cu refuses.
//
// A block owns 32 rows (queries, or keys for dK and dV) and loops over the other side in tiles of 32 rows, which it
// keeps in shared memory as floats. A warp has 4 of the block's rows. For scores, each lane computes one of the 32
// columns. For sums of rows of V, K, Q or dO, each lane has every 32nd column, and gets the weights of other lanes by
// shuffles. Every kernel computes scores with the same chain of fused multiply-adds, so the backward gets the same bits
// as the forward: weights are right even where lse is so large that it has lost all digits of the sum.
//
// Bound by shared memory: about 0.6 loads per multiply-add. Bytes moved: as in attention_kernels.cuh.
#include <algorithm>

#include "attention_plain.cuh"

namespace fastbert::cuda {

namespace {

using namespace plain;

// ---- forward

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    attention_plain_fwd_kernel(Attention a, T* __restrict__ out,  // [T, H, D]
                               float* __restrict__ lse,           // [H, T]
                               int parts) {
  if (fill_uncovered(a, out, int64_t(a.heads) * a.D, lse)) return;
  const Work work = work_of(a, parts);
  const Head<T> head(a, work);
  const int D = a.D, tile = kBlock * (D | 1), length = head.bounds.length;
  if (head.first >= length) return;
  const Key site = a.drop.threshold ? site_key(a.drop) : Key{};
  FB_DYNAMIC_SHARED(shared);
  float *const queries = reinterpret_cast<float*>(shared), *const keys = queries + tile, *const values = keys + tile;
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
    dot(weights, queries + head.row * (D | 1), keys, D);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float score = step + lane() < length ? __fmul_rn(weights[r], a.scale) : -INFINITY;
      weights[r] = weight_of(score, largest[r], total[r], sums[r]);
      if (a.drop.threshold && !keeps(a, site, head.first + head.row + r, step + lane(), work)) weights[r] = 0;
    }
    add(sums, weights, values, D);
  }
  store_out(a, head, work, sums, largest, total, out, lse);
}

// ---- backward: attention_kernels.cuh has the formulas

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    attention_plain_bwd_queries_kernel(Attention a, const T* __restrict__ dout,  // [T, H, D]
                                       const T* __restrict__ out,                // [T, H, D]
                                       const float* __restrict__ lse,            // [H, T]
                                       T* __restrict__ dqkv,                     // [T, 3, H, D]: dQ is written
                                       Statistics statistics, int parts) {
  if (fill_uncovered(a, dqkv, 3 * int64_t(a.heads) * a.D, nullptr)) return;
  const Work work = work_of(a, parts);
  const Head<T> head(a, work);
  const int D = a.D, tile = kBlock * (D | 1), length = head.bounds.length;
  if (head.first >= length) return;
  const Key site = a.drop.threshold ? site_key(a.drop) : Key{};
  FB_DYNAMIC_SHARED(shared);
  float *const queries = reinterpret_cast<float*>(shared), *const douts = queries + tile;
  float *const keys = douts + tile, *const values = keys + tile;
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
    dot(scores, queries + head.row * (D | 1), keys, D);
    dot(ds, douts + head.row * (D | 1), values, D);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float weight = step + lane() < length ? expf(__fsub_rn(__fmul_rn(scores[r], a.scale), offset[r])) : 0;
      float factor = a.drop.keep_scale;
      if (a.drop.threshold && !keeps(a, site, head.first + head.row + r, step + lane(), work)) factor = 0;
      total[r] += weight;
      ds[r] = weight * (ds[r] * factor - delta[r]);
    }
    add(dq, ds, keys, D);
  }
  store_dq(a, head, work, dq, total, offset, delta, statistics, dqkv);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    attention_plain_bwd_keys_kernel(Attention a, const T* __restrict__ dout,  // [T, H, D]
                                    T* __restrict__ dqkv,                     // [T, 3, H, D]: dK and dV are written
                                    Statistics statistics, int parts) {
  const Work work = work_of(a, parts);
  const Head<T> head(a, work);
  const int D = a.D, tile = kBlock * (D | 1), length = head.bounds.length;
  if (head.first >= length) return;
  const Key site = a.drop.threshold ? site_key(a.drop) : Key{};
  const Rows<T> grads = head.of(dout, work);
  FB_DYNAMIC_SHARED(shared);
  float *const keys = reinterpret_cast<float*>(shared), *const values = keys + tile;
  float *const queries = values + tile, *const douts = queries + tile;
  head.k.read(keys, head.first), head.v.read(values, head.first);

  Sums dk = {}, dv = {};
  for (int step = 0; step < length; step += kBlock) {
    __syncthreads();
    head.q.read(queries, step), grads.read(douts, step);
    __syncthreads();
    const QueryRow query(statistics, head.bounds, work, step + lane());
    float weights[kRows], ds[kRows];
    dot(weights, keys + head.row * (D | 1), queries, D);
    dot(ds, values + head.row * (D | 1), douts, D);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float weight = query.weight(__fmul_rn(weights[r], a.scale));
      float factor = a.drop.keep_scale;
      if (a.drop.threshold && !keeps(a, site, query.place, head.first + head.row + r, work)) factor = 0;
      weights[r] = weight * factor;
      ds[r] = weight * (ds[r] * factor - query.delta);
    }
    add(dv, weights, douts, D);
    add(dk, ds, queries, D);
  }
  store_dk_dv(a, head, work, dk, dv, dqkv);
}

}  // namespace

// ---- launchers

const char* plain_fwd(const Attention& a, void* out, float* lse, void* stream) {
  return for_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    return run(a, fill_blocks(a), 3, stream, attention_plain_fwd_kernel<T>, static_cast<T*>(out), lse);
  });
}

const char* plain_bwd(const Attention& a, const void* dout, const void* out, const float* lse, void* dqkv, float* room,
                      void* stream) {
  const Statistics statistics = statistics_in(room, a);
  return for_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    const T* const douts = static_cast<const T*>(dout);
    T* const gradients = static_cast<T*>(dqkv);
    const char* const error = run(a, fill_blocks(a), 4, stream, attention_plain_bwd_queries_kernel<T>, douts,
                                  static_cast<const T*>(out), lse, gradients, statistics);
    return error ? error : run(a, 0, 4, stream, attention_plain_bwd_keys_kernel<T>, douts, gradients, statistics);
  });
}

// ---- the choice between the three sets of kernels

const char* attention_fwd(const Attention& a, void* out, float* lse, void* stream) {
  return (wgmma_takes(a) ? wgmma_fwd : mma_takes(a) ? mma_fwd : plain_fwd)(a, out, lse, stream);
}

const char* attention_bwd(const Attention& a, const void* dout, const void* out, const float* lse, void* dqkv,
                          float* statistics, void* stream) {
  const auto run = wgmma_takes(a) ? wgmma_bwd : mma_takes(a) ? mma_bwd : plain_bwd;
  return run(a, dout, out, lse, dqkv, statistics, stream);
}

}  // namespace fastbert::cuda
