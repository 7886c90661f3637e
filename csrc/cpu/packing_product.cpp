// Products in float32 by the loops of packed weights, which pack one of the factors in each call.
#include "../packed_linear.h"
#include "../tensor.h"
#include "matrix_product.h"
#include "product_blocks.h"

namespace fastbert {

namespace {

// What a product of the rows of x, without GELU, is known to be before the other factor is packed.
cpu::PackedLinear product_of_rows(const Tensor& x, const Tensor& y) {
  cpu::PackedLinear op{};
  op.x = x.const_data_ptr(), op.x_stride = row_stride(x), op.rows = x.size(0), op.inner = x.size(1);
  op.y = y.mutable_data_ptr(), op.y_stride = y.size(1), op.x_dtype = op.y_dtype = dtype_of(x);
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

// With AVX2 ours is faster in float32, whichever factor it packs.
bool packs_either_factor() { return cpu::best_isa() == cpu::Isa::avx2 || cpu::best_isa() == cpu::Isa::avx2_vnni; }

// The rows of b's matrix to take at a time: whole tiles, fewer where threads would have less than two parts each.
int64_t turned_at_once(int64_t columns) {
  const int64_t most = FB_BEST_ISA(turned_rows)(), tile = most / cpu::kTurnedTiles;
  return std::clamp(columns / (2 * threads()) / tile * tile, tile, most);
}

// The product with a packed: the loops multiply rows of b's matrix by all rows of a. The bits are the same as with b
// packed, because each element is the same sum.
Tensor turned_product(const Tensor& a, const Tensor& b, const Tensor* bias) {
  const int64_t rows = a.size(0), inner = a.size(1), columns = b.size(0), width = FB_BEST_ISA(packed_width)();
  const int64_t panels = divide_up(rows, width), panel = width * inner, at_once = turned_at_once(columns);
  const Tensor c = empty_rows({rows, columns}, a);
  const Scratch memory(panels * panel * int64_t(sizeof(float)));
  float* const packed = static_cast<float*>(memory.get());
  cpu::PackedLinear op = product_of_rows(b, c);
  op.channels = rows, op.weight = packed, op.bias = bias ? bias->const_data_ptr() : nullptr;
  parallel_for(panels, std::max<int64_t>(1, grain() / panel), [&](int64_t begin, int64_t end) {
    const int64_t row = begin * width, count = std::min(end * width, rows) - row, stride = row_stride(a);
    FB_BEST_ISA(pack_weight)
    (a.const_data_ptr<float>() + row * stride, stride, false, inner, count, packed + begin * panel);
  });
  ProductBlocks{rows, inner, columns, rows, at_once}.run(
      FB_BEST_ISA(packed_scratch)(), [&](const ProductBlocks::Block& all, void* scratch) {
        cpu::PackedLinear part = op;
        for (int64_t row = all.column, end; row < all.column_end; row = end) {
          end = std::min(row + at_once, all.column_end);
          const int64_t next = end < all.column_end ? end : all.next;
          part.next = next < columns ? b.const_data_ptr<float>() + next * op.x_stride : nullptr;
          FB_BEST_ISA(turned_linear)(part, row, end, scratch);
        }
      });
  return c;
}

}  // namespace

bool use_packing_product(ScalarType type, int64_t rows, const Factor& b) {
  if (!packs_either_factor() || type != ScalarType::Float || type_of(b.matrix) != type) return false;
  return rows > 0 && std::min(b.rows(), b.columns()) >= kThin;
}

bool packs_rows(int64_t rows, const Factor& b) {
  const bool fill_panels = 8 * round_up(rows, FB_BEST_ISA(packed_width)()) <= 9 * rows;
  return b.transposed && b.rows() > kNarrow && rows >= 16 && rows <= std::min<int64_t>(192, b.columns() / 5) &&
         fill_panels;
}

Tensor packing_product(const Tensor& a, const Factor& b, const Tensor* bias) {
  FB_CHECK(type_of(a) == ScalarType::Float, "linear: expected float32 where a factor is packed");
  const int64_t columns = b.columns();
  const bool all_have_work = columns >= 2 * FB_BEST_ISA(turned_rows)() * threads();
  if (all_have_work && packs_rows(a.size(0), b)) return turned_product(a, b.matrix, bias);
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
