// What an operator costs, independent of any device: the planner turns this into seconds.
#pragma once

#include <cstdint>
#include <vector>

namespace trainrt {

// One matrix product [batch] x (m x k) . (k x n); a convolution is described by the product it is
// equivalent to (implicit GEMM), so that tile and wave quantisation can be priced from the shape.
struct MatmulDims {
  int64_t batch = 1;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  double flops() const {
    return 2.0 * static_cast<double>(batch) * static_cast<double>(m) * static_cast<double>(n) *
           static_cast<double>(k);
  }
};

struct Cost {
  double flops = 0;                 // arithmetic outside matrix units (element-wise, reductions)
  double bytes = 0;                 // tensor bytes read and written at least once
  std::vector<MatmulDims> matmuls;  // what runs on matrix units

  double matmul_flops() const {
    double sum = 0;
    for (const MatmulDims& dims : matmuls) {
      sum += dims.flops();
    }
    return sum;
  }
};

}  // namespace trainrt
