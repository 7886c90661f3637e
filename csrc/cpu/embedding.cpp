// The torch side of embedding on the CPU. The schema is defined in fastbert/ops/embedding.py.
//
// The tables' gradients are added up by PyTorch's own kernel: each thread owns rows of the table, so the order is
// fixed.
#include "../embedding.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/index_select.h>
#include <torch/library.h>

#include <vector>

#include "../checks.h"
#include "../tensor.h"

namespace fastbert {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

// The inputs as the loops take them, and the tensors that they point into.
struct EmbeddingInputs {
  at::Tensor ids[3], tables[3], ids_of_copies[3], weight, bias;
  int64_t rows[3];
  Embedding op{};
  int64_t tokens;

  EmbeddingInputs(const at::Tensor& input_ids, const at::Tensor& position_ids, const OptionalTensor& token_type_ids,
                  const at::Tensor& word, const at::Tensor& position, const OptionalTensor& token_type,
                  const at::Tensor& weight_, const OptionalTensor& bias_, double eps, Dropout drop) {
    TORCH_CHECK_VALUE(token_type.has_value() == token_type_ids.has_value(),
                      "embedding: token_type and token_type_ids go together; expected both or neither");
    check_table("input_ids", input_ids, word, input_ids, word);
    check_table("position_ids", position_ids, position, input_ids, word);
    if (token_type) check_table("token_type_ids", *token_type_ids, *token_type, input_ids, word);
    check_parameter("embedding", "weight", weight_, word);
    if (bias_) check_parameter("embedding", "bias", *bias_, word);
    auto dtype = c10::promoteTypes(word.scalar_type(), position.scalar_type());
    if (token_type) dtype = c10::promoteTypes(dtype, token_type->scalar_type());
    tokens = input_ids.numel(), op.channels = word.size(-1);
    lookup(0, input_ids, word, dtype);
    lookup(1, position_ids, position, dtype);
    if (token_type) lookup(2, *token_type_ids, *token_type, dtype);
    weight = as_math(weight_, tables[0]), bias = bias_ ? as_math(*bias_, tables[0]) : weight;
    op.weight = weight.const_data_ptr(), op.bias = bias.const_data_ptr();
    op.eps = eps, op.drop = drop, op.dtype = dtype_of(tables[0]);
  }

  void lookup(int i, const at::Tensor& ids_, const at::Tensor& table, at::ScalarType dtype) {
    ids[i] = ids_.to(at::kLong).contiguous().flatten(), rows[i] = table.size(0);
    check_range(i);
    at::Tensor places = ids[i];
    tables[i] = table;
    if (table.scalar_type() != dtype || !table.is_contiguous()) {  // the rows that are needed, not the whole table
      tables[i] = table.index_select(0, ids[i]).to(dtype);
      ids_of_copies[i] = places = at::arange(tokens, ids[i].options());
    }
    op.lookups[i] = {places.const_data_ptr<int64_t>(), tables[i].const_data_ptr()};
  }

  // Here, because code compiled by torch.compile runs no checks in Python.
  void check_range(int i) const {
    static constexpr const char* kNames[] = {"input_ids", "position_ids", "token_type_ids"};
    const int64_t* const id = ids[i].const_data_ptr<int64_t>();
    for (int64_t t = 0; t < tokens; ++t)
      TORCH_CHECK_INDEX(0 <= id[t] && id[t] < rows[i], "embedding: ", kNames[i], "[", t, "] is ", id[t],
                        "; expected 0 <= ", kNames[i], " < ", rows[i]);
  }

  at::TensorOptions math() const { return weight.options(); }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> embedding_fwd_cpu(
    const at::Tensor& input_ids, const at::Tensor& position_ids, const OptionalTensor& token_type_ids,
    const at::Tensor& word, const at::Tensor& position, const OptionalTensor& token_type, const at::Tensor& weight,
    const at::Tensor& bias, const OptionalTensor& rng, double eps, double dropout_p, int64_t site) {
  const auto loop = FB_BEST_ISA(embedding_fwd);
  TORCH_CHECK_NOT_IMPLEMENTED(loop, kNoIsa);
  EmbeddingInputs in(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, eps,
                     dropout_of(dropout_p, rng, site, kRowBits));
  std::vector<int64_t> shape = input_ids.sizes().vec();
  const at::Tensor mean = at::empty(shape, in.math()), rstd = at::empty(shape, in.math());
  shape.push_back(in.op.channels);
  const at::Tensor y = empty_rows(shape, in.tables[0].options());
  in.op.mean = mean.mutable_data_ptr(), in.op.rstd = rstd.mutable_data_ptr();
  void* const out = y.mutable_data_ptr();
  if (y.numel())
    parallel_rows(in.tokens, in.op.channels, FB_BEST_ISA(embedding_scratch)(in.op.channels),
                  [&](int64_t begin, int64_t end, void* room) { loop(in.op, out, begin, end, room); });
  return {y, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> embedding_bwd_cpu(
    const at::Tensor& dy, const at::Tensor& input_ids, const at::Tensor& position_ids,
    const OptionalTensor& token_type_ids, const at::Tensor& word, const at::Tensor& position,
    const OptionalTensor& token_type, const at::Tensor& weight, const at::Tensor& mean, const at::Tensor& rstd,
    const OptionalTensor& rng, double dropout_p, int64_t site, int64_t padding_idx, const c10::List<bool>& need) {
  const auto loop = FB_BEST_ISA(embedding_bwd);
  TORCH_CHECK_NOT_IMPLEMENTED(loop, kNoIsa);
  const at::AutoDispatchBelowAutograd guard;
  EmbeddingInputs in(input_ids, position_ids, token_type_ids, word, position, token_type, weight, {}, 0,
                     dropout_of(dropout_p, rng, site, kRowBits));
  const int64_t C = in.op.channels;
  check_embedding_gradients(dy, input_ids, word, mean, rstd, in.tables[0].scalar_type(), in.weight.scalar_type());
  TORCH_CHECK_VALUE(need.size() == 4 && (token_type || !need.get(2)), "embedding: need has ", need.size(),
                    " entries; expected 4, and no gradient of a token_type that is None");
  const at::Tensor grad = dy.contiguous(), means = mean.contiguous(), rstds = rstd.contiguous();
  in.op.mean = means.data_ptr(), in.op.rstd = rstds.data_ptr();
  const at::Tensor dz = at::empty({in.tokens, C}, in.math());
  EmbeddingGradients gradients{grad.const_data_ptr(), dz.mutable_data_ptr(), nullptr, nullptr};
  const at::Tensor sums = sum_rows(in.tokens, C, 2, FB_BEST_ISA(embedding_scratch)(C), in.math(),
                                   [&](int64_t begin, int64_t end, char* chunk, void* room) {
                                     EmbeddingGradients here = gradients;
                                     here.dweight = chunk, here.dbias = chunk + C * in.weight.element_size();
                                     loop(in.op, here, begin, end, room);
                                   });
  const auto table = [&](int i, const at::Tensor& of, int64_t padding) {
    if (!need.get(i)) return at::empty({0}, in.math());
    return at::embedding_dense_backward(dz, in.ids[i], in.rows[i], padding, false).to(of.scalar_type());
  };
  const auto row = [&](int64_t i) {
    return need.get(3) ? sums[i].to(weight.options(), false, /*copy=*/true) : at::empty({0}, weight.options());
  };
  return {table(0, word, padding_idx), table(1, position, -1), table(2, token_type.value_or(word), -1), row(0), row(1)};
}

}  // namespace

TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("embedding_fwd", &embedding_fwd_cpu);
  m.impl("embedding_bwd", &embedding_bwd_cpu);
}

}  // namespace fastbert
