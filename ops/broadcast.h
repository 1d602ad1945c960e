// How a kernel walks over broadcast operands: dims merged as far as the strides of all operands
// allow, so that the usual cases (equal shapes, a scalar, a bias over the last dim, a channel
// scale) become one or two loops over contiguous memory.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "graph/shape.h"

namespace trainrt {

constexpr int kMaxDims = 16;     // after merging; an ONNX model with more would be the first
constexpr int kMaxOperands = 4;  // inputs of one element-wise operator

// A loop nest over an output of shape `dims` (major first) and, per operand, the step in elements
// for each dim: 0 where the operand is repeated. ndim >= 1; a scalar is one dim of size 1.
struct BroadcastLoops {
  int ndim = 1;
  int num_operands = 0;
  std::array<int64_t, kMaxDims> dims{};
  std::array<std::array<int64_t, kMaxDims>, kMaxOperands> strides{};

  int64_t inner() const { return dims[static_cast<size_t>(ndim - 1)]; }
  int64_t inner_stride(int operand) const {
    return strides[static_cast<size_t>(operand)][static_cast<size_t>(ndim - 1)];
  }
};

// Merges dims whose strides are compatible in all operands, and drops dims of size 1. `strides` has
// one entry per operand, each as long as `dims`.
BroadcastLoops merge_loops(const Shape& dims, std::span<const Shape> strides);

// The loop nest of operands of the given shapes broadcast to `target`.
BroadcastLoops broadcast_loops(const Shape& target, std::span<const Shape* const> shapes);

// A position in a loop nest without its innermost dim, with the offset of every operand.
class RowCursor {
 public:
  RowCursor(const BroadcastLoops& loops, int64_t row);
  int64_t offset(int operand) const { return offsets_[static_cast<size_t>(operand)]; }
  void next();

 private:
  const BroadcastLoops* loops_;
  std::array<int64_t, kMaxDims> index_{};
  std::array<int64_t, kMaxOperands> offsets_{};
};

}  // namespace trainrt
