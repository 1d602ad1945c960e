// Which data feeds which input, and what the loss reads: --data, --input and --labels against the
// model's inputs.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "graph/training_graph.h"
#include "runtime/data_loader.h"
#include "runtime/dataset.h"
#include "runtime/options.h"

namespace trainrt {

struct DataChoice {
  std::shared_ptr<const Dataset> dataset;
  std::optional<int> label_array;
  LossSpec loss;  // resolved
};

// Opens the data and resolves the loss. `forward` is bound to any number of samples > 0; `evaluate`
// chooses the test files of an IDX folder; `array_axes`: the batch axis of data arrays.
DataChoice choose_data(const Options& options,
                       const Graph& forward,
                       bool evaluate,
                       const std::map<std::string, int>& array_axes);

// An array for every input that the runtime does not feed itself. Throws kInvalidArgument with the
// inputs and arrays that are left.
std::vector<InputBinding> bind_inputs(const Options& options,
                                      const Graph& training,
                                      const DataChoice& choice);

// Fills in the range of classes and indices. `forward` as for choose_data.
void find_ranges(const Graph& forward,
                 const DataChoice& choice,
                 std::vector<InputBinding>& bindings);

}  // namespace trainrt
