// Made-up samples that a model can learn: inputs depend on the labels (or the targets on the
// inputs) by a fixed rule, and everything is a pure function of (seed, sample number).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "runtime/dataset.h"

namespace trainrt {

struct SyntheticInput {
  std::string name;
  DType dtype = DType::kFloat32;
  Shape sample_shape;
  int64_t num_indices = 0;  // integers are drawn from [0, num_indices); 0: all ones (masks)
};

struct SyntheticLabels {
  Shape sample_shape;
  int64_t num_classes = 0;  // 0: float targets
};

// Array names are the inputs' names and "labels".
std::unique_ptr<Dataset> make_synthetic_dataset(uint64_t seed,
                                                std::vector<SyntheticInput> inputs,
                                                std::optional<SyntheticLabels> labels);

// The sizes of the axes that integer input `input` picks places of (through casts and the like), by
// Gather, Scatter and their kin; 0 when it picks none. Indices below the smallest fit everywhere;
// one beyond the largest fits nowhere it is read: tuples (GatherND) have several axes.
struct IndexSizes {
  int64_t smallest = 0;
  int64_t largest = 0;
};
IndexSizes index_sizes_of(const Graph& graph, ValueId input);

}  // namespace trainrt
