// The torch side of cross_entropy on a GPU: checks, allocation, stream, and the library's products. The schema is
// defined in fastbert/ops/cross_entropy.py.
//
// Rows of logits begin at multiples of 128 bytes, whatever the number of classes: the library's fast products and
// 16-byte accesses need 16, and no cache line is shared by two rows. In 16 bits the speed of the library's products
// also depends on the number of classes: they are fast if that is a multiple of 8, which BERT's 30522 is not. With many
// rows, the product therefore takes a copy of the weight that is padded with rows of zeros to such a number, and
// dlogits has columns of zeros there, after its last class. Nothing else reads the padding between rows.
#include "../cross_entropy.h"

#include "../checks.h"
#include "../tensor.h"

namespace fastbert {

namespace {

// With fewer rows the copy of the weight does not pay off, nor do its launches with fewer classes.
constexpr int64_t kPaddedRows = 256, kPaddedClasses = 1024, kPadding = 8;

// The number of classes, including the padding with zeros.
int64_t padded_classes(const Tensor& hidden, const Tensor& weight) {
  const int64_t classes = weight.size(0), inner = weight.size(1);
  const bool pays = hidden.element_size() == 2 && hidden.size(0) >= kPaddedRows && classes >= kPaddedClasses;
  return pays && inner % kPadding == 0 ? round_up(classes, kPadding) : classes;
}

// The distance from one row of logits to the next, in elements.
int64_t stride_of(int64_t classes, const Tensor& hidden) {
  const int64_t line = 128 / hidden.element_size();
  return round_up(classes, line);
}

// The weight, contiguous, followed by rows of zeros up to `rows`.
Tensor with_rows(const Tensor& weight, int64_t rows) {
  const int64_t classes = weight.size(0), inner = weight.size(1);
  if (rows == classes) return contiguous(weight);
  const Tensor made = empty({rows, inner}, weight);
  copy_(view(made, {classes, inner}), weight);
  zero_(view(made, {rows - classes, inner}, classes * inner));
  return made;
}

// dlogits with the columns of zeros that the forward wrote after it. A copy that was made elsewhere, such as by a hook
// for saved tensors, lacks them, which shows in its strides or in the size of its memory; it is returned unchanged.
Tensor with_columns(const Tensor& dlogits, int64_t columns) {
  const int64_t rows = dlogits.size(0), classes = dlogits.size(1), stride = stride_of(classes, dlogits);
  if (columns == classes || dlogits.stride(0) != stride || dlogits.stride(1) != 1 || dlogits.storage_offset())
    return dlogits;
  int64_t bytes = 0;
  check_call(aoti_torch_get_storage_size(dlogits.get(), &bytes), "storage_size");
  const int64_t whole = ((rows - 1) * stride + columns) * int64_t(dlogits.element_size());
  return bytes == whole ? strided(dlogits, {rows, columns}, {stride, 1}, 0) : dlogits;
}

cuda::Labels labels_of(const Tensor& labels, int64_t ignored) {
  return {labels.const_data_ptr(), type_of(labels) == ScalarType::Long, labels.size(0), ignored};
}

// The sum of values [count] divided by the number of labelled rows: a float on the device.
Tensor mean(const Tensor& values, const cuda::Labels& labels) {
  const Tensor result = empty({}, values);
  const char* const error = cuda::mean_over_labelled(values.const_data_ptr<float>(), values.numel(), labels,
                                                     result.mutable_data_ptr<float>(), current_stream(values));
  FB_CHECK(!error, "cross_entropy: ", error);
  return result;
}

// to = x times the factor on the device.
void scale(const Tensor& x, const Tensor& factor, const Tensor& to) {
  const char* const error = x.numel() == 0
                                ? nullptr
                                : cuda::scaled(x.const_data_ptr(), dtype_of(x), factor.const_data_ptr<float>(),
                                               to.mutable_data_ptr(), dtype_of(to), x.numel(), current_stream(x));
  FB_CHECK(!error, "cross_entropy: ", error);
}

void check(const Tensor& hidden, const Tensor& weight, const OptionalTensor& bias, const Tensor& labels) {
  check_cross_entropy(hidden, weight, bias, labels);
  FB_CHECK(dtype_of(hidden) != DType::f64, "cross_entropy: the CUDA kernels have no fp64");
}

std::tuple<Tensor, Tensor> cross_entropy_fwd_cuda(const Tensor& hidden, const Tensor& weight, const Tensor& bias,
                                                  const Tensor& labels, int64_t ignore_index, bool need_dlogits) {
  check(hidden, weight, bias, labels);
  const DeviceGuard guard(hidden);
  const NoGrad no_grad;
  const int64_t rows = hidden.size(0), classes = weight.size(0), stride = stride_of(classes, hidden);
  const int64_t padded = padded_classes(hidden, weight);
  const Tensor logits = empty_strided({rows, padded}, {stride, 1}, hidden, type_of(hidden));
  const Tensor losses = empty({rows}, hidden, ScalarType::Float), given = contiguous(labels);
  const Tensor b = aligned(bias);
  call("aten::mm", "out", contiguous(hidden), transposed(with_rows(weight, padded)), logits);
  const cuda::Labels of_rows = labels_of(given, ignore_index);
  const char* const error = rows == 0
                                ? nullptr
                                : cuda::cross_entropy_rows(logits.mutable_data_ptr(), b.const_data_ptr(), of_rows,
                                                           losses.mutable_data_ptr<float>(), classes, padded, stride,
                                                           need_dlogits, dtype_of(hidden), current_stream(hidden));
  FB_CHECK(!error, "cross_entropy: ", error);
  const Tensor dlogits = need_dlogits ? strided(logits, {rows, classes}, {stride, 1}, 0) : empty({0}, hidden);
  return {mean(losses, of_rows), dlogits};
}

// dlogits is softmax - onehot. The factor dloss / count is applied after the first product, and to the smaller operand
// of the second product, where it does not underflow in fp16.
std::tuple<Tensor, Tensor, Tensor> cross_entropy_bwd_cuda(const Tensor& dloss, const Tensor& hidden,
                                                          const Tensor& weight, const Tensor& labels,
                                                          const Tensor& dlogits, int64_t ignore_index,
                                                          bool need_dhidden, bool need_dparams) {
  check(hidden, weight, std::nullopt, labels);
  check_cross_entropy_gradients(dloss, dlogits, hidden, weight, ScalarType::Float);
  const DeviceGuard guard(hidden);
  const NoGrad no_grad;
  const Tensor given = contiguous(labels), scalar = contiguous(dloss);
  const Tensor factor = mean(scalar, labels_of(given, ignore_index));
  const Tensor left = with_columns(dlogits, padded_classes(hidden, weight));
  Tensor dhidden = empty({0}, hidden);
  if (need_dhidden) {
    dhidden = call("aten::mm", "", left, with_rows(weight, left.size(1)));
    scale(dhidden, factor, dhidden);
  }
  if (!need_dparams) return {dhidden, empty({0}, hidden), empty({0}, hidden)};
  const Tensor sums = call("aten::sum", "dim_IntList", dlogits, std::optional(std::vector<int64_t>{0}), false,
                           std::optional(ScalarType::Float));
  const Tensor x = contiguous(hidden), scaled = empty(x.sizes(), x), dbias = empty(sums.sizes(), x);
  scale(sums, factor, dbias);
  scale(x, factor, scaled);
  const Tensor dweight = call("aten::mm", "", transposed(left), scaled);
  return {dhidden, view(dweight, weight.sizes()), dbias};
}

}  // namespace

FB_CUDA_LIBRARY(m) {
  m.impl("cross_entropy_fwd", TORCH_BOX(&cross_entropy_fwd_cuda));
  m.impl("cross_entropy_bwd", TORCH_BOX(&cross_entropy_bwd_cuda));
}

}  // namespace fastbert
