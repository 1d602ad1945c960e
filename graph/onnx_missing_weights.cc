#include "graph/onnx_missing_weights.h"

#include <filesystem>
#include <map>

#include "graph/onnx_external_data.h"
#include "graph/onnx_model.h"
#include "graph/onnx_tensor.h"

namespace trainrt {

std::vector<MissingWeights> missing_weights(const OnnxModel& model) {
  std::map<std::string, std::vector<std::string>> tensors;  // by file
  for (const onnx::TensorProto& tensor : model.impl().graph().initializer()) {
    if (has_external_data(tensor)) {
      tensors[external_location(tensor).file].push_back(tensor.name());
    }
  }
  std::vector<MissingWeights> missing;
  for (const auto& [file, names] : tensors) {
    std::error_code error;
    if (!std::filesystem::exists(std::filesystem::path(model.impl().files.folder) / file, error)) {
      missing.push_back({file, names});
    }
  }
  return missing;
}

}  // namespace trainrt
