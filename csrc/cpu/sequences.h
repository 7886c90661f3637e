// Where the sequences of packed tokens begin and end.
#pragma once

#include <vector>

#include "../tensor.h"

namespace fastbert {

// (sequences + 1,): sequence b is tokens bounds[b] to bounds[b + 1]. Within the tokens, and never decreasing, whatever
// cu_seqlens holds.
inline std::vector<int64_t> bounds_of(const Tensor& cu_seqlens, int64_t tokens) {
  const Tensor ends = contiguous(cu_seqlens);
  std::vector<int64_t> bounds;
  for (int64_t i = 0; i < ends.numel(); ++i)
    bounds.push_back(std::clamp<int64_t>(ends.const_data_ptr<int32_t>()[i], i ? bounds.back() : 0, tokens));
  return bounds;
}

}  // namespace fastbert
