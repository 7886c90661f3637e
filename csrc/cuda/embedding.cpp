// The torch side of embedding on a GPU: checks, allocation, stream. The schema is defined in fastbert/ops/embedding.py.
#include "embedding.h"

#include "../checks.h"
#include "../layer_norm.h"
#include "../tensor.h"
#include "column_sums.h"

namespace fastbert {

namespace {

// The inputs in the types that kernels take, and the tensors that own the memory they point to.
struct EmbeddingInputs {
  Tensor ids[3], tables[3], weight;
  OptionalTensor bias;
  ScalarType y_type;
  cuda::EmbeddingRows op{};
  DeviceGuard guard;

  // bias_ is absent in the backward
  EmbeddingInputs(const Tensor& input_ids, const Tensor& position_ids, const OptionalTensor& token_type_ids,
                  const Tensor& word, const Tensor& position, const OptionalTensor& token_type, const Tensor& weight_,
                  const OptionalTensor& bias_, const OptionalTensor& rng, double dropout_p, int64_t site)
      : guard(word) {
    FB_CHECK_VALUE(token_type.has_value() == token_type_ids.has_value(),
                   "embedding: token_type and token_type_ids go together; expected both or neither");
    op.drop = device_dropout_of(dropout_p, rng, site, kRowBits, word);
    op.tokens = input_ids.numel();
    lookup(0, "input_ids", input_ids, word, input_ids, word);
    lookup(1, "position_ids", position_ids, position, input_ids, word);
    if (token_type) lookup(2, "token_type_ids", *token_type_ids, *token_type, input_ids, word);
    op.channels = word.size(1);
    FB_CHECK(op.channels <= cuda::kMostChannels, "embedding: the CUDA kernels take rows of at most ",
             cuda::kMostChannels, " channels, word has shape ", word.sizes());
    check_parameter("embedding", "weight", weight_, word);
    if (bias_) check_parameter("embedding", "bias", *bias_, word);

    const auto is = [&](const Tensor& tensor) { return type_of(tensor) == type_of(word); };
    y_type = is(position) && (!token_type || is(*token_type)) ? type_of(word) : ScalarType::Float;
    const bool narrow = y_type == type_of(word) && is(weight_) && (!bias_ || is(*bias_));
    const ScalarType parameters = narrow ? y_type : ScalarType::Float;
    weight = aligned(weight_, parameters);
    if (bias_) bias = aligned(*bias_, parameters);
    op.weight = weight.const_data_ptr(), op.parameters = dtype_of(weight);
    op.y_type = y_type == ScalarType::Float ? DType::f32 : dtype_of(word);
  }

  void lookup(int i, const char* name, const Tensor& ids_, const Tensor& table, const Tensor& input_ids,
              const Tensor& word) {
    check_table(name, ids_, table, input_ids, word);
    FB_CHECK(type_of(table) != ScalarType::Double, "embedding: the CUDA kernels have no fp64");
    FB_CHECK_INDEX(op.tokens == 0 || table.size(0) > 0, "embedding: the table of ", name, " has shape ", table.sizes(),
                   " beside ", op.tokens, " ids; expected at least one row");
    ids[i] = contiguous(ids_), tables[i] = contiguous(table);
    op.lookups.of[i] = {{ids[i].const_data_ptr(), type_of(ids[i]) == ScalarType::Int, table.size(0)},
                        tables[i].const_data_ptr(),
                        dtype_of(table)};
  }
};

std::tuple<Tensor, Tensor, Tensor> embedding_fwd_cuda(const Tensor& input_ids, const Tensor& position_ids,
                                                      const OptionalTensor& token_type_ids, const Tensor& word,
                                                      const Tensor& position, const OptionalTensor& token_type,
                                                      const Tensor& weight, const Tensor& bias,
                                                      const OptionalTensor& rng, double eps, double dropout_p,
                                                      int64_t site) {
  const EmbeddingInputs in(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, rng,
                           dropout_p, site);
  std::vector<int64_t> shape = input_ids.sizes().vec();
  const Tensor mean = empty(shape, word, ScalarType::Float), rstd = empty(shape, word, ScalarType::Float);
  shape.push_back(in.op.channels);
  const Tensor y = empty(shape, word, in.y_type);
  if (in.op.tokens == 0) return {y, mean, rstd};
  const char* const error =
      cuda::embedding_fwd(in.op, y.mutable_data_ptr(), mean.mutable_data_ptr<float>(), rstd.mutable_data_ptr<float>(),
                          in.bias->const_data_ptr(), eps, current_stream(word));
  FB_CHECK(!error, "embedding: ", error);
  return {y, mean, rstd};
}

// The tokens in the order of their ids.
Tensor order_of(const EmbeddingInputs& in, int i) {
  const cuda::Ids& ids = in.op.lookups.of[i].ids;
  if (!cuda::lists_instead_of_sorting(in.op.tokens, ids.rows))
    return call("aten::argsort", "stable", view(in.ids[i], {in.op.tokens}), true, int64_t(0), false);
  const Tensor order = empty({in.op.tokens}, in.ids[i], ScalarType::Long);
  const char* const error =
      cuda::list_tokens(ids, order.mutable_data_ptr<int64_t>(), in.op.tokens, current_stream(order));
  FB_CHECK(!error, "embedding: ", error);
  return order;
}

Tensor table_gradient(const EmbeddingInputs& in, int i, const Tensor& dz, int64_t padding_idx) {
  const Tensor gradient = zeros(in.tables[i].sizes(), dz, type_of(in.tables[i]));
  if (in.op.tokens == 0) return gradient;
  const Tensor order = order_of(in, i);
  const Tensor partials = empty({cuda::table_chunks(in.op.tokens), 2, in.op.channels}, dz);
  const char* const error =
      cuda::add_up_by_id(dz.const_data_ptr<float>(), in.op.lookups.of[i].ids, order.const_data_ptr<int64_t>(),
                         partials.mutable_data_ptr<float>(), gradient.mutable_data_ptr(), dtype_of(gradient),
                         in.op.tokens, in.op.channels, padding_idx, current_stream(dz));
  FB_CHECK(!error, "embedding: ", error);
  return gradient;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> embedding_bwd_cuda(
    const Tensor& dy, const Tensor& input_ids, const Tensor& position_ids, const OptionalTensor& token_type_ids,
    const Tensor& word, const Tensor& position, const OptionalTensor& token_type, const Tensor& weight,
    const Tensor& mean, const Tensor& rstd, const OptionalTensor& rng, double dropout_p, int64_t site,
    int64_t padding_idx, const std::vector<bool>& need) {
  const NoGrad no_grad;
  const EmbeddingInputs in(input_ids, position_ids, token_type_ids, word, position, token_type, weight, {}, rng,
                           dropout_p, site);
  const int64_t tokens = in.op.tokens, channels = in.op.channels;
  check_embedding_gradients(dy, input_ids, word, mean, rstd, in.y_type, ScalarType::Float);
  FB_CHECK_VALUE(need.size() == 4 && (token_type || !need[2]), "embedding: need has ", need.size(),
                 " entries; expected 4, and no gradient of a token_type that is None");
  const int64_t types = need[2] ? token_type->size(0) : 0;
  const bool in_passing = types > 0 && tokens > 0 && cuda::sums_types_in_passing(types, channels);
  const bool need_dz = need[0] || need[1] || (need[2] && !in_passing);
  const auto room = [&](bool needed, const std::vector<int64_t>& sizes) {
    return needed ? empty(sizes, word, ScalarType::Float) : empty({0}, word, ScalarType::Float);
  };
  const auto pointer = [](bool needed, const Tensor& x) { return needed ? x.mutable_data_ptr<float>() : nullptr; };

  const int64_t blocks = tokens ? cuda::layer_norm_bwd_blocks(tokens, channels) : 0;
  const Tensor grad = contiguous(dy), means = contiguous(mean), rstds = contiguous(rstd);
  const Tensor dz = room(need_dz, {tokens, channels}), partials = room(need[3], {blocks, 2, channels}),
               type_partials = room(in_passing, {blocks, types, channels});
  const auto parameter = [&] {
    const int64_t size = need[3] ? channels : 0;
    return tokens ? empty({size}, weight) : zeros({size}, weight, type_of(weight));
  };
  const Tensor dweight = parameter(), dbias = parameter();
  const Tensor type_sums = in_passing ? empty({types, channels}, *token_type) : room(false, {});
  if (tokens) {
    void* const stream = current_stream(word);
    const cuda::EmbeddingSums sums{grad.const_data_ptr(),         means.const_data_ptr<float>(),
                                   rstds.const_data_ptr<float>(), pointer(need_dz, dz),
                                   pointer(need[3], partials),    pointer(in_passing, type_partials)};
    const auto to = [](const Tensor& sum) { return cuda::ColumnSum{sum.mutable_data_ptr(), dtype_of(sum)}; };
    const char* error = cuda::embedding_bwd(in.op, sums, blocks, stream);
    if (!error && need[3])
      error = cuda::column_sums(sums.partials, blocks, channels, {{to(dweight), to(dbias)}, 2}, stream);
    if (!error && in_passing)
      error = cuda::column_sums(sums.type_partials, blocks, types * channels, {{to(type_sums)}, 1}, stream);
    FB_CHECK(!error, "embedding: ", error);
  }
  const auto table = [&](int i, int64_t padding) {
    return need[i] ? table_gradient(in, i, dz, padding) : room(false, {});
  };
  return {table(0, padding_idx), table(1, -1), in_passing ? type_sums : table(2, -1), dweight, dbias};
}

}  // namespace

FB_CUDA_LIBRARY(m) {
  m.impl("embedding_fwd", TORCH_BOX(&embedding_fwd_cuda));
  m.impl("embedding_bwd", TORCH_BOX(&embedding_bwd_cuda));
}

}  // namespace fastbert
