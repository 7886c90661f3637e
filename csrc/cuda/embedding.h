// The interface between the torch side of embedding and its CUDA kernels. Launchers return an error message, or
// nullptr.
#pragma once

#include <stdint.h>

#include "../dropout.h"
#include "../dtype.h"

namespace fastbert::cuda {

// The ids of tokens, which are rows of a table; other numbers stand for the nearest row. The table has at least one
// row.
struct Ids {
  const void* at;  // [tokens], of int32_t if narrow, else of int64_t
  bool narrow;
  int64_t rows;
};

struct Lookup {
  Ids ids;
  const void* table;  // [rows, channels]; nullptr where the model has no token types
  DType dtype;
};

struct Lookups {
  Lookup of[3];  // words, positions, token types
};

struct EmbeddingRows {
  Lookups lookups;
  const void* weight;  // [channels] of type parameters
  DType y_type;        // of y and dy: the type of all tables, or f32
  DType parameters;    // y_type or f32; f32 if the tables' types differ
  int64_t tokens, channels;
  DeviceDropout drop;
};

struct EmbeddingSums {
  const void* dy;            // [tokens, channels] of y_type
  const float *mean, *rstd;  // [tokens]
  float* dz;                 // [tokens, channels], or nullptr
  float* partials;           // [blocks, 2, channels]: for dweight and dbias; or nullptr
  float* type_partials;      // [blocks, token types, channels]: for the token types' gradient; or nullptr
};

const char* embedding_fwd(const EmbeddingRows& op, void* y, float* mean, float* rstd, const void* bias, double eps,
                          void* stream);

// blocks: layer_norm_bwd_blocks(tokens, channels).
const char* embedding_bwd(const EmbeddingRows& op, const EmbeddingSums& to, int64_t blocks, void* stream);

// Whether there are at most 16 types, and shared memory has room for their sums in the backward (type_partials).
bool sums_types_in_passing(int64_t types, int64_t channels);

// Lists the tokens by id, those of each id in order. This is for small tables; for others, tokens are sorted.
bool lists_instead_of_sorting(int64_t tokens, int64_t rows);
const char* list_tokens(const Ids& ids, int64_t* order, int64_t tokens, void* stream);

// Adds up dz's rows by id, and writes the sums to the rows of the gradient ([rows, channels] of dtype) whose ids occur,
// except padding_idx. partials: [table_chunks(tokens), 2, channels].
const char* add_up_by_id(const float* dz, const Ids& ids, const int64_t* order, float* partials, void* gradient,
                         DType dtype, int64_t tokens, int64_t channels, int64_t padding_idx, void* stream);
int64_t table_chunks(int64_t tokens);

}  // namespace fastbert::cuda
