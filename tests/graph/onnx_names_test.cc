// Names that a tensor may not have, and names that nodes do not keep.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "graph/onnx_model.h"
#include "tests/graph/onnx_models.h"

namespace trainrt {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::model_of;

onnx::ModelProto proto_of(const OnnxModel& model) {
  return *model.impl().proto;
}

OnnxModel load(const onnx::ModelProto& proto) {
  const std::filesystem::path path = std::filesystem::temp_directory_path() /
                                     ("onnx_names_" + std::to_string(::getpid()) + ".onnx");
  std::ofstream(path, std::ios::binary) << proto.SerializeAsString();
  OnnxModel model = OnnxModel::load(path.string());
  std::filesystem::remove(path);
  return model;
}

// y = -(x * w), with the tensor `from` renamed.
onnx::ModelProto renamed(const std::string& from, const std::string& to) {
  onnx::ModelProto proto = proto_of(
      model_of("(float[2] x) => (float[2] y)", "float[2] w = {1, 2}", "h = Mul(x, w)\ny = Neg(h)"));
  onnx::GraphProto& graph = *proto.mutable_graph();
  const auto rename = [&](std::string* name) {
    if (*name == from) {
      *name = to;
    }
  };
  rename(graph.mutable_input(0)->mutable_name());
  rename(graph.mutable_output(0)->mutable_name());
  rename(graph.mutable_initializer(0)->mutable_name());
  for (onnx::NodeProto& node : *graph.mutable_node()) {
    for (std::string& name : *node.mutable_input()) {
      rename(&name);
    }
    for (std::string& name : *node.mutable_output()) {
      rename(&name);
    }
  }
  return proto;
}

TEST(OnnxNamesTest, ReservedNamesOfTensorsAreRefused) {
  for (const char* role : {"x", "w", "h", "y"}) {
    for (const std::string name : {"trainrt.loss_sum", "trainrt.step", "__metadata__"}) {
      EXPECT_THAT(error_of(ErrorCode::kUnsupported, [&] { load(renamed(role, name)); }),
                  AllOf(HasSubstr("'" + name + "'"), HasSubstr("rename")));
    }
    load(renamed(role, "trainrt"));
  }
}

TEST(OnnxNamesTest, NodesOfOneNameDrawApart) {
  onnx::ModelProto proto =
      proto_of(model_of("(float[N, 4] x) => (float[N, 4] y)",
                        "float ratio = {0.5}, bool on = {1}",
                        "a = Dropout(x, ratio, on)\nb = Dropout(x, ratio, on)\n"
                        "c = Dropout(x, ratio, on)\nd = Sub(a, b)\n"
                        "y = Sub(d, c)"));
  const char* names[] = {"drop", "drop", "drop:b"};
  for (int i = 0; i < 3; ++i) {
    proto.mutable_graph()->mutable_node(i)->set_name(names[i]);
  }
  const Graph graph = load(proto).bind(testing::at_batch(2));
  std::set<std::string> found;
  std::set<int64_t> streams;
  for (const Node& node : graph.nodes()) {
    if (node.attributes.has("rng_stream")) {
      found.insert(node.name);
      streams.insert(node.attributes.get_int("rng_stream"));
    }
  }
  EXPECT_EQ(found, (std::set<std::string>{"drop", "drop:b", "drop:b:c"}));
  EXPECT_EQ(streams.size(), 3U);
}

}  // namespace
}  // namespace trainrt
