// The float32 matrix product of the BLAS library that torch carries, by its Fortran name, on row-major matrices.
#pragma once

#include <stdint.h>

extern "C" {
void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*,
            const float*, const int*, const float*, float*, const int*) __attribute__((weak));
}

namespace fastbert {

// Whether sgemm_ is there: not every build of torch exports it.
inline bool has_blas() { return sgemm_; }

// A matrix in memory: rows are `stride` elements apart.
template <class M>
struct Matrix {
  M* data;
  int64_t stride;
};

enum class Op : char { as_is = 'N', transposed = 'T' };

// c = a b + beta c, c being m by n and k the inner dimension. With beta 0, c is only written.
inline void product(Op op_a, Op op_b, int64_t m, int64_t n, int64_t k, Matrix<const float> a, Matrix<const float> b,
                    float beta, Matrix<float> c) {
  // BLAS is column-major and reads a row-major matrix as its transpose, so the operands change places.
  const char first = char(op_b), second = char(op_a);
  const int rows = int(n), columns = int(m), inner = int(k), lda = int(a.stride), ldb = int(b.stride),
            ldc = int(c.stride);
  const float alpha = 1;
  sgemm_(&first, &second, &rows, &columns, &inner, &alpha, b.data, &ldb, a.data, &lda, &beta, c.data, &ldc);
}

}  // namespace fastbert
