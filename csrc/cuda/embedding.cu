// y = dropout(LayerNorm(word[input_id] + position[position_id] + token_type[token_type_id])) on [tokens, channels], and
// its gradients; channels <= 8192.
//
// A row belongs to one warp or to several, as in layer_norm.cu. If tables have different types, they are read by a
// switch that takes the same branch in all threads. Of an id that is out of range, the nearest row is read, and y is
// NaN.
//
// Backward: one block per multiprocessor loops over the rows, as in layer_norm.cu. It writes dz once, in fp32. The sums
// of dz for the few token types stay in shared memory, which has a row of channels for each type and each row of the
// block, so dz need not be read again for them. For the other tables, and for token types if that memory is too small,
// dz's rows are added up by id:
//
//   order    tokens by id, those of one id in order: by aten::argsort, or by list_few_kernel if the table is small
//   sum_runs chunks of 32 tokens of that order, one warp for each 32 columns. The sum of a run of equal ids that lies
//            within a chunk is a row of the gradient. If a run crosses chunks, each chunk has a partial sum of it: its
//            head if the run began before the chunk, else its tail
//   join     tail + heads of each run that crosses chunks, in order
//
// So no warp adds up more than 32 rows, or one partial sum for every 32 rows, even if all tokens have the same id.
// Every row of a gradient has one writer, rows without an id keep zeros, and the order of a sum depends on the ids
// alone. list_few_kernel has a block for each row of the table. It reads all ids twice: it counts the smaller ids,
// which gives the place of its tokens, then each warp lists the tokens in its share. 512 rows and 16384 tokens are 134
// MB, from the L2 cache: about 30 us, where a sort launches a dozen kernels.
//
// Bytes moved: forward the rows and y once. Backward dy and the rows once, dz written; for words and positions dz is
// read once more each, with 16 bytes per token of order and ids, and at most a 16th of dz of partial sums, written and
// read; each gradient of a table is written once as zeros, and its rows with an id once more.
#include <initializer_list>

#include "embedding.h"
#include "rows.cuh"

namespace fastbert::cuda {

namespace {

// ---- tables

__device__ __forceinline__ int64_t id_of(const Ids& ids, int64_t token) {
  return ids.narrow ? static_cast<const int32_t*>(ids.at)[token] : static_cast<const int64_t*>(ids.at)[token];
}

// The row of the table for an id, or the nearest one. The table has at least one row.
__device__ __forceinline__ int64_t nearest_row(const Ids& ids, int64_t id) {
  return id < 0 ? 0 : id < ids.rows ? id : ids.rows - 1;
}

__device__ __forceinline__ int64_t row_of(const Ids& ids, int64_t token) { return nearest_row(ids, id_of(ids, token)); }

template <class T, int kVec, int kColumns, bool kVectors>
__device__ __forceinline__ void add_row(float (&z)[kColumns][kVec], const void* table, int64_t row,
                                        const Place<kVec, kVectors>& place) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (!place.inside(i)) continue;
    const Vec<T, kVec> v = load(static_cast<const T*>(table), row, place, i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) z[i][j] += to_float(v.at[j]);
  }
}

// Computes z of a row; NaN if an id is out of range. T: the type of all tables; kMixed: each table has its own type.
template <class T, bool kMixed, int kVec, int kColumns, bool kVectors>
__device__ __forceinline__ void sum(float (&z)[kColumns][kVec], const Lookups& lookups,
                                    const Place<kVec, kVectors>& place) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
#pragma unroll
    for (int j = 0; j < kVec; ++j) z[i][j] = 0;
  if (place.columns == 0) return;
#pragma unroll
  for (int n = 0; n < 3; ++n) {
    const Lookup& lookup = lookups.of[n];
    if (!lookup.table) continue;
    const int64_t id = id_of(lookup.ids, place.row), row = nearest_row(lookup.ids, id);
    if (row != id) z[0][0] = NAN;  // one channel is enough: the mean and all that follows become NaN
    if constexpr (!kMixed) {
      add_row<T>(z, lookup.table, row, place);
    } else {
      switch (lookup.dtype) {
        case DType::bf16: add_row<__nv_bfloat16>(z, lookup.table, row, place); break;
        case DType::f16: add_row<__half>(z, lookup.table, row, place); break;
        default: add_row<float>(z, lookup.table, row, place);
      }
    }
  }
}

// ---- forward

template <class T, bool kMixed, class P, int kThreadChannels, bool kVectors>
__global__ void __launch_bounds__(256, 2)
    embedding_fwd_kernel(Lookups lookups,
                         const P* __restrict__ weight,  // [channels]
                         const P* __restrict__ bias,    // [channels]
                         T* __restrict__ y,             // [tokens, channels]
                         float* __restrict__ mean,      // [tokens]
                         float* __restrict__ rstd,      // [tokens]
                         int64_t tokens, int channels, float eps, DeviceDropout drop) {
  constexpr int kVec = 16 / sizeof(T), kColumns = kThreadChannels / kVec;
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= tokens) return;  // no barrier is missed: a row of several warps has a block to itself
  const auto place = place_of<kVec, kColumns, kVectors>(row, channels);
  float z[kColumns][kVec];
  sum<T, kMixed>(z, lookups, place);
  const RowStatistics row_is = centre(z, place, eps);
  const Key key = drop.threshold ? site_key(drop) : Key{};
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (!place.inside(i)) continue;
    scale_and_shift(z[i], row_is, weight, bias, place, i);
    if (drop.threshold) drop_out(z[i], drop, key, place, i);
    store(z[i], y, row, place, i);
  }
  if (place.first == 0) mean[row] = row_is.mean, rstd[row] = row_is.rstd;
}

// ---- backward: dropout is applied to dy; dz, dweight and dbias follow as in layer_norm.cu, and a table's gradient is
// the sum of dz by id

template <class T, bool kMixed, class P, int kThreadChannels, bool kVectors>
__global__ void __launch_bounds__(32 * backward_warps(kThreadChannels), 1)
    embedding_bwd_kernel(const T* __restrict__ dy,  // [tokens, channels]
                         Lookups lookups,
                         const P* __restrict__ weight,       // [channels]
                         const float* __restrict__ mean,     // [tokens]
                         const float* __restrict__ rstd,     // [tokens]
                         float* __restrict__ dz,             // [tokens, channels], or nullptr
                         float* __restrict__ partials,       // [blocks, 2, channels]: dweight, dbias; or nullptr
                         float* __restrict__ type_partials,  // [blocks, types, channels], or nullptr
                         int64_t tokens, int channels, DeviceDropout drop) {
  constexpr int kVec = 16 / sizeof(T), kColumns = kThreadChannels / kVec;
  auto place = place_of<kVec, kColumns, kVectors>(0, channels);
  const int columns = place.columns;
  const Key key = drop.threshold ? site_key(drop) : Key{};
  const Ids& types = lookups.of[2].ids;
  const int64_t type_rows = type_partials ? types.rows : 0;

  float dweight[kColumns][kVec] = {}, dbias[kColumns][kVec] = {};
  FB_DYNAMIC_SHARED(memory);
  float* const row_sums =
      reinterpret_cast<float*>(memory);  // [blockDim.y, types, channels], then [blockDim.y, channels]
  const float zeros[kVec] = {};
  for (int64_t type = 0; type < type_rows; ++type)
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (place.inside(i)) store(zeros, row_sums, threadIdx.y * type_rows + type, place, i);

  for (int64_t first_row = int64_t(blockIdx.x) * blockDim.y; first_row < tokens;
       first_row += int64_t(gridDim.x) * blockDim.y) {
    place.row = first_row + threadIdx.y;
    place.columns = place.row < tokens ? columns : 0;
    Vec<T, kVec> d[kColumns];
    float z[kColumns][kVec];
    start_loads(d, dy, place);
    const float row_mean = place.row < tokens ? mean[place.row] : 0, scale = place.row < tokens ? rstd[place.row] : 0;
    sum<T, kMixed>(z, lookups, place);
    uint32_t kept = ~0u;
    if (drop.threshold) {
      kept = 0;
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        if (place.inside(i)) kept |= kept_of(drop, key, place, i) << (i * kVec);
    }
    const auto dy_of = [&](int i, int j) {
      return kept >> (i * kVec + j) & 1 ? to_float(d[i].at[j]) * drop.keep_scale : 0;
    };
    const RowGradient gradient = centre(z, dy_of, weight, row_mean, scale, place);
    const int64_t sums = type_rows && place.columns ? threadIdx.y * type_rows + row_of(types, place.row) : 0;

#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (!place.inside(i)) continue;
      const Vec<P, kVec> w = load(weight, 0, place, i);
      float dz_[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float dy_ = dy_of(i, j), n = gradient.n(z[i][j]);
        dz_[j] = gradient.dz(n, dy_ * to_float(w.at[j]));
        dweight[i][j] = fmaf(dy_, n, dweight[i][j]);
        dbias[i][j] += dy_;
      }
      if (dz) store(dz_, dz, place.row, place, i);
      if (type_rows) {
        const Vec<float, kVec> so_far = load(row_sums, sums, place, i);
#pragma unroll
        for (int j = 0; j < kVec; ++j) dz_[j] += so_far.at[j];
        store(dz_, row_sums, sums, place, i);
      }
    }
  }

  place.columns = columns;
  const int64_t type_channels = type_rows * channels;
  if (type_rows)
    add_up(row_sums, type_channels, int(type_channels), type_partials + int64_t(blockIdx.x) * type_channels);
  if (!partials) return;
  float* const to = partials + int64_t(blockIdx.x) * 2 * channels;
  add_up(dweight, row_sums, place, to);
  add_up(dbias, row_sums, place, to + channels);
}

// ---- a table's gradient

constexpr int kListWarps = 8;

__global__ void __launch_bounds__(32 * kListWarps) list_few_kernel(Ids ids, int64_t* __restrict__ order,  // [tokens]
                                                                   int64_t tokens) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t id = blockIdx.x, share = divide_up(tokens, 32 * kListWarps) * 32;
  const int64_t first = warp * share, end = first + share < tokens ? first + share : tokens;
  int64_t counts[2] = {};  // tokens with smaller ids, and with this one
#pragma unroll 4
  for (int64_t token = first + lane; token < end; token += 32) {
    const int64_t other = row_of(ids, token);
    counts[0] += other < id, counts[1] += other == id;
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    counts[0] += __shfl_xor_sync(~0u, counts[0], lanes);
    counts[1] += __shfl_xor_sync(~0u, counts[1], lanes);
  }
  FB_SHARED(int64_t, warp_counts, 2 * kListWarps);
  if (lane == 0) warp_counts[2 * warp] = counts[0], warp_counts[2 * warp + 1] = counts[1];
  __syncthreads();
  if (counts[1] == 0) return;
  int64_t next = 0;
#pragma unroll
  for (int w = 0; w < kListWarps; ++w) next += warp_counts[2 * w] + (w < warp ? warp_counts[2 * w + 1] : 0);
  for (int64_t from = first; from < end; from += 32) {
    const bool found = from + lane < end && row_of(ids, from + lane) == id;
    const unsigned all = __ballot_sync(~0u, found);
    if (found) order[next + __popc(all & ((1u << lane) - 1))] = from + lane;
    next += __popc(all);
  }
}

constexpr int kChunk = 32;    // tokens
constexpr int kRunWarps = 4;  // per block: neighbouring columns of one chunk
constexpr int kInFlight = 8;  // rows of dz that are loaded together

template <class T>
struct TableSum {
  const float* dz;       // [tokens, channels]
  Ids ids;               // [tokens]
  const int64_t* order;  // [tokens]
  float* partials;       // [chunks, 2, channels]: heads and tails
  T* gradient;           // [rows, channels]
  int64_t tokens, channels, padding_idx;

  // The id at a place in the order; -1 if there is no such place.
  __device__ int64_t id(int64_t place) const { return 0 <= place && place < tokens ? row_of(ids, order[place]) : -1; }
};

// Writes kVec sums to one column of a row whose columns are kVec wide.
template <class T, int kVec>
__device__ __forceinline__ void put(const float (&sums)[kVec], T* to, int64_t row, int64_t columns, int64_t column) {
  Vec<T, kVec> rounded;
#pragma unroll
  for (int j = 0; j < kVec; ++j) rounded.at[j] = from_float<T>(sums[j]);
  reinterpret_cast<Vec<T, kVec>*>(to)[row * columns + column] = rounded;
}

template <class T, int kVec>
__global__ void __launch_bounds__(32 * kRunWarps) sum_runs_kernel(TableSum<T> table) {
  const int64_t chunk = blockIdx.x, first = chunk * kChunk, columns = table.channels / kVec;
  const int64_t column = int64_t(blockIdx.y) * blockDim.x + threadIdx.x;
  const int lane = threadIdx.x % 32;
  const int64_t id = table.id(first + lane);
  const int64_t token = id < 0 ? 0 : table.order[first + lane];
  const int64_t before = table.id(first - 1), after = table.id(first + kChunk);

  int64_t current = __shfl_sync(~0u, id, 0);
  bool is_head = current == before;
  float sums[kVec] = {};
  const auto leave = [&](bool goes_on) {
    if (column < columns && current >= 0 && current != table.padding_idx) {
      if (is_head || goes_on) {
        put(sums, table.partials, 2 * chunk + !is_head, columns, column);
      } else {
        put(sums, table.gradient, current, columns, column);
      }
    }
  };
#pragma unroll 1
  for (int begin = 0; begin < kChunk; begin += kInFlight) {
    Vec<float, kVec> rows[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t row = __shfl_sync(~0u, token, begin + k);
      if (column < columns) rows[k] = reinterpret_cast<const Vec<float, kVec>*>(table.dz)[row * columns + column];
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t next = __shfl_sync(~0u, id, begin + k);
      if (next != current) {
        leave(false);
        current = next, is_head = false;
#pragma unroll
        for (int j = 0; j < kVec; ++j) sums[j] = 0;
      }
      if (column < columns)
#pragma unroll
        for (int j = 0; j < kVec; ++j) sums[j] += rows[k].at[j];
    }
  }
  leave(current == after);
}

template <class T, int kVec>
__global__ void __launch_bounds__(32 * kRunWarps) join_kernel(TableSum<T> table) {
  const int64_t chunk = blockIdx.x, first = chunk * kChunk, columns = table.channels / kVec;
  const int64_t column = int64_t(blockIdx.y) * blockDim.x + threadIdx.x;
  const int64_t id = table.id(first + kChunk - 1);
  const bool from_before = id == table.id(first) && id == table.id(first - 1);
  if (id < 0 || id == table.padding_idx || from_before || id != table.id(first + kChunk)) return;
  const auto partial = [&](int64_t row) {
    return reinterpret_cast<const Vec<float, kVec>*>(table.partials)[row * columns + column];
  };
  float sums[kVec] = {};
  const auto add = [&](int64_t row) {
    const Vec<float, kVec> more = partial(row);
#pragma unroll
    for (int j = 0; j < kVec; ++j) sums[j] += more.at[j];
  };
  if (column < columns) add(2 * chunk + 1);
  int64_t next = chunk + 1;
  for (int count = 32; count == 32; next += count) {
    const unsigned others = __ballot_sync(~0u, table.id((next + threadIdx.x % 32) * kChunk) != id);
    count = others ? __ffs(others) - 1 : 32;
    if (column < columns)
#pragma unroll 4
      for (int k = 0; k < count; ++k) add(2 * (next + k));
  }
  if (column < columns) put(sums, table.gradient, id, columns, column);
}

// ---- launchers

// Calls f with a value of the tables' type (float if they have several, and y is fp32 then), with whether they have
// several, and with a value of the parameters' type.
template <class F>
const char* for_types(const Lookups& lookups, DType y, DType parameters, F&& f) {
  for (const Lookup& lookup : lookups.of)
    if (lookup.table && lookup.dtype != y) return f(float{}, Constant<true>{}, float{});
  return for_dtype(y, [&](auto t) {
    if (parameters == DType::f32) return f(t, Constant<false>{}, float{});
    return f(t, Constant<false>{}, t);
  });
}

bool aligned(const Lookups& lookups, std::initializer_list<const void*> others, int64_t channels, DType y) {
  bool all = channels % (y == DType::f32 ? 4 : 8) == 0;
  for (const Lookup& lookup : lookups.of) all = all && is_aligned(lookup.table, 16);
  for (const void* other : others) all = all && is_aligned(other, 16);
  return all;
}

size_t backward_memory(int rows, int64_t channels, int64_t types) {
  return sizeof(float) * rows * channels * (types > 1 ? types : 1);
}

template <class T>
const char* launch_table_sum(const TableSum<T>& table, bool vectors, void* stream) {
  const int64_t chunks = divide_up(table.tokens, kChunk);
  const auto both = [&](auto vec) {
    const dim3 grid(chunks, divide_up(table.channels, int64_t(vec.value) * 32 * kRunWarps)), block(32 * kRunWarps);
    const char* const error = launch(sum_runs_kernel<T, vec.value>, grid, block, 0, stream, table);
    return error ? error : launch(join_kernel<T, vec.value>, grid, block, 0, stream, table);
  };
  return vectors ? both(Constant<4>{}) : both(Constant<1>{});
}

}  // namespace

const char* embedding_fwd(const EmbeddingRows& op, void* y, float* mean, float* rstd, const void* bias, double eps,
                          void* stream) {
  const bool vectors = aligned(op.lookups, {op.weight, bias, y}, op.channels, op.y_type);
  return for_types(op.lookups, op.y_type, op.parameters, [&](auto t, auto mixed, auto p) {
    return for_row_size(op.channels, vectors, [&](auto held, auto in_vectors) {
      using T = decltype(t);
      using P = decltype(p);
      const dim3 block = forward_block(op.channels);
      const int64_t blocks = divide_up(op.tokens, int64_t(block.y));
      if (blocks > INT32_MAX) return "the tensor is too large for one launch";
      return launch(embedding_fwd_kernel<T, mixed.value, P, held.value, in_vectors.value>, dim3(blocks), block, 0,
                    stream, op.lookups, static_cast<const P*>(op.weight), static_cast<const P*>(bias),
                    static_cast<T*>(y), mean, rstd, op.tokens, int(op.channels), float(eps), op.drop);
    });
  });
}

bool sums_types_in_passing(int64_t types, int64_t channels) {
  constexpr int64_t kStatic = 1 << 10;  // at least the kernel's static shared memory
  return types <= 16 &&
         int64_t(backward_memory(backward_rows(channels), channels, types)) <= shared_memory_limit() - kStatic;
}

const char* embedding_bwd(const EmbeddingRows& op, const EmbeddingSums& to, int64_t blocks, void* stream) {
  const bool vectors = aligned(op.lookups, {op.weight, to.dy, to.dz}, op.channels, op.y_type);
  const int64_t types = to.type_partials ? op.lookups.of[2].ids.rows : 0;
  return for_types(op.lookups, op.y_type, op.parameters, [&](auto t, auto mixed, auto p) {
    return for_row_size(op.channels, vectors, [&](auto held, auto in_vectors) {
      using T = decltype(t);
      using P = decltype(p);
      const dim3 block = backward_block(op.channels, held.value);
      return launch(embedding_bwd_kernel<T, mixed.value, P, held.value, in_vectors.value>, dim3(blocks), block,
                    backward_memory(block.y, op.channels, types), stream, static_cast<const T*>(to.dy), op.lookups,
                    static_cast<const P*>(op.weight), to.mean, to.rstd, to.dz, to.partials, to.type_partials, op.tokens,
                    int(op.channels), op.drop);
    });
  });
}

bool lists_instead_of_sorting(int64_t tokens, int64_t rows) { return rows <= 1024 && tokens <= (1 << 25) / rows; }

const char* list_tokens(const Ids& ids, int64_t* order, int64_t tokens, void* stream) {
  return launch(list_few_kernel, dim3(ids.rows), dim3(32 * kListWarps), 0, stream, ids, order, tokens);
}

int64_t table_chunks(int64_t tokens) { return divide_up(tokens, kChunk); }

const char* add_up_by_id(const float* dz, const Ids& ids, const int64_t* order, float* partials, void* gradient,
                         DType dtype, int64_t tokens, int64_t channels, int64_t padding_idx, void* stream) {
  if (table_chunks(tokens) > INT32_MAX) return "the tensor is too large for one launch";
  const bool vectors = channels % 4 == 0 && is_aligned(dz, 16) && is_aligned(partials, 16) && is_aligned(gradient, 16);
  return for_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    const TableSum<T> table{dz, ids, order, partials, static_cast<T*>(gradient), tokens, channels, padding_idx};
    return launch_table_sum(table, vectors, stream);
  });
}

}  // namespace fastbert::cuda
