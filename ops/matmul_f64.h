// One float64 matrix product on Eigen, cut into fixed blocks of rows.
#pragma once

#include "graph/kernel.h"

namespace trainrt {

// A matrix read at a pointer with a stride per row and per column, in elements.
struct MatrixF64 {
  const double* data = nullptr;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

// y[m, n] (row-major, dense) = a[m, k] . b[k, n].
void matmul_f64(KernelContext& op,
                const MatrixF64& a,
                const MatrixF64& b,
                double* y,
                int64_t m,
                int64_t n,
                int64_t k);

}  // namespace trainrt
