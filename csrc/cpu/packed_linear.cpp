// The torch side of packed_linear. The schema is defined in fastbert/ops/packed_linear.py.
#include "packed_product.h"

namespace fastbert::packed {

namespace {

Tensor packed_linear_fwd_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& scale,
                             const OptionalTensor& bias, int64_t channels, std::string_view approximate) {
  const NoGrad guard;
  const Packed p{weight, scale, bias, channels};
  check_packed(x, p);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = channels;
  const Tensor rows = matrix(contiguous(x)), y = empty_rows({rows.size(0), channels}, x);
  Workspace workspace;
  const Left left(rows, weights_of(weight), workspace);
  left.put_all();
  products_into(left, {{y, p}}, gelu_of(approximate));
  return view(y, shape);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) { m.impl("packed_linear_fwd", TORCH_BOX(&packed_linear_fwd_cpu)); }

}  // namespace fastbert::packed
