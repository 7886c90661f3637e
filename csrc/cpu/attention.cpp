// The torch side of attention on the CPU. The schema is defined in fastbert/ops/attention.py.
//
// A task is one head of one sequence. It takes kQueries queries at a time: a matrix product computes their scores with
// all keys, a loop turns those into weights, another product multiplies them by the values. The products read queries,
// keys and values in place, in the projection's output; only bf16 and f16 are converted to fp32 first. A task runs in
// one thread, library included, and adds up dK and dV in the order of its queries, so the number of threads changes no
// bit where the library repeats its own.
#include "../attention.h"

#include <memory>
#include <new>

#include "../checks.h"
#include "../layer_ops.h"
#include "../tensor.h"
#include "blas.h"

namespace fastbert {

namespace {

constexpr int64_t kQueries = 64;

struct Loops {
  decltype(FB_BEST_ISA(attention_bits_room)) bits_room = FB_BEST_ISA(attention_bits_room);
  decltype(FB_BEST_ISA(attention_softmax)) softmax = FB_BEST_ISA(attention_softmax);
  decltype(FB_BEST_ISA(attention_softmax_bwd)) softmax_bwd = FB_BEST_ISA(attention_softmax_bwd);
  decltype(FB_BEST_ISA(attention_dot)) dot = FB_BEST_ISA(attention_dot);
  decltype(FB_BEST_ISA(attention_load)) load = FB_BEST_ISA(attention_load);
  decltype(FB_BEST_ISA(attention_store)) store = FB_BEST_ISA(attention_store);
};

// The arguments of a call, checked, for all of its tasks.
struct Batch {
  int64_t tokens, heads, D, sequences, longest = 0, covered = 0;
  int64_t element;  // bytes
  DType dtype;
  double scale;
  Dropout drop;
  Loops loops;
  std::vector<int64_t> start, length;  // of each sequence: within the tokens and disjoint, whatever cu_seqlens holds

  Batch(const Tensor& qkv, const Tensor& cu_seqlens, double scale_, Dropout drop_)
      : element(qkv.element_size()), dtype(dtype_of(qkv)), scale(scale_), drop(drop_) {
    check_attention(qkv, cu_seqlens);
    FB_CHECK(loops.softmax, kNoIsa);
    FB_CHECK(has_blas(), "attention: this torch exports no BLAS");
    tokens = qkv.size(0), heads = qkv.size(2), D = qkv.size(3), sequences = cu_seqlens.numel() - 1;
    const Tensor ends = contiguous(cu_seqlens);
    const int32_t* const end = ends.const_data_ptr<int32_t>();
    for (int64_t b = 0; b < sequences; ++b) {
      start.push_back(std::clamp<int64_t>(end[b], b ? start[b - 1] + length[b - 1] : 0, tokens));
      length.push_back(std::clamp<int64_t>(end[b + 1], start[b], tokens) - start[b]);
      longest = std::max(longest, length[b]), covered += length[b];
    }
  }

  // Of scores: a power of two would put every row into the same sets of the cache.
  int64_t stride() const { return (longest + 15) / 16 * 16 + 16; }
  int64_t qkv_stride() const { return 3 * heads * D; }
  int64_t out_stride() const { return heads * D; }

  // Calls f(head, sequence, scratch) for all tasks, in all threads, with one Scratch for each thread. Neighbouring
  // tasks are the same head of different sequences, so that threads get equal shares of long and short ones.
  template <class Scratch, class F>
  void for_tasks(const F& f) const {
    if (tokens == 0 || D == 0) return;
    const double work = double(longest) * covered * D / std::max<int64_t>(1, sequences);
    parallel_for(heads * sequences, std::max<int64_t>(1, int64_t(kGrain * 16 / (work + 1))),
                 [&](int64_t begin, int64_t end) {
                   const SingleThreadedBlas blas;
                   Scratch scratch(*this);
                   for (int64_t i = begin; i < end; ++i)
                     if (length[i % sequences]) f(i / sequences, i % sequences, scratch);
                 });
  }
};

// Rows of a head for the products: in place, or converted to `room`.
template <class M>
Matrix<const M> rows_of(const Batch& batch, const char* data, int64_t stride, int64_t rows, M* room) {
  if (batch.element == sizeof(M)) return {reinterpret_cast<const M*>(data), stride};
  batch.loops.load(data, stride, rows, batch.D, room, batch.dtype);
  return {room, batch.D};
}

// Memory at multiples of 64 bytes: a product's bits can depend on where its operands begin.
template <class M>
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(static_cast<M*>(::operator new(size * sizeof(M), kAlignment))) {}
  operator M*() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Delete {
    void operator()(M* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<M, Delete> data_;
};

AttentionTile tile_of(const Batch& batch, int64_t head, int64_t sequence, int64_t first, uint8_t* bits) {
  const int64_t keys = batch.length[sequence];
  return {std::min(kQueries, keys - first), keys, batch.stride(), first, head, sequence, batch.drop, bits};
}

// ---- forward

template <class M>
struct ForwardScratch {
  Buffer<M> scores, keys, values, queries, out, factors;
  Buffer<uint8_t> bits;

  explicit ForwardScratch(const Batch& batch, bool narrow)
      : scores(kQueries * batch.stride()),
        keys(narrow * batch.longest * batch.D),
        values(narrow * batch.longest * batch.D),
        queries(narrow * kQueries * batch.D),
        out(narrow * kQueries * batch.D),
        factors(kQueries),
        bits(batch.loops.bits_room(batch.longest)) {}
  explicit ForwardScratch(const Batch& batch) : ForwardScratch(batch, batch.element != sizeof(M)) {}
};

template <class M>
void forward(const Batch& batch, const char* qkv, char* out, M* lse) {
  using Room = ForwardScratch<M>;
  batch.for_tasks<Room>([&](int64_t head, int64_t sequence, Room& room) {
    const int64_t D = batch.D, start = batch.start[sequence], keys = batch.length[sequence];
    const int64_t row_bytes = batch.qkv_stride() * batch.element, part = batch.heads * D * batch.element;
    const char* const q = qkv + start * row_bytes + head * D * batch.element;
    const auto k = rows_of<M>(batch, q + part, batch.qkv_stride(), keys, room.keys);
    const auto v = rows_of<M>(batch, q + 2 * part, batch.qkv_stride(), keys, room.values);
    for (int64_t first = 0; first < keys; first += kQueries) {
      const AttentionTile tile = tile_of(batch, head, sequence, first, room.bits);
      const int64_t rows = tile.queries;
      char* const o = out + ((start + first) * batch.heads + head) * D * batch.element;
      const bool narrow = batch.element != sizeof(M);
      const Matrix<M> sums = narrow ? Matrix<M>{room.out, D} : Matrix<M>{reinterpret_cast<M*>(o), batch.out_stride()};
      const Matrix<M> scores{room.scores, tile.stride};
      const auto queries = rows_of<M>(batch, q + first * row_bytes, batch.qkv_stride(), rows, room.queries);
      product<M>(Op::as_is, Op::transposed, rows, keys, D, M(batch.scale), queries, k, 0, scores);
      batch.loops.softmax(tile, scores.data, lse + head * batch.tokens + start + first, room.factors, batch.dtype);
      product<M>(Op::as_is, Op::as_is, rows, D, keys, 1, {scores.data, scores.stride}, v, 0, sums);
      batch.loops.store(sums.data, sums.stride, room.factors, rows, D, o, batch.out_stride(), batch.dtype);
    }
  });
}

}  // namespace

std::tuple<Tensor, Tensor> attention_fwd_cpu(const Tensor& qkv, const Tensor& cu_seqlens, int64_t /*max_seqlen*/,
                                             double scale, double dropout_p, const OptionalTensor& rng, int64_t site) {
  const Batch batch(qkv, cu_seqlens, scale, dropout_of(dropout_p, rng, site, kAttentionBits));
  const Tensor in = contiguous(qkv);
  const Tensor out = view(empty_rows({batch.tokens, batch.heads * batch.D}, qkv), {batch.tokens, batch.heads, batch.D});
  const Tensor lse = empty({batch.heads, batch.tokens}, qkv, math_type(qkv));
  if (batch.covered != batch.tokens) zero_(out), zero_(lse);
  const char* const src = static_cast<const char*>(in.const_data_ptr());
  char* const dst = static_cast<char*>(out.mutable_data_ptr());
  if (batch.dtype == DType::f64) {
    forward<double>(batch, src, dst, lse.mutable_data_ptr<double>());
  } else {
    forward<float>(batch, src, dst, lse.mutable_data_ptr<float>());
  }
  return {out, lse};
}

namespace {

// ---- backward: with P = exp(S - lse), F the dropout factors and delta = rowsum(dO O): dV = (P F)^T dO,
// dS = P (dO V^T F - delta), dQ = scale dS K, dK = scale dS^T Q

template <class M>
struct BackwardScratch : ForwardScratch<M> {
  Buffer<M> dp, dout, dkeys, dvalues, delta;

  explicit BackwardScratch(const Batch& batch, bool narrow)
      : ForwardScratch<M>(batch, narrow),
        dp(kQueries * batch.stride()),
        dout(narrow * kQueries * batch.D),
        dkeys(narrow * batch.longest * batch.D),
        dvalues(narrow * batch.longest * batch.D),
        delta(kQueries) {}
  explicit BackwardScratch(const Batch& batch) : BackwardScratch(batch, batch.element != sizeof(M)) {}
};

template <class M>
void backward(const Batch& batch, const char* dout, const char* qkv, const char* out, const M* lse, char* dqkv) {
  using Room = BackwardScratch<M>;
  batch.for_tasks<Room>([&](int64_t head, int64_t sequence, Room& room) {
    const Loops& loops = batch.loops;
    const int64_t D = batch.D, start = batch.start[sequence], keys = batch.length[sequence];
    const int64_t stride = batch.qkv_stride(), row_bytes = stride * batch.element, part = row_bytes / 3;
    const int64_t offset = start * row_bytes + head * D * batch.element;
    const char* const q = qkv + offset;
    char* const dq = dqkv + offset;
    const bool narrow = batch.element != sizeof(M);
    const auto k = rows_of<M>(batch, q + part, stride, keys, room.keys);
    const auto v = rows_of<M>(batch, q + 2 * part, stride, keys, room.values);
    const auto sums_at = [&](char* place, M* room_for_it) {
      return narrow ? Matrix<M>{room_for_it, D} : Matrix<M>{reinterpret_cast<M*>(place), stride};
    };
    const Matrix<M> dk = sums_at(dq + part, room.dkeys), dv = sums_at(dq + 2 * part, room.dvalues);
    for (int64_t first = 0; first < keys; first += kQueries) {
      const AttentionTile tile = tile_of(batch, head, sequence, first, room.bits);
      const int64_t rows = tile.queries, at = ((start + first) * batch.heads + head) * D * batch.element;
      const M beta = first ? 1 : 0;
      const Matrix<M> s{room.scores, tile.stride}, dp{room.dp, tile.stride};
      const Matrix<const M> weights{s.data, s.stride}, ds{dp.data, dp.stride};
      const auto queries = rows_of<M>(batch, q + first * row_bytes, stride, rows, room.queries);
      const auto grad = rows_of<M>(batch, dout + at, batch.out_stride(), rows, room.dout);
      loops.dot(dout + at, out + at, rows, D, batch.out_stride(), room.delta, batch.dtype);
      product<M>(Op::as_is, Op::transposed, rows, keys, D, M(batch.scale), queries, k, 0, s);
      product<M>(Op::as_is, Op::transposed, rows, keys, D, 1, grad, v, 0, dp);
      loops.softmax_bwd(tile, s.data, dp.data, lse + head * batch.tokens + start + first, room.delta, batch.dtype);
      product<M>(Op::transposed, Op::as_is, keys, D, rows, 1, weights, grad, beta, dv);
      product<M>(Op::transposed, Op::as_is, keys, D, rows, M(batch.scale), ds, queries, beta, dk);
      const Matrix<M> dqueries = sums_at(dq + first * row_bytes, room.out);
      product<M>(Op::as_is, Op::as_is, rows, D, keys, M(batch.scale), ds, k, 0, dqueries);
      if (narrow) loops.store(dqueries.data, D, nullptr, rows, D, dq + first * row_bytes, stride, batch.dtype);
    }
    if (narrow) loops.store(dk.data, D, nullptr, keys, D, dq + part, stride, batch.dtype);
    if (narrow) loops.store(dv.data, D, nullptr, keys, D, dq + 2 * part, stride, batch.dtype);
  });
}

}  // namespace

Tensor attention_bwd_cpu(const Tensor& dout, const Tensor& qkv, const Tensor& out, const Tensor& lse,
                         const Tensor& cu_seqlens, int64_t /*max_seqlen*/, double scale, double dropout_p,
                         const OptionalTensor& rng, int64_t site) {
  const Batch batch(qkv, cu_seqlens, scale, dropout_of(dropout_p, rng, site, kAttentionBits));
  check_attention_gradients(dout, out, lse, qkv, math_type(qkv));
  const Tensor in = contiguous(qkv), grad = contiguous(dout), result = contiguous(out), sums = contiguous(lse);
  const Tensor dqkv = empty(qkv.sizes(), qkv);
  if (batch.covered != batch.tokens) zero_(dqkv);
  const auto bytes = [](const Tensor& t) { return static_cast<const char*>(t.const_data_ptr()); };
  char* const dst = static_cast<char*>(dqkv.mutable_data_ptr());
  if (batch.dtype == DType::f64) {
    backward<double>(batch, bytes(grad), bytes(in), bytes(result), sums.const_data_ptr<double>(), dst);
  } else {
    backward<float>(batch, bytes(grad), bytes(in), bytes(result), sums.const_data_ptr<float>(), dst);
  }
  return dqkv;
}

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("attention_fwd", TORCH_BOX(&attention_fwd_cpu));
  m.impl("attention_bwd", TORCH_BOX(&attention_bwd_cpu));
}

}  // namespace fastbert
