#include "graph/onnx_weight_files.h"

#include <filesystem>
#include <map>

#include "graph/onnx_external_data.h"
#include "graph/onnx_model.h"
#include "graph/onnx_tensor.h"

namespace trainrt {

std::vector<WeightFile> weight_files(const OnnxModel& model) {
  std::map<std::string, std::vector<std::string>> tensors;  // by file
  for (const onnx::TensorProto& tensor : model.impl().graph().initializer()) {
    if (has_external_data(tensor)) {
      tensors[external_location(tensor).file].push_back(tensor.name());
    }
  }
  std::vector<WeightFile> files;
  for (auto& [name, held] : tensors) {
    const std::filesystem::path path = std::filesystem::path(model.impl().files.folder) / name;
    std::error_code error;
    const bool exists = std::filesystem::exists(path, error);
    files.push_back({name, path.string(), std::move(held), exists});
  }
  return files;
}

}  // namespace trainrt
