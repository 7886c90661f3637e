// The CUDA kernels on the CPU without torch: each at a few shapes, in three orders of its threads.
// tests/sanitizers/run.py builds this program with ThreadSanitizer, which supports fibers.
//
//   cuda_on_cpu          all launches; exits with 1 if one fails or an order changes a bit
//   cuda_on_cpu FAULT    a kernel of faults.cu, with a race that has to be reported
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "attention.h"
#include "bias_gelu.h"
#include "cross_entropy.h"
#include "cuda/column_sums.h"
#include "cuda/embedding.h"
#include "cuda/padding.h"
#include "cuda/relative_attention.h"
#include "dense_gelu.h"
#include "layer_norm.h"

using namespace fastbert;

extern "C" {
void cuda_on_cpu_set_order(const char* words);
const char* run_fault(const char* name, float* memory);
}

namespace {

constexpr int64_t kRows = 13;
const int64_t kKey[] = {0x0123456789ABCDEF};

// ---- buffers: aligned for vectors, and rounded up to whole vectors

struct alignas(16) Chunk {
  unsigned char byte[16];
};

class Buffer {
 public:
  Buffer(int64_t elements, DType dtype)
      : bytes_(elements * (dtype == DType::f32 ? 4 : 2)), chunks_((bytes_ + 15) / 16) {
    memset(chunks_.data(), 0xFF, bytes_);  // NaN
  }
  unsigned char* bytes() { return chunks_.data()->byte; }
  const unsigned char* bytes() const { return chunks_.data()->byte; }
  operator void*() { return chunks_.data(); }
  operator float*() { return reinterpret_cast<float*>(chunks_.data()); }
  bool operator==(const Buffer& other) const { return !memcmp(chunks_.data(), other.chunks_.data(), bytes_); }

 private:
  size_t bytes_;
  std::vector<Chunk> chunks_;
};

// Finite values in (-4, 4) that bf16 represents exactly.
Buffer values(int64_t elements, DType dtype) {
  static std::minstd_rand random(0);
  Buffer buffer(elements, dtype);
  unsigned char* to = buffer.bytes();
  for (int64_t i = 0; i < elements; ++i) {
    const float value = float(int(random() % 255) - 127) / 32;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    // f16 has another exponent bias, and three more bits of mantissa.
    if (dtype == DType::f16 && value != 0) bits = (bits & 0x80000000) | ((bits & 0x7FFFFFFF) - (112 << 23)) << 3;
    const size_t size = dtype == DType::f32 ? 4 : 2;
    memcpy(to + i * size, reinterpret_cast<char*>(&bits) + 4 - size, size);
  }
  return buffer;
}

// ---- launches

using Results = std::vector<Buffer>;
int failures = 0;

void require(const char* error) {
  if (!error) return;
  ++failures;
  fprintf(stderr, "%s\n", error);
}

void same_in_all_orders(const std::string& what, const std::function<Results()>& run) {
  std::vector<Results> results;
  for (const char* order : {"forward", "reverse", "random:1"}) {
    cuda_on_cpu_set_order(order);
    results.push_back(run());
  }
  if (results[0] == results[1] && results[0] == results[2]) return;
  ++failures;
  fprintf(stderr, "%s: the order of the threads changes bits\n", what.c_str());
}

std::string name(const char* op, int64_t size, DType dtype) {
  static constexpr const char* kNames[] = {"f32", "bf16", "f16"};
  return std::string(op) + " " + kNames[int(dtype)] + " " + std::to_string(size);
}

void check_bias_gelu(int64_t C, DType dtype, bool tanh) {
  Buffer x = values(kRows * C, dtype), dy = values(kRows * C, dtype), bias = values(C, dtype);
  same_in_all_orders(name("bias_gelu", C, dtype), [&] {
    const int64_t shares = cuda::bias_gelu_bwd_shares(kRows, C, dtype);
    Buffer y(kRows * C, dtype), dx(kRows * C, dtype), partials(shares * C, DType::f32), dbias(C, dtype);
    require(cuda::bias_gelu_fwd(x, bias, y, kRows, C, dtype, dtype, tanh, nullptr));
    require(cuda::bias_gelu_bwd(dy, x, bias, dx, partials, kRows, C, shares, dtype, dtype, tanh, nullptr));
    require(cuda::column_sums(partials, shares, C, {{{dbias, dtype}}, 1}, nullptr));
    return Results{y, dx, dbias};
  });
}

void check_dense_gelu(int64_t rows, int64_t inner, int64_t C, DType dtype, bool tanh) {
  Buffer x = values(rows * inner, dtype), weight = values(C * inner, dtype), bias = values(C, dtype);
  same_in_all_orders(name("dense_gelu", C, dtype), [&] {
    Buffer y(rows * C, dtype), preactivation(rows * C, dtype), y_alone(rows * C, dtype);
    const cuda::DenseGelu dense{x, weight, bias, rows, inner, C, dtype, tanh};
    if (!cuda::dense_gelu_takes(dense)) require("dense_gelu does not take it");
    require(cuda::dense_gelu_fwd(dense, y, preactivation, nullptr));
    require(cuda::dense_gelu_fwd(dense, y_alone, nullptr, nullptr));
    return Results{y, preactivation, y_alone};
  });
}

void check_cross_entropy(int64_t classes, DType dtype) {
  const int64_t stride = (classes + 63) / 64 * 64;
  const Buffer products = values(kRows * stride, dtype);
  Buffer bias = values(classes, dtype), dloss = values(1, DType::f32);
  std::vector<int64_t> given(kRows);
  for (int64_t row = 0; row < kRows; ++row) given[row] = row % 3 ? row * 7 % classes : -100;
  const cuda::Labels labels{given.data(), true, kRows, -100};
  same_in_all_orders(name("cross_entropy", classes, dtype), [&] {
    Buffer logits = products, losses(kRows, DType::f32), loss(1, DType::f32), scaled(kRows * stride, dtype);
    const int64_t padded = (classes + 7) / 8 * 8;
    require(cuda::cross_entropy_rows(logits, bias, labels, losses, classes, padded, stride, true, dtype, nullptr));
    require(cuda::mean_over_labelled(losses, kRows, labels, loss, nullptr));
    require(cuda::scaled(products.bytes(), dtype, dloss, scaled, dtype, kRows * stride, nullptr));
    return Results{logits, losses, loss, scaled};
  });
}

void check_layer_norm(int64_t C, DType dtype, bool add) {
  Buffer x = values(kRows * C, dtype), residual = values(kRows * C, dtype), dy = values(kRows * C, dtype);
  Buffer weight = values(C, dtype), bias = values(C, dtype), x_bias = values(C, dtype);
  const DeviceDropout drop = add ? DeviceDropout{kKey, 7, 6554, 65536.0f / (65536 - 6554)} : DeviceDropout{};
  same_in_all_orders(name(add ? "add_layer_norm" : "layer_norm", C, dtype), [&] {
    const int64_t blocks = cuda::layer_norm_bwd_blocks(kRows, C);
    const int quantities = add ? 3 : 2;
    Buffer y(kRows * C, dtype), mean(kRows, DType::f32), rstd(kRows, DType::f32), dx(kRows * C, dtype);
    Buffer dresidual(add ? kRows * C : 0, dtype), partials(blocks * quantities * C, DType::f32);
    Buffer dweight(C, dtype), dbias(C, dtype), dx_bias(add ? C : 0, dtype);
    LayerNorm op{};
    op.x = x, op.weight = weight, op.bias = bias, op.mean = mean, op.rstd = rstd, op.channels = C, op.eps = 1e-12;
    op.x_type = op.residual_type = op.y_type = dtype;
    if (add) op.residual = residual, op.x_bias = x_bias;
    require(cuda::layer_norm_fwd(op, dtype, drop, y, kRows, nullptr));
    LayerNormGradients gradients{};
    gradients.dy = dy, gradients.dx = dx;
    if (add) gradients.dresidual = dresidual;
    op.bias = nullptr;
    require(cuda::layer_norm_bwd(op, dtype, drop, gradients, partials, quantities, blocks, kRows, nullptr));
    const cuda::ColumnSums sums{{{dweight, dtype}, {dbias, dtype}, {dx_bias, dtype}}, quantities};
    require(cuda::column_sums(partials, blocks, C, sums, nullptr));
    return Results{y, mean, rstd, dx, dresidual, dweight, dbias, dx_bias};
  });
}

void check_embedding(int64_t C, DType dtype) {
  constexpr int64_t kTokens = 70, kTableRows = 3;
  std::vector<int64_t> ids(kTokens), order(kTokens);
  for (int64_t t = 0; t < kTokens; ++t) ids[t] = t * t % 4;
  Buffer table = values(kTableRows * C, dtype), weight = values(C, dtype), dy = values(kTokens * C, dtype);
  const cuda::Lookup lookup{{ids.data(), false, kTableRows}, table, dtype};
  const cuda::EmbeddingRows op{
      {{lookup, lookup, lookup}}, weight, dtype, dtype, kTokens, C, {kKey, 7, 6554, 65536.0f / (65536 - 6554)}};
  same_in_all_orders(name("embedding", C, dtype), [&] {
    const int64_t blocks = cuda::layer_norm_bwd_blocks(kTokens, C);
    Buffer y(kTokens * C, dtype), mean(kTokens, DType::f32), rstd(kTokens, DType::f32), dz(kTokens * C, DType::f32);
    Buffer partials(blocks * 2 * C, DType::f32), types(blocks * kTableRows * C, DType::f32);
    Buffer ends(cuda::table_chunks(kTokens) * 2 * C, DType::f32), gradient(kTableRows * C, dtype);
    require(cuda::embedding_fwd(op, y, mean, rstd, weight, 1e-12, nullptr));
    require(cuda::embedding_bwd(op, {dy, mean, rstd, dz, partials, types}, blocks, nullptr));
    require(cuda::list_tokens(lookup.ids, order.data(), kTokens, nullptr));
    require(cuda::add_up_by_id(dz, lookup.ids, order.data(), ends, gradient, dtype, kTokens, C, 1, nullptr));
    return Results{y, mean, rstd, dz, partials, types, gradient};
  });
}

void check_padding(int64_t bytes) {
  constexpr int64_t kBatch = 11, kWidth = 45, kPlaces = kBatch * kWidth;
  std::vector<uint8_t> visible(kPlaces);
  for (int64_t i = 0; i < kPlaces; ++i) visible[i] = i * i % 7 < 3;
  Buffer x = values(kPlaces * bytes / 2, DType::bf16);
  same_in_all_orders("padding " + std::to_string(bytes), [&] {
    std::vector<int64_t> places(kPlaces), facts(4), token_of(kPlaces);
    std::vector<int32_t> rows(2 * kBatch), ends(kBatch + 1);
    require(cuda::padding_places(
        {visible.data(), kBatch, kWidth, rows.data(), places.data(), ends.data(), facts.data()}, nullptr));
    const int64_t tokens = facts[0];
    Buffer packed(tokens * bytes / 2, DType::bf16), back(kPlaces * bytes / 2, DType::bf16);
    require(cuda::padding_pack(x, places.data(), packed, tokens, kPlaces, bytes, nullptr));
    require(cuda::padding_unpack(packed, places.data(), token_of.data(), back, tokens, kPlaces, bytes, nullptr));
    return Results{packed, back};
  });
}

void check_attention(const std::vector<int>& lengths, int D, DType dtype, bool dropout) {
  constexpr int kHeads = 2;
  std::vector<int32_t> ends{0};
  for (const int length : lengths) ends.push_back(ends.back() + length);
  const int64_t tokens = ends.back(), out_size = tokens * kHeads * D;
  Buffer qkv = values(3 * out_size, dtype), dout = values(out_size, dtype);
  cuda::Attention a{};
  a.qkv = qkv, a.cu_seqlens = ends.data(), a.tokens = tokens, a.sequences = int(lengths.size());
  a.longest = *std::max_element(lengths.begin(), lengths.end()), a.heads = kHeads, a.D = D, a.dtype = dtype;
  a.scale = 0.125f;
  if (dropout) a.drop = {kKey, 7, 26, 256.0f / (256 - 26)};
  same_in_all_orders(name("attention", D, dtype), [&] {
    Buffer out(out_size, dtype), lse(kHeads * tokens, DType::f32), dqkv(3 * out_size, dtype);
    Buffer statistics(cuda::attention_statistics(a), DType::f32);
    require(cuda::attention_fwd(a, out, lse, nullptr));
    require(cuda::attention_bwd(a, dout, out, lse, dqkv, statistics, nullptr));
    return Results{out, lse, dqkv};
  });
}

void check_relative_attention(const std::vector<int>& lengths, int D, DType dtype, bool dropout) {
  constexpr int kHeads = 2, kFarthest = 20, kWidth = 7;
  std::vector<int32_t> ends{0}, slots;
  for (const int length : lengths) ends.push_back(ends.back() + length);
  for (int i = 0; i <= 2 * kFarthest; ++i) slots.push_back(i * 5 % kWidth);
  const int64_t tokens = ends.back(), out_size = tokens * kHeads * D, table_size = kWidth * kHeads * D;
  Buffer qkv = values(3 * out_size, dtype), dout = values(out_size, dtype), keys = values(table_size, dtype);
  Buffer queries = values(table_size, dtype), bias = values(kHeads * kWidth, DType::f32);
  cuda::Attention a{};
  a.qkv = qkv, a.cu_seqlens = ends.data(), a.tokens = tokens, a.sequences = int(lengths.size());
  a.longest = *std::max_element(lengths.begin(), lengths.end()), a.heads = kHeads, a.D = D, a.dtype = dtype;
  a.scale = 0.125f;
  if (dropout) a.drop = {kKey, 7, 26, 256.0f / (256 - 26)};
  const cuda::RelativePositions positions{slots.data(), kFarthest, kWidth, keys, queries, bias};
  same_in_all_orders(name("relative_attention", D, dtype), [&] {
    Buffer out(out_size, dtype), lse(kHeads * tokens, DType::f32), dqkv(3 * out_size, dtype);
    Buffer dkeys(table_size, dtype), dqueries(table_size, dtype), dbias(kHeads * kWidth, DType::f32);
    const cuda::RelativeGradients gradients{dkeys, dqueries, dbias};
    Buffer room(cuda::relative_attention_room(a, gradients), DType::f32);
    require(cuda::relative_attention_fwd(a, positions, out, lse, nullptr));
    require(cuda::relative_attention_bwd(a, positions, dout, out, lse, dqkv, gradients, room, nullptr));
    return Results{out, lse, dqkv, dkeys, dqueries, dbias};
  });
}

void check_all() {
  for (const int64_t bytes : {2, 12, 1552}) check_padding(bytes);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const int64_t C : {72, 75, 1032}) {
      for (const bool tanh : {false, true}) check_bias_gelu(C, dtype, tanh);
      for (const bool add : {false, true}) check_layer_norm(C, dtype, add);
      check_embedding(C, dtype);
    }
    for (const int64_t classes : {1, 77, 4100}) check_cross_entropy(classes, dtype);
    for (const bool tanh : {false, true}) {
      if (dtype == DType::f32) continue;  // a library multiplies fp32
      check_dense_gelu(70, 72, 136, dtype, tanh);
      check_dense_gelu(130, 136, 200, dtype, tanh);
    }
    for (const bool dropout : {false, true}) {
      check_attention({1, 33, 70}, 64, dtype, dropout);  // for 16 bits, by warpgroups
      check_attention({1, 33, 70}, 32, dtype, dropout);
      check_attention({17}, 24, dtype, dropout);
      check_relative_attention({1, 33, 40}, 24, dtype, dropout);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2) {
    std::vector<float> memory(1024);
    require(run_fault(argv[1], memory.data()));
    return failures;
  }
  check_all();
  printf("the CUDA kernels: %d failures\n", failures);
  return failures != 0;
}
