// Which data feeds which input, and what the loss reads: --data, --input and --labels against the
// model's inputs.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "graph/onnx_symbols.h"
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

// The data that can be opened before the model has sizes, an npz file or an IDX folder; nothing for
// text, which is cut by the model's length, and synthetic data. `evaluate` chooses the test files
// of an IDX folder; `array_axes`: the batch axis of data arrays; `inputs`: see open_npz().
std::shared_ptr<const Dataset> open_arrays(const Options& options,
                                           const OnnxModel& model,
                                           bool evaluate,
                                           const std::map<std::string, int>& array_axes,
                                           const std::map<std::string, InputLayout>& inputs);

// Opens the data, unless they are open, and resolves the loss. `forward` is bound to any number of
// samples > 0; `alphabet`: the model's (TextAlphabet), empty when it has none; `at_batch`: see
// resolve_loss().
DataChoice choose_data(const Options& options,
                       const Graph& forward,
                       std::shared_ptr<const Dataset> arrays,
                       const std::string& alphabet,
                       const GraphAtBatch& at_batch);

// What the arrays hold for each input, as far as it is sure before the model has sizes: arrays
// named by --input or like the input, or the only one left for the only input left.
std::map<std::string, SampleShape> samples_of_inputs(const OnnxModel& model,
                                                     const Options& options,
                                                     const Dataset& arrays);

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
