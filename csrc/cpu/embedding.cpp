// The torch side of embedding on the CPU. The schema is defined in fastbert/ops/embedding.py.
//
// The tables' gradients are computed row by row, adding up a row's tokens in order, so that results do not depend on
// threads. A 16-bit table is never held in 32 bits as a whole.
#include "../embedding.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <vector>

#include "../checks.h"
#include "../tensor.h"

namespace fastbert {

namespace {

// The inputs as the loops take them, and the tensors that they point into.
struct EmbeddingInputs {
  Tensor ids[3], tables[3], ids_of_copies[3], weight, bias;
  int64_t rows[3];
  Embedding op{};
  int64_t tokens;
  std::vector<int64_t> shape;  // of the ids

  EmbeddingInputs(const Tensor& input_ids, const Tensor& position_ids, const OptionalTensor& token_type_ids,
                  const Tensor& word, const Tensor& position, const OptionalTensor& token_type, const Tensor& weight_,
                  const OptionalTensor& bias_, double eps, Dropout drop) {
    FB_CHECK_VALUE(token_type.has_value() == token_type_ids.has_value(),
                   "embedding: token_type and token_type_ids go together; expected both or neither");
    check_table("input_ids", input_ids, word, input_ids, word);
    check_table("position_ids", position_ids, position, input_ids, word);
    if (token_type) check_table("token_type_ids", *token_type_ids, *token_type, input_ids, word);
    check_parameter("embedding", "weight", weight_, word);
    if (bias_) check_parameter("embedding", "bias", *bias_, word);
    const auto is = [&](const Tensor& table) { return type_of(table) == type_of(word); };
    const bool same = is(position) && (!token_type || is(*token_type));
    const ScalarType dtype = same ? type_of(word) : ScalarType::Float;  // Double does not mix with others
    tokens = input_ids.numel(), op.channels = word.size(-1), shape = input_ids.sizes().vec();
    lookup(0, input_ids, word, dtype);
    lookup(1, position_ids, position, dtype);
    if (token_type) lookup(2, *token_type_ids, *token_type, dtype);
    weight = as_math(weight_, tables[0]), bias = bias_ ? as_math(*bias_, tables[0]) : weight;
    op.weight = weight.const_data_ptr(), op.bias = bias.const_data_ptr();
    op.eps = eps, op.drop = drop, op.dtype = dtype_of(tables[0]);
  }

  void lookup(int i, const Tensor& ids_, const Tensor& table, ScalarType dtype) {
    ids[i] = view(contiguous(ids_, ScalarType::Long), {tokens}), rows[i] = table.size(0);
    check_range(i);
    Tensor places = ids[i];
    tables[i] = table;
    if (type_of(table) != dtype || !table.is_contiguous()) {  // copies the rows that are needed, not the whole table
      tables[i] = contiguous(call("aten::index_select", "", table, int64_t(0), ids[i]), dtype);
      ids_of_copies[i] = places = empty({tokens}, ids[i]);
      std::iota(places.mutable_data_ptr<int64_t>(), places.mutable_data_ptr<int64_t>() + tokens, 0);
    }
    op.lookups[i] = {places.const_data_ptr<int64_t>(), tables[i].const_data_ptr()};
  }

  // Checked here, because code compiled by torch.compile does not run the checks in Python.
  void check_range(int i) const {
    static constexpr const char* kNames[] = {"input_ids", "position_ids", "token_type_ids"};
    const int64_t* const id = ids[i].const_data_ptr<int64_t>();
    for (int64_t t = 0; t < tokens; ++t)
      FB_CHECK_INDEX(0 <= id[t] && id[t] < rows[i], "embedding: ", kNames[i], place(t), " is ", id[t],
                     "; expected 0 <= ", kNames[i], " < ", rows[i]);
  }

  // The index of token t in a tensor of the ids' shape, as Python writes it.
  std::string place(int64_t t) const {
    std::string text = "]";
    for (size_t i = shape.size(); i-- > 0; t /= shape[i]) text = (i ? ", " : "[") + std::to_string(t % shape[i]) + text;
    return shape.empty() ? "" : text;
  }

  ScalarType math() const { return type_of(weight); }
};

std::tuple<Tensor, Tensor, Tensor> embedding_fwd_cpu(const Tensor& input_ids, const Tensor& position_ids,
                                                     const OptionalTensor& token_type_ids, const Tensor& word,
                                                     const Tensor& position, const OptionalTensor& token_type,
                                                     const Tensor& weight, const Tensor& bias,
                                                     const OptionalTensor& rng, double eps, double dropout_p,
                                                     int64_t site) {
  const auto loop = FB_BEST_ISA(embedding_fwd);
  FB_CHECK(loop, kNoIsa);
  EmbeddingInputs in(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, eps,
                     dropout_of(dropout_p, rng, site, kRowBits));
  std::vector<int64_t> shape = input_ids.sizes().vec();
  const Tensor mean = empty(shape, word, in.math()), rstd = empty(shape, word, in.math());
  shape.push_back(in.op.channels);
  const Tensor y = empty_rows(shape, in.tables[0]);
  in.op.mean = mean.mutable_data_ptr(), in.op.rstd = rstd.mutable_data_ptr();
  void* const out = y.mutable_data_ptr();
  if (y.numel())
    parallel_rows(in.tokens, in.op.channels, FB_BEST_ISA(embedding_scratch)(in.op.channels),
                  [&](int64_t begin, int64_t end, void* room) { loop(in.op, out, begin, end, room); });
  return {y, mean, rstd};
}

// The tokens sorted by id, and where each id begins among them. Tokens with padding_idx as their id are left out.
struct TokensById {
  std::vector<int64_t> tokens, first;

  TokensById(const int64_t* ids, int64_t count, int64_t padding_idx) {
    for (int64_t token = 0; token < count; ++token)
      if (ids[token] != padding_idx) tokens.push_back(token);
    std::stable_sort(tokens.begin(), tokens.end(), [&](int64_t a, int64_t b) { return ids[a] < ids[b]; });
    for (size_t i = 0; i < tokens.size(); ++i)
      if (i == 0 || ids[tokens[i]] != ids[tokens[i - 1]]) first.push_back(int64_t(i));
    first.push_back(int64_t(tokens.size()));
  }
};

// Asks Linux for pages of 2 MiB in the memory of a large tensor that has just been allocated. Otherwise the first write
// to each 4 KiB of it is a page fault: 96,000 for the gradient of DeBERTa-v3's vocabulary.
void in_huge_pages(const Tensor& tensor) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 2 << 20, kFewest = 16;  // malloc gives memory of this size to nobody else
  const auto begin = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr()),
             end = begin + uintptr_t(tensor.numel() * tensor.element_size());
  const uintptr_t first = (begin + kPage - 1) / kPage, last = end / kPage;
  if (first + kFewest <= last) madvise(reinterpret_cast<void*>(first * kPage), (last - first) * kPage, MADV_HUGEPAGE);
#endif
}

// The gradient of a table, in the table's type. dz: (T, C).
Tensor table_gradient(const Tensor& dz, const Tensor& ids, const Tensor& table, int64_t padding_idx) {
  const Tensor gradient = empty(table.sizes(), table);
  in_huge_pages(gradient);
  zero_(gradient);
  const int64_t* const id = ids.const_data_ptr<int64_t>();
  const TokensById by_id(id, ids.numel(), padding_idx);
  const int64_t C = table.size(1), rows = int64_t(by_id.first.size()) - 1, bytes = C * gradient.element_size();
  char* const to = static_cast<char*>(gradient.mutable_data_ptr());
  const void* const from = dz.const_data_ptr();
  const int64_t grain = 1 + rows * kGrain / std::max<int64_t>(1, dz.numel());
  parallel_for(rows, grain, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<double[]> scratch(new double[C]);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t* const tokens = &by_id.tokens[by_id.first[row]];
      FB_BEST_ISA(embedding_row)
      (from, tokens, by_id.first[row + 1] - by_id.first[row], C, dtype_of(table), to + id[*tokens] * bytes,
       scratch.get());
    }
  });
  return gradient;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> embedding_bwd_cpu(
    const Tensor& dy, const Tensor& input_ids, const Tensor& position_ids, const OptionalTensor& token_type_ids,
    const Tensor& word, const Tensor& position, const OptionalTensor& token_type, const Tensor& weight,
    const Tensor& mean, const Tensor& rstd, const OptionalTensor& rng, double dropout_p, int64_t site,
    int64_t padding_idx, const std::vector<bool>& need) {
  const auto loop = FB_BEST_ISA(embedding_bwd);
  FB_CHECK(loop, kNoIsa);
  const NoGrad guard;
  EmbeddingInputs in(input_ids, position_ids, token_type_ids, word, position, token_type, weight, {}, 0,
                     dropout_of(dropout_p, rng, site, kRowBits));
  const int64_t C = in.op.channels;
  check_embedding_gradients(dy, input_ids, word, mean, rstd, type_of(in.tables[0]), type_of(in.weight));
  FB_CHECK_VALUE(need.size() == 4 && (token_type || !need[2]), "embedding: need has ", need.size(),
                 " entries; expected 4, and no gradient of a token_type that is None");
  const Tensor grad = contiguous(dy), means = contiguous(mean), rstds = contiguous(rstd);
  in.op.mean = means.data_ptr(), in.op.rstd = rstds.data_ptr();
  const Tensor dz = empty({in.tokens, C}, word, in.math());
  EmbeddingGradients gradients{grad.const_data_ptr(), dz.mutable_data_ptr(), nullptr, nullptr};
  const Tensor sums = sum_rows(in.tokens, C, 2, FB_BEST_ISA(embedding_scratch)(C), in.tables[0],
                               [&](int64_t begin, int64_t end, char* chunk, void* room) {
                                 EmbeddingGradients here = gradients;
                                 here.dweight = chunk, here.dbias = chunk + C * in.weight.element_size();
                                 loop(in.op, here, begin, end, room);
                               });
  const auto table = [&](int i, const Tensor& of, int64_t padding) {
    return need[i] ? table_gradient(dz, in.ids[i], of, padding) : empty({0}, word, in.math());
  };
  const auto sum = [&](int64_t i) { return need[3] ? copy_of(row(sums, i), type_of(weight)) : empty({0}, weight); };
  return {table(0, word, padding_idx), table(1, position, -1), table(2, token_type.value_or(word), -1), sum(0), sum(1)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("embedding_fwd", TORCH_BOX(&embedding_fwd_cpu));
  m.impl("embedding_bwd", TORCH_BOX(&embedding_bwd_cpu));
}

}  // namespace fastbert
