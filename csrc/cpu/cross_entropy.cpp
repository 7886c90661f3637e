// The torch side of cross_entropy on the CPU: checks, allocation, threads, and the products of the backward.
// The schema is defined in fastbert/ops/cross_entropy.py.
#include "../cross_entropy.h"

#include <numeric>
#include <vector>

#include "../checks.h"
#include "../tensor.h"
#include "matrix_product.h"

namespace fastbert {

namespace {

constexpr int64_t kFewestRows = 48;  // for which packing the weights is worth it

// The class of each row; -1 for rows that do not count.
template <class I>
std::vector<int64_t> classes_of(const Tensor& labels, int64_t ignored, int64_t classes) {
  const Tensor given = contiguous(labels);
  const I* const label = given.const_data_ptr<I>();
  std::vector<int64_t> found(given.numel());
  for (size_t i = 0; i < found.size(); ++i) {
    const bool counts = label[i] != ignored;
    FB_CHECK_INDEX(!counts || (0 <= label[i] && label[i] < classes), "cross_entropy: labels[", i, "] is ", label[i],
                   "; expected 0 <= labels < ", classes);
    found[i] = counts ? label[i] : -1;
  }
  return found;
}

std::vector<int64_t> labels_of(const Tensor& labels, int64_t ignored, int64_t classes) {
  const bool is_long = type_of(labels) == ScalarType::Long;
  return is_long ? classes_of<int64_t>(labels, ignored, classes) : classes_of<int32_t>(labels, ignored, classes);
}

int64_t labelled(const std::vector<int64_t>& labels) {
  return std::max<int64_t>(1, std::count_if(labels.begin(), labels.end(), [](int64_t label) { return label >= 0; }));
}

// A number as a tensor, in the type of arithmetic.
Tensor number(double value, const Tensor& x) {
  const Tensor made = empty({}, x, math_type(x));
  if (type_of(made) == ScalarType::Double) {
    *made.mutable_data_ptr<double>() = value;
  } else {
    *made.mutable_data_ptr<float>() = float(value);
  }
  return made;
}

// Fills op's losses and gradients.
void run(cpu::CrossEntropy op, const Tensor& like) {
  if (op.rows == 0) return;
  const cpu::CrossEntropyRoom room = FB_BEST_ISA(cross_entropy_room)(op.dtype, op.inner);
  const int64_t tasks = divide_up(op.classes, room.classes);
  const Tensor parts = empty({tasks, op.rows, room.part}, like, ScalarType::Byte);
  const Tensor targets = empty({op.rows}, like, math_type(like));
  op.parts = parts.mutable_data_ptr(), op.targets = targets.mutable_data_ptr();
  // Where there are fewer tasks than threads, each task is split by rows, and each share packs the weights anew.
  const int64_t shares = std::clamp<int64_t>(divide_up(threads(), std::max<int64_t>(1, tasks)), 1,
                                             std::max<int64_t>(1, op.rows / kFewestRows));
  const int64_t work = std::max<int64_t>(1, op.rows * op.inner * std::min(room.classes, op.classes) / shares);
  const int64_t units = tasks * shares, least = kShareOfProducts / work + 1;
  parallel_ranges({units, threads(), least}, room.scratch, [&](const Range& range, void* scratch) {
    for (int64_t unit = range.begin; unit < range.end; ++unit) {
      const int64_t share = unit % shares, first = op.rows * share / shares, last = op.rows * (share + 1) / shares;
      FB_BEST_ISA(cross_entropy_logits)(op, unit / shares, first, last, scratch);
    }
  });
  parallel_rows(op.rows, op.classes, 0,
                [&](int64_t begin, int64_t end, void*) { FB_BEST_ISA(cross_entropy_rows)(op, tasks, begin, end); });
}

std::tuple<Tensor, Tensor> cross_entropy_fwd_cpu(const Tensor& hidden, const Tensor& weight, const Tensor& bias,
                                                 const Tensor& labels, int64_t ignore_index, bool need_dlogits) {
  check_cross_entropy(hidden, weight, bias, labels);
  FB_CHECK(FB_BEST_ISA(cross_entropy_logits), kNoIsa);
  const NoGrad guard;
  const int64_t rows = hidden.size(0), inner = hidden.size(1), classes = weight.size(0);
  const int64_t line = 128 / hidden.element_size(), stride = round_up(classes, line);
  const Tensor dlogits =
      need_dlogits ? empty_strided({rows, classes}, {stride, 1}, hidden, type_of(hidden)) : empty({0}, hidden);
  const bool pairs = FB_BEST_ISA(cross_entropy_takes_pairs)(dtype_of(hidden), inner);
  const Tensor x = pairs ? contiguous(hidden) : as_math(hidden, hidden);
  const Tensor w = contiguous(weight), b = as_math(bias, hidden);
  const std::vector<int64_t> of_rows = labels_of(labels, ignore_index, classes);
  std::vector<double> losses(rows);
  run({x.const_data_ptr(), w.const_data_ptr(), b.const_data_ptr(), of_rows.data(),
       need_dlogits ? dlogits.mutable_data_ptr() : nullptr, losses.data(), nullptr, nullptr, rows, inner, classes,
       stride, dtype_of(hidden)},
      hidden);
  const double total = std::accumulate(losses.begin(), losses.end(), 0.0);
  return {number(total / double(labelled(of_rows)), hidden), dlogits};
}

Tensor scaled(const Tensor& x, const Tensor& factor, ScalarType type) {
  return contiguous(call("aten::mul", "Tensor", as_math(x, x), factor), type);
}

// dlogits is softmax - onehot. The factor dloss / count is applied after the first product, and to the smaller operand
// of the second, where it neither underflows in fp16 nor costs a pass over the logits.
std::tuple<Tensor, Tensor, Tensor> cross_entropy_bwd_cpu(const Tensor& dloss, const Tensor& hidden,
                                                         const Tensor& weight, const Tensor& labels,
                                                         const Tensor& dlogits, int64_t ignore_index, bool need_dhidden,
                                                         bool need_dparams) {
  check_cross_entropy(hidden, weight, std::nullopt, labels);
  check_cross_entropy_gradients(dloss, dlogits, hidden, weight, math_type(hidden));
  const NoGrad guard;
  const ScalarType type = type_of(hidden);
  const double upstream = type == ScalarType::Double ? *dloss.const_data_ptr<double>() : *dloss.const_data_ptr<float>();
  const Tensor factor = number(upstream / double(labelled(labels_of(labels, ignore_index, weight.size(0)))), hidden);
  const Tensor dhidden =
      need_dhidden ? scaled(matrix_product(dlogits, false, contiguous(weight)), factor, type) : empty({0}, hidden);
  if (!need_dparams) return {dhidden, empty({0}, hidden), empty({0}, hidden)};
  const Tensor sums = call("aten::sum", "dim_IntList", dlogits, std::optional(std::vector<int64_t>{0}), false,
                           std::optional(math_type(hidden)));
  return {dhidden, matrix_product(dlogits, true, scaled(hidden, factor, type)), scaled(sums, factor, type)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("cross_entropy_fwd", TORCH_BOX(&cross_entropy_fwd_cpu));
  m.impl("cross_entropy_bwd", TORCH_BOX(&cross_entropy_bwd_cpu));
}

}  // namespace fastbert
