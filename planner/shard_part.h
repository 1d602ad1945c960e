// How much of a tensor a rank holds when it is cut into parts that may differ.
#pragma once

#include <cstdint>

#include "parallel/mesh_axis.h"
#include "parallel/plan.h"

namespace trainrt {

// What stands for a cut of `size` units: equal parts are the same whatever the units are called.
inline int64_t cut_units(int64_t size, int degree) {
  return size % degree == 0 ? degree : size;
}

// Units that a split tensor is dealt out in: its elements, where the placement does not say.
inline int64_t num_units(const Shape& shape, const Placement& placement) {
  return placement.units > 0 ? placement.units : shape.at(static_cast<size_t>(placement.dim));
}

// Bytes of `whole` on the rank that holds the most: the first.
inline double largest_part(double whole,
                           const Shape& shape,
                           const Placement& placement,
                           int degree) {
  if (placement.kind != Placement::Kind::kShard) {
    return whole;
  }
  const int64_t units = num_units(shape, placement);
  return whole * static_cast<double>(shard_range(units, degree, 0).size) /
         static_cast<double>(units);
}

}  // namespace trainrt
