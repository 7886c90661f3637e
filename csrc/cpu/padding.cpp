// The torch side of packing on the CPU. Rows are copied as bytes: one loop serves every dtype and instruction set. The
// schemas are defined in fastbert/ops/padding.py.

#include <cstring>
#include <tuple>
#include <vector>

#include "../checks.h"
#include "../tensor.h"

namespace fastbert {

namespace {

// The places of a (batch, seqlen) grid, b * seqlen + s, those of visible tokens first; cu_seqlens; and four facts: how
// many tokens are visible, how many in the longest row, whether no row begins with a gap, whether no row has a gap
// between tokens.
std::tuple<Tensor, Tensor, Tensor> padding_places(const Tensor& mask) {
  check_mask("padding_places", mask);
  const Tensor visible = contiguous(mask), cu_seqlens = empty({mask.size(0) + 1}, mask, ScalarType::Int);
  const Tensor places = empty({mask.numel()}, mask, ScalarType::Long), facts = empty({4}, places);
  // Bytes, not bools: a view of other bytes as bool can hold more than 0 and 1.
  const uint8_t* const see = static_cast<const uint8_t*>(visible.const_data_ptr());
  int* const ends = cu_seqlens.mutable_data_ptr<int>();
  int64_t* const place = places.mutable_data_ptr<int64_t>();
  const int64_t batch = mask.size(0), seqlen = mask.size(1);
  int64_t tokens = 0, longest = 0, starts_visible = 1, in_runs = 1;
  ends[0] = 0;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t before = tokens;
    for (int64_t i = b * seqlen; i < (b + 1) * seqlen; ++i)
      if (see[i]) place[tokens++] = i;
    const int64_t length = tokens - before;
    longest = std::max(longest, length);
    if (seqlen && !see[b * seqlen]) starts_visible = 0;
    if (length && place[tokens - 1] - place[before] >= length) in_runs = 0;
    ends[b + 1] = int(tokens);
  }
  int64_t* hidden = place + tokens;
  for (int64_t i = 0; i < batch * seqlen; ++i)
    if (!see[i]) *hidden++ = i;
  int64_t fact = 0;
  for (const int64_t each : {tokens, longest, starts_visible, in_runs})
    facts.mutable_data_ptr<int64_t>()[fact++] = each;
  return {places, cu_seqlens, facts};
}

// indices, contiguous, and checked to be from 0 to rows - 1.
Tensor places(const Tensor& indices, int64_t rows) {
  const Tensor checked = contiguous(indices);
  const int64_t* const place = checked.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < checked.numel(); ++t)
    FB_CHECK_INDEX(0 <= place[t] && place[t] < rows, "indices holds ", place[t], "; expected 0 to ", rows - 1);
  return checked;
}

Tensor padding_pack(const Tensor& x, const Tensor& indices) {
  check_packing("padding_pack", x, indices, 2);
  const Tensor in = contiguous(x), place = places(indices, x.size(0) * x.size(1));
  const std::vector<int64_t> shape = shape_of_rows(x, 2, {place.numel()});
  const Tensor out = x.dim() > 2 ? empty_rows(shape, x) : empty(shape, x);
  if (!out.numel()) return out;
  const int64_t bytes = out.numel() / place.numel() * x.element_size();
  const char* const src = bytes_of(in);
  const int64_t* const from = place.const_data_ptr<int64_t>();
  char* const dst = static_cast<char*>(out.mutable_data_ptr());
  parallel_rows(place.numel(), bytes / x.element_size(), 0, [&](int64_t begin, int64_t end, void*) {
    for (int64_t t = begin; t < end; ++t) std::memcpy(dst + t * bytes, src + from[t] * bytes, bytes);
  });
  return out;
}

Tensor padding_unpack(const Tensor& x, const Tensor& indices, int64_t batch, int64_t seqlen) {
  check_unpacking("padding_unpack", x, indices, batch, seqlen);
  const int64_t rows = batch * seqlen;
  const Tensor in = contiguous(x), place = places(indices, rows);
  const Tensor out = empty(shape_of_rows(x, 1, {batch, seqlen}), x);
  if (!out.numel()) return out;
  std::vector<int64_t> token(rows, -1);
  for (int64_t t = 0; t < place.numel(); ++t) token[place.const_data_ptr<int64_t>()[t]] = t;
  const int64_t bytes = out.numel() / rows * x.element_size();
  const char* const src = bytes_of(in);
  char* const dst = static_cast<char*>(out.mutable_data_ptr());
  parallel_rows(rows, bytes / x.element_size(), 0, [&](int64_t begin, int64_t end, void*) {
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

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("padding_places", TORCH_BOX(&padding_places));
  m.impl("padding_pack", TORCH_BOX(&padding_pack));
  m.impl("padding_unpack", TORCH_BOX(&padding_unpack));
}

}  // namespace fastbert
