// The torch side of relative_attention on the CPU. The schema is defined in fastbert/ops/relative_attention.py.
//
// The gradients of tables are added up in tasks, each one head of some sequences, and then over the tasks in order. The
// tasks do not depend on the number of threads.
#include "../layer_ops.h"
#include "relative_positions.h"

namespace fastbert {

namespace {

constexpr int64_t kMostTasks = 64;  // of the backward; each has its own memory for the gradients of tables

// The gradients of tables, as sums over groups of neighbouring sequences, which are then added up.
class TableGradients {
 public:
  TableGradients(const Batch& batch, const PackedTables& packed, const Tables& tables, const Tensor& like)
      : batch_(batch), packed_(packed), tables_(tables), like_(like) {
    const int64_t number = math_type(like) == ScalarType::Double ? 8 : 4;
    key_bytes_ = tables.keys ? packed.table_bytes() : 0, query_bytes_ = tables.queries ? packed.table_bytes() : 0;
    bytes_ = round_up(key_bytes_ + query_bytes_ + packed.steps() * number, 64);
    make_groups();
    memory_ = empty({groups() * batch.heads, bytes_}, like, ScalarType::Byte);
  }

  // Computes all of the backward, dqkv included.
  void run(const AttentionBackward& backward) const {
    const int64_t bytes = FB_BEST_ISA(attention_bwd_room)(batch_.largest());
    parallel_ranges({groups() * batch_.heads, threads(), 1}, bytes, [&](const Range& range, void* room) {
      for (int64_t task = range.begin; task < range.end; ++task)
        run_task(backward, task / batch_.heads, task % batch_.heads, room);
    });
  }

  Tensor keys() const {
    const double factor = packed_.pairs ? batch_.scale : 1;  // else queries are already multiplied by it
    return table(tables_.keys, packed_.columns.slot_by_key, 0, factor);
  }
  Tensor queries() const { return table(tables_.queries, packed_.columns.slot_by_query, key_bytes_, batch_.scale); }
  Tensor bias() const {
    if (!tables_.bias) return empty({0}, like_);
    const Tensor sums = zeros(tables_.bias->sizes(), *tables_.bias, type_of(*tables_.bias));
    type_of(sums) == ScalarType::Double ? add_up_bias<double>(sums) : add_up_bias<float>(sums);
    return sums;
  }

 private:
  int64_t groups() const { return int64_t(ends_.size()); }
  char* part(int64_t group, int64_t head) const {
    return static_cast<char*>(memory_.mutable_data_ptr()) + (group * batch_.heads + head) * bytes_;
  }

  // Groups of about equal work, which depend on the lengths alone.
  void make_groups() {
    const int64_t most = std::max<int64_t>(1, kMostTasks / std::max<int64_t>(1, batch_.heads));
    double all = 0, done = 0;
    for (const int64_t keys : batch_.length) all += double(keys) * keys;
    for (int64_t b = 0; b < batch_.sequences; ++b) {
      done += double(batch_.length[b]) * batch_.length[b];
      if (b + 1 == batch_.sequences || (all > 0 && done * most >= all * double(groups() + 1))) ends_.push_back(b + 1);
    }
  }

  void run_task(const AttentionBackward& backward, int64_t group, int64_t head, void* room) const {
    char* const sums = part(group, head);
    std::memset(sums, 0, bytes_);
    cpu::Positions positions = batch_.positions[head];
    if (tables_.keys) positions.dkeys = sums;
    if (tables_.queries) positions.dqueries = sums + key_bytes_;
    if (tables_.bias) positions.dbias = sums + key_bytes_ + query_bytes_;
    for (int64_t sequence = group ? ends_[group - 1] : 0; sequence < ends_[group]; ++sequence) {
      if (batch_.length[sequence] == 0) continue;
      const int64_t task = sequence * batch_.heads + head;
      cpu::AttentionHead of = batch_.head(task, bytes_of(backward.qkv));
      of.positions = &positions;
      backward.run(of, task, room);
    }
  }

  Tensor table(const OptionalTensor& of, const std::vector<int32_t>& slot, int64_t offset, double factor) const {
    if (!of) return empty({0}, like_);
    const Tensor gradient = empty(of->sizes(), *of);
    const int64_t room = of->size(0) * (batch_.D + 64) * int64_t(sizeof(double));  // 64: no panel is wider
    parallel_for(batch_.heads, 1, [&](int64_t first, int64_t last) {
      const std::unique_ptr<char[]> scratch(new char[room]);
      for (int64_t head = first; head < last; ++head) {
        std::vector<const void*> parts;
        for (int64_t group = 0; group < groups(); ++group) parts.push_back(part(group, head) + offset);
        FB_BEST_ISA(add_up_positions)
        (parts.data(), groups(), factor, of_head(gradient, head, slot), scratch.get());
      }
    });
    return gradient;
  }

  template <class M>
  void add_up_bias(const Tensor& sums) const {
    const Columns& columns = packed_.columns;
    for (int64_t head = 0; head < batch_.heads; ++head) {
      std::vector<double> total(tables_.width());
      for (int64_t group = 0; group < groups(); ++group) {
        const M* const from = reinterpret_cast<const M*>(part(group, head) + key_bytes_ + query_bytes_);
        for (int64_t step = 0; step < packed_.steps(); ++step)
          total[columns.slot_by_key[columns.by_key[step]]] += from[step];
      }
      std::copy(total.begin(), total.end(), sums.mutable_data_ptr<M>() + head * tables_.width());
    }
  }

  const Batch& batch_;
  const PackedTables& packed_;
  const Tables& tables_;
  const Tensor& like_;
  int64_t key_bytes_, query_bytes_, bytes_;
  std::vector<int64_t> ends_;
  Tensor memory_;
};

}  // namespace

std::tuple<Tensor, Tensor> relative_attention_fwd_cpu(const Tensor& qkv, const Tensor& slots,
                                                      const OptionalTensor& keys, const OptionalTensor& queries,
                                                      const OptionalTensor& bias, const Tensor& cu_seqlens,
                                                      int64_t /*max_seqlen*/, double scale, double dropout_p,
                                                      const OptionalTensor& rng, int64_t site) {
  Batch batch(qkv, cu_seqlens, scale, dropout_of(dropout_p, rng, site, kAttentionBits));
  const Tables tables(qkv, slots, keys, queries, bias);
  const PackedTables packed(batch, qkv, slots, tables, false);
  return attention_forward(batch, qkv);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> relative_attention_bwd_cpu(
    const Tensor& dout, const Tensor& qkv, const Tensor& out, const Tensor& lse, const Tensor& slots,
    const OptionalTensor& keys, const OptionalTensor& queries, const OptionalTensor& bias, const Tensor& cu_seqlens,
    int64_t /*max_seqlen*/, double scale, double dropout_p, const OptionalTensor& rng, int64_t site,
    bool table_gradients) {
  Batch batch(qkv, cu_seqlens, scale, dropout_of(dropout_p, rng, site, kAttentionBits));
  const Tables tables(qkv, slots, keys, queries, bias);
  const PackedTables packed(batch, qkv, slots, tables, true);
  const AttentionBackward backward(batch, dout, qkv, out, lse);
  if (table_gradients) {
    const TableGradients gradients(batch, packed, tables, qkv);
    gradients.run(backward);
    return {backward.dqkv, gradients.keys(), gradients.queries(), gradients.bias()};
  }
  backward.run_all();
  const auto none = [&](const OptionalTensor& table) { return empty({0}, table ? *table : qkv); };
  return {backward.dqkv, none(keys), none(queries), none(bias)};
}

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("relative_attention_fwd", TORCH_BOX(&relative_attention_fwd_cpu));
  m.impl("relative_attention_bwd", TORCH_BOX(&relative_attention_bwd_cpu));
}

}  // namespace fastbert
