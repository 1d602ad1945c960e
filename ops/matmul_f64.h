// One float64 matrix product on Eigen, cut into fixed blocks.
#pragma once

#include "graph/kernel.h"

namespace trainrt {

// A matrix read at a pointer with a stride per row and per column, in elements.
struct MatrixF64 {
  const double* data = nullptr;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

// The result: rows of consecutive elements; `add`: added to what is there.
struct ProductF64 {
  double* data = nullptr;
  int64_t row_stride = 0;
  bool add = false;
};

// y[m, n] = (or +=) a[m, k] . b[k, n].
void matmul_f64(KernelContext& op,
                const MatrixF64& a,
                const MatrixF64& b,
                const ProductF64& y,
                int64_t m,
                int64_t n,
                int64_t k);

}  // namespace trainrt
