// A model may be written without its weights, to be planned and inspected only.
#pragma once

#include <string>
#include <vector>

#include "graph/onnx_import.h"

namespace trainrt {

struct MissingWeights {
  std::string file;                  // relative to the model's folder
  std::vector<std::string> tensors;  // that are to lie in it
};

// Files that initializers name and that do not exist. Opens none. Throws kInvalidModel for a
// location that leads out of the model's folder.
std::vector<MissingWeights> missing_weights(const OnnxModel& model);

}  // namespace trainrt
