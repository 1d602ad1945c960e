#include "ops/broadcast.h"

#include "graph/base/error.h"

namespace trainrt {

BroadcastLoops merge_loops(const Shape& dims, std::span<const Shape> strides) {
  TRAINRT_CHECK(strides.size() <= kMaxOperands);
  BroadcastLoops loops;
  loops.num_operands = static_cast<int>(strides.size());
  int ndim = 0;
  for (size_t d = 0; d < dims.size(); ++d) {
    if (dims[d] == 1) {
      continue;
    }
    bool merges = ndim > 0;
    for (size_t i = 0; i < strides.size() && merges; ++i) {
      merges = loops.strides[i][static_cast<size_t>(ndim - 1)] == strides[i][d] * dims[d];
    }
    if (!merges) {
      TRAINRT_REQUIRE(ndim < kMaxDims,
                      kUnsupported,
                      "a kernel can walk at most ",
                      kMaxDims,
                      " dims, the tensor has shape ",
                      shape_string(dims));
      loops.dims[static_cast<size_t>(ndim++)] = 1;
    }
    loops.dims[static_cast<size_t>(ndim - 1)] *= dims[d];
    for (size_t i = 0; i < strides.size(); ++i) {
      loops.strides[i][static_cast<size_t>(ndim - 1)] = strides[i][d];
    }
  }
  if (ndim == 0) {
    loops.dims[0] = 1;
    for (size_t i = 0; i < strides.size(); ++i) {
      loops.strides[i][0] = 1;
    }
    ndim = 1;
  }
  loops.ndim = ndim;
  return loops;
}

BroadcastLoops broadcast_loops(const Shape& target, std::span<const Shape* const> shapes) {
  std::array<Shape, kMaxOperands> strides;
  TRAINRT_CHECK(shapes.size() <= kMaxOperands);
  for (size_t i = 0; i < shapes.size(); ++i) {
    strides[i] = broadcast_strides(*shapes[i], target);
  }
  return merge_loops(target, std::span(strides).first(shapes.size()));
}

RowCursor::RowCursor(const BroadcastLoops& loops, int64_t row) : loops_(&loops) {
  // Row 0 has index 0 in all dims, those of size 0 too: reductions start there and read nothing.
  for (int d = loops.ndim - 2; d >= 0 && row > 0; --d) {
    const size_t dim = static_cast<size_t>(d);
    index_[dim] = row % loops.dims[dim];
    row /= loops.dims[dim];
    for (int i = 0; i < loops.num_operands; ++i) {
      offsets_[static_cast<size_t>(i)] += index_[dim] * loops.strides[static_cast<size_t>(i)][dim];
    }
  }
}

void RowCursor::next() {
  for (int d = loops_->ndim - 2; d >= 0; --d) {
    const size_t dim = static_cast<size_t>(d);
    if (++index_[dim] < loops_->dims[dim]) {
      for (int i = 0; i < loops_->num_operands; ++i) {
        offsets_[static_cast<size_t>(i)] += loops_->strides[static_cast<size_t>(i)][dim];
      }
      return;
    }
    index_[dim] = 0;
    for (int i = 0; i < loops_->num_operands; ++i) {
      offsets_[static_cast<size_t>(i)] -=
          (loops_->dims[dim] - 1) * loops_->strides[static_cast<size_t>(i)][dim];
    }
  }
}

}  // namespace trainrt
