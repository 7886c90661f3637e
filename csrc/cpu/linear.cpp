#include "linear.h"

#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "../checks.h"
#include "../few_rows.h"
#include "../tensor.h"
#include "blas.h"
#include "matrix_product.h"
#include "product_blocks.h"

// Functions that not every build of torch has. oneDNN's inner product:
extern "C" AOTITorchError aoti_torch_cpu__linear_pointwise(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*,
                                                           const char*, const double**, int64_t, const char**,
                                                           AtenTensorHandle*) __attribute__((weak));
// at::globalContext() and at::Context::userEnabledMkldnn(), which have no C functions.
void* torch_context() asm("_ZN2at13globalContextEv") __attribute__((weak));
bool torch_user_enabled_mkldnn(const void* context) asm("_ZNK2at7Context17userEnabledMkldnnEv") __attribute__((weak));

namespace fastbert {

namespace {

// Whether torch.backends.mkldnn leaves oneDNN enabled.
bool user_wants_onednn() {
  return !torch_context || !torch_user_enabled_mkldnn || torch_user_enabled_mkldnn(torch_context());
}

bool use_onednn(const Tensor& x, const Tensor& weight) {
  return type_of(x) == ScalarType::Float && type_of(weight) == ScalarType::Float && x.numel() > 0 &&
         aoti_torch_cpu__linear_pointwise && user_wants_onednn();
}

Tensor onednn_product(const Tensor& x, const Tensor& weight, const Tensor* bias) {
  AtenTensorHandle b = bias ? bias->get() : nullptr, made = nullptr;
  const char* algorithm = "";
  check_call(aoti_torch_cpu__linear_pointwise(x.get(), weight.get(), bias ? &b : nullptr, "none", nullptr, 0,
                                              &algorithm, &made),
             "linear");
  return Tensor(made);
}

// x (rows, K), contiguous, extended by more rows until its last block is full: whatever follows in its storage or, if
// the storage ends, zeros in a copy. The products of the additional rows are thrown away.
Tensor in_whole_blocks(const Tensor& x) {
  const int64_t rows = x.size(0), blocks = whole_blocks(rows), K = x.size(1);
  if (rows == blocks) return x;
  int64_t bytes = 0;
  check_call(aoti_torch_get_storage_size(x.get(), &bytes), "storage_size");
  if ((x.storage_offset() + blocks * K) * int64_t(x.element_size()) <= bytes) return view(x, {blocks, K});
  const Tensor copy = empty_rows(x.sizes(), x);
  copy_(copy, x);
  return view(copy, {blocks, K});
}

// Whether the product takes less time than oneDNN's preparation for it, which is repeated in each call.
bool is_small(const Tensor& rows, const Tensor& weight) {
  return has_blas() && weight.numel() > 0 && rows.size(0) * weight.numel() <= kSmallProduct;
}

constexpr int64_t kFewRows = 48;

// Whether PyTorch multiplies this 16-bit type in simple loops of its own, because the processor lacks the instructions
// without which it does not call oneDNN.
bool library_is_missing(ScalarType dtype) {
#ifdef __x86_64__
  static const bool float16 = !cpu::has_avx512_fp16(), bfloat16 = !cpu::processor_has(cpu::Isa::avx512);
  return dtype == ScalarType::Half ? float16 : dtype == ScalarType::BFloat16 && bfloat16;
#else
  return false;
#endif
}

// Up to how many rows our own loops take less time than a library, which arranges all weights in memory first.
int64_t most_few_rows(ScalarType dtype) {
  const cpu::Isa isa = cpu::best_isa();
  if (library_is_missing(dtype)) return std::numeric_limits<int64_t>::max();
  switch (dtype) {
    case ScalarType::Float: return kFewRows;
    case ScalarType::Half: return isa == cpu::Isa::amx ? 16 : kFewRows;
    case ScalarType::BFloat16: return isa == cpu::Isa::amx ? 4 : isa == cpu::Isa::avx512_bf16 ? kFewRows : 8;
    default: return 0;
  }
}

bool has_few_rows(const Tensor& x, const Tensor& weight) {
  if (!FB_BEST_ISA(few_rows) || weight.numel() == 0 || !user_wants_onednn()) return false;
  const int64_t inner = weight.size(1), rows = x.numel() / inner;
  const bool long_enough = std::min(rows, kFewRows) <= inner / 4;  // for the sums of lanes
  return rows > 0 && rows <= most_few_rows(type_of(x)) && long_enough;
}

// By csrc/cpu/loops/few_rows.cpp, in blocks of few rows.
Tensor few_rows_product(const Tensor& rows, const Tensor& weight, const Tensor* bias) {
  const int64_t inner = rows.size(1), channels = weight.size(0), element = rows.element_size();
  const Tensor y = empty_rows({rows.size(0), channels}, rows);
  const ProductBlocks blocks{rows.size(0), inner, channels, kFewRows, FB_BEST_ISA(few_rows_width)()};
  blocks.run(0, [&](int64_t row, int64_t row_end, int64_t channel, int64_t channel_end, void*) {
    const cpu::FewRows op{static_cast<const char*>(rows.const_data_ptr()) + row * inner * element,
                          weight.const_data_ptr(),
                          bias ? bias->const_data_ptr() : nullptr,
                          static_cast<char*>(y.mutable_data_ptr()) + row * channels * element,
                          row_end - row,
                          inner,
                          channels,
                          dtype_of(rows)};
    FB_BEST_ISA(few_rows)(op, channel, channel_end);
  });
  return y;
}

// Calls MKL directly: the bias is copied to each row of y, then one call adds the product.
Tensor small_product(const Tensor& rows, const Tensor& weight, const Tensor* bias) {
  const int64_t tokens = rows.size(0), K = rows.size(1), channels = weight.size(0);
  const Tensor y = empty_rows({tokens, channels}, rows);
  float* const to = y.mutable_data_ptr<float>();
  if (bias)
    for (int64_t row = 0; row < tokens; ++row)
      std::memcpy(to + row * channels, bias->const_data_ptr<float>(), channels * sizeof(float));
  const Matrix<const float> x{rows.const_data_ptr<float>(), K}, w{weight.const_data_ptr<float>(), K};
  product(Op::as_is, Op::transposed, tokens, channels, K, x, w, bias ? 1 : 0, {to, channels});
  return y;
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  const NoGrad guard;
  const bool few = has_few_rows(x, weight);
  if (!few && !use_onednn(x, weight)) {
    const Tensor y = contiguous(call("aten::linear", "", x, weight, bias));
    return view(y, y.sizes());  // y may be a view that autograd knows of, which could not be changed in place
  }
  const Tensor rows = matrix(contiguous(x)), w = contiguous(weight);
  const Tensor b = bias ? contiguous(*bias) : w;  // oneDNN ignores the bias's stride
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = w.size(0);
  if (few) return view(few_rows_product(rows, w, bias ? &b : nullptr), shape);
  if (is_small(rows, w)) return view(small_product(rows, w, bias ? &b : nullptr), shape);
  return view(onednn_product(in_whole_blocks(rows), w, bias ? &b : nullptr), shape);
}

namespace {

Tensor linear_fwd_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  check_dense("linear", x, weight, bias);
  return fastbert::linear(x, weight, bias);
}

std::tuple<Tensor, Tensor> linear_bwd_cpu(const Tensor& dy, const Tensor& x, const Tensor& weight, bool need_dx,
                                          bool need_dweight) {
  check_dense("linear", x, weight, std::nullopt);
  check_dense_result("linear", "dy", dy, x, weight);
  const NoGrad guard;
  return dense_gradients(dy, x, weight, need_dx, need_dweight);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("linear_fwd", TORCH_BOX(&linear_fwd_cpu));
  m.impl("linear_bwd", TORCH_BOX(&linear_bwd_cpu));
}

}  // namespace fastbert
