// The files beside a model that hold its weights. They need not be there: a model may be written
// without its weights, to be planned and inspected only.
#pragma once

#include <string>
#include <vector>

#include "graph/onnx_import.h"

namespace trainrt {

struct WeightFile {
  std::string name;                  // relative to the model's folder
  std::string path;                  // folder included
  std::vector<std::string> tensors;  // initializers that lie in it
  bool exists = false;
};

// Files that initializers name. Opens none. Throws kInvalidModel for a location that leads out of
// the model's folder.
std::vector<WeightFile> weight_files(const OnnxModel& model);

}  // namespace trainrt
