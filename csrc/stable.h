// What the torch sides use of torch: its stable ABI, which later releases keep, so that one binary works with all of
// them, and a few weak symbols that a release may lack (docs/build.md). Here are short names, errors, and the functions
// of tensors that are needed; torch/csrc/stable/ops.h has more of these, but they are slower.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <numeric>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

extern "C" const char* torch_exception_get_what_without_backtrace() __attribute__((weak));  // torch 2.13 has it

namespace fastbert {

using torch::headeronly::ScalarType;
using torch::stable::Device;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// ---- errors: RuntimeError, ValueError and IndexError in Python. No standard exception becomes a TypeError.

inline std::ostream& operator<<(std::ostream& to, const Sizes& sizes) {
  to << '[';
  for (size_t i = 0; i < sizes.size(); ++i) to << (i ? ", " : "") << sizes[i];
  return to << ']';
}

inline std::ostream& operator<<(std::ostream& to, const Device& device) {
  if (device.is_cpu()) return to << "cpu";
  return to << (device.is_cuda() ? "cuda:" : "another device:") << device.index();
}

template <class Error, class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Error(text.str());
}

#define FB_CHECK_AS(error, condition, ...)                \
  do {                                                    \
    if (!(condition)) fastbert::fail<error>(__VA_ARGS__); \
  } while (false)
#define FB_CHECK(condition, ...) FB_CHECK_AS(std::runtime_error, condition, __VA_ARGS__)
#define FB_CHECK_VALUE(condition, ...) FB_CHECK_AS(std::invalid_argument, condition, __VA_ARGS__)
#define FB_CHECK_INDEX(condition, ...) FB_CHECK_AS(std::out_of_range, condition, __VA_ARGS__)

// Checks a call of one of torch's C functions, which do not throw. Before torch 2.13 they print the error's message and
// do not return it.
inline void check_call(AOTITorchError error, const char* what) {
  const auto why = &torch_exception_get_what_without_backtrace;
  FB_CHECK(error == TORCH_SUCCESS, what, ": ", why ? why() : "torch failed; its message is in the standard error");
}

// ---- tensors

// x.scalar_type(), remembered for each of torch's codes: it asks torch for one code after the other until it finds x's.
inline ScalarType type_of(const Tensor& x) {
  static std::array<std::atomic<int>, 64> known;  // 1 + the type, by torch's code
  int32_t code = 0;
  check_call(aoti_torch_get_dtype(x.get(), &code), "dtype");
  if (code < 0 || code >= int32_t(known.size())) return x.scalar_type();
  const int type = known[code].load(std::memory_order_relaxed);
  if (type) return ScalarType(type - 1);
  known[code].store(1 + int(x.scalar_type()), std::memory_order_relaxed);
  return x.scalar_type();
}

// While an object of this class lives, torch's operators record nothing for autograd in this thread.
class NoGrad {
 public:
  NoGrad() { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(before_); }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  const bool before_ = aoti_torch_grad_mode_is_enabled();
};

// Calls an operator by name, with all of its arguments. For operators without a C function, which would be faster.
template <class... Args>
Tensor call(const char* name, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  check_call(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION), name);
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// The strides of a contiguous tensor.
inline std::vector<int64_t> strides_of(Sizes sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(1, sizes[i]);
  return strides;
}

// An uninitialised tensor on x's device. This C function does not go through torch's dispatcher on a CPU.
inline Tensor empty_strided(Sizes sizes, Sizes strides, const Tensor& x, ScalarType type) {
  const int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  int32_t device = 0;
  check_call(aoti_torch_get_device_type(x.get(), &device), "device_type");
  AtenTensorHandle made = nullptr;
  check_call(aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(), code, device,
                                      x.get_device_index(), &made),
             "empty");
  return Tensor(made);
}
inline Tensor empty(Sizes sizes, const Tensor& x, ScalarType type) {
  return empty_strided(sizes, strides_of(sizes), x, type);
}
inline Tensor empty(Sizes sizes, const Tensor& x) { return empty(sizes, x, type_of(x)); }

inline void zero_(const Tensor& x) { check_call(aoti_torch_zero_(x.get()), "zero_"); }

inline Tensor zeros(Sizes sizes, const Tensor& x, ScalarType type) {
  const Tensor made = empty(sizes, x, type);
  zero_(made);
  return made;
}

inline void copy_(const Tensor& to, const Tensor& from) {
  const NoGrad guard;
  check_call(aoti_torch_copy_(to.get(), from.get(), 0), "copy_");
}

// A contiguous copy.
inline Tensor copy_of(const Tensor& x, ScalarType type) {
  const Tensor made = empty(x.sizes(), x, type);
  copy_(made, x);
  return made;
}

// x if it is contiguous (and of the type), or else a contiguous copy.
inline Tensor contiguous(const Tensor& x) { return x.is_contiguous() ? x : copy_of(x, type_of(x)); }
inline Tensor contiguous(const Tensor& x, ScalarType type) {
  return type_of(x) == type ? contiguous(x) : copy_of(x, type);
}

// A view of x's memory from its element `offset` on. Autograd does not know that it is a view.
inline Tensor strided(const Tensor& x, Sizes sizes, Sizes strides, int64_t offset) {
  AtenTensorHandle made = nullptr;
  check_call(
      aoti_torch__reinterpret_tensor(x.get(), int64_t(sizes.size()), sizes.data(), strides.data(), offset, &made),
      "view");
  return Tensor(made);
}

// The same, with the strides of a contiguous tensor.
inline Tensor view(const Tensor& x, Sizes sizes, int64_t offset = 0) {
  return strided(x, sizes, strides_of(sizes), offset);
}

// A matrix with rows and columns exchanged.
inline Tensor transposed(const Tensor& x) { return strided(x, {x.size(1), x.size(0)}, {x.stride(1), x.stride(0)}, 0); }

// x[i], for a contiguous x.
inline Tensor row(const Tensor& x, int64_t i) {
  const Sizes sizes = x.sizes().slice(1);
  return view(x, sizes, i * x.numel() / x.size(0));
}

// The sum over x's first dimension.
inline Tensor sum_first(const Tensor& x) {
  return call("aten::sum", "dim_IntList", x, std::optional(std::vector<int64_t>{0}), false, std::nullopt);
}

// a + b, by the C function for a - alpha b: there is one, and torch computes both as a + alpha b.
inline Tensor add(const Tensor& a, const Tensor& b) {
  AtenTensorHandle made = nullptr;
  check_call(aoti_torch_aten_subtract_Tensor(a.get(), b.get(), -1, &made), "add");
  return Tensor(made);
}

// The number of rows of (..., channels), and such an x, contiguous, as a matrix of its rows.
inline int64_t count_rows(Sizes sizes) {
  return std::accumulate(sizes.begin(), sizes.end() - 1, int64_t(1), std::multiplies<int64_t>());
}
inline Tensor matrix(const Tensor& x) { return view(x, {count_rows(x.sizes()), x.size(-1)}); }

}  // namespace fastbert
