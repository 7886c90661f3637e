// The tables of relative positions on the CPU, packed for the loops of attention: once per call and head.
#pragma once

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "attention_batch.h"

namespace fastbert {

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

inline cpu::PositionTable of_head(const Tensor& table, int64_t head, const std::vector<int32_t>& slot) {
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

}  // namespace fastbert
