// What the torch sides share: types, streams, dropout arguments, memory, and splitting rows over threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "division.h"
#include "dropout.h"
#include "dtype.h"
#include "ranges.h"
#include "stable.h"
#include "team.h"

// Weak, because not every build of torch has it.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**) __attribute__((weak));

namespace fastbert {

// Fewer elements than this are not worth another thread.
constexpr int64_t kGrain = 32768;
// Nor are fewer multiplications than this, for a matrix product.
constexpr int64_t kShareOfProducts = 1 << 17;

inline DType dtype_of(const Tensor& tensor) {
  switch (type_of(tensor)) {
    case ScalarType::Float: return DType::f32;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Half: return DType::f16;
    case ScalarType::Double: return DType::f64;
    default: fail<std::invalid_argument>("fastbert: no kernel for elements of type ", type_of(tensor));
  }
}

// The library that csrc/cuda/<op>.cpp adds its operators to. tests/cuda_on_cpu builds the same files to run the kernels
// on CPU tensors, which have no streams.
#ifdef FB_CUDA_ON_CPU
#define FB_CUDA_LIBRARY(m) STABLE_TORCH_LIBRARY_IMPL(fastbert_cuda_on_cpu, CPU, m)

inline void* current_stream(const Tensor&) { return nullptr; }
struct DeviceGuard {
  explicit DeviceGuard(const Tensor&) {}
};
#else
#define FB_CUDA_LIBRARY(m) STABLE_TORCH_LIBRARY_IMPL(fastbert, CUDA, m)

// The current stream of the tensor's device.
inline void* current_stream(const Tensor& tensor) {
  FB_CHECK(aoti_torch_get_current_cuda_stream, "fastbert: this torch has no CUDA");
  void* stream = nullptr;
  check_call(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream), "current_stream");
  return stream;
}

// While an object of this class lives, the tensor's device is the current one.
struct DeviceGuard : torch::stable::accelerator::DeviceGuard {
  explicit DeviceGuard(const Tensor& tensor) : torch::stable::accelerator::DeviceGuard(tensor.get_device_index()) {}
};
#endif

// ---- dropout

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

// Elements whose `bits` random bits are below this threshold are dropped. If p > 0, rng must be given, on the device.
// Python checks the same, with better messages.
inline uint32_t dropout_threshold(double p, const OptionalTensor& rng, int bits, const Device& device) {
  const double range = std::exp2(bits), threshold = std::nearbyint(p * range);  // half to even, as Python rounds
  FB_CHECK_VALUE(p == 0 || (threshold > 0 && threshold < range), "dropout_p is ", p,
                 "; expected 0 <= dropout_p < 1, and that it is not rounded to 0 or 1 in ", bits, " bits");
  FB_CHECK_VALUE(p == 0 || rng, "dropout_p is ", p, " but rng is None; expected a key");
  if (rng) {
    FB_CHECK_VALUE(type_of(*rng) == ScalarType::Long && rng->numel() == 1, "rng is ", type_of(*rng), " of shape ",
                   rng->sizes(), "; expected one Long key");
    FB_CHECK_VALUE(rng->device() == device, "rng is on ", rng->device(), "; expected ", device);
  }
  return uint32_t(threshold);
}

inline double keep_scale(uint32_t threshold, int bits) { return std::exp2(bits) / (std::exp2(bits) - threshold); }

// The dropout of a site, for loops on the CPU. It reads the key.
inline Dropout dropout_of(double p, const OptionalTensor& rng, int64_t site, int bits) {
  const uint32_t threshold = dropout_threshold(p, rng, bits, torch::headeronly::DeviceType::CPU);
  if (threshold == 0) return {};
  const uint64_t key = uint64_t(*rng->const_data_ptr<int64_t>()) + uint64_t(site) * kGolden;
  return {key, threshold, keep_scale(threshold, bits)};
}

// The same for kernels on x's device. rng has to live until the kernel is launched.
inline DeviceDropout device_dropout_of(double p, const OptionalTensor& rng, int64_t site, int bits, const Tensor& x) {
  const uint32_t threshold = dropout_threshold(p, rng, bits, x.device());
  if (threshold == 0) return {};
  return {rng->const_data_ptr<int64_t>(), uint64_t(site) * kGolden, threshold, float(keep_scale(threshold, bits))};
}

// ---- loops on the CPU

constexpr char kNoIsa[] = "fastbert's CPU kernels need a processor with AVX2 and FMA";

// The type in which the loops compute and take parameters.
inline ScalarType math_type(const Tensor& x) {
  return type_of(x) == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}
inline Tensor as_math(const Tensor& parameter, const Tensor& x) { return contiguous(parameter, math_type(x)); }
inline OptionalTensor as_math(const OptionalTensor& parameter, const Tensor& x) {
  return parameter ? std::optional(as_math(*parameter, x)) : std::nullopt;
}

inline const char* bytes_of(const Tensor& tensor) { return static_cast<const char*>(tensor.const_data_ptr()); }
inline const void* data(const OptionalTensor& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

// The number of rows that a product is computed for: `rows` rounded up to whole blocks, on which oneDNN is fast. There
// are no more than about 32 such numbers between one power of two and the next, because oneDNN keeps generated code for
// every number of rows it has met (docs/linear.md).
inline int64_t whole_blocks(int64_t rows) {
  int64_t block = rows > 256 ? 16 : 1;
  while (64 * block < rows) block *= 2;
  return round_up(rows, block);
}

// An uninitialised tensor of `sizes`, (..., channels), followed in its storage by rows of zeros up to whole_blocks():
// a product that reads whole blocks then does not have to copy it.
inline Tensor empty_rows(Sizes sizes, const Tensor& x, ScalarType type) {
  const int64_t channels = sizes.back(), rows = count_rows(sizes);
  const Tensor blocks = empty({whole_blocks(rows), channels}, x, type);
  if (blocks.size(0) != rows) zero_(view(blocks, {blocks.size(0) - rows, channels}, rows * channels));
  return view(blocks, sizes);
}
inline Tensor empty_rows(Sizes sizes, const Tensor& x) { return empty_rows(sizes, x, type_of(x)); }

// The number of threads that parallel_for uses.
inline int64_t threads() {
  if (const Team* const team = Team::current()) return team->members();
  uint32_t count = 1;
  check_call(torch_get_num_threads(&count), "get_num_threads");
  return count;
}

// Calls f(begin, end) on ranges of 0 to n, of at least `grain`, in all threads.
template <class F>
void parallel_for(int64_t n, int64_t grain, const F& f) {
  if (Team* const team = Team::current()) return team->share(n, grain, f);
  const auto range = [](int64_t begin, int64_t end, void* f) {
    Team::run_part([&] { (*static_cast<const F*>(f))(begin, end); });
  };
  check_call(torch_parallel_for(0, n, grain, range, const_cast<F*>(&f)), "parallel_for");
}

// The number of elements that are worth another thread: fewer where a team's threads stand by.
inline int64_t grain() { return Team::current() ? kGrain / 8 : kGrain; }

// Calls f() once, in this thread, while the other threads stand by for its calls of parallel_for. Anything else in f()
// that would use threads, such as torch's products, runs in this thread alone.
template <class F>
void together(const F& f) {
  const int64_t members = threads();
  Team team(members);
  std::exception_ptr error;
  parallel_for(members, 1, [&](int64_t begin, int64_t) {
    if (begin) return team.stand_by(begin);
    try {
      team.run(f);
    } catch (...) {
      error = std::current_exception();  // rethrown below: torch would change its type
    }
  });
  if (error) std::rethrow_exception(error);
}

// Calls f(range, thread) on ranges, which threads take; they are numbered from 0 to ranges.threads(). For loops
// that compute: loops that wait for memory gain nothing over parallel_for.
template <class F>
void parallel_ranges(Ranges&& ranges, const F& f) {
  parallel_for(ranges.threads(), 1,
               [&](int64_t thread, int64_t) { ranges.take([&](const Range& range) { f(range, thread); }); });
}

// Memory for a loop, from a cache line on. The thread that asked for it keeps it for its next loop: malloc may give
// blocks of this size back to the system, and new pages for them would take a few percent of a model's time.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    const int64_t lines = divide_up(bytes, kLine);
    if (!kept_.empty() && lines <= kMost) own_ = std::move(kept_.back()), kept_.pop_back();
    if (own_.lines < lines) own_ = {std::unique_ptr<Line[]>(new Line[lines]), lines};
  }
  Scratch(const Scratch&) = delete;
  ~Scratch() {
    try {
      if (own_.lines <= kMost) kept_.push_back(std::move(own_));
    } catch (const std::bad_alloc&) {  // then it is freed
    }
  }
  void* get() const { return own_.memory.get(); }

 private:
  static constexpr int64_t kLine = 64, kMost = (1 << 22) / kLine;
  struct alignas(kLine) Line {
    char bytes[kLine];
  };
  struct Block {
    std::unique_ptr<Line[]> memory;
    int64_t lines;
  };
  inline static thread_local std::vector<Block> kept_;  // a loop within another loop takes the second last, and so on
  Block own_{};
};

// The same with f(range, scratch): each thread has its own scratch of scratch_bytes, which begins at a cache line.
template <class F>
void parallel_ranges(Ranges&& ranges, int64_t scratch_bytes, const F& f) {
  parallel_for(ranges.threads(), 1, [&](int64_t, int64_t) {
    const Scratch scratch(scratch_bytes);
    ranges.take([&](const Range& range) { f(range, scratch.get()); });
  });
}

// Calls f(begin, end, scratch) on ranges of rows in all threads; each call gets its own scratch of scratch_bytes.
template <class F>
void parallel_rows(int64_t rows, int64_t channels, int64_t scratch_bytes, const F& f) {
  parallel_for(rows, std::max<int64_t>(1, grain() / std::max<int64_t>(1, channels)), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<char[]> scratch(new char[scratch_bytes]);
    f(begin, end, static_cast<void*>(scratch.get()));
  });
}

// Adds n of `more` to `sums`, both of one math type.
inline void add_to(void* sums, const void* more, int64_t n, ScalarType type) {
  const auto add = [&](auto* to, const auto* from) {
    for (int64_t i = 0; i < n; ++i) to[i] += from[i];
  };
  if (type == ScalarType::Double) return add(static_cast<double*>(sums), static_cast<const double*>(more));
  add(static_cast<float*>(sums), static_cast<const float*>(more));
}

// Sums over rows, [quantities, channels] of x's math_type, with the same bits for any number of threads. f(begin, end,
// sums, scratch) adds a range of rows to sums. It is called for blocks of kBlock rows. One thread adds up the sums of
// the blocks of a chunk of rows; then those of the chunks are added up, in order. Blocks and chunks depend on the shape
// alone, and no single sum is so long that it loses digits.
template <class F>
Tensor sum_rows(int64_t rows, int64_t channels, int64_t quantities, int64_t scratch_bytes, const Tensor& x,
                const F& f) {
  constexpr int64_t kBlock = 64, kChunks = 64;
  const int64_t columns = quantities * channels,
                smallest = std::max<int64_t>(32, kGrain / std::max<int64_t>(1, channels));
  const int64_t chunk = std::max(smallest, divide_up(rows, kChunks)), chunks = divide_up(rows, chunk);
  const Tensor sums = zeros({chunks, quantities, channels}, x, math_type(x));
  const int64_t size = sums.element_size(), bytes = columns * size;
  char* const data = static_cast<char*>(sums.mutable_data_ptr());
  parallel_for(columns ? chunks : 0, 1, [&](int64_t first, int64_t last) {
    const std::unique_ptr<char[]> scratch(new char[scratch_bytes]), block(new char[bytes]);
    for (int64_t i = first; i < last; ++i) {
      const int64_t end = std::min(rows, (i + 1) * chunk);
      char* const sum = data + i * bytes;
      f(i * chunk, std::min(end, i * chunk + kBlock), sum, static_cast<void*>(scratch.get()));
      for (int64_t row = i * chunk + kBlock; row < end; row += kBlock) {
        std::memset(block.get(), 0, bytes);
        f(row, std::min(end, row + kBlock), block.get(), static_cast<void*>(scratch.get()));
        add_to(sum, block.get(), columns, type_of(sums));
      }
    }
  });
  if (chunks == 1) return row(sums, 0);
  const Tensor total = zeros({quantities, channels}, sums, type_of(sums));
  char* const to = static_cast<char*>(total.mutable_data_ptr());
  parallel_for(columns, kGrain / kChunks, [&](int64_t first, int64_t last) {
    for (int64_t i = 0; i < chunks; ++i)
      add_to(to + first * size, data + i * bytes + first * size, last - first, type_of(sums));
  });
  return total;
}

// `shape`, followed by x's sizes from dimension `from` on.
inline std::vector<int64_t> shape_of_rows(const Tensor& x, int64_t from, std::vector<int64_t> shape) {
  shape.insert(shape.end(), x.sizes().begin() + from, x.sizes().end());
  return shape;
}

// x in `dtype`, copied if it is not contiguous or not aligned to the 16 bytes that kernels read at a time. Parameters
// of a few channels are copied then (a part of a flat buffer may begin anywhere): reading activations element by
// element, as kernels do if any pointer is not aligned, takes longer, and adds up a row in another order.
inline Tensor aligned(const Tensor& x, ScalarType dtype) {
  const Tensor ordered = contiguous(x, dtype);
  return reinterpret_cast<uintptr_t>(ordered.const_data_ptr()) % 16 ? copy_of(ordered, dtype) : ordered;
}
inline Tensor aligned(const Tensor& x) { return aligned(x, type_of(x)); }

}  // namespace fastbert
