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

// How many rows the table has that integer input `input` looks up (through casts and the like): the
// range of valid values. 0 when it looks up nothing.
int64_t num_indices_of(const Graph& graph, ValueId input);

}  // namespace trainrt
