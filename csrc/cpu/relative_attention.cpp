// The torch side of relative_attention on the CPU. The schema is defined in fastbert/ops/relative_attention.py.
//
// Tables are packed once per call and head. Their gradients are added up in tasks, each one head of some sequences, and
// then over the tasks in order. The tasks do not depend on the number of threads.
#include <cmath>
#include <limits>

#include "attention_batch.h"

namespace fastbert {

namespace {

constexpr int64_t kMostTasks = 64;  // of the backward; each has its own memory for the gradients of tables

// The columns of a batch's distances (see cpu::Positions), by rising key - query and by rising query - key.
struct Columns {
  int64_t longest, count = 0;
  std::vector<int32_t> by_key, by_query, slot_by_key, slot_by_query;

  Columns(int64_t longest_, const Tensor& slots, int64_t width) : longest(std::max<int64_t>(1, longest_)) {
    const Tensor ordered = contiguous(slots);
    const int32_t* const slot_of = ordered.const_data_ptr<int32_t>();
    const int64_t farthest = slots.numel() / 2;
    for (int64_t distance = longest - 1; distance > -longest; --distance) {
      const int64_t known = std::clamp(distance, -farthest, farthest) + farthest;
      const int32_t slot = std::clamp<int32_t>(slot_of[known], 0, int32_t(width - 1));
      if (slot_by_key.empty() || slot_by_key.back() != slot) slot_by_key.push_back(slot);
      by_key.push_back(int32_t(slot_by_key.size() - 1));
    }
    count = int64_t(slot_by_key.size());
    slot_by_query.assign(slot_by_key.rbegin(), slot_by_key.rend());
    for (auto column = by_key.rbegin(); column != by_key.rend(); ++column)
      by_query.push_back(int32_t(count - 1 - *column));
  }
};

// The tables of a call, any of which may be absent.
struct Tables {
  OptionalTensor keys, queries, bias;

  Tables(const Tensor& qkv, const Tensor& slots, const OptionalTensor& keys_, const OptionalTensor& queries_,
         const OptionalTensor& bias_)
      : keys(keys_), queries(queries_), bias(bias_) {
    check_relative_attention(qkv, slots, keys, queries, bias);
    for (OptionalTensor* table : {&keys, &queries, &bias})
      if (*table) *table = contiguous(**table);
  }
  int64_t width() const { return bias ? bias->size(1) : (keys ? keys : queries)->size(0); }
};

cpu::PositionTable of_head(const Tensor& table, int64_t head, const std::vector<int32_t>& slot) {
  const int64_t heads = table.size(1), D = table.size(2);
  const char* const data = bytes_of(table) + head * D * table.element_size();
  return {data, heads * D, table.size(0), D, dtype_of(table), slot.data(), int64_t(slot.size())};
}

// A batch's positions, and the memory that they point into.
class PackedTables {
 public:
  PackedTables(Batch& batch, const Tensor& qkv, const Tensor& slots, const Tables& tables, bool backward)
      : columns(batch.longest, slots, tables.width()),
        pairs(in_pairs(batch)),
        batch_(batch),
        like_(qkv),
        tables_(tables) {
    size_ = FB_BEST_ISA(position_room)(columns.count, batch.D, batch.dtype);
    keys_ = pack(tables.keys, columns.slot_by_key, 1, backward);
    queries_ = pack(tables.queries, columns.slot_by_query, batch.scale, backward);
    if (tables.bias) bias_ = spread_bias();
    for (int64_t head = 0; head < batch.heads; ++head) batch.positions.push_back(of(head));
  }

  const Columns columns;
  const bool pairs;  // whether scores are computed from pairs
  int64_t table_bytes() const { return size_.rows; }
  int64_t steps() const { return 2 * columns.longest - 1; }

 private:
  static bool in_pairs(const Batch& batch) {
    return cpu::can_scale_late(batch.scale) && FB_BEST_ISA(positions_in_pairs)(batch.dtype, batch.D);
  }

  // A table packed for each head, (heads, bytes): `across` and then, for the backward, `rows`.
  OptionalTensor pack(const OptionalTensor& table, const std::vector<int32_t>& slot, double factor, bool backward) {
    if (!table) return std::nullopt;
    const int64_t bytes = size_.across + (backward ? size_.rows : 0), room = columns.count * batch_.D * sizeof(double);
    const Tensor packed = empty({batch_.heads, bytes}, like_, ScalarType::Byte);
    char* const to = static_cast<char*>(packed.mutable_data_ptr());
    parallel_for(batch_.heads, 1, [&](int64_t first, int64_t last) {
      const std::unique_ptr<char[]> scratch(new char[room]);
      for (int64_t head = first; head < last; ++head) {
        char* const across = to + head * bytes;
        const cpu::PositionTable of_one = of_head(*table, head, slot);
        void* const rows = backward ? across + size_.across : nullptr;
        if (pairs) FB_BEST_ISA(pack_position_pairs)(of_one, across, scratch.get());
        if (!pairs || rows)
          FB_BEST_ISA(pack_positions)(of_one, pairs ? 1 : factor, pairs ? nullptr : across, rows, scratch.get());
      }
    });
    return packed;
  }

  // (H, steps): the bias of each distance, by rising key - query.
  Tensor spread_bias() const {
    const Tensor spread = empty({batch_.heads, steps()}, *tables_.bias);
    type_of(*tables_.bias) == ScalarType::Double ? spread_bias<double>(spread) : spread_bias<float>(spread);
    return spread;
  }
  template <class M>
  void spread_bias(const Tensor& spread) const {
    const M* const from = tables_.bias->const_data_ptr<M>();
    M* const to = spread.mutable_data_ptr<M>();
    const M factor = M(pairs ? 1 / batch_.scale : 1), most = std::numeric_limits<M>::max();
    for (int64_t head = 0; head < batch_.heads; ++head)
      for (int64_t step = 0; step < steps(); ++step) {
        const M bias = from[head * tables_.width() + columns.slot_by_key[columns.by_key[step]]];
        to[head * steps() + step] = std::isfinite(bias) ? std::clamp(bias * factor, -most, most) : bias * factor;
      }
  }

  cpu::Positions of(int64_t head) const {
    cpu::Positions of{columns.longest, columns.count, columns.by_key.data(), columns.by_query.data()};
    const auto at = [&](const OptionalTensor& packed) {
      return packed ? bytes_of(*packed) + head * packed->size(1) : nullptr;
    };
    of.keys = at(keys_), of.queries = at(queries_);
    of.key_rows = keys_ ? at(keys_) + size_.across : nullptr;
    of.query_rows = queries_ ? at(queries_) + size_.across : nullptr;
    if (bias_) of.bias = bytes_of(*bias_) + head * steps() * bias_->element_size();
    of.pairs = pairs;
    return of;
  }

  const Batch& batch_;
  const Tensor& like_;
  const Tables& tables_;
  cpu::PositionRoom size_;
  OptionalTensor keys_, queries_, bias_;
};

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

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("relative_attention_fwd", TORCH_BOX(&relative_attention_fwd_cpu));
  m.impl("relative_attention_bwd", TORCH_BOX(&relative_attention_bwd_cpu));
}

}  // namespace fastbert
