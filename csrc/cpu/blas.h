// The matrix products of the BLAS library that torch carries, by their Fortran names, on row-major matrices.
#pragma once

#include <stdint.h>

extern "C" {
void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*,
            const float*, const int*, const float*, float*, const int*) __attribute__((weak));
void dgemm_(const char*, const char*, const int*, const int*, const int*, const double*, const double*, const int*,
            const double*, const int*, const double*, double*, const int*) __attribute__((weak));
int MKL_Set_Num_Threads_Local(int) __attribute__((weak));  // returns the setting before
}

namespace fastbert {

// Not every build of torch exports them.
inline bool has_blas() { return sgemm_ && dgemm_; }

// While one of these lives, MKL runs its thread's products on that thread alone: split over several, a sum is added up
// in another order. Other libraries are called as they are.
class SingleThreadedBlas {
 public:
  SingleThreadedBlas() : before_(MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(1) : 0) {}
  ~SingleThreadedBlas() {
    if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(before_);
  }
  SingleThreadedBlas(const SingleThreadedBlas&) = delete;
  SingleThreadedBlas& operator=(const SingleThreadedBlas&) = delete;

 private:
  const int before_;
};

// A matrix in memory: rows are `stride` elements apart.
template <class M>
struct Matrix {
  M* data;
  int64_t stride;

  Matrix rows_from(int64_t row) const { return {data + row * stride, stride}; }
};

enum class Op : char { as_is = 'N', transposed = 'T' };

// c = alpha a b + beta c, c being m by n and k the inner dimension. With beta 0, c is only written.
template <class M>
void product(Op op_a, Op op_b, int64_t m, int64_t n, int64_t k, M alpha, Matrix<const M> a, Matrix<const M> b, M beta,
             Matrix<M> c) {
  // Column-major reads a row-major matrix as its transpose, so the operands change places.
  const char first = char(op_b), second = char(op_a);
  const int rows = int(n), columns = int(m), inner = int(k), lda = int(a.stride), ldb = int(b.stride),
            ldc = int(c.stride);
  if constexpr (sizeof(M) == sizeof(float)) {
    sgemm_(&first, &second, &rows, &columns, &inner, &alpha, b.data, &ldb, a.data, &lda, &beta, c.data, &ldc);
  } else {
    dgemm_(&first, &second, &rows, &columns, &inner, &alpha, b.data, &ldb, a.data, &lda, &beta, c.data, &ldc);
  }
}

}  // namespace fastbert
