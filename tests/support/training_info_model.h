// Models that bring their own training step, from ONNX's text syntax, which has none.
#pragma once

#include <gtest/gtest.h>
#include <onnx/defs/parser.h>
#include <onnx/onnx_pb.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "graph/onnx_import.h"
#include "graph/training_graph.h"

namespace trainrt::testing {

// GraphProto from text, through a model around it.
inline onnx::GraphProto graph_from_text(const std::string& text) {
  onnx::ModelProto model;
  const std::string whole =
      "<ir_version: 8, opset_import: [\"\" : 17, \"ai.onnx.preview.training\" : 1]>\n" + text;
  const auto status = onnx::OnnxParser::Parse(model, whole.c_str());
  EXPECT_TRUE(status.IsOK()) << status.ErrorMessage();
  return model.graph();
}

struct Bindings {
  std::vector<std::pair<std::string, std::string>> update;
  std::vector<std::pair<std::string, std::string>> initialization;
};

inline OnnxModel with_training_info(const char* forward,
                                    const std::string& algorithm,
                                    const Bindings& bindings,
                                    const std::string& initialization = "") {
  onnx::ModelProto model;
  const auto status = onnx::OnnxParser::Parse(model, forward);
  EXPECT_TRUE(status.IsOK()) << status.ErrorMessage();
  onnx::TrainingInfoProto* info = model.add_training_info();
  *info->mutable_algorithm() = graph_from_text(algorithm);
  for (const auto& [key, value] : bindings.update) {
    onnx::StringStringEntryProto* entry = info->add_update_binding();
    entry->set_key(key);
    entry->set_value(value);
  }
  if (!initialization.empty()) {
    *info->mutable_initialization() = graph_from_text(initialization);
    for (const auto& [key, value] : bindings.initialization) {
      onnx::StringStringEntryProto* entry = info->add_initialization_binding();
      entry->set_key(key);
      entry->set_value(value);
    }
  }
  // Each test is a process, and several run at once.
  const std::string path = concat(::testing::TempDir(), "training_info_", ::getpid(), ".onnx");
  std::ofstream(path, std::ios::binary) << model.SerializeAsString();
  OnnxModel loaded = OnnxModel::load(path);
  std::filesystem::remove(path);
  return loaded;
}

inline TrainingGraph training_info_graph(const OnnxModel& model,
                                         const BindOptions& options,
                                         bool accumulate) {
  return build_from_training_info(
      model, options, accumulate, loss_of_training_info(model, options).sums_samples);
}

}  // namespace trainrt::testing
