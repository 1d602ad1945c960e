// Eigen is an own source: its templates take most of a minute to compile, and GCC 12 takes
// uninitialized halves of its AVX-512 registers for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define EIGEN_DONT_PARALLELIZE
#include "ops/matmul_f64.h"

#include <Eigen/Core>

namespace trainrt {

namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Strides = Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>;

Eigen::Map<const Matrix, 0, Strides> map(const MatrixF64& matrix,
                                         int64_t first_row,
                                         int64_t rows,
                                         int64_t first_column,
                                         int64_t columns) {
  return {matrix.data + first_row * matrix.row_stride + first_column * matrix.column_stride,
          rows,
          columns,
          Strides(matrix.row_stride, matrix.column_stride)};
}

}  // namespace

void matmul_f64(KernelContext& op,
                const MatrixF64& a,
                const MatrixF64& b,
                const ProductF64& y,
                int64_t m,
                int64_t n,
                int64_t k) {
  constexpr int64_t kBlock = 64;
  const auto block = [&](int64_t row, int64_t rows, int64_t column, int64_t columns) {
    const auto lhs = map(a, row, rows, 0, k);
    const auto rhs = map(b, 0, k, column, columns);
    Eigen::Map<Matrix, 0, Eigen::OuterStride<>> out(
        y.data + row * y.row_stride + column, rows, columns, Eigen::OuterStride<>(y.row_stride));
    if (y.add) {
      out.noalias() += lhs * rhs;
    } else {
      out.noalias() = lhs * rhs;
    }
  };
  // Cut along the longer side, so that all threads have work in flat products too.
  if (m >= n) {
    op.parallel_for(
        m, kBlock, [&](int64_t begin, int64_t end) { block(begin, end - begin, 0, n); });
  } else {
    op.parallel_for(
        n, 4 * kBlock, [&](int64_t begin, int64_t end) { block(0, m, begin, end - begin); });
  }
}

}  // namespace trainrt
