// Symbolic dims that are neither a batch nor given by --bind: their sizes come from the data.
#pragma once

#include <map>
#include <string>

#include "graph/onnx_import.h"

namespace trainrt {

// What the data hold for one input.
struct SampleShape {
  Shape shape;         // of one sample, without the batch axis
  std::string source;  // the array, for messages
};

// Sizes by symbol, where the data have as many dims as the input. Throws kInvalidArgument when two
// places disagree.
std::map<std::string, int64_t> dims_of_samples(const OnnxModel& model,
                                               const BindOptions& options,
                                               const std::map<std::string, SampleShape>& inputs);

// A size for each such dim at which the model can be imported, to describe it without data; empty
// when there is no such dim, or no size does.
std::map<std::string, int64_t> dims_to_describe(const OnnxModel& model, const BindOptions& options);

}  // namespace trainrt
