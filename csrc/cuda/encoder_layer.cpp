// encoder_layer on a GPU (csrc/encoder_layer.h): torch's library computes the products, our kernels the other parts.
#include "../encoder_layer.h"

namespace fastbert {

namespace {

struct CudaOps {
  static constexpr auto attention_fwd = attention_fwd_cuda;
  static constexpr auto attention_bwd = attention_bwd_cuda;
  static constexpr auto relative_attention_fwd = relative_attention_fwd_cuda;
  static constexpr auto relative_attention_bwd = relative_attention_bwd_cuda;
  static constexpr auto add_layer_norm_fwd = add_layer_norm_fwd_cuda;
  static constexpr auto add_layer_norm_bwd = add_layer_norm_bwd_cuda;

  template <class F>
  static void run(const Tensor&, const Tensors&, int64_t, ScalarType, const F& f) {
    f();
  }

  // Two copies and one product. Three products into rows that lie apart would be six launches: there PyTorch copies the
  // bias into the result first, and then adds the product to it.
  static bool joins_weights(int64_t, int64_t) { return true; }

  static Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    return call("aten::linear", "", x, weight, bias);
  }

  static Tensor matrix_product(const Tensor& a, bool is_transposed, const Tensor& b) {
    return call("aten::mm", "", is_transposed ? transposed(a) : a, b);
  }

  static Tensor gelu(const Tensor& x, std::string_view approximate, bool) {
    return gelu_cuda(x, std::nullopt, approximate);
  }

  static std::tuple<Tensor, Tensor> gelu_bwd(const Tensor& dy, const Tensor& x, std::string_view approximate,
                                             bool need_dbias) {
    return gelu_bwd_cuda(dy, x, std::nullopt, approximate, need_dbias);
  }
};

}  // namespace

FB_CUDA_LIBRARY(m) {
  m.impl("encoder_layer_fwd", TORCH_BOX(&encoder_layer_fwd<CudaOps>));
  m.impl("encoder_layer_bwd", TORCH_BOX(&encoder_layer_bwd<CudaOps>));
}

}  // namespace fastbert
