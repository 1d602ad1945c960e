// cuBLASLt's problem for the product of a node.
#pragma once

#include <algorithm>
#include <numeric>

#include "ops/cublas.cuh"
#include "ops/matmul.h"

namespace trainrt {

// Of a matrix with one stored row the distance to the next is any number; cuBLASLt wants one that
// no row is longer than.
inline cublas::Operand operand(int64_t rows, int64_t columns, int64_t row, int64_t column) {
  const bool transposed = column != 1;
  const int64_t length = transposed ? rows : columns;
  return {rows, columns, std::max(transposed ? column : row, length), transposed};
}

// The batch dims but the last, whose matrices one call takes.
struct Batches {
  Product outer;  // its `batch` is without the last dim
  int64_t count = 1, a_stride = 0, b_stride = 0;
};

inline Batches split_batch(const Product& p) {
  Batches batches{p};
  if (!p.batch.empty()) {
    batches.count = p.batch.back();
    batches.a_stride = p.a_batch_strides.back();
    batches.b_stride = p.b_batch_strides.back();
    batches.outer.batch.pop_back();
    batches.outer.a_batch_strides.pop_back();
    batches.outer.b_batch_strides.pop_back();
  }
  return batches;
}

// What offsets of these strides keep of the arena's alignment.
inline int64_t alignment_of(const Shape& strides, DType dtype) {
  int64_t alignment = cublas::kArenaBytes;
  for (const int64_t stride : strides) {
    alignment = std::gcd(alignment, stride * dtype_bytes(dtype));
  }
  return alignment;
}

inline cublas::Problem problem_of(const OpContext& op, const Product& p, const Batches& batches) {
  cublas::Problem problem;
  problem.dtype = op.input_dtype(0);
  problem.a = operand(p.m, p.k, p.a_row, p.a_column);
  problem.b = operand(p.k, p.n, p.b_row, p.b_column);
  problem.y_stride = p.n;
  problem.batch = batches.count;
  problem.a_batch_stride = batches.a_stride;
  problem.b_batch_stride = batches.b_stride;
  problem.y_batch_stride = p.m * p.n;
  problem.a_alignment = alignment_of(batches.outer.a_batch_strides, problem.dtype);
  problem.b_alignment = alignment_of(batches.outer.b_batch_strides, problem.dtype);
  problem.y_alignment = alignment_of({problem.y_batch_stride * batches.count}, problem.dtype);
  return problem;
}

}  // namespace trainrt
