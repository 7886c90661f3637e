// Attention on the CPU, as a batch of tasks: what attention and relative_attention share.
//
// A task is one head of one sequence. Where there are few tasks, the forward splits them by queries. dK and dV are
// added up in the order of the queries, so results have the same bits for any number of tasks and threads.
#pragma once

#include <vector>

#include "../attention.h"
#include "../checks.h"
#include "../tensor.h"
#include "sequences.h"

namespace fastbert {

constexpr int64_t kFewestQueries = cpu::kAttentionQueries / 2;  // of a part of a task; parts begin at multiples of it

// The arguments of a call, checked, for all of its tasks.
struct Batch {
  int64_t tokens, heads, D, sequences, longest = 0, covered = 0;
  int64_t element;  // bytes
  DType dtype;
  double scale;
  Dropout drop;
  std::vector<int64_t> start, length;     // of each sequence; start also has the end of the last one
  std::vector<cpu::Positions> positions;  // of each head, for relative_attention; else empty

  Batch(const Tensor& qkv, const Tensor& cu_seqlens, double scale_, Dropout drop_)
      : element(qkv.element_size()), dtype(dtype_of(qkv)), scale(scale_), drop(drop_) {
    check_attention(qkv, cu_seqlens);
    FB_CHECK(FB_BEST_ISA(attention_fwd), kNoIsa);
    tokens = qkv.size(0), heads = qkv.size(2), D = qkv.size(3), sequences = cu_seqlens.numel() - 1;
    start = bounds_of(cu_seqlens, tokens);
    for (int64_t b = 0; b < sequences; ++b) {
      length.push_back(start[b + 1] - start[b]);
      longest = std::max(longest, length[b]), covered += length[b];
    }
  }

  int64_t qkv_stride() const { return 3 * heads * D; }
  int64_t out_stride() const { return heads * D; }
  int64_t tasks() const { return heads * sequences; }

  cpu::AttentionHead head(int64_t task, const char* qkv) const {
    const char* const q = qkv + (first_token(task) * qkv_stride() + task % heads * D) * element;
    const int64_t part = heads * D * element, sequence = task / heads;
    const cpu::Positions* const relative = positions.empty() ? nullptr : &positions[task % heads];
    return {q,        q + part, q + 2 * part, qkv_stride(), length[sequence], D, scale, task % heads,
            sequence, drop,     dtype,        relative};
  }
  int64_t first_token(int64_t task) const { return start[task / heads]; }
  // Offsets in elements, into (tokens, heads, D) and (heads, tokens).
  int64_t out_at(int64_t task) const { return first_token(task) * out_stride() + task % heads * D; }
  int64_t lse_at(int64_t task) const { return task % heads * tokens + first_token(task); }

  // A head as large as that of any task, for the size of rooms.
  cpu::AttentionHead largest() const {
    return {nullptr, nullptr, nullptr, 0,    longest, D,
            scale,   0,       0,       drop, dtype,   positions.empty() ? nullptr : positions.data()};
  }

  // Calls f(head, task, part, room) in all threads, for each of the `parts` parts of each task. room_of returns the
  // size of room in bytes. Neighbouring tasks are heads of the same sequence, which are neighbours in memory;
  // threads take ranges of them by the work.
  template <class F>
  void for_tasks(const Tensor& qkv, int64_t parts, int64_t (*room_of)(const cpu::AttentionHead&), const F& f) const {
    if (covered == 0) return;
    std::vector<int64_t> before{0};  // the work of the sequences before each one, in all their heads
    for (const int64_t keys : length) before.push_back(before.back() + keys * (keys + kPacking) * heads);
    const int64_t work = before.back(), least = std::max<int64_t>(1, grain() * 16 / D);
    const auto first = [&](int64_t wanted) {  // the first part after so much work, counted over all tasks
      if (wanted == work) return tasks() * parts;
      const int64_t b = std::upper_bound(before.begin(), before.end() - 1, wanted) - before.begin() - 1;
      const double within = double(wanted - before[b]) / double(before[b + 1] - before[b]);
      return b * heads * parts + int64_t(within * double(heads * parts));
    };
    const char* const q = bytes_of(qkv);
    parallel_ranges({work, threads(), least}, room_of(largest()), [&](const Range& range, void* room) {
      for (int64_t i = first(range.begin); i < first(range.end); ++i)
        if (length[i / parts / heads]) f(head(i / parts, q), i / parts, i % parts, room);
    });
  }

  // The number of parts that the queries of a task are split into. Each part packs the keys and values anew.
  int64_t parts() const {
    const int64_t wanted = divide_up(2 * threads(), std::max<int64_t>(1, tasks()));
    return threads() == 1 ? 1 : std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, longest / kFewestQueries));
  }

 private:
  static constexpr int64_t kPacking = 64;  // the work for a key besides its scores, as a number of scores
};

// out: (tokens, heads, D), contiguous, of qkv's type; lse: (heads, tokens), contiguous, of its math_type.
inline void attention_forward_into(const Tensor& out, const Tensor& lse, const Batch& batch, const Tensor& qkv) {
  const Tensor in = contiguous(qkv);
  if (batch.covered != batch.tokens) zero_(out), zero_(lse);
  char *const dst = static_cast<char*>(out.mutable_data_ptr()), *const sums =
                                                                    static_cast<char*>(lse.mutable_data_ptr());
  const int64_t parts = batch.parts(), number = lse.element_size();
  batch.for_tasks(in, parts, FB_BEST_ISA(attention_fwd_room),
                  [&](const cpu::AttentionHead& head, int64_t task, int64_t part, void* room) {
                    const auto query = [&](int64_t part) {
                      return part == parts ? head.keys : head.keys * part / parts / kFewestQueries * kFewestQueries;
                    };
                    const int64_t first = query(part), last = query(part + 1);
                    if (first == last) return;
                    FB_BEST_ISA(attention_fwd)
                    (head, first, last, dst + batch.out_at(task) * batch.element, batch.out_stride(),
                     sums + batch.lse_at(task) * number, room);
                  });
}

// Allocates out and lse.
inline std::tuple<Tensor, Tensor> attention_outputs(const Batch& batch, const Tensor& qkv) {
  const Tensor out = empty_rows({batch.tokens, batch.heads * batch.D}, qkv);
  return {view(out, {batch.tokens, batch.heads, batch.D}), empty({batch.heads, batch.tokens}, qkv, math_type(qkv))};
}

inline std::tuple<Tensor, Tensor> attention_forward(const Batch& batch, const Tensor& qkv) {
  const auto [out, lse] = attention_outputs(batch, qkv);
  attention_forward_into(out, lse, batch, qkv);
  return {out, lse};
}

// The backward of a batch, task by task.
class AttentionBackward {
 public:
  AttentionBackward(const Batch& batch, const Tensor& dout, const Tensor& qkv, const Tensor& out, const Tensor& lse)
      : qkv(contiguous(qkv)), dqkv(empty(qkv.sizes(), qkv)), batch_(batch) {
    check_attention_gradients(dout, out, lse, qkv, math_type(qkv));
    dout_ = contiguous(dout), out_ = contiguous(out), lse_ = contiguous(lse);
    if (batch.covered != batch.tokens) zero_(dqkv);
  }

  void run(const cpu::AttentionHead& head, int64_t task, void* room) const {
    const int64_t at = batch_.out_at(task) * batch_.element, part = batch_.heads * batch_.D * batch_.element;
    char* const dq = static_cast<char*>(dqkv.mutable_data_ptr()) + (static_cast<const char*>(head.q) - bytes_of(qkv));
    FB_BEST_ISA(attention_bwd)
    (head, bytes_of(dout_) + at, bytes_of(out_) + at, batch_.out_stride(),
     bytes_of(lse_) + batch_.lse_at(task) * lse_.element_size(), dq, dq + part, dq + 2 * part, room);
  }

  void run_all() const {
    batch_.for_tasks(
        qkv, 1, FB_BEST_ISA(attention_bwd_room),
        [&](const cpu::AttentionHead& head, int64_t task, int64_t /*part*/, void* room) { run(head, task, room); });
  }

  const Tensor qkv, dqkv;

 private:
  const Batch& batch_;
  Tensor dout_, out_, lse_;
};

}  // namespace fastbert
