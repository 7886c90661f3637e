// Products with packed weights, for packed_linear and packed_layer: checks, memory and threads.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "../checks.h"
#include "../packed_linear.h"
#include "../tensor.h"
#include "product_blocks.h"

namespace fastbert::packed {

using cpu::PackedLinear;

inline Weights weights_of(const Tensor& packed) {
  switch (type_of(packed)) {
    case ScalarType::Float: return Weights::f32;
    case ScalarType::BFloat16: return Weights::bf16;
    case ScalarType::Char: return Weights::s8;
    default:
      fail<std::invalid_argument>("packed_linear: weight is ", type_of(packed), "; expected Float, BFloat16 or Char");
  }
}

// approximate: empty for no GELU.
inline Gelu gelu_of(std::string_view approximate) {
  if (approximate.empty()) return Gelu::none;
  check_approximate("packed_linear", approximate);
  return approximate == "tanh" ? Gelu::tanh : Gelu::erf;
}

// One thread's memory for what one op passes to the next. Each new use overwrites the contents of the last one; the
// memory is kept from block to block and from layer to layer.
class Workspace {
 public:
  enum Use { kLeft, kLeftScale, kProduct, kMiddle, kWide, kUses };

  char* bytes(Use use, int64_t count, const Tensor& like) {
    if (!memory_[use] || memory_[use]->numel() < count) memory_[use] = empty({count}, like, ScalarType::Byte);
    return static_cast<char*>(memory_[use]->mutable_data_ptr());
  }
  // Like empty_rows; but rows of kWide lie apart if they would otherwise share sets of the first-level cache.
  Tensor matrix(Use use, int64_t rows, int64_t channels, const Tensor& like, ScalarType type) {
    OptionalTensor& memory = memory_[use];
    const bool fits = memory && memory->size(0) >= rows && memory->size(1) == channels && type_of(*memory) == type;
    if (!fits)
      memory = use == kWide ? rows_apart(rows, channels, like, type) : empty_rows({rows, channels}, like, type);
    return memory->size(0) == rows ? *memory : strided(*memory, {rows, channels}, {memory->stride(0), 1}, 0);
  }

 private:
  static Tensor rows_apart(int64_t rows, int64_t channels, const Tensor& like, ScalarType type) {
    constexpr int64_t kApart = 64;
    const bool share = channels * empty({0}, like, type).element_size() % 4096 == 0;
    const int64_t stride = share ? channels + kApart : channels;
    return strided(empty({rows, stride}, like, type), {rows, channels}, {stride, 1}, 0);
  }

  OptionalTensor memory_[kUses];
};

// Rows of x in the form that products with one kind of weights take. Several products can use them.
class Left {
 public:
  // x: (rows, K), each row contiguous. put() has to convert the rows before a product takes them. workspace: has to
  // live as long as this object, and holds only one Left at a time.
  Left(const Tensor& x, Weights weights, Workspace& workspace) : x_(x) {
    FB_CHECK(FB_BEST_ISA(packed_linear), kNoIsa);
    const int64_t rows = x.size(0), inner = x.size(1);
    const int64_t bytes = FB_BEST_ISA(packed_left_bytes)(inner, dtype_of(x), weights);
    call_.x = x.const_data_ptr(), call_.x_stride = x.stride(0);
    call_.rows = rows, call_.inner = inner, call_.x_dtype = dtype_of(x);
    call_.weights = weights;
    if (rows == 0 || (bytes == 0 && weights != Weights::s8)) return;
    call_.left = workspace.bytes(Workspace::kLeft, cpu::whole_tiles(rows) * bytes, x);
    if (weights == Weights::s8)
      call_.left_scale =
          reinterpret_cast<float*>(workspace.bytes(Workspace::kLeftScale, rows * int64_t(sizeof(float)), x));
  }

  // Whether the form differs from that of x, so that put() is needed.
  bool differs() const { return call_.left || call_.left_scale; }
  // Converts rows begin to end of x.
  void put(int64_t begin, int64_t end) const { FB_BEST_ISA(packed_left)(call_, begin, end); }
  void put_all() const {
    if (differs())
      parallel_rows(call_.rows, call_.inner, 0, [&](int64_t begin, int64_t end, void*) { put(begin, end); });
  }

  Weights weights() const { return call_.weights; }

  // The arguments of a product, as far as the left factor determines them.
  const PackedLinear& call() const { return call_; }

 private:
  Tensor x_;
  PackedLinear call_{};
};

struct Packed {
  Tensor weight;
  OptionalTensor scale, bias;
  int64_t channels;
};

inline void check_packed(const Tensor& x, const Packed& p) {
  FB_CHECK(FB_BEST_ISA(packed_linear), kNoIsa);
  const ScalarType type = type_of(x);
  const Weights weights = weights_of(p.weight);
  check_floating_beside("packed_linear", "x", x, ScalarType::Float);
  FB_CHECK_VALUE(x.dim() >= 2, "packed_linear: x has shape ", x.sizes(), "; expected (..., K)");
  FB_CHECK_VALUE(weights == Weights::s8 || type == type_of(p.weight), "packed_linear: x is ", type,
                 " beside a weight of ", type_of(p.weight), "; expected one type");
  FB_CHECK_VALUE(p.channels >= 0, "packed_linear: channels is ", p.channels, "; expected 0 or more");
  const int64_t width = FB_BEST_ISA(packed_width)(), group = FB_BEST_ISA(packed_group)(weights), inner = x.size(-1);
  const int64_t panels = divide_up(p.channels, width);
  FB_CHECK_VALUE(weights != Weights::s8 || inner <= 1 << 16, "packed_linear: K is ", inner,
                 "; expected at most 2**16 beside int8 weights");
  check_shape("packed_linear", "weight", p.weight, {panels, divide_up(inner, group), width, group});
  if (weights == Weights::s8) {
    FB_CHECK_VALUE(p.scale.has_value(), "packed_linear: scale is None beside int8 weights");
    check_shape("packed_linear", "scale", *p.scale, {2, p.channels});
  } else {
    FB_CHECK_VALUE(!p.scale, "packed_linear: scale is given beside weights of ", type_of(p.weight));
  }
  const auto check_memory = [&](const char* name, const Tensor& tensor) {
    check_device("packed_linear", name, tensor, x.device());
    FB_CHECK_VALUE(tensor.is_contiguous(), "packed_linear: ", name, " is not contiguous");
  };
  check_memory("weight", p.weight);
  if (p.scale) check_memory("scale", *p.scale);
  if (p.bias) check_memory("bias", *p.bias);
  if (p.scale) check_dtype("packed_linear", "scale", *p.scale, ScalarType::Float);
  if (p.bias) check_shape("packed_linear", "bias", *p.bias, {p.channels});
  if (p.bias) check_dtype("packed_linear", "bias", *p.bias, ScalarType::Float);
}

// A product of rows x with `factor`. y: (rows, channels), of any type that PackedLinear takes; its rows may lie apart.
struct Product {
  Tensor y;
  Packed factor;
};

// Products of the same rows as if they were one: each one's columns, in whole panels, follow those of the one before.
class Joined {
 public:
  void add(const PackedLinear& op, const Tensor& weight) {
    const int64_t panels = weight.size(0), width = weight.size(2);
    column_bytes_ = weight.size(1) * weight.size(3) * weight.element_size();
    parts_.push_back({op, columns(), columns() + panels * width});
  }
  int64_t columns() const { return parts_.empty() ? 0 : parts_.back().end; }

  void run(const ProductBlocks::Block& block, void* scratch) const {
    for (auto [op, begin, end] : parts_) {
      const int64_t from = std::max(block.column, begin), to = std::min(block.column_end, end);
      if (from >= to) continue;
      op.next = weights_from(block.column_end > end ? end : block.next);
      const int64_t channel_end = std::min(to - begin, op.channels);
      FB_BEST_ISA(packed_linear)(op, block.row, block.row_end, from - begin, channel_end, scratch);
    }
  }

 private:
  struct Part {
    PackedLinear op;
    int64_t begin, end;  // its columns
  };

  // The weights from a column on. Behind the last column: the memory after them, often the next layer's weights.
  const void* weights_from(int64_t column) const {
    const Part& part = *std::find_if(parts_.begin(), parts_.end() - 1, [&](const Part& p) { return column < p.end; });
    return static_cast<const char*>(part.op.weight) + (column - part.begin) * column_bytes_;
  }

  std::vector<Part> parts_;
  int64_t column_bytes_ = 0;  // of the weights; all products have the same inner dimension and kind of weights
};

// How many rows to take at a time, at most packed_rows(). Where threads would get unequal numbers of panels, or none,
// blocks of fewer rows are shared more evenly; but each reads the weights once more.
inline int64_t rows_at_once(int64_t rows, int64_t panels, Weights weights) {
  constexpr int64_t kFewest = 32, kEvenly = 4;  // rows of a block; with so many panels a thread shares are even
  const int64_t rows_a_panel = FB_BEST_ISA(packed_rows_a_panel)(weights);
  const auto block_of = [&](int64_t blocks) { return cpu::whole_tiles(divide_up(std::max<int64_t>(1, rows), blocks)); };
  const auto time = [&](int64_t blocks) {
    return divide_up(blocks * panels, threads()) * (block_of(blocks) + rows_a_panel);
  };
  int64_t best = std::max<int64_t>(1, divide_up(rows, FB_BEST_ISA(packed_rows)()));
  for (int64_t more = best + 1; more * kFewest <= rows && more * panels <= kEvenly * threads(); ++more)
    if (time(more) < time(best)) best = more;
  return block_of(best);
}

// Computes the products, from checked arguments. Threads share all of them as if they were one product.
inline void products_into(const Left& left, const std::vector<Product>& products, Gelu gelu) {
  Joined joined;
  for (const auto& [y, p] : products) {
    PackedLinear op = left.call();
    op.weight = p.weight.const_data_ptr();
    op.scale = p.scale ? p.scale->const_data_ptr<float>() : nullptr;
    op.bias = p.bias ? p.bias->const_data_ptr<float>() : nullptr;
    op.y = y.mutable_data_ptr(), op.y_stride = y.stride(0), op.y_dtype = dtype_of(y);
    op.channels = p.channels, op.gelu = gelu;
    joined.add(op, p.weight);
  }
  const int64_t rows = left.call().rows, width = FB_BEST_ISA(packed_width)();
  const int64_t at_once = rows_at_once(rows, divide_up(joined.columns(), width), left.weights());
  const ProductBlocks blocks{rows, left.call().inner, joined.columns(), at_once, width};
  blocks.run(FB_BEST_ISA(packed_scratch)(),
             [&](const ProductBlocks::Block& block, void* scratch) { joined.run(block, scratch); });
}

}  // namespace fastbert::packed
