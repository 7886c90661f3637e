// The interface between the torch side of padding and its CUDA kernels. Launchers return an error message, or nullptr.
#pragma once

#include <stdint.h>

namespace fastbert::cuda {

// The plan of a mask: (batch, seqlen) bytes, nonzero where a token is visible, with batch * seqlen < 2**31. places,
// [batch * seqlen]: first the places of all visible tokens in order, then the other places in order. cu_seqlens: [batch
// + 1]. facts: how many tokens are visible, how many in the longest row, whether no row begins with a gap, whether no
// row has a gap between tokens. rows: [batch, 2], scratch memory for the kernels.
struct PaddingPlan {
  const uint8_t* visible;
  int64_t batch, seqlen;
  int32_t* rows;
  int64_t* places;
  int32_t* cu_seqlens;
  int64_t* facts;  // [4]
};
const char* padding_places(const PaddingPlan& plan, void* stream);

// y[row] = x[from[row]] for rows of `bytes` bytes; zeros if from[row] is not one of x's `sources` rows.
const char* padding_pack(const void* x, const int64_t* from, void* y, int64_t rows, int64_t sources, int64_t bytes,
                         void* stream);

// y[indices[token]] = x[token], zeros in other rows. token_of: [rows] zeros, scratch memory for the kernels.
const char* padding_unpack(const void* x, const int64_t* indices, int64_t* token_of, void* y, int64_t tokens,
                           int64_t rows, int64_t bytes, void* stream);

}  // namespace fastbert::cuda
