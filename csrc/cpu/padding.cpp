// The torch side of packing on the CPU. Rows are copied as bytes: one loop serves every dtype and instruction set. The
// schemas are defined in fastbert/ops/padding.py.
#include <ATen/ops/index_select.h>
#include <torch/library.h>

#include <cstring>
#include <tuple>
#include <vector>

#include "../checks.h"
#include "../tensor.h"

namespace fastbert {

namespace {

// Where the visible tokens of a (batch, seqlen) grid are, in one pass: their places in the flattened grid, cu_seqlens,
// and the longest row's count.
std::tuple<at::Tensor, at::Tensor, at::Tensor> padding_plan(const at::Tensor& mask) {
  TORCH_CHECK_VALUE(mask.dim() == 2 && mask.scalar_type() == at::kBool, "padding_plan: expected (B, S) bool, got ",
                    mask.sizes(), " ", mask.scalar_type());
  const at::Tensor visible = mask.contiguous(),
                   cu_seqlens = at::empty({mask.size(0) + 1}, mask.options().dtype(at::kInt));
  // Bytes, not bools: a view of other bytes as bool can hold more than 0 and 1.
  const uint8_t* const see = static_cast<const uint8_t*>(visible.const_data_ptr());
  int* const ends = cu_seqlens.mutable_data_ptr<int>();
  const int64_t batch = mask.size(0), seqlen = mask.size(1);
  int64_t longest = 0;
  ends[0] = 0;
  for (int64_t b = 0; b < batch; ++b) {
    int64_t length = 0;
    for (int64_t i = b * seqlen; i < (b + 1) * seqlen; ++i) length += see[i] != 0;
    longest = std::max(longest, length);
    TORCH_CHECK_VALUE(ends[b] + length <= INT32_MAX, "padding_plan: more than 2**31 tokens");
    ends[b + 1] = int(ends[b] + length);
  }
  const at::Tensor indices = at::empty({ends[batch]}, mask.options().dtype(at::kLong));
  int64_t* next = indices.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < batch * seqlen; ++i)
    if (see[i]) *next++ = i;
  return {indices, cu_seqlens, at::empty({}, indices.options()).fill_(longest)};
}

// indices, contiguous and checked to be among `rows`.
at::Tensor places(const at::Tensor& indices, int64_t rows) {
  const at::Tensor checked = indices.contiguous();
  const int64_t* const place = checked.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < checked.numel(); ++t)
    TORCH_CHECK_INDEX(0 <= place[t] && place[t] < rows, "indices holds ", place[t], "; expected 0 to ", rows - 1);
  return checked;
}

std::vector<int64_t> shape_of_rows(const at::Tensor& x, int64_t from, std::vector<int64_t> shape) {
  shape.insert(shape.end(), x.sizes().begin() + from, x.sizes().end());
  return shape;
}

at::Tensor padding_pack(const at::Tensor& x, const at::Tensor& indices) {
  check_packing("padding_pack", x, indices, 2);
  const at::Tensor in = x.contiguous().flatten(0, 1), place = places(indices, in.size(0));
  const std::vector<int64_t> shape = shape_of_rows(x, 2, {place.numel()});
  at::Tensor out = x.dim() > 2 ? empty_rows(shape, x.options()) : at::empty(shape, x.options());
  return at::index_select_out(out, in, 0, place);
}

at::Tensor padding_unpack(const at::Tensor& x, const at::Tensor& indices, c10::SymInt batch, c10::SymInt seqlen) {
  check_unpacking("padding_unpack", x, indices, batch.expect_int(), seqlen.expect_int());
  const int64_t rows = batch.expect_int() * seqlen.expect_int();
  const at::Tensor in = x.contiguous(), place = places(indices, rows);
  const at::Tensor out = at::empty(shape_of_rows(x, 1, {batch.expect_int(), seqlen.expect_int()}), x.options());
  if (!out.numel()) return out;
  std::vector<int64_t> token(rows, -1);
  for (int64_t t = 0; t < place.numel(); ++t) token[place.const_data_ptr<int64_t>()[t]] = t;
  const int64_t bytes = out.numel() / rows * x.element_size();
  const char* const src = static_cast<const char*>(in.const_data_ptr());
  char* const dst = static_cast<char*>(out.mutable_data_ptr());
  parallel_rows(rows, bytes, 0, [&](int64_t begin, int64_t end, void*) {
    for (int64_t row = begin; row < end; ++row) {
      if (token[row] < 0) {
        std::memset(dst + row * bytes, 0, bytes);
      } else {
        std::memcpy(dst + row * bytes, src + token[row] * bytes, bytes);
      }
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("padding_plan", &padding_plan);
  m.impl("padding_pack", &padding_pack);
  m.impl("padding_unpack", &padding_unpack);
}

}  // namespace fastbert
