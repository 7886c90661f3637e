// The interface between the torch side of embedding and its loops. M stands for their type of arithmetic: double for
// f64, else float.
#pragma once

#include <stdint.h>

#include "cpu/isa.h"
#include "dropout.h"
#include "dtype.h"

namespace fastbert {

// y = dropout(LayerNorm(word[input_id] + position[position_id] + token_type[token_type_id])); tables have one dtype.
struct Embedding {
  struct Lookup {
    const int64_t* ids;  // [tokens], rows of the table
    const void* table;   // [rows, channels]; nullptr where the model has no token types
  } lookups[3];
  const void *weight, *bias;  // [channels] of M
  void *mean, *rstd;          // [tokens] of M
  int64_t channels;
  double eps;
  Dropout drop;
  DType dtype;
};

struct EmbeddingGradients {
  const void* dy;         // of dtype
  void* dz;               // [tokens, channels] of M
  void *dweight, *dbias;  // [channels] of M, added to
};

namespace cpu {

// The loops compute tokens begin to end. scratch: embedding_scratch(channels) bytes.
FB_FOR_EACH_ISA(int64_t embedding_scratch(int64_t channels);
                void embedding_fwd(const Embedding& op, void* y, int64_t begin, int64_t end, void* scratch);
                void embedding_bwd(const Embedding& op, const EmbeddingGradients& gradients, int64_t begin, int64_t end,
                                   void* scratch);
                // Writes a row of a table's gradient, of type dtype: the sum of dz's rows for `count` tokens, at least
                // one, in their order.
                void embedding_row(const void* dz, const int64_t* tokens, int64_t count, int64_t channels, DType dtype,
                                   void* row, void* scratch);)

}  // namespace cpu

}  // namespace fastbert
