// Small models in ONNX's text syntax, for the tests of the importer.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "graph/evaluator.h"
#include "graph/onnx_import.h"

namespace trainrt::testing {

inline OnnxModel model_of(const std::string& signature,
                          const std::string& initializers,
                          const std::string& body,
                          int opset = 17) {
  return OnnxModel::parse_text(
      "<ir_version: 8, opset_import: [\"\" : " + std::to_string(opset) + "]>\ng " + signature +
      "\n" + (initializers.empty() ? "" : "<" + initializers + ">") + "\n{\n" + body + "\n}\n");
}

inline BindOptions at_batch(int64_t batch) {
  BindOptions options;
  options.batch = batch;
  options.fuse = false;
  return options;
}

// What `function` throws; a failure when it throws nothing or another code.
template <typename Function>
std::string error_of(ErrorCode code, Function&& function) {
  try {
    function();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

inline std::vector<std::string> op_types(const Graph& graph) {
  std::vector<std::string> types;
  for (const Node& node : graph.nodes()) {
    types.push_back(node.op_type);
  }
  return types;
}

inline std::vector<std::string> names_of_kind(const Graph& graph, ValueKind kind) {
  std::vector<std::string> names;
  for (const ValueId id : graph.values_of_kind(kind)) {
    names.push_back(graph.value(id).name);
  }
  return names;
}

inline Shape output_shape(const Graph& graph, size_t i = 0) {
  return graph.value(graph.outputs().at(i)).type.shape;
}

inline std::map<std::string, std::string> roles(const OnnxModel& model,
                                                const BindOptions& options = at_batch(1)) {
  std::map<std::string, std::string> result;
  for (const TensorReport& report : model.tensors(options)) {
    result[report.name] = report.role;
  }
  return result;
}

}  // namespace trainrt::testing
