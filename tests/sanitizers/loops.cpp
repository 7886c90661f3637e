// Calls the loops of csrc/cpu/loops as the torch sides csrc/cpu/<op>.cpp do, without torch: in four threads on disjoint
// rows, chunks and tasks of shared inputs, and again in one thread, which must give the same bits. Every buffer has
// exactly the size that the headers require, and starts with other bytes in each run, so a byte that is not written
// makes the runs differ.
//
//   loops          all checks; 1 if a result differs
//   loops FAULT    a wrong call that a sanitizer has to report: race, overwrite, overread or overflow
//
// run.py builds it with each sanitizer. OpenMP's barriers are invisible to ThreadSanitizer, hence std::thread.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "attention.h"
#include "bias_gelu.h"
#include "cross_entropy.h"
#include "embedding.h"
#include "few_rows.h"
#include "layer_norm.h"
#include "linear_max.h"
#include "matrix_product.h"
#include "packed_linear.h"
#include "ranges.h"
#include "team.h"

using namespace fastbert;
namespace loops = fastbert::cpu::FB_ISA;

namespace {

// Around the widths of vectors, and around BERT's width.
constexpr int64_t kSizes[] = {1, 7, 8, 9, 15, 17, 33, 767, 769};
constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16, DType::f64};
constexpr const char* kNames[] = {"f32", "bf16", "f16", "f64"};

constexpr int kThreads = 4;
constexpr int64_t kRows = 13, kChunkRows = 3, kChunks = (kRows + kChunkRows - 1) / kChunkRows;

const Dropout kDropRows{0x0123456789ABCDEF, 6554, 65536.0 / (65536 - 6554)};
const Dropout kDropScores{0x0123456789ABCDEF, 26, 256.0 / (256 - 26)};

// ---- memory

using Bytes = std::vector<char>;
using Results = std::vector<Bytes>;

int64_t size_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }
DType math_of(DType dtype) { return dtype == DType::f64 ? dtype : DType::f32; }

Bytes filled(int64_t elements, DType dtype, int with) { return Bytes(elements * size_of(dtype), char(with)); }

// Finite values of either sign, of magnitude 2^-11 to 4: normal numbers in every type.
Bytes values(int64_t elements, DType dtype) {
  static std::mt19937 random(0);
  Bytes bytes(elements * size_of(dtype));
  for (int64_t i = 0; i < elements; ++i) {
    const float v = (float(random() % 8192) - 4095.5f) / 1024;
    const double wide = v;
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    uint16_t half = uint16_t(bits >> 16);
    if (dtype == DType::f16) half = uint16_t((half & 0x8000) | (((bits & 0x7fffffff) >> 13) - (112 << 10)));
    const void* const from = dtype == DType::f64 ? (const void*)&wide : dtype == DType::f32 ? &v : (const void*)&half;
    memcpy(bytes.data() + i * size_of(dtype), from, size_of(dtype));
  }
  return bytes;
}

// ---- threads

// Calls f(begin, end) on equal ranges, each in its own thread.
template <class F>
void in_threads(int threads, int64_t count, const F& f) {
  std::vector<std::thread> pool;
  for (int i = 0; i < threads; ++i) pool.emplace_back(f, count * i / threads, count * (i + 1) / threads);
  for (std::thread& thread : pool) thread.join();
}

// Calls f(i, first row, last row) for chunks of rows, as sum_rows in csrc/tensor.h does.
template <class F>
void in_chunks(int threads, const F& f) {
  in_threads(threads, kChunks, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) f(i, i * kChunkRows, std::min(kRows, (i + 1) * kChunkRows));
  });
}

int checks = 0, differences = 0;

// Checks that run(threads) gives the same results for one thread as for four. It fills its buffers with `threads`.
template <class F>
void same(const std::string& what, const F& run) {
  ++checks;
  if (run(1) == run(kThreads)) return;
  ++differences;
  fprintf(stderr, "%s: four threads give other bits than one\n", what.c_str());
}

std::string name(const char* op, int64_t size, DType dtype, const char* kind) {
  return std::string(op) + " " + kNames[int(dtype)] + " " + std::to_string(size) + kind;
}

// ---- bias_gelu

void check_bias_gelu(int64_t C, DType dtype, bool with_bias, bool tanh) {
  const DType math = math_of(dtype);
  const Bytes x = values(kRows * C, dtype), dy = values(kRows * C, dtype), parameter = values(C, math);
  const void* const bias = with_bias ? parameter.data() : nullptr;
  const int64_t row = C * size_of(dtype), sums = C * size_of(math);
  same(name("bias_gelu", C, dtype, with_bias ? " with a bias" : ""), [&](int threads) {
    Bytes y = filled(kRows * C, dtype, threads), in_place = x, dx = y, dbias = filled(kChunks * C, math, 0);
    in_threads(threads, kRows, [&](int64_t begin, int64_t end) {
      const int64_t at = begin * row, rows = end - begin;
      loops::bias_gelu_fwd(x.data() + at, bias, y.data() + at, rows, C, dtype, tanh);
      loops::bias_gelu_fwd(in_place.data() + at, bias, in_place.data() + at, rows, C, dtype, tanh);
    });
    in_chunks(threads, [&](int64_t i, int64_t begin, int64_t end) {
      const int64_t at = begin * row;
      loops::bias_gelu_bwd(dy.data() + at, x.data() + at, bias, dx.data() + at, dbias.data() + i * sums, end - begin, C,
                           dtype, tanh);
    });
    if (in_place != y) fprintf(stderr, "bias_gelu in place gives other bits\n"), ++differences;
    return Results{y, dx, dbias};
  });
}

// ---- layer_norm

// residual_type: nullptr for layer_norm.
void check_layer_norm(int64_t C, DType x_type, const DType* residual_type, Dropout drop) {
  const DType math = math_of(x_type);
  const bool sum = residual_type, mixed = sum && *residual_type != x_type, shared = sum && !mixed && !drop.threshold;
  const DType r_type = sum ? *residual_type : x_type, y_type = mixed ? DType::f32 : x_type;
  const Bytes x = values(kRows * C, x_type), residual = values(kRows * C, r_type), dy = values(kRows * C, y_type);
  const Bytes x_bias = values(C, math), weight = values(C, math), bias = values(C, math);
  const char* const kind = drop.threshold ? " with dropout" : sum ? " of a sum" : "";
  same(name("layer_norm", C, x_type, kind), [&](int threads) {
    Bytes y = filled(kRows * C, y_type, threads), dx = filled(shared ? 0 : kRows * C, x_type, threads);
    Bytes dresidual = filled(sum ? kRows * C : 0, r_type, threads);
    Bytes mean = filled(kRows, math, threads), rstd = mean, dweight = filled(kChunks * C, math, 0), dbias = dweight;
    Bytes dx_bias = filled(sum ? kChunks * C : 0, math, 0);
    LayerNorm op{x.data(),
                 sum ? residual.data() : nullptr,
                 sum ? x_bias.data() : nullptr,
                 weight.data(),
                 bias.data(),
                 mean.data(),
                 rstd.data(),
                 C,
                 1e-12,
                 drop,
                 x_type,
                 r_type,
                 y_type};
    in_threads(threads, kRows, [&](int64_t begin, int64_t end) {
      Bytes scratch(loops::layer_norm_scratch(C), char(threads));
      loops::layer_norm_fwd(op, y.data(), begin, end, scratch.data());
    });
    op.bias = nullptr;
    in_chunks(threads, [&](int64_t i, int64_t begin, int64_t end) {
      Bytes scratch(loops::layer_norm_scratch(C), char(threads));
      const int64_t at = i * C * size_of(math);
      const LayerNormGradients gradients{
          dy.data(),         shared ? nullptr : dx.data(),       sum ? dresidual.data() : nullptr, dweight.data() + at,
          dbias.data() + at, sum ? dx_bias.data() + at : nullptr};
      loops::layer_norm_bwd(op, gradients, begin, end, scratch.data());
    });
    return Results{y, mean, rstd, dx, dresidual, dweight, dbias, dx_bias};
  });
}

void check_layer_norms(int64_t C, DType dtype) {
  check_layer_norm(C, dtype, nullptr, {});
  for (const DType residual : kTypes) {
    if (math_of(residual) != math_of(dtype)) continue;  // refused by the torch side
    for (const Dropout& drop : {Dropout{}, kDropRows}) check_layer_norm(C, dtype, &residual, drop);
  }
}

// ---- embedding

void check_embedding(int64_t C, DType dtype, bool token_types, Dropout drop) {
  const DType math = math_of(dtype);
  // The last row of each table is among them.
  const std::vector<int64_t> words{0, 10, 3, 7, 10, 4, 5, 5, 5, 9, 0, 1, 2};
  const std::vector<int64_t> positions{0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2},
      types{0, 0, 0, 1, 1, 1, 0, 1, 0, 1, 0, 1, 0};
  const Bytes word = values(11 * C, dtype), position = values(5 * C, dtype), type = values(2 * C, dtype);
  const Bytes weight = values(C, math), bias = values(C, math), dy = values(kRows * C, dtype);
  same(name("embedding", C, dtype, drop.threshold ? " with dropout" : ""), [&](int threads) {
    Bytes y = filled(kRows * C, dtype, threads), dz = filled(kRows * C, math, threads);
    Bytes mean = filled(kRows, math, threads), rstd = mean, dweight = filled(kChunks * C, math, 0), dbias = dweight;
    Embedding op{{{words.data(), word.data()}, {positions.data(), position.data()}, {}},
                 weight.data(),
                 bias.data(),
                 mean.data(),
                 rstd.data(),
                 C,
                 1e-12,
                 drop,
                 dtype};
    if (token_types) op.lookups[2] = {types.data(), type.data()};
    in_threads(threads, kRows, [&](int64_t begin, int64_t end) {
      Bytes scratch(loops::embedding_scratch(C), char(threads));
      loops::embedding_fwd(op, y.data(), begin, end, scratch.data());
    });
    in_chunks(threads, [&](int64_t i, int64_t begin, int64_t end) {
      Bytes scratch(loops::embedding_scratch(C), char(threads));
      const int64_t at = i * C * size_of(math);
      const EmbeddingGradients gradients{dy.data(), dz.data(), dweight.data() + at, dbias.data() + at};
      loops::embedding_bwd(op, gradients, begin, end, scratch.data());
    });
    Bytes dtypes = filled(2 * C, dtype, threads);
    in_threads(threads, 2, [&](int64_t begin, int64_t end) {
      Bytes scratch(C * size_of(math), char(threads));
      for (int64_t row = begin; row < end; ++row) {
        std::vector<int64_t> tokens;
        for (int64_t token = 0; token < kRows; ++token)
          if (types[token] == row) tokens.push_back(token);
        loops::embedding_row(dz.data(), tokens.data(), int64_t(tokens.size()), C, dtype,
                             dtypes.data() + row * C * size_of(dtype), scratch.data());
      }
    });
    return Results{y, mean, rstd, dz, dweight, dbias, dtypes};
  });
}

// ---- attention

// Packed sequences. A task is a head of one, in the forward a part of its queries.
struct Attention {
  static constexpr int64_t kHeads = 2, kParts = 2;
  const std::vector<int64_t> lengths;
  const int64_t D;
  const DType dtype, math = math_of(dtype);
  const Dropout drop;
  int64_t tokens = 0;
  std::vector<int64_t> start;
  Bytes qkv, dout;

  Attention(std::vector<int64_t> lengths_, int64_t D_, DType dtype_, Dropout drop_)
      : lengths(lengths_), D(D_), dtype(dtype_), drop(drop_) {
    for (const int64_t length : lengths) start.push_back(tokens), tokens += length;
    qkv = values(tokens * 3 * out_stride(), dtype), dout = values(tokens * out_stride(), dtype);
  }

  int64_t out_stride() const { return kHeads * D; }
  int64_t tasks() const { return kHeads * int64_t(lengths.size()); }
  int64_t sequence(int64_t task) const { return task % int64_t(lengths.size()); }
  int64_t head(int64_t task) const { return task / int64_t(lengths.size()); }
  // In bytes, of a task's first element.
  int64_t qkv_at(int64_t task) const { return (start[sequence(task)] * 3 * kHeads + head(task)) * D * size_of(dtype); }
  int64_t out_at(int64_t task) const { return (start[sequence(task)] * kHeads + head(task)) * D * size_of(dtype); }
  int64_t lse_at(int64_t task) const { return (head(task) * tokens + start[sequence(task)]) * size_of(math); }

  cpu::AttentionHead of(int64_t task, const cpu::Positions* positions) const {
    const int64_t part = out_stride() * size_of(dtype);
    const char* const q = qkv.data() + qkv_at(task);
    return {q,    q + part, q + 2 * part, 3 * out_stride(), lengths[sequence(task)], D, 0.3, head(task), sequence(task),
            drop, dtype,    positions};
  }

  // positions_of: those of a task, for relative attention.
  Results run(int threads, const std::function<cpu::Positions(int64_t)>& positions_of = nullptr) const {
    Bytes out = filled(tokens * out_stride(), dtype, threads), lse = filled(kHeads * tokens, math, threads);
    Bytes dqkv = filled(tokens * 3 * out_stride(), dtype, threads);
    const int64_t parts = threads == 1 ? 1 : kParts, step = out_stride() * size_of(dtype);
    in_threads(threads, tasks() * parts, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t task = i / parts;
        const cpu::Positions positions = positions_of ? positions_of(task) : cpu::Positions{};
        const cpu::AttentionHead a = of(task, positions_of ? &positions : nullptr);
        const int64_t blocks = (a.keys + cpu::kAttentionQueries - 1) / cpu::kAttentionQueries;
        const auto query = [&](int64_t part) {
          return std::min(a.keys, blocks * part / parts * cpu::kAttentionQueries);
        };
        const int64_t first = query(i % parts), last = query(i % parts + 1);
        Bytes room(loops::attention_fwd_room(a), char(threads));
        if (first < last)
          loops::attention_fwd(a, first, last, out.data() + out_at(task), out_stride(), lse.data() + lse_at(task),
                               room.data());
      }
    });
    in_threads(threads, tasks(), [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const cpu::Positions positions = positions_of ? positions_of(task) : cpu::Positions{};
        const cpu::AttentionHead a = of(task, positions_of ? &positions : nullptr);
        Bytes room(loops::attention_bwd_room(a), char(threads));
        char* const dq = dqkv.data() + qkv_at(task);
        loops::attention_bwd(a, dout.data() + out_at(task), out.data() + out_at(task), out_stride(),
                             lse.data() + lse_at(task), dq, dq + step, dq + 2 * step, room.data());
      }
    });
    return {out, lse, dqkv};
  }
};

// The tables of relative positions, packed for each head, and their gradients: of each task, then of all.
struct RelativePositions {
  static constexpr int64_t kSlots = 21, kHeads = Attention::kHeads;
  const Attention& attention;
  const int64_t longest, steps = 2 * longest - 1, D = attention.D;
  std::vector<int32_t> by_key, by_query, slot_by_key, slot_by_query;
  Bytes keys, queries, bias;
  cpu::PositionRoom room;
  std::vector<Bytes> packed;  // of each head: keys across and in rows, queries likewise
  std::vector<Bytes> pairs;   // of each head: keys and queries across, where scores are made in pairs

  explicit RelativePositions(const Attention& attention_)
      : attention(attention_), longest(*std::max_element(attention.lengths.begin(), attention.lengths.end())) {
    for (int64_t step = 0; step < steps; ++step) {  // a slot for each of the nearest distances, then one for two
      const int64_t from = step - longest, far = std::abs(from) <= 4 ? from : from / 2 + (from > 0 ? 2 : -2);
      const int32_t slot = int32_t(std::clamp<int64_t>(kSlots / 2 + far, 0, kSlots - 1));
      if (slot_by_key.empty() || slot_by_key.back() != slot) slot_by_key.push_back(slot);
      by_key.push_back(int32_t(slot_by_key.size()) - 1);
    }
    slot_by_query.assign(slot_by_key.rbegin(), slot_by_key.rend());
    for (auto column = by_key.rbegin(); column != by_key.rend(); ++column) by_query.push_back(columns() - 1 - *column);
    keys = values(kSlots * kHeads * D, attention.dtype), queries = values(kSlots * kHeads * D, attention.dtype);
    bias = values(steps, attention.math), room = loops::position_room(columns(), D, attention.dtype);
    for (int64_t head = 0; head < kHeads; ++head)
      for (const auto& [table, slot] : {std::pair{&keys, &slot_by_key}, {&queries, &slot_by_query}}) {
        packed.emplace_back(room.across), packed.emplace_back(room.rows);
        Bytes scratch(columns() * D * size_of(attention.math));
        loops::pack_positions(of_head(*table, head, *slot), 0.3, packed.rbegin()[1].data(), packed.back().data(),
                              scratch.data());
        if (!loops::positions_in_pairs(attention.dtype, D)) continue;
        loops::pack_position_pairs(of_head(*table, head, *slot), pairs.emplace_back(room.across).data(),
                                   scratch.data());
      }
  }

  int32_t columns() const { return int32_t(slot_by_key.size()); }
  cpu::PositionTable of_head(const Bytes& table, int64_t head, const std::vector<int32_t>& slot) const {
    return {table.data() + head * D * size_of(attention.dtype),
            kHeads * D,
            kSlots,
            D,
            attention.dtype,
            slot.data(),
            columns()};
  }
  cpu::Positions of(int64_t task) const {
    const Bytes* const parts = &packed[4 * attention.head(task)];
    cpu::Positions positions{longest,         columns(),       by_key.data(),   by_query.data(), parts[0].data(),
                             parts[2].data(), parts[1].data(), parts[3].data(), bias.data()};
    if (pairs.empty()) return positions;
    const Bytes* const of_head = &pairs[2 * attention.head(task)];
    positions.keys = of_head[0].data(), positions.queries = of_head[1].data(), positions.pairs = true;
    return positions;
  }

  Results run(int threads) const {
    std::vector<Results> gradients;  // of tasks
    for (int64_t task = 0; task < attention.tasks(); ++task)
      gradients.push_back({Bytes(room.rows), Bytes(room.rows), Bytes(steps * size_of(attention.math))});
    Results results = attention.run(threads, [&](int64_t task) {
      cpu::Positions positions = of(task);
      positions.dkeys = gradients[task][0].data(), positions.dqueries = gradients[task][1].data();
      positions.dbias = gradients[task][2].data();
      return positions;
    });
    for (const Results& of_task : gradients) results.insert(results.end(), of_task.begin(), of_task.end());
    Bytes dkeys = filled(kSlots * kHeads * D, attention.dtype, threads);
    const int64_t wide = room.rows / columns() / size_of(attention.math);  // whole panels of D
    in_threads(threads, kHeads, [&](int64_t begin, int64_t end) {
      Bytes sums(kSlots * wide * size_of(attention.math), char(threads));
      for (int64_t head = begin; head < end; ++head) {
        std::vector<const void*> parts;
        for (int64_t task = 0; task < attention.tasks(); ++task)
          if (attention.head(task) == head) parts.push_back(gradients[task][0].data());
        loops::add_up_positions(parts.data(), int64_t(parts.size()), 0.3, of_head(dkeys, head, slot_by_key),
                                sums.data());
      }
    });
    results.push_back(dkeys);
    return results;
  }
};

void check_relative_attention(std::vector<int64_t> lengths, int64_t D, DType dtype, Dropout drop) {
  const Attention attention(lengths, D, dtype, drop);
  const RelativePositions positions(attention);
  same(name("relative_attention", D, dtype, drop.threshold ? " with dropout" : ""),
       [&](int threads) { return positions.run(threads); });
}

void check_attention(std::vector<int64_t> lengths, int64_t D, DType dtype, Dropout drop) {
  const Attention attention(lengths, D, dtype, drop);
  same(name("attention", D, dtype, drop.threshold ? " with dropout" : ""),
       [&](int threads) { return attention.run(threads); });
}

// Calls f(row, row end, column, column end, scratch) on blocks of at most `most` rows, whose panels threads share, as
// csrc/cpu/product_blocks.h does.
template <class F>
void in_blocks(int threads, int64_t rows, int64_t most, int64_t columns, int64_t width, int64_t scratch_bytes,
               const F& f) {
  const int64_t blocks = (rows + most - 1) / most, panels = (columns + width - 1) / width;
  in_threads(threads, blocks * panels, [&](int64_t begin, int64_t end) {
    Bytes scratch(scratch_bytes, char(threads));
    for (int64_t unit = begin, count; unit < end; unit += count) {
      const int64_t block = unit / panels, panel = unit % panels;
      count = std::min(panels - panel, end - unit);
      f(cpu::first_row(block, blocks, rows), cpu::first_row(block + 1, blocks, rows), panel * width,
        std::min(columns, (panel + count) * width), scratch.data());
    }
  });
}

// ---- packed_linear

// A dense layer of small integers, whose results plain integer arithmetic gives too. Each row of x has a 127, so that
// int8 holds it as it is. Between y's rows lie `gap` elements, which stay as they are.
struct PackedLayer {
  static constexpr int64_t gap = 3;
  const int64_t rows, inner, channels;
  const DType dtype;
  const Weights weights;
  const int64_t width = loops::packed_width(), panels = (channels + width - 1) / width;
  // What an instruction adds up, and how many of those there are.
  const int64_t group = loops::packed_group(weights), groups = (inner + group - 1) / group;
  std::vector<int> x, weight, bias;  // (rows, inner), (channels, inner), (channels,)

  // Of magnitude `most` at most.
  static int number(int most) {
    static std::mt19937 random(0);
    return int(random() % (2 * most + 1)) - most;
  }

  // extreme: rows of nothing but 127 or -127, channels of nothing but 127 or -128.
  PackedLayer(int64_t rows_, int64_t inner_, int64_t channels_, DType dtype_, Weights weights_, bool extreme)
      : rows(rows_), inner(inner_), channels(channels_), dtype(dtype_), weights(weights_) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < inner; ++k) x.push_back(extreme ? 127 - r % 2 * 254 : k == r % inner ? 127 : number(8));
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t k = 0; k < inner; ++k) weight.push_back(extreme ? 127 - c % 2 * 255 : number(3));
    for (int64_t c = 0; c < channels; ++c) bias.push_back(number(9));
  }

  // Integers as elements of a type.
  static Bytes as(const std::vector<int>& numbers, DType type) {
    Bytes bytes(numbers.size() * size_of(type));
    for (size_t i = 0; i < numbers.size(); ++i) write(float(numbers[i]), bytes, i, type);
    return bytes;
  }
  static void write(float number, Bytes& to, int64_t i, DType type) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    const uint16_t bf16 = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    const _Float16 f16 = static_cast<_Float16>(number);
    const void* const from = type == DType::f32    ? (const void*)&number
                             : type == DType::bf16 ? (const void*)&bf16
                                                   : &f16;
    memcpy(to.data() + i * size_of(type), from, size_of(type));
  }

  // (panels, groups, width, group), zeros where there is nothing.
  Bytes packed() const {
    std::vector<int> all(panels * groups * width * group);
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t k = 0; k < inner; ++k)
        all[((c / width * groups + k / group) * width + c % width) * group + k % group] = weight[c * inner + k];
    if (weights == Weights::s8) return Bytes(all.begin(), all.end());
    return as(all, weights == Weights::f32 ? DType::f32 : DType::bf16);
  }

  void check_packing() const {
    std::vector<int> transposed(weight.size());
    for (int64_t i = 0; i < channels * inner; ++i) transposed[i % inner * channels + i / inner] = weight[i];
    const Bytes expected = packed();
    for (const bool across : {false, true}) {
      const Bytes plain = as(across ? transposed : weight, DType::f32);
      Bytes made(expected.size());
      loops::pack_weight(reinterpret_cast<const float*>(plain.data()), across ? channels : inner, across, inner,
                         channels, reinterpret_cast<float*>(made.data()));
      if (made == expected) continue;
      ++differences;
      fprintf(stderr, "pack_weight: %d to %d: not packed\n", int(inner), int(channels));
    }
  }

  // The factor of each channel, 1, and the sum of its weights.
  std::vector<float> scale() const {
    std::vector<float> all(2 * channels, 1.f);
    for (int64_t c = 0; c < channels; ++c) {
      int64_t sum = 0;
      for (int64_t k = 0; k < inner; ++k) sum += weight[c * inner + k];
      all[channels + c] = float(sum);
    }
    return all;
  }

  // y, where it began as bytes of `with`.
  Bytes in_integers(int with) const {
    Bytes y = filled(rows * (channels + gap), dtype, with);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < channels; ++c) {
        int64_t sum = 0;
        for (int64_t k = 0; k < inner; ++k) sum += int64_t(x[r * inner + k]) * weight[c * inner + k];
        write(float(sum) + float(bias[c]), y, r * (channels + gap) + c, dtype);
      }
    return y;
  }

  Results run(int threads, Gelu gelu) const {
    const Bytes elements = as(x, dtype), panels_ = packed(), biases = as(bias, DType::f32);
    const std::vector<float> factors = scale();
    const int64_t left_bytes = loops::packed_left_bytes(inner, dtype, weights);
    // The last tile is not all written.
    Bytes left(cpu::whole_tiles(rows) * left_bytes, 0), y = filled(rows * (channels + gap), dtype, threads);
    std::vector<float> left_scale(weights == Weights::s8 ? rows : 0);
    const cpu::PackedLinear op{elements.data(),
                               panels_.data(),
                               weights == Weights::s8 ? factors.data() : nullptr,
                               reinterpret_cast<const float*>(biases.data()),
                               y.data(),
                               rows,
                               inner,
                               channels,
                               inner,
                               channels + gap,
                               dtype,
                               dtype,
                               weights,
                               gelu,
                               left_bytes ? left.data() : nullptr,
                               weights == Weights::s8 ? left_scale.data() : nullptr,
                               nullptr};
    if (left_bytes) in_threads(threads, rows, [&](int64_t begin, int64_t end) { loops::packed_left(op, begin, end); });
    in_blocks(threads, rows, loops::packed_rows(), channels, width, loops::packed_scratch(),
              [&](auto... block) { loops::packed_linear(op, block...); });
    if (gelu == Gelu::none) check_integers(y, threads);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = channels; c < channels + gap; ++c) write(0, y, r * (channels + gap) + c, dtype);
    return {left, y};
  }

  void check_integers(const Bytes& y, int with) const {
    if (y == in_integers(with)) return;
    ++differences;
    fprintf(stderr, "%d rows, %d to %d: not what integers give\n", int(rows), int(inner), int(channels));
  }

  // With the rows of x packed in place of the weight.
  void check_turned(int threads) const {
    const int64_t unit = loops::turned_rows();
    const Bytes elements = as(x, dtype), weights_ = as(weight, dtype), biases = as(bias, dtype);
    Bytes packed_x((rows + width - 1) / width * width * inner * size_of(dtype)),
        y = filled(rows * (channels + gap), dtype, threads);
    loops::pack_weight(reinterpret_cast<const float*>(elements.data()), inner, false, inner, rows,
                       reinterpret_cast<float*>(packed_x.data()));
    const cpu::PackedLinear op{
        weights_.data(), packed_x.data(), nullptr, biases.data(), y.data(),   channels, inner,   rows,           inner,
        channels + gap,  dtype,           dtype,   weights,       Gelu::none, nullptr,  nullptr, weights_.data()};
    in_threads(threads, (channels + unit - 1) / unit, [&](int64_t begin, int64_t end) {
      Bytes scratch(loops::packed_scratch(), char(threads));
      for (int64_t row = begin * unit; row < std::min(end * unit, channels); row += unit)
        loops::turned_linear(op, row, std::min(row + unit, channels), scratch.data());
    });
    ++checks;
    check_integers(y, threads);
  }
};

void check_packed_linears(DType dtype, Weights weights, const char* kind) {
  const auto check = [&](int64_t rows, int64_t inner, int64_t channels, bool extreme = false) {
    const PackedLayer layer(rows, inner, channels, dtype, weights, extreme);
    if (weights == Weights::f32) layer.check_packing();
    if (weights == Weights::f32 && dtype == DType::f32 && inner) layer.check_turned(2);
    for (const Gelu gelu : {Gelu::none, Gelu::erf, Gelu::tanh})
      same(name("packed_linear", inner, dtype, kind) + " to " + std::to_string(channels),
           [&](int threads) { return layer.run(threads, gelu); });
  };
  for (const int64_t size : kSizes) check(kRows, size, 19), check(kRows, 11, size);
  check(loops::packed_rows() + 1, 300, 53);  // two blocks of rows, and of what a chain adds up
  check(2, 5, 0), check(2, 0, 5);
  if (weights == Weights::bf16 && dtype == DType::bf16)
    check(kRows, 514, 53), check(kRows, 2048, 53);  // two chains of pairs; rows that are copied
  if (weights == Weights::s8 && dtype == DType::f32) check(2, 1 << 16, 3, true);  // the largest sums
}

// ---- matrix_product

// A matrix of small integers, whose rows lie `gap` elements apart, and end with the last one's.
struct Integers {
  static constexpr int64_t gap = 5;
  const int64_t rows, columns, stride = columns + gap;
  std::vector<int> numbers;

  Integers(int64_t rows_, int64_t columns_) : rows(rows_), columns(columns_) {
    const int64_t count = rows && columns ? (rows - 1) * stride + columns : 0;
    for (int64_t i = 0; i < count; ++i) numbers.push_back(PackedLayer::number(4));
  }
  int at(int64_t row, int64_t column, bool transposed = false) const {
    return transposed ? numbers[column * stride + row] : numbers[row * stride + column];
  }
};

// c = a b, with a bias if the number of rows is even, where a or b may be transposed; and what integer arithmetic
// gives.
void check_matrix_product(int64_t rows, int64_t inner, int64_t columns, DType dtype) {
  for (const int transposed : {0, 1, 2, 3}) {
    const bool a_transposed = transposed & 1, b_transposed = transposed & 2;
    const Integers a(a_transposed ? inner : rows, a_transposed ? rows : inner),
        b(b_transposed ? columns : inner, b_transposed ? inner : columns), bias(1, columns);
    std::vector<int> sums;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) {
        int sum = rows % 2 ? 0 : bias.at(0, c);
        for (int64_t k = 0; k < inner; ++k) sum += a.at(r, k, a_transposed) * b.at(k, c, b_transposed);
        sums.push_back(sum);
      }
    const Bytes as = PackedLayer::as(a.numbers, dtype), bs = PackedLayer::as(b.numbers, dtype),
                biases = PackedLayer::as(bias.numbers, dtype);
    constexpr const char* kWhich[] = {"", ", a transposed", ", b transposed", ", both transposed"};
    same(name("matrix_product", inner, dtype, kWhich[transposed]), [&](int threads) {
      Bytes c = filled(rows * columns, dtype, threads);
      const cpu::MatrixProduct op{as.data(),    bs.data(), rows % 2 ? nullptr : biases.data(),
                                  c.data(),     inner,     columns,
                                  a.stride,     b.stride,  a_transposed,
                                  b_transposed, dtype};
      in_blocks(threads, rows, loops::product_rows(), columns, loops::product_width(), loops::product_scratch(),
                [&](auto... block) { loops::matrix_product(op, block...); });
      if (c != PackedLayer::as(sums, dtype)) {
        ++differences;
        fprintf(stderr, "%d by %d by %d: not what integers give\n", int(rows), int(inner), int(columns));
      }
      return Results{c};
    });
  }
}

// ---- few_rows

// y = x weight^T, with a bias if the number of rows is even; and what integer arithmetic gives.
void check_few_rows(int64_t rows, int64_t inner, int64_t channels, DType dtype) {
  const int most = inner > 60 ? 1 : 2;  // so that bf16 has all sums
  const auto integers = [&](int64_t count) {
    std::vector<int> of;
    while (int64_t(of.size()) < count) of.push_back(PackedLayer::number(most));
    return of;
  };
  const std::vector<int> x = integers(rows * inner), weight = integers(channels * inner), bias = integers(channels);
  std::vector<int> sums;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t channel = 0; channel < channels; ++channel) {
      int sum = rows % 2 ? 0 : bias[channel];
      for (int64_t k = 0; k < inner; ++k) sum += x[row * inner + k] * weight[channel * inner + k];
      sums.push_back(sum);
    }
  const Bytes xs = PackedLayer::as(x, dtype), weights = PackedLayer::as(weight, dtype),
              biases = PackedLayer::as(bias, dtype);
  same(name("few_rows", inner, dtype, " to ") + std::to_string(channels), [&](int threads) {
    Bytes y = filled(rows * channels, dtype, threads);
    const cpu::FewRows op{
        xs.data(), weights.data(), rows % 2 ? nullptr : biases.data(), y.data(), rows, inner, channels, dtype,
        nullptr,   rows > 3};
    const int64_t width = loops::few_rows_width();
    in_threads(threads, (channels + width - 1) / width, [&](int64_t begin, int64_t end) {
      cpu::FewRows part = op;
      part.next = end * width < channels ? nullptr : weights.data();
      loops::few_rows(part, begin * width, std::min(channels, end * width));
    });
    if (y != PackedLayer::as(sums, dtype)) {
      ++differences;
      fprintf(stderr, "few_rows, %d by %d by %d: not what integers give\n", int(rows), int(inner), int(channels));
    }
    return Results{y};
  });
}

// ---- cross_entropy

// Losses and gradients of rows, of which every third has no label.
void check_cross_entropy(int64_t rows, int64_t inner, int64_t classes, DType dtype) {
  const bool pairs = loops::cross_entropy_takes_pairs(dtype, inner);
  const Bytes x = values(rows * inner, pairs ? dtype : math_of(dtype)), weight = values(classes * inner, dtype),
              bias = values(classes, math_of(dtype));
  std::vector<int64_t> labels;
  for (int64_t row = 0; row < rows; ++row) labels.push_back(row % 3 ? classes - 1 - row % classes : -1);
  const cpu::CrossEntropyRoom room = loops::cross_entropy_room(dtype, inner);
  constexpr int64_t gap = 3;
  const int64_t stride = classes + gap, tasks = (classes + room.classes - 1) / room.classes;
  same(name("cross_entropy", inner, dtype, " to ") + std::to_string(classes), [&](int threads) {
    Bytes dlogits = filled((rows - 1) * stride + classes, dtype, threads), losses = filled(rows, DType::f64, threads),
          targets = filled(rows, math_of(dtype), threads), parts(tasks * rows * room.part, char(threads));
    const cpu::CrossEntropy op{x.data(),       weight.data(),  bias.data(),
                               labels.data(),  dlogits.data(), reinterpret_cast<double*>(losses.data()),
                               targets.data(), parts.data(),   rows,
                               inner,          classes,        stride,
                               dtype};
    in_threads(threads, tasks, [&](int64_t begin, int64_t end) {
      Bytes scratch(room.scratch, char(threads));
      for (int64_t task = begin; task < end; ++task) {
        loops::cross_entropy_logits(op, task, 0, rows / 2, scratch.data());
        loops::cross_entropy_logits(op, task, rows / 2, rows, scratch.data());
      }
    });
    in_threads(threads, rows, [&](int64_t begin, int64_t end) { loops::cross_entropy_rows(op, tasks, begin, end); });
    for (int64_t row = 1; row < rows; ++row)  // what lies between the rows stays as it was
      memset(dlogits.data() + (row * stride - gap) * size_of(dtype), 0, gap * size_of(dtype));
    return Results{dlogits, losses};
  });
}

// ---- linear_max, forward

void check_linear_max(int64_t rows, int64_t inner, int64_t classes, DType dtype) {
  const bool pairs = loops::linear_max_takes_pairs(dtype, inner);
  const Bytes x = values(rows * inner, pairs ? dtype : math_of(dtype)), weight = values(classes * inner, dtype),
              bias = values(classes, math_of(dtype));
  const std::vector<int64_t> bounds{0, 1, 1, rows};  // an empty sequence among them
  const int64_t sequences = int64_t(bounds.size()) - 1, width = loops::linear_max_width(dtype);
  same(name("linear_max", inner, dtype, " to ") + std::to_string(classes), [&](int threads) {
    Bytes y = filled(sequences * classes, dtype, threads), places = filled(sequences * classes, DType::f32, threads);
    const cpu::LinearMax op{
        x.data(), weight.data(), bias.data(), bounds.data(), y.data(), reinterpret_cast<int32_t*>(places.data()),
        inner,    classes,       sequences,   dtype};
    in_threads(threads, (classes + width - 1) / width, [&](int64_t begin, int64_t end) {
      Bytes scratch(loops::linear_max_scratch(inner, dtype), char(threads));
      for (int64_t task = begin; task < end; ++task)
        loops::linear_max_fwd(op, task * width, std::min(classes, (task + 1) * width), scratch.data());
    });
    return Results{y, places};
  });
}

void check_maxima(int64_t rows, int64_t columns, DType dtype) {
  const Bytes logits = values(rows * columns, DType::f32);
  const std::vector<int64_t> bounds{0, 1, 1, rows};
  const int64_t sequences = int64_t(bounds.size()) - 1;
  same(name("maxima_of_logits", columns, dtype, ""), [&](int threads) {
    Bytes y = filled(sequences * columns, dtype, threads);
    const cpu::Maxima op{
        reinterpret_cast<const float*>(logits.data()), bounds.data(), y.data(), columns, columns, sequences, dtype};
    in_threads(threads, columns, [&](int64_t begin, int64_t end) { loops::maxima_of_logits(op, begin, end); });
    return Results{y};
  });
}

// ---- teams

// A program of short loops, each of which reads what other members wrote in the one before. The last `late` members
// come when it is half done, or have nothing left to do.
void check_team(int64_t numbers, int late) {
  same("a team with " + std::to_string(late) + " late members", [&](int threads) {
    std::vector<uint64_t> x(numbers, 1), y(numbers);
    Team team(threads);
    std::atomic<bool> half_done{false};
    in_threads(threads, threads, [&](int64_t member, int64_t) {
      while (member && member >= threads - late && !half_done) std::this_thread::yield();
      if (member) return team.stand_by(member);
      team.run([&] {
        for (int loop = 0; loop < 300; ++loop) {
          half_done = loop >= 150;
          Team::current()->share(numbers, loop % 5, [&](int64_t first, int64_t last) {
            Team::current()->share(last - first, 1, [&](int64_t begin, int64_t end) {  // in this thread alone
              for (int64_t i = first + begin; i < first + end; ++i) y[i] = 31 * x[(7 * i + 3) % numbers] + uint64_t(i);
            });
          });
          x.swap(y);
        }
      });
    });
    Bytes bytes(numbers * 8);
    if (numbers) memcpy(bytes.data(), x.data(), bytes.size());
    return Results{bytes};
  });
}

// What two members throw reaches the program once, when all are done, and the loops after it are shared as before.
void check_team_throws(int64_t thrower) {
  std::vector<int> done(kThreads);
  int caught = 0;
  Team team(kThreads);
  in_threads(kThreads, kThreads, [&](int64_t member, int64_t) {
    if (member) return team.stand_by(member);
    team.run([&] {
      for (int loop = 0; loop < 50; ++loop) {
        try {
          Team::current()->share(kThreads, 1, [&](int64_t part, int64_t) {
            if (++done[part]; (part == thrower || part == kThreads - 1) && loop % 2) throw loop;
          });
        } catch (int thrown) {
          caught += thrown == loop ? 1 : 1000;
        }
      }
    });
  });
  ++checks;
  if (done == std::vector<int>(kThreads, 50) && caught == 25) return;
  ++differences;
  fprintf(stderr, "a team whose member %d throws: %d of 25 were caught\n", int(thrower), caught);
}

// Threads take each number once, in ranges of at most `most`; those of each size are as many as threads, so that
// threads that take turns get equal shares, but for the rounding of the last sizes. They know what their next turn
// gives.
void check_ranges(int64_t n, int64_t least, int64_t most) {
  std::vector<int> taken(n);
  Ranges ranges(n, kThreads, least, most);
  in_threads(kThreads, kThreads, [&](int64_t, int64_t) {
    ranges.take([&](const Range& range) {
      for (int64_t i = range.begin; i < range.end; ++i) ++taken[i];
    });
  });
  std::vector<Range> all;
  Ranges(n, kThreads, least, most).take([&](const Range& range) { all.push_back(range); });
  std::vector<int64_t> sizes, shares(kThreads);
  bool knew = true;
  for (size_t i = 0; i < all.size(); ++i) {
    const int64_t size = all[i].end - all[i].begin;
    const size_t then = i + size_t(ranges.threads());
    shares[i % kThreads] += size, sizes.push_back(size);
    knew &= all[i].next == (then < all.size() ? all[then].begin : n);
  }
  const auto [low, high] = std::minmax_element(shares.begin(), shares.end());
  ++checks;
  if (knew && taken == std::vector<int>(n, 1) && std::is_sorted(sizes.rbegin(), sizes.rend()) &&
      (sizes.empty() || sizes[0] <= most) && (n < 100 || 4 * (*high - *low) < *high))
    return;
  ++differences;
  fprintf(stderr, "ranges of 0 to %d, of %d to %d: differ\n", int(n), int(least), int(most));
}

// ---- all of them

void check_all() {
  for (const int64_t numbers : {0, 1, 3, 64})
    for (const int late : {0, 1, 3}) check_team(numbers, late);
  for (const int64_t thrower : {0, 2}) check_team_throws(thrower);
  for (const int64_t n : {0, 1, 5, 64, 1000})
    for (const int64_t least : {1, 4, 30})
      for (const int64_t most : {30, 2000}) check_ranges(n, least, most);
  check_packed_linears(DType::f32, Weights::f32, " by f32");
  check_packed_linears(DType::bf16, Weights::bf16, " by bf16");
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    check_packed_linears(dtype, Weights::s8, " by int8");
  }
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const int64_t size : kSizes)
      check_matrix_product(kRows, size, 19, dtype), check_matrix_product(size, 11, size, dtype);
    check_matrix_product(loops::product_rows() + 1, 300, 33, dtype);  // two blocks of rows, and of what a chain adds up
    check_matrix_product(3, 7, 600, dtype);                           // and of columns
    check_matrix_product(2, 5, 0, dtype), check_matrix_product(0, 5, 2, dtype);
  }
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const int64_t inner : {1, 2, 31, 32, 33, 64, 66, 129})
      for (const int64_t rows : {1, 2, 3, 4, 11})
        for (const int64_t channels : {1, 3, 4, 18}) check_few_rows(rows, inner, channels, dtype);
  for (const DType dtype : kTypes) {
    for (const int64_t classes : kSizes)
      for (const int64_t inner : {9, 10}) check_cross_entropy(kRows, inner, classes, dtype);
    check_cross_entropy(293, 600, 33, dtype);  // two blocks of rows, and two chains of sums
    check_cross_entropy(2, 0, 5, dtype);
    for (const int64_t inner : {9, 10}) check_linear_max(kRows, inner, 300, dtype);
    check_linear_max(146, 600, 33, dtype);
    for (const int64_t columns : {1, 9, 127})
      if (dtype != DType::f64) check_maxima(kRows, columns, dtype);
    for (const int64_t C : kSizes) {
      for (const bool flag : {false, true})
        for (const bool tanh : {false, true}) check_bias_gelu(C, dtype, flag, tanh);
      check_layer_norms(C, dtype);
      for (const bool flag : {false, true})
        for (const Dropout& drop : {Dropout{}, kDropRows}) check_embedding(C, dtype, flag, drop);
    }
    for (const Dropout& drop : {Dropout{}, kDropScores}) {
      for (const int64_t D : {1, 7, 8, 9, 17, 65}) check_attention({1, 7, 8, 9, 17, 65, 129}, D, dtype, drop);
      check_attention({769, 767}, 9, dtype, drop);
      check_attention({769, 130}, 66, dtype, drop);
      for (const int64_t D : {1, 9, 17}) check_relative_attention({1, 7, 8, 9, 17, 65, 129}, D, dtype, drop);
      check_relative_attention({769, 300}, 9, dtype, drop);
    }
  }
}

// ---- wrong calls

void race(const Bytes& x, int64_t C) {
  Bytes y(x.size());
  in_threads(2, 2,
             [&](int64_t, int64_t) { loops::bias_gelu_fwd(x.data(), nullptr, y.data(), 1, C, DType::f32, false); });
}

// x or y is one element shorter than C.
void out_of_bounds(int64_t x_elements, int64_t y_elements, int64_t C) {
  const Bytes x = values(x_elements, DType::f32);
  Bytes y = filled(y_elements, DType::f32, 0);
  loops::bias_gelu_fwd(x.data(), nullptr, y.data(), 1, C, DType::f32, false);
}

// No rows, but the computation of their address overflows.
void overflow(int64_t C) {
  LayerNorm op{};
  op.channels = C;
  loops::layer_norm_fwd(op, nullptr, INT64_MAX, INT64_MAX, nullptr);
}

int commit(const std::string& fault) {
  constexpr int64_t C = 17;
  if (fault == "race") return race(values(C, DType::f32), C), 0;
  if (fault == "overwrite") return out_of_bounds(C, C - 1, C), 0;
  if (fault == "overread") return out_of_bounds(C - 1, C, C), 0;
  if (fault == "overflow") return overflow(C), 0;
  fprintf(stderr, "no fault is called %s\n", fault.c_str());
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) return commit(argv[1]);
  check_all();
  printf("%d checks, %d with differences\n", checks, differences);
  return differences != 0;
}
