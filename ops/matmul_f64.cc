// Eigen is an own source: its templates take most of a minute to compile, and GCC 12 takes
// uninitialized halves of its AVX-512 registers for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define EIGEN_DONT_PARALLELIZE
#include "ops/matmul_f64.h"

#include <Eigen/Core>

namespace trainrt {

void matmul_f64(KernelContext& op,
                const MatrixF64& a,
                const MatrixF64& b,
                double* y,
                int64_t m,
                int64_t n,
                int64_t k) {
  using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using Strides = Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>;
  constexpr int64_t kRows = 64;
  op.parallel_for(m, kRows, [&](int64_t begin, int64_t end) {
    const Eigen::Map<const Matrix, 0, Strides> lhs(
        a.data + begin * a.row_stride, end - begin, k, Strides(a.row_stride, a.column_stride));
    const Eigen::Map<const Matrix, 0, Strides> rhs(
        b.data, k, n, Strides(b.row_stride, b.column_stride));
    Eigen::Map<Matrix> out(y + begin * n, end - begin, n);
    out.noalias() = lhs * rhs;
  });
}

}  // namespace trainrt
