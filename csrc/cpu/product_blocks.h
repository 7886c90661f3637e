// How the threads share a product.
#pragma once

#include "../packed_linear.h"
#include "../tensor.h"

namespace fastbert {

// A product's blocks of at most `max_rows` rows. Each block has all panels of `width` columns.
struct ProductBlocks {
  int64_t rows, inner, columns, max_rows, width;

  struct Block {
    int64_t row, row_end, column, column_end;
    int64_t next;  // the column that the thread probably continues with; `columns` if there is none
  };

  // Calls f(block, scratch); threads take ranges of the panels of all blocks.
  template <class F>
  void run(int64_t scratch_bytes, const F& f) const {
    const int64_t blocks = divide_up(rows, max_rows), panels = divide_up(columns, width), units = blocks * panels;
    if (units == 0) return;
    const int64_t work = std::max<int64_t>(1, rows * columns * std::max<int64_t>(1, inner) / kShareOfProducts);
    const int64_t shares = std::min({work, threads(), units});
    // An eighth of a thread's share, or 2^23 multiplications if that is less.
    const int64_t least = std::max<int64_t>(1, std::min(units / (8 * shares), 64 * units / work));
    parallel_ranges({units, shares, least}, scratch_bytes, [&](const Range& range, void* scratch) {
      for (int64_t unit = range.begin; unit < range.end;) {
        const int64_t block = unit / panels, panel = unit % panels, count = std::min(panels - panel, range.end - unit);
        unit += count;
        const int64_t then = unit < range.end ? unit : range.next;
        f(Block{cpu::first_row(block, blocks, rows), cpu::first_row(block + 1, blocks, rows), panel * width,
                std::min(columns, (panel + count) * width), then < units ? then % panels * width : columns},
          scratch);
      }
    });
  }
};

}  // namespace fastbert
