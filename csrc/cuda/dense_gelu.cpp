// The torch side of dense_gelu on a GPU: checks, allocation, stream. For calls that the kernel does not take, it uses
// the library's product and one pass of bias_gelu's kernel. The backward is always like that: one pass for the
// derivative and dbias, and two of the library's products. The schema is defined in fastbert/ops/dense_gelu.py.
#include "../dense_gelu.h"

#include <string_view>

#include "../checks.h"
#include "../layer_ops.h"
#include "../tensor.h"

namespace fastbert {

namespace {

void check(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, std::string_view approximate) {
  check_dense("dense_gelu", x, weight, bias);
  check_approximate("dense_gelu", approximate);
  FB_CHECK(dtype_of(x) != DType::f64, "dense_gelu: the CUDA kernels have no fp64");
}

std::tuple<Tensor, Tensor> dense_gelu_fwd_cuda(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                               std::string_view approximate, bool save) {
  check(x, weight, bias, approximate);
  const DeviceGuard guard(x);
  const NoGrad no_grad;
  const Tensor rows = matrix(contiguous(x)), w = contiguous(weight), b = contiguous(bias);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = w.size(0);
  const cuda::DenseGelu dense{rows.const_data_ptr(), w.const_data_ptr(), b.const_data_ptr(), rows.size(0),
                              rows.size(1),          w.size(0),          dtype_of(x),        approximate == "tanh"};
  if (!cuda::dense_gelu_takes(dense)) {
    const Tensor preactivation = view(call("aten::linear", "", rows, w, OptionalTensor(b)), shape);
    return {gelu_cuda(preactivation, {}, approximate), save ? preactivation : empty({0}, x)};
  }
  const Tensor y = empty(shape, x), preactivation = save ? empty(shape, x) : empty({0}, x);
  const char* const error = cuda::dense_gelu_fwd(dense, y.mutable_data_ptr(),
                                                 save ? preactivation.mutable_data_ptr() : nullptr, current_stream(x));
  FB_CHECK(!error, "dense_gelu: ", error);
  return {y, preactivation};
}

std::tuple<Tensor, Tensor, Tensor> dense_gelu_bwd_cuda(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                                       const Tensor& preactivation, std::string_view approximate,
                                                       bool need_dx, bool need_dparams) {
  check(x, weight, std::nullopt, approximate);
  check_dense_gelu_gradients(dy, x, weight, preactivation);
  const DeviceGuard guard(x);
  const NoGrad no_grad;
  const auto [dpre, dbias] = gelu_bwd_cuda(dy, preactivation, {}, approximate, need_dparams);
  const Tensor rows = matrix(dpre);
  const Tensor dx = need_dx ? view(call("aten::mm", "", rows, contiguous(weight)), x.sizes()) : empty({0}, x);
  const Tensor dweight = need_dparams ? call("aten::mm", "", transposed(rows), matrix(contiguous(x))) : empty({0}, x);
  return {dx, dweight, dbias};
}

}  // namespace

FB_CUDA_LIBRARY(m) {
  m.impl("dense_gelu_fwd", TORCH_BOX(&dense_gelu_fwd_cuda));
  m.impl("dense_gelu_bwd", TORCH_BOX(&dense_gelu_bwd_cuda));
}

}  // namespace fastbert
