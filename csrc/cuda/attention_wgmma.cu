// attention in 16-bit types on Hopper's tensor cores, for head sizes that are padded to 64 and sequences of more than
// 32 tokens: the launchers for the kernels of attention_kernels.cuh. This file is compiled for sm_90a if sm_90 is among
// the architectures.
#include "attention_kernels.cuh"

namespace fastbert::cuda {

#ifdef FB_HOPPER

namespace {

constexpr int kWidth = 64;

template <class T, bool kDropout, int kRowTiles>
const char* forward_of(const Attention& a, int warps, int blocks, void* out, float* lse, void* stream) {
  const Plan plan =
      plan_of(a, {16 * kRowTiles, kWidth / 8, Stream<ByWarpgroup, kWidth, T>::chunks(false)}, warps, blocks);
  return run(a, plan, fill_blocks(a), stream, attention_fwd_kernel<ByWarpgroup, T, kWidth, kRowTiles, kDropout>,
             static_cast<T*>(out), lse);
}

// The variants that were the fastest on an H200: benchmarks/results/h200/attention_tiles.txt.
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

}  // namespace

bool wgmma_takes(const Attention& a) {
  return major_architecture() == 9 && a.D > 32 && a.D <= kWidth && a.longest > kShort && mma_takes(a);
}

const char* wgmma_fwd(const Attention& a, void* out, float* lse, void* stream) {
  return for_element_and_dropout(
      a, [&](auto element, auto dropout) { return forward<decltype(element), dropout()>(a, out, lse, stream); });
}

const char* wgmma_bwd(const Attention& a, const void* dout, const void* out, const float* lse, void* dqkv, float* room,
                      void* stream) {
  return for_element_and_dropout(a, [&](auto element, auto dropout) {
    return long_backward<ByWarpgroup, decltype(element), kWidth, dropout()>(a, dout, out, lse, dqkv, room, stream);
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
