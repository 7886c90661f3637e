#include "linear.h"

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
bool is_small(int64_t rows, const Tensor& weight) {
  return has_blas() && type_of(weight) == ScalarType::Float && rows * weight.numel() <= kSmallProduct;
}

constexpr int64_t kFewRows = 48;
constexpr int64_t kManyToPrefetchNear = 28;  // rows; with fewer, prefetches to the first-level cache hold up loads

// On AMD's processors with AVX-512: as many as the second-level cache holds, twice, unless so many rows of weights
// share a set of the first-level cache.
int64_t most_few_rows_of_amd(const Tensor& weight) {
  const int64_t inner = weight.size(1), bytes = inner * weight.element_size();
  if (inner < kThin) return inner / 4;
  if (bytes > 12 << 10) return kFewRows;
  return std::min<int64_t>((2 << 20) / bytes, type_of(weight) == ScalarType::Float ? 256 : 384);
}

// Up to how many rows few_rows takes less time than a library, own_product or packing_product, which first arrange all
// weights. Elsewhere than on AMD's processors larger numbers were not measured. packs: use_packing_product.
int64_t most_few_rows(const Tensor& weight, bool packs) {
  const ScalarType dtype = type_of(weight);
  const cpu::Isa isa = cpu::best_isa();
  const int64_t inner = weight.size(1), most = std::min(kFewRows, inner / 4);
  if (library_is_missing(dtype)) return isa >= cpu::Isa::avx512 ? 64 : 8;
  if (dtype == ScalarType::Half) return isa == cpu::Isa::amx ? std::min<int64_t>(16, most) : most;
  if (packs) return inner <= kNarrow ? std::min<int64_t>(192, inner / 2) : kFewRows;
  if (dtype == ScalarType::Float) return is_amd_with_avx512() ? most_few_rows_of_amd(weight) : most;
  if (dtype != ScalarType::BFloat16) return 0;
  if (isa != cpu::Isa::avx512_bf16) return std::min<int64_t>(isa == cpu::Isa::amx ? 4 : 8, most);
  return is_amd_with_avx512() ? most_few_rows_of_amd(weight) : most;
}

// By whom a dense layer is computed: our own loops (few_rows, own_product, packing_product), MKL called directly,
// oneDNN called directly, or torch's choice.
enum class By { few_rows, own_product, packing_product, mkl, onednn, torch };

By whom(int64_t rows, const Tensor& weight) {
  const ScalarType type = type_of(weight);
  if (rows == 0 || weight.numel() == 0 || !user_wants_onednn()) return By::torch;
  const bool packs = use_packing_product(type, rows, {weight, true});
  const bool has_loops = FB_BEST_ISA(few_rows);
  const bool turns = packs && packs_rows(rows, {weight, true});
  if (has_loops && !turns && rows <= most_few_rows(weight, packs)) return By::few_rows;
  if (has_loops && library_is_missing(type)) return By::own_product;
  if (!packs && !(type == ScalarType::Float && aoti_torch_cpu__linear_pointwise)) return By::torch;
  if (is_small(rows, weight)) return By::mkl;
  return packs ? By::packing_product : By::onednn;
}

// By csrc/cpu/loops/few_rows.cpp.
Tensor few_rows_product(const Tensor& rows, const Tensor& weight, const Tensor* bias) {
  const int64_t channels = weight.size(0);
  const Tensor y = empty_rows({rows.size(0), channels}, rows);
  const cpu::FewRows op{rows.const_data_ptr(),
                        weight.const_data_ptr(),
                        bias ? bias->const_data_ptr() : nullptr,
                        y.mutable_data_ptr(),
                        rows.size(0),
                        rows.size(1),
                        channels,
                        dtype_of(rows),
                        nullptr,
                        is_amd_with_avx512() && rows.size(0) >= kManyToPrefetchNear};
  const ProductBlocks blocks{op.rows, op.inner, channels, op.rows, FB_BEST_ISA(few_rows_width)()};
  blocks.run(0, [&](const ProductBlocks::Block& block, void*) {
    cpu::FewRows part = op;
    if (block.next < channels) part.next = bytes_of(weight) + block.next * op.inner * weight.element_size();
    FB_BEST_ISA(few_rows)(part, block.column, block.column_end);
  });
  return y;
}

}  // namespace

bool is_linear_ours(int64_t rows, const Tensor& weight) {
  const By by = whom(rows, weight);
  return by == By::few_rows || by == By::own_product || by == By::packing_product;
}

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  const NoGrad guard;
  const By by = whom(count_rows(x.sizes()), weight);
  if (by == By::torch) {
    const Tensor y = contiguous(call("aten::linear", "", x, weight, bias));
    return view(y, y.sizes());  // y may be a view that autograd knows of, which could not be changed in place
  }
  const Tensor rows = matrix(contiguous(x)), w = contiguous(weight);
  const OptionalTensor b = bias ? std::optional(contiguous(*bias)) : std::nullopt;  // oneDNN ignores its stride
  const auto product = [&](const Tensor* added) {
    switch (by) {
      case By::few_rows: return few_rows_product(rows, w, added);
      case By::own_product: return own_product({rows, false}, {w, true}, added);
      case By::packing_product: return packing_product(rows, {w, true}, added);
      case By::mkl: return small_product({rows, false}, {w, true}, added);
      default: return onednn_product(in_whole_blocks(rows), w, added);
    }
  };
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = w.size(0);
  return view(product(b ? &*b : nullptr), shape);
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
