// The losses of rows of logits, their gradient in place, and the scaling that remains. The library computes the
// products.
//
// A block owns a row. In the first pass each thread adds the bias and keeps the largest logit and the sum of
// exponentials so far, which is rescaled when a larger logit comes. The threads' results are joined in a fixed order.
// For a backward, a second pass turns the logits into softmax - onehot. By then the row comes from the L2 cache: the
// blocks that an H100 runs at a time have 396 rows, which is 24 MB for 30522 classes in 16 bits. A thread reads and
// writes the same columns in both passes, so the only thing to wait for is the sums.
//
// The bias is added here and not in the product, because for rows with a stride the library adds a bias only by writing
// it to every row first. It is read from the caches, in both passes.
//
// Bytes moved: logits read once and, for a backward, written once; from L2 the bias once or twice and logits once more.
// On sm_90 an element takes 17 instructions in the first pass and 19 in the second; an H100 issues about 38 in the time
// that 4 bytes take.
#include <float.h>

#include <algorithm>

#include "../cross_entropy.h"
#include "common.cuh"

namespace fastbert::cuda {

namespace {

constexpr int kMostThreads = 512, kBlocksOnProcessor = 3;  // of the kernel for rows
constexpr int kWarps = 32;                                 // of the kernel for the mean

// ---- over the threads of a block

// The sum of exp(x) over some numbers x, as exp(largest) total.
struct Exponentials {
  float largest, total;

  __device__ __forceinline__ void add(const Exponentials& other) {
    const float top = fmaxf(largest, other.largest);
    total = total * expf(largest - top) + other.total * expf(other.largest - top);
    largest = top;
  }
};

// Joins the sums of all threads of a block; every thread gets the same bits.
__device__ __forceinline__ Exponentials join(Exponentials mine) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    mine.add({__shfl_xor_sync(~0u, mine.largest, lanes), __shfl_xor_sync(~0u, mine.total, lanes)});
  FB_SHARED(Exponentials, of_warps, kMostThreads / 32);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
  __syncthreads();
  Exponentials all = of_warps[0];
  for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) all.add(of_warps[warp]);
  return all;
}

__device__ __forceinline__ int64_t label_of(const Labels& labels, int64_t row) {
  return labels.is_long ? static_cast<const int64_t*>(labels.of_rows)[row]
                        : static_cast<const int32_t*>(labels.of_rows)[row];
}

// ---- rows

template <class T>
__global__ void __launch_bounds__(kMostThreads, kBlocksOnProcessor)
    cross_entropy_rows_kernel(T* __restrict__ logits,      // [rows, stride], the first `classes` columns are used
                              const T* __restrict__ bias,  // [classes]
                              Labels labels,
                              float* __restrict__ losses,  // [rows]
                              int64_t classes, int64_t padded, int64_t stride, bool need_dlogits) {
  constexpr int kVec = 16 / sizeof(T);
  using Pack = Vec<T, kVec>;
  const int64_t row = blockIdx.x, given = label_of(labels, row), packs = classes / kVec;
  const int64_t label = min(max(given, int64_t(0)), classes - 1);  // -1 where there are no classes
  const bool labelled = given != labels.ignored;
  Pack* const x = reinterpret_cast<Pack*>(logits) + row * (stride / kVec);
  const Pack* const b = reinterpret_cast<const Pack*>(bias);
  T* const single = logits + row * stride;  // for the columns after the last whole vector

  float picked = 0;
  Exponentials sum{-FLT_MAX, 0};  // not -inf: -inf - -inf is NaN
  if (labelled) {
    if (threadIdx.x == 0 && label >= 0) picked = to_float(single[label]) + to_float(bias[label]);
#pragma unroll 1
    for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
      const Pack some = x[i], biases = b[i];
      float v[kVec], top = sum.largest;
#pragma unroll
      for (int j = 0; j < kVec; ++j) v[j] = to_float(some.at[j]) + to_float(biases.at[j]), top = fmaxf(top, v[j]);
      sum.total *= expf(sum.largest - top);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum.total += expf(v[j] - top);
      sum.largest = top;
    }
    for (int64_t i = packs * kVec + threadIdx.x; i < classes; i += blockDim.x) {
      // v is not made an Exponentials {v, 1}, whose `largest` could be -inf.
      const float v = to_float(single[i]) + to_float(bias[i]), top = fmaxf(sum.largest, v);
      sum.total = sum.total * expf(sum.largest - top) + expf(v - top);
      sum.largest = top;
    }
  }
  sum = join(sum);
  if (labelled && given != label) sum.total = NAN;  // no such class: loss and gradient become NaN
  if (threadIdx.x == 0) losses[row] = labelled ? sum.largest - picked + logf(sum.total) : 0;
  if (!need_dlogits) return;

  const float inverse = 1 / sum.total;
  const auto gradient = [&](T logit, T bias_, bool is_label) {
    const float p = expf(to_float(logit) + to_float(bias_) - sum.largest) * inverse;
    return from_float<T>(is_label ? p - 1 : p);
  };
  for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
    Pack some;
    if (labelled) {
      some = x[i];
      const Pack biases = b[i];
      const int place = i == label / kVec ? int(label % kVec) : kVec;  // the label's, if it is among these
#pragma unroll
      for (int j = 0; j < kVec; ++j) some.at[j] = gradient(some.at[j], biases.at[j], j == place);
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) some.at[j] = from_float<T>(0);
    }
    x[i] = some;
  }
  for (int64_t i = packs * kVec + threadIdx.x; i < classes; i += blockDim.x)
    single[i] = labelled ? gradient(single[i], bias[i], i == label) : from_float<T>(0);
  for (int64_t i = classes + threadIdx.x; i < padded; i += blockDim.x) single[i] = from_float<T>(0);
}

// ---- the mean, and what it scales

__global__ void __launch_bounds__(32 * kWarps, 1)
    mean_over_labelled_kernel(const float* __restrict__ values,  // [count]
                              int64_t count, Labels labels,
                              float* __restrict__ mean) {  // [1]
  double sum = 0;  // a thread adds few values, but in float their rounding would be most of the error
  int labelled = 0;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += double(values[i]);
  for (int64_t row = threadIdx.x; row < labels.rows; row += blockDim.x)
    labelled += label_of(labels, row) != labels.ignored;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    sum += __shfl_xor_sync(~0u, sum, lanes);
    labelled += __shfl_xor_sync(~0u, labelled, lanes);
  }
  FB_SHARED(double, sums, kWarps);
  FB_SHARED(int, counts, kWarps);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum, counts[threadIdx.x / 32] = labelled;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < kWarps; ++warp) sum += sums[warp], labelled += counts[warp];
  *mean = float(sum / max(labelled, 1));
}

template <class X, class Y>
__global__ void __launch_bounds__(256) scaled_kernel(const X* x, const float* __restrict__ factor, Y* y, int64_t count,
                                                     int64_t packs) {  // packs: whole vectors at the start
  constexpr int kVec = 16 / sizeof(X);
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, threads = int64_t(gridDim.x) * blockDim.x;
  const float by = *factor;
  for (int64_t i = thread; i < packs; i += threads) {
    const Vec<X, kVec> in = reinterpret_cast<const Vec<X, kVec>*>(x)[i];
    Vec<Y, kVec> out;
#pragma unroll
    for (int j = 0; j < kVec; ++j) out.at[j] = from_float<Y>(to_float(in.at[j]) * by);
    reinterpret_cast<Vec<Y, kVec>*>(y)[i] = out;
  }
  for (int64_t i = packs * kVec + thread; i < count; i += threads) y[i] = from_float<Y>(to_float(x[i]) * by);
}

template <class X, class Y>
const char* scale(const void* x, const float* factor, void* y, int64_t count, void* stream) {
  constexpr int kVec = 16 / sizeof(X);
  const int64_t packs = is_aligned(x, 16) && is_aligned(y, 16) ? count / kVec : 0, most = 8 * multiprocessors();
  const int64_t blocks = std::min(divide_up(packs ? packs : count, 256), most);
  return launch(scaled_kernel<X, Y>, dim3(unsigned(blocks ? blocks : 1)), dim3(256), 0, stream,
                static_cast<const X*>(x), factor, static_cast<Y*>(y), count, packs);
}

}  // namespace

// ---- launchers

const char* cross_entropy_rows(void* logits, const void* bias, const Labels& labels, float* losses, int64_t classes,
                               int64_t padded, int64_t stride, bool need_dlogits, DType dtype, void* stream) {
  if (labels.rows > INT32_MAX) return "the tensor is too large for one launch";
  return for_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t wanted = divide_up(classes, 16 / sizeof(T) * 32) * 32;  // threads: one for each vector
    const int threads = int(std::clamp<int64_t>(wanted, 32, kMostThreads));
    return launch(cross_entropy_rows_kernel<T>, dim3(unsigned(labels.rows)), dim3(threads), 0, stream,
                  static_cast<T*>(logits), static_cast<const T*>(bias), labels, losses, classes, padded, stride,
                  need_dlogits);
  });
}

const char* mean_over_labelled(const float* values, int64_t count, const Labels& labels, float* mean, void* stream) {
  return launch(mean_over_labelled_kernel, dim3(1), dim3(32 * kWarps), 0, stream, values, count, labels, mean);
}

const char* scaled(const void* x, DType x_type, const float* factor, void* y, DType y_type, int64_t count,
                   void* stream) {
  return for_dtype(y_type, [&](auto to) {
    using Y = decltype(to);
    return x_type == DType::f32 ? scale<float, Y>(x, factor, y, count, stream)
                                : scale<Y, Y>(x, factor, y, count, stream);
  });
}

}  // namespace fastbert::cuda
