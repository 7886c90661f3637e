// Rows in registers: how layer_norm.cu, embedding.cu and scaled_linear.cu split a row of up to 8192 channels over
// threads, load and store it, apply dropout, normalise it, and add up rows. layer_norm.cu gives the reasons.
#pragma once

#include "common.cuh"
#include "philox.cuh"

namespace fastbert::cuda {

constexpr int kMaxWarps = 16;        // per block
constexpr int kForwardRows = 4;      // rows per block of the forward, if a row belongs to one warp
constexpr int kWarpChannels = 1024;  // channels that a warp holds

// How many warps of the backward a multiprocessor has registers for. A channel takes registers for two sums, for z, and
// for dy or the residual.
constexpr int backward_warps(int thread_channels) {
  return thread_channels == 16 ? 16 : thread_channels == 24 ? 12 : 8;
}

inline int warps_per_row(int64_t channels) { return int(divide_up(channels, kWarpChannels)); }

// How many channels a thread holds: as few as possible, so that more rows fit into the registers.
inline int thread_channels(int64_t channels) {
  const int64_t each = divide_up(channels, 32 * warps_per_row(channels));
  return each <= 16 ? 16 : each <= 24 ? 24 : 32;
}

// The shape of a block: the threads of a row, and the number of rows. held: how many channels a thread of the backward
// holds.
inline dim3 forward_block(int64_t channels) {
  const int warps = warps_per_row(channels);
  return dim3(32 * warps, warps == 1 ? kForwardRows : 1);
}
inline dim3 backward_block(int64_t channels, int held) {
  const int warps = warps_per_row(channels);
  return dim3(32 * warps, backward_warps(held) / warps);
}

// The largest number of rows in a block of the backward.
inline int backward_rows(int64_t channels) { return backward_block(channels, thread_channels(channels)).y; }

// Calls f with how many channels a thread holds, and with whether it loads vectors.
template <class F>
const char* for_row_size(int64_t channels, bool vectors, F&& f) {
  constexpr auto yes = Constant<true>{};
  if (!vectors) return f(Constant<32>{}, Constant<false>{});
  switch (thread_channels(channels)) {
    case 16: return f(Constant<16>{}, yes);
    case 24: return f(Constant<24>{}, yes);
    default: return f(Constant<32>{}, yes);
  }
}

// ---- a row's columns

// The columns of a row that a thread holds, each of kVec channels: its i-th one is column(i) of the row. Neighbouring
// lanes have neighbouring columns, and each warp has a separate range of them.
template <int kVec, bool kVectors>
struct Place {
  int64_t row;
  int channels, columns;  // of the row; columns is 0 beyond the last row
  int first;

  __device__ int column(int i) const { return first + 32 * i; }
  __device__ bool inside(int i) const { return column(i) < columns; }
  __device__ bool inside(int i, int j) const {
    return kVectors ? inside(i) : column(i) * kVec + j < channels && columns > 0;
  }
};

template <int kVec, int kColumns, bool kVectors>
__device__ __forceinline__ Place<kVec, kVectors> place_of(int64_t row, int channels) {
  return {row, channels, int(divide_up(channels, kVec)), int(threadIdx.x / 32 * 32 * kColumns + threadIdx.x % 32)};
}

// Loads the thread's i-th column of a row of a tensor; a parameter is a tensor of one row. A column that is not whole
// is filled up with zeros.
template <class T, int kVec, bool kVectors>
__device__ __forceinline__ Vec<T, kVec> load(const T* tensor, int64_t row, const Place<kVec, kVectors>& place, int i) {
  if constexpr (kVectors) {
    return reinterpret_cast<const Vec<T, kVec>*>(tensor)[row * place.columns + place.column(i)];
  } else {
    Vec<T, kVec> v;
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      v.at[j] = place.inside(i, j) ? tensor[row * place.channels + place.column(i) * kVec + j] : from_float<T>(0);
    return v;
  }
}

template <class T, int kVec, bool kVectors>
__device__ __forceinline__ void store(const Vec<T, kVec>& v, T* tensor, int64_t row, const Place<kVec, kVectors>& place,
                                      int i) {
  if constexpr (kVectors) {
    reinterpret_cast<Vec<T, kVec>*>(tensor)[row * place.columns + place.column(i)] = v;
  } else {
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (place.inside(i, j)) tensor[row * place.channels + place.column(i) * kVec + j] = v.at[j];
  }
}

template <class T, int kVec, bool kVectors>
__device__ __forceinline__ void store(const float (&v)[kVec], T* tensor, int64_t row,
                                      const Place<kVec, kVectors>& place, int i) {
  Vec<T, kVec> rounded;
#pragma unroll
  for (int j = 0; j < kVec; ++j) rounded.at[j] = from_float<T>(v[j]);
  store(rounded, tensor, row, place, i);
}

// Reduces v over all threads of a row with `combine`; every thread gets the results. If a row has several warps, they
// exchange theirs through shared memory.
template <int N, class Combine>
__device__ __forceinline__ void over_row(float (&v)[N], const Combine& combine) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
#pragma unroll
    for (int n = 0; n < N; ++n) v[n] = combine(v[n], __shfl_xor_sync(~0u, v[n], lanes));
  if (blockDim.x == 32) return;
  FB_SHARED(float, of_warps, N* kMaxWarps);
  const int warps = blockDim.x / 32, first = threadIdx.y * warps;
  __syncthreads();  // the results of an earlier call have been read
  if (threadIdx.x % 32 == 0)
#pragma unroll
    for (int n = 0; n < N; ++n) of_warps[n * kMaxWarps + first + threadIdx.x / 32] = v[n];
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    v[n] = of_warps[n * kMaxWarps + first];
#pragma unroll 1
    for (int w = 1; w < warps; ++w) v[n] = combine(v[n], of_warps[n * kMaxWarps + first + w]);
  }
}

template <int N>
__device__ __forceinline__ void add_over_row(float (&v)[N]) {
  over_row(v, [](float a, float b) { return a + b; });
}

// v of the row's first thread. Call this only once per kernel; a row of several warps must have a block to itself.
__device__ __forceinline__ float first_of_row(float v) {
  if (blockDim.x == 32) return __shfl_sync(~0u, v, 0);
  FB_SHARED(float, first, 1);
  if (threadIdx.x == 0) first[0] = v;
  __syncthreads();
  return first[0];
}

// Starts to load all of a thread's columns of a row. Nothing waits for the loads here: the caller uses the results
// later.
template <class T, int kVec, int kColumns, bool kVectors>
__device__ __forceinline__ void start_loads(Vec<T, kVec> (&v)[kColumns], const T* tensor,
                                            const Place<kVec, kVectors>& place) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (place.inside(i)) v[i] = load(tensor, place.row, place, i);
}

// Which elements of column i dropout keeps, one bit for each. A Philox call serves 8 channels: if columns have 4, two
// threads make the same call and each uses half of its bits.
template <int kVec, bool kVectors>
__device__ __forceinline__ uint32_t kept_of(const DeviceDropout& drop, Key key, const Place<kVec, kVectors>& place,
                                            int i) {
  const Words words = philox(place.column(i) * kVec / 8, uint32_t(place.row), uint32_t(place.row >> 32), 0, key);
  const int half = place.column(i) * kVec % 8 / 4;  // which half, for columns of 4
  uint32_t kept = 0;
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    const uint32_t word = kVec == 4 && half ? words.word[2 + j / 2 % 2] : words.word[j / 2];
    kept |= uint32_t((word >> 16 * (j % 2) & 0xffff) >= drop.threshold) << j;
  }
  return kept;
}

// Applies dropout to column i of z and returns the bits of kept_of().
template <int kVec, bool kVectors>
__device__ __forceinline__ uint32_t drop_out(float (&z)[kVec], const DeviceDropout& drop, Key key,
                                             const Place<kVec, kVectors>& place, int i) {
  const uint32_t kept = kept_of(drop, key, place, i);
#pragma unroll
  for (int j = 0; j < kVec; ++j) z[j] = kept >> j & 1 ? z[j] * drop.keep_scale : 0;
  return kept;
}

// ---- LayerNorm of a row

struct RowStatistics {
  float mean, rstd;
  float offset;  // the mean that is left in z because of rounding, times -rstd
};

// Subtracts the mean from z: (z - mean) rstd is then z rstd + offset.
template <int kVec, int kColumns, bool kVectors>
__device__ __forceinline__ RowStatistics centre(float (&z)[kColumns][kVec], const Place<kVec, kVectors>& place,
                                                float eps) {
  const float shift = first_of_row(z[0][0]);
  float total[1] = {};
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (place.inside(i, j)) total[0] += z[i][j] - shift;
  add_over_row(total);
  const float inverse_channels = 1.0f / place.channels, row_mean = shift + total[0] * inverse_channels;

  float moments[2] = {};
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (place.inside(i, j)) {
        z[i][j] -= row_mean;
        moments[0] += z[i][j];
        moments[1] = fmaf(z[i][j], z[i][j], moments[1]);
      }
  add_over_row(moments);
  const float correction = moments[0] * inverse_channels,
              variance = fmaxf(moments[1] * inverse_channels - correction * correction, 0);
  const float scale = rsqrtf(variance + eps);
  return {row_mean + correction, scale, -correction * scale};
}

// Turns column i of z, less the mean, into z rstd weight + bias.
template <class P, int kVec, bool kVectors>
__device__ __forceinline__ void scale_and_shift(float (&z)[kVec], const RowStatistics& row_is, const P* weight,
                                                const P* bias, const Place<kVec, kVectors>& place, int i) {
  const Vec<P, kVec> w = load(weight, 0, place, i), b = load(bias, 0, place, i);
#pragma unroll
  for (int j = 0; j < kVec; ++j)
    z[j] = fmaf(fmaf(z[j], row_is.rstd, row_is.offset), to_float(w.at[j]), to_float(b.at[j]));
}

// What the gradients of a row's elements have in common; layer_norm.cu has the formula.
struct RowGradient {
  float scale, offset, g_mean, minus_gn_mean;

  __device__ float n(float z) const { return fmaf(z, scale, offset); }
  __device__ float dz(float n, float g) const { return (fmaf(n, minus_gn_mean, g) - g_mean) * scale; }
};

// Subtracts the mean from z. dy(i, j) is the gradient of element j of column i.
template <class P, int kVec, int kColumns, bool kVectors, class Dy>
__device__ __forceinline__ RowGradient centre(float (&z)[kColumns][kVec], const Dy& dy, const P* weight, float row_mean,
                                              float scale, const Place<kVec, kVectors>& place) {
  float total[3] = {};  // sums of z - mean, of g, and of their products
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (!place.inside(i)) continue;
    const Vec<P, kVec> w = load(weight, 0, place, i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      if (!place.inside(i, j)) continue;
      z[i][j] -= row_mean;
      const float g = dy(i, j) * to_float(w.at[j]);
      total[0] += z[i][j];
      total[1] += g;
      total[2] = fmaf(g, z[i][j], total[2]);
    }
  }
  add_over_row(total);
  const float inverse_channels = 1.0f / place.channels, correction = total[0] * inverse_channels,
              g_mean = total[1] * inverse_channels;
  return {scale, -correction * scale, g_mean, -(total[2] * inverse_channels - correction * g_mean) * scale};
}

// ---- sums over the rows of a block

// Adds up `count` numbers over the block's rows, which are `stride` apart in shared memory.
__device__ __forceinline__ void add_up(const float* row_sums, int64_t stride, int count, float* to) {
  __syncthreads();
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < count; i += blockDim.x * blockDim.y) {
    float total = 0;
    for (unsigned r = 0; r < blockDim.y; ++r) total += row_sums[r * stride + i];
    to[i] = total;
  }
}

// The same for sums in registers; row_sums has room for [blockDim.y, channels].
template <int kVec, int kColumns, bool kVectors>
__device__ __forceinline__ void add_up(const float (&sums)[kColumns][kVec], float* row_sums,
                                       const Place<kVec, kVectors>& place, float* to) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (place.inside(i)) store(sums[i], row_sums, threadIdx.y, place, i);
  add_up(row_sums, place.channels, place.channels, to);
}

}  // namespace fastbert::cuda
