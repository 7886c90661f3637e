// Products in float32 by the loops of packed weights, which pack one of the factors in each call.
#include "../packed_linear.h"
#include "../tensor.h"
#include "matrix_product.h"
#include "product_blocks.h"

namespace fastbert {

namespace {

// What a product of the rows of x, in float and without GELU, is known to be before the other factor is packed.
cpu::PackedLinear product_of_rows(const Tensor& x, const Tensor& y) {
  cpu::PackedLinear op{};
  op.x = x.const_data_ptr(), op.x_stride = row_stride(x), op.rows = x.size(0), op.inner = x.size(1);
  op.y = y.mutable_data_ptr(), op.y_stride = y.size(1), op.x_dtype = op.y_dtype = DType::f32;
  op.weights = Weights::f32, op.gelu = Gelu::none;
  return op;
}

// How a thread takes its columns: it packs some panels of b at a time and multiplies all its rows by them. Threads
// share the rows only where there are too few panels for all of them.
struct PackingProduct {
  static constexpr int64_t kPacked = 1 << 19, kColumns = 256;  // floats, and columns, that are packed at a time
  static constexpr int64_t kUnitsPerThread = 4;

  cpu::PackedLinear op{};  // but for the columns
  const float *b, *bias;
  float* c;
  int64_t b_stride;
  bool across;  // whether b is (inner, columns), not its transpose

  const float* b_at(int64_t column) const { return b + (across ? column : column * b_stride); }
  int64_t columns_at_once() const {
    const int64_t width = FB_BEST_ISA(packed_width)();
    return std::clamp(kPacked / op.inner / width * width, width, kColumns);
  }
  static int64_t loop_scratch() { return round_up(FB_BEST_ISA(packed_scratch)(), 64); }
  int64_t scratch() const { return loop_scratch() + columns_at_once() * op.inner * int64_t(sizeof(float)); }

  ProductBlocks blocks(int64_t columns) const {
    const int64_t width = FB_BEST_ISA(packed_width)(), block = FB_BEST_ISA(packed_rows)();
    const int64_t panels = divide_up(columns, width), most = divide_up(op.rows, block);
    const int64_t shares = std::clamp<int64_t>(kUnitsPerThread * threads() / panels, 1, most);
    return {op.rows, op.inner, columns, divide_up(op.rows, shares), width};
  }

  void run(const ProductBlocks::Block& all, void* scratch) const {
    const int64_t block = FB_BEST_ISA(packed_rows)(), at_once = columns_at_once();
    float* const packed = reinterpret_cast<float*>(static_cast<char*>(scratch) + loop_scratch());
    cpu::PackedLinear part = op;
    part.weight = packed;
    for (int64_t column = all.column; column < all.column_end; column += at_once) {
      part.channels = std::min(at_once, all.column_end - column);
      part.y = c + column, part.bias = bias ? bias + column : nullptr;
      FB_BEST_ISA(pack_weight)(b_at(column), b_stride, across, op.inner, part.channels, packed);
      for (int64_t row = all.row; row < all.row_end; row += block)
        FB_BEST_ISA(packed_linear)(part, row, std::min(row + block, all.row_end), 0, part.channels, scratch);
    }
  }
};

constexpr int64_t kTurnedRows = 24;  // rows of b's matrix that are multiplied at a time: whole tiles of 6 or 12

// Whether to pack a rather than b: if that is little beside the product, a nearly fills its panels, and all threads
// have enough rows of b's matrix (docs/linear.md).
bool packs_rows(const Tensor& a, const Factor& b) {
  constexpr int64_t kMostRows = 192;
  const int64_t rows = a.size(0), width = FB_BEST_ISA(packed_width)(), whole = round_up(rows, width);
  return b.transposed && rows <= std::min(kMostRows, b.columns() / 5) && 8 * whole <= 9 * rows &&
         b.columns() >= 2 * kTurnedRows * threads();
}

// The product with a packed: the loops multiply rows of b's matrix by all rows of a. The bits are the same as with b
// packed, because each element is the same sum.
Tensor turned_product(const Tensor& a, const Tensor& b, const Tensor* bias) {
  const int64_t rows = a.size(0), inner = a.size(1), columns = b.size(0), width = FB_BEST_ISA(packed_width)();
  const int64_t panels = divide_up(rows, width), panel = width * inner;
  const Tensor c = empty_rows({rows, columns}, a);
  const Scratch memory(panels * panel * int64_t(sizeof(float)));
  float* const packed = static_cast<float*>(memory.get());
  const float *const a_rows = a.const_data_ptr<float>(), *const b_rows = b.const_data_ptr<float>();
  parallel_for(panels, std::max<int64_t>(1, grain() / panel), [&](int64_t begin, int64_t end) {
    const int64_t row = begin * width, count = std::min(end * width, rows) - row;
    FB_BEST_ISA(pack_weight)
    (a_rows + row * row_stride(a), row_stride(a), false, inner, count, packed + begin * panel);
  });
  cpu::PackedLinear op = product_of_rows(b, c);
  op.channels = rows, op.weight = packed, op.bias = bias ? bias->const_data_ptr<float>() : nullptr;
  ProductBlocks{rows, inner, columns, rows, kTurnedRows}.run(
      FB_BEST_ISA(packed_scratch)(), [&](const ProductBlocks::Block& all, void* scratch) {
        cpu::PackedLinear part = op;
        for (int64_t row = all.column, end; row < all.column_end; row = end) {
          end = std::min(row + kTurnedRows, all.column_end);
          const int64_t next = end < all.column_end ? end : all.next;
          part.next = next < columns ? b_rows + next * op.x_stride : nullptr;
          FB_BEST_ISA(turned_linear)(part, row, end, scratch);
        }
      });
  return c;
}

}  // namespace

// Ours is faster with AVX2. With AVX-512 only Zen 4 was measured, and the libraries are faster there (docs/linear.md).
bool use_packing_product(const Tensor& a, const Factor& b) {
  const cpu::Isa isa = cpu::best_isa();
  return (isa == cpu::Isa::avx2 || isa == cpu::Isa::avx2_vnni) && type_of(a) == ScalarType::Float &&
         type_of(b.matrix) == ScalarType::Float && a.numel() > 0 && std::min(b.rows(), b.columns()) >= kThin;
}

Tensor packing_product(const Tensor& a, const Factor& b, const Tensor* bias) {
  if (packs_rows(a, b)) return turned_product(a, b.matrix, bias);
  const int64_t columns = b.columns();
  const Tensor c = empty_rows({a.size(0), columns}, a);
  PackingProduct product{};
  product.op = product_of_rows(a, c);
  product.b = b.matrix.const_data_ptr<float>(), product.b_stride = row_stride(b.matrix), product.across = !b.transposed;
  product.bias = bias ? bias->const_data_ptr<float>() : nullptr, product.c = c.mutable_data_ptr<float>();
  product.blocks(columns).run(product.scratch(),
                              [&](const ProductBlocks::Block& all, void* scratch) { product.run(all, scratch); });
  return c;
}

}  // namespace fastbert
