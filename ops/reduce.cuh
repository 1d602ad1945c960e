// How a CUDA kernel walks over the elements that one output of a reduction sums up.
#pragma once

#include <array>
#include <vector>

#include "ops/broadcast.h"
#include "ops/launch.cuh"

namespace trainrt {

// The dims of a tensor, merged, split into kept and reduced ones.
struct ReductionWalk {
  int num_kept = 0, num_reduced = 0;
  int64_t kept_dims[kMaxDims], kept_strides[kMaxDims];
  int64_t reduced_dims[kMaxDims], reduced_strides[kMaxDims];
  int64_t outputs = 1, count = 1;

  TRAINRT_HOST_DEVICE static int64_t offset(int ndim,
                                            const int64_t* dims,
                                            const int64_t* strides,
                                            int64_t i) {
    int64_t at = 0;
    for (int d = ndim - 1; d > 0; --d) {
      at += i % dims[d] * strides[d];
      i /= dims[d];
    }
    return ndim > 0 ? at + i * strides[0] : 0;
  }
  TRAINRT_HOST_DEVICE int64_t kept(int64_t output) const {
    return offset(num_kept, kept_dims, kept_strides, output);
  }
  TRAINRT_HOST_DEVICE int64_t reduced(int64_t i) const {
    return offset(num_reduced, reduced_dims, reduced_strides, i);
  }
};

inline ReductionWalk reduction_walk(const Shape& shape, const std::vector<int64_t>& axes) {
  const int ndim = static_cast<int>(shape.size());
  std::vector<bool> reduced(shape.size(), false);
  for (const int64_t axis : axes) {
    reduced[static_cast<size_t>(normalize_axis(axis, ndim))] = true;
  }
  // merge_loops keeps dims apart whose second stride does not continue: 0 marks the reduced ones.
  Shape marks(shape.size());
  int64_t running = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    marks[d] = reduced[d] ? 0 : running;
    running *= reduced[d] ? 1 : shape[d];
  }
  const std::array<Shape, 2> strides = {row_major_strides(shape), marks};
  const BroadcastLoops loops = merge_loops(shape, strides);
  ReductionWalk walk{};
  walk.outputs = walk.count = 1;
  for (size_t d = 0; d < static_cast<size_t>(loops.ndim); ++d) {
    if (loops.strides[1][d] == 0) {
      walk.reduced_dims[walk.num_reduced] = loops.dims[d];
      walk.reduced_strides[walk.num_reduced++] = loops.strides[0][d];
      walk.count *= loops.dims[d];
    } else {
      walk.kept_dims[walk.num_kept] = loops.dims[d];
      walk.kept_strides[walk.num_kept++] = loops.strides[0][d];
      walk.outputs *= loops.dims[d];
    }
  }
  return walk;
}

}  // namespace trainrt
