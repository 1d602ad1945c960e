// The tables that Resize's CUDA kernels read, and how they divide their workspace.
#pragma once

#include <cstring>
#include <vector>

#include "ops/resize.h"

namespace trainrt {

// Where the taps of one axis lie in the blob of tables, and what the map does.
struct ResizeStep {
  int axis = 0;
  int64_t in = 1, out = 1, taps = 1;
  int64_t weights = 0, index = 0, constant = -1;  // byte offsets; -1: no extrapolation
};

struct ResizeTables {
  std::vector<ResizeStep> steps;  // in the order in which they run
  std::vector<std::byte> blob;    // weights and constants in float64, indices in int32
};

inline ResizeTables resize_tables(const ResizeProblem& p, const Attributes& attributes) {
  ResizeTables tables;
  const auto append = [&tables](const void* data, size_t bytes) {
    const size_t at = tables.blob.size();
    tables.blob.resize(at + (bytes + 63) / 64 * 64);
    std::memcpy(tables.blob.data() + at, data, bytes);
    return static_cast<int64_t>(at);
  };
  std::vector<AxisMap> maps = resize_maps(attributes, p.in, p.out);
  if (p.transposed) {
    std::reverse(maps.begin(), maps.end());
  }
  for (const AxisMap& map : maps) {
    const std::vector<int32_t> index(map.index.begin(), map.index.end());
    ResizeStep step{map.axis, map.in, map.out, map.taps, 0, 0, -1};
    step.weights = append(map.weight.data(), map.weight.size() * sizeof(double));
    step.index = append(index.data(), index.size() * sizeof(int32_t));
    if (!map.constant.empty() && !p.transposed) {
      step.constant = append(map.constant.data(), map.constant.size() * sizeof(double));
    }
    tables.steps.push_back(step);
  }
  return tables;
}

// Bytes of one of the two intermediate tensors, in the type of computation.
inline int64_t resize_buffer_bytes(const ResizeProblem& p, DType dtype) {
  int64_t elements = 1;
  for (size_t d = 0; d < p.in.size(); ++d) {
    elements *= std::max(p.in[d], p.out[d]);
  }
  return (elements * (dtype == DType::kFloat64 ? 8 : 4) + 63) / 64 * 64;
}

}  // namespace trainrt
