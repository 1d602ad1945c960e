// The tables that Resize's CUDA kernels read, and how they divide their workspace.
#pragma once

#include <cstring>
#include <utility>
#include <vector>

#include "ops/resize.h"

namespace trainrt {

// The matrix of one axis, by rows of what is written: of the forward operator's outputs, or, where
// it is transposed, of its inputs, each with the outputs that have it as a tap. Element i is
// sum over t in [starts[i], starts[i + 1]) of weights[t] x[index[t]], plus constant[i].
struct ResizeStep {
  int axis = 0;
  int64_t from = 1, to = 1;                                   // the axis before and after
  int64_t starts = 0, index = 0, weights = 0, constant = -1;  // byte offsets; -1: none
};

struct ResizeTables {
  std::vector<ResizeStep> steps;  // in the order in which they run
  std::vector<std::byte> blob;    // weights and constants in float64, the rest in int32
};

inline ResizeTables resize_tables(const ResizeProblem& p, const Attributes& attributes) {
  ResizeTables tables;
  const auto append = [&tables](const auto& data) {
    const size_t at = tables.blob.size(), bytes = data.size() * sizeof(data[0]);
    tables.blob.resize(at + (bytes + 63) / 64 * 64);
    if (bytes > 0) {
      std::memcpy(tables.blob.data() + at, data.data(), bytes);
    }
    return static_cast<int64_t>(at);
  };
  std::vector<AxisMap> maps = resize_maps(attributes, p.in, p.out);
  if (p.transposed) {
    std::reverse(maps.begin(), maps.end());
  }
  for (const AxisMap& map : maps) {
    const int64_t to = p.transposed ? map.in : map.out;
    std::vector<std::vector<std::pair<int32_t, double>>> rows(static_cast<size_t>(to));
    for (size_t t = 0; t < map.index.size(); ++t) {
      const int64_t output = static_cast<int64_t>(t) / map.taps, input = map.index[t];
      if (map.weight[t] != 0) {
        rows[static_cast<size_t>(p.transposed ? input : output)].emplace_back(
            static_cast<int32_t>(p.transposed ? output : input), map.weight[t]);
      }
    }
    std::vector<int32_t> starts = {0}, index;
    std::vector<double> weights;
    for (const auto& row : rows) {
      for (const auto& [from, weight] : row) {
        index.push_back(from);
        weights.push_back(weight);
      }
      starts.push_back(static_cast<int32_t>(index.size()));
    }
    ResizeStep step{map.axis, p.transposed ? map.out : map.in, to};
    step.starts = append(starts);
    step.index = append(index);
    step.weights = append(weights);
    if (!map.constant.empty() && !p.transposed) {
      step.constant = append(map.constant);
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
