// encoder_layer on the CPU: its products and the loops of its other parts, for csrc/encoder_layer.h.
#include "../encoder_layer.h"

#include <algorithm>
#include <cstring>

#include "gelu_rows.h"
#include "linear.h"
#include "matrix_product.h"

namespace fastbert {

namespace {

struct CpuOps {
  static constexpr auto linear = fastbert::linear;
  static constexpr auto matrix_product = fastbert::matrix_product;
  static constexpr auto attention_fwd = attention_fwd_cpu;
  static constexpr auto attention_bwd = attention_bwd_cpu;
  static constexpr auto relative_attention_fwd = relative_attention_fwd_cpu;
  static constexpr auto relative_attention_bwd = relative_attention_bwd_cpu;
  static constexpr auto add_layer_norm_fwd = add_layer_norm_fwd_cpu;
  static constexpr auto add_layer_norm_bwd = add_layer_norm_bwd_cpu;

  // Calls f(), which runs layers: while all threads stand by, if it uses them for nothing but our own loops.
  template <class F>
  static void run(const Tensor& hidden, const Tensors& parameters, int64_t layers, ScalarType dtype, const F& f) {
    is_all_ours(hidden, parameters, layers, dtype) ? together(f) : f();
  }

  // Whether our own loops compute all products, and no weights are converted, copied or concatenated.
  static bool is_all_ours(const Tensor& hidden, const Tensors& parameters, int64_t layers, ScalarType dtype) {
    const bool separate = int64_t(parameters.size()) == 16 * layers;
    if (hidden.dim() != 2 || (separate && joins_weights(hidden.size(0), hidden.size(1)))) return false;
    return std::all_of(parameters.begin(), parameters.end(), [&](const Tensor& each) {
      if (each.dim() != 2) return true;
      return type_of(each) == dtype && each.is_contiguous() && is_linear_ours(hidden.size(0), each);
    });
  }

  // Concatenating the weights copies 3 C numbers for each input channel, copying three products 3 C for each token.
  static bool joins_weights(int64_t tokens, int64_t channels) { return tokens > channels; }

  static void linear_into(const Tensor& y, const Tensor& x, const Tensor& weight, const Tensor& bias) {
    const Tensor product = linear(x, weight, bias);
    check_gradient("encoder_layer", "a projection", product, y);  // y's shape and dtype
    const int64_t tokens = y.size(0), width = y.size(1), bytes = x.element_size(), apart = y.stride(0) * bytes;
    const char* const from = bytes_of(product);
    char* const to = static_cast<char*>(y.mutable_data_ptr());
    parallel_rows(tokens, width, 0, [&](int64_t begin, int64_t end, void*) {
      for (int64_t row = begin; row < end; ++row)
        std::memcpy(to + row * apart, from + row * width * bytes, width * bytes);
    });
  }

  // keep: x must not be overwritten.
  static Tensor gelu(const Tensor& x, std::string_view approximate, bool keep) {
    const Tensor y = keep ? empty_rows(x.sizes(), x) : x;
    gelu_cpu(x, std::nullopt, approximate, y);
    return y;
  }

  static std::tuple<Tensor, Tensor> gelu_bwd(const Tensor& dy, const Tensor& x, std::string_view approximate,
                                             bool need_dbias) {
    return gelu_bwd_cpu(dy, x, std::nullopt, approximate, need_dbias ? std::optional(type_of(x)) : std::nullopt);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("encoder_layer_fwd", TORCH_BOX(&encoder_layer_fwd<CpuOps>));
  m.impl("encoder_layer_bwd", TORCH_BOX(&encoder_layer_bwd<CpuOps>));
}

}  // namespace fastbert
