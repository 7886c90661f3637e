// attention in 16-bit types on Hopper's tensor cores, for head sizes that are computed as 64 and sequences of more than
// 32 tokens: the launches of attention_kernels.cuh. This file is compiled for sm_90a, where sm_90 is among the
// architectures.
#include "attention_kernels.cuh"

namespace fastbert::cuda {

#ifdef FB_HOPPER

namespace {

constexpr int kWidth = 64, kChunks = kWidth / 8;

template <class T, bool kDropout, int kRowTiles>
const char* forward_of(const Attention& a, int warps, int blocks, void* out, float* lse, void* stream) {
  const Plan plan = plan_of(a, {16 * kRowTiles, kChunks, Stream<ByWarpgroup, kWidth, T>::chunks(false)}, warps, blocks);
  return run(a, plan, fill_blocks(a), stream, attention_fwd_kernel<ByWarpgroup, T, kWidth, kRowTiles, kDropout>,
             static_cast<T*>(out), lse);
}

// What was the fastest on an H200: benchmarks/results/h200/attention_tiles.txt.
template <class T, bool kDropout>
const char* forward(const Attention& a, void* out, float* lse, void* stream) {
  if constexpr (kDropout) {
    if (a.longest > 256) return forward_of<T, true, 2>(a, 4, 2, out, lse, stream);
    return forward_of<T, true, 1>(a, 4, 3, out, lse, stream);
  } else {
    if (a.longest > 128) return forward_of<T, false, 1>(a, 8, 2, out, lse, stream);
    return forward_of<T, false, 1>(a, 4, 4, out, lse, stream);
  }
}

template <class T, bool kDropout>
const char* backward(const Attention& a, const void* dout, const void* out, const float* lse, void* dqkv, float* room,
                     void* stream) {
  using Of = Backward<ByWarpgroup>;
  const Statistics statistics = statistics_in(room, a);
  const T* const douts = static_cast<const T*>(dout);
  T* const gradients = static_cast<T*>(dqkv);
  const Plan queries =
      plan_of(a, {16, 2 * kChunks, Stream<ByWarpgroup, kWidth, T>::chunks(false)}, 4, Of::kBlocksOfQueries);
  const char* const error =
      run(a, queries, fill_blocks(a), stream, attention_bwd_queries_kernel<ByWarpgroup, T, kWidth, kDropout>, douts,
          static_cast<const T*>(out), lse, gradients, statistics);
  if (error) return error;
  const int row_chunks = 2 * kChunks + (kDropout ? kMaskChunks : 0);
  const Plan keys = plan_of(a, {16, row_chunks, Stream<ByWarpgroup, kWidth, T>::chunks(true)}, 4, Of::kBlocksOfKeys);
  return run(a, keys, 0, stream, attention_bwd_keys_kernel<ByWarpgroup, T, kWidth, kDropout>, douts, gradients,
             statistics);
}

// Calls f with a value of the element type, and whether anything is dropped.
template <class F>
const char* for_variant(const Attention& a, const F& f) {
  const auto of_type = [&](auto element) {
    return a.drop.threshold ? f(element, std::true_type{}) : f(element, std::false_type{});
  };
  return a.dtype == DType::bf16 ? of_type(__nv_bfloat16{}) : of_type(__half{});
}

}  // namespace

bool wgmma_takes(const Attention& a) {
  const bool is_half = a.dtype == DType::f16 || a.dtype == DType::bf16;
  return major_architecture() == 9 && is_half && a.D > 32 && a.D <= kWidth && a.D % 8 == 0 && a.scale > 0 &&
         a.longest > 32;
}

const char* wgmma_fwd(const Attention& a, void* out, float* lse, void* stream) {
  return for_variant(
      a, [&](auto element, auto dropout) { return forward<decltype(element), dropout()>(a, out, lse, stream); });
}

const char* wgmma_bwd(const Attention& a, const void* dout, const void* out, const float* lse, void* dqkv, float* room,
                      void* stream) {
  return for_variant(a, [&](auto element, auto dropout) {
    return backward<decltype(element), dropout()>(a, dout, out, lse, dqkv, room, stream);
  });
}

#else

bool wgmma_takes(const Attention&) { return false; }
const char* wgmma_fwd(const Attention&, void*, float*, void*) { return "attention: built without sm_90"; }
const char* wgmma_bwd(const Attention&, const void*, const void*, const float*, void*, float*, void*) {
  return "attention: built without sm_90";
}

#endif

}  // namespace fastbert::cuda
