// The exporter's own list of parameters decides where it is there.
#include "graph/onnx_signature.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <onnx/defs/parser.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/graph/onnx_models.h"

namespace trainrt {
namespace {

using ::testing::HasSubstr;
using testing::roles;

using Roles = std::map<std::string, std::string>;

void annotate(google::protobuf::RepeatedPtrField<onnx::StringStringEntryProto>& entries,
              const std::string& key,
              const std::string& value) {
  onnx::StringStringEntryProto* entry = entries.Add();
  entry->set_key(key);
  entry->set_value(value);
}

// A file with the metadata of torch.export's exporter: the lines of its list, and by tensor the
// names it was folded from.
OnnxModel captured(const std::string& initializers,
                   const std::string& body,
                   const std::string& listed,
                   const std::map<std::string, std::string>& folded = {}) {
  onnx::ModelProto model;
  const std::string text =
      "<ir_version: 10, opset_import: [\"\" : 20]>\ng (float[N, 2] x) => (float[N, 2] y)\n<" +
      initializers + ">\n{" + body + "}";
  EXPECT_TRUE(onnx::OnnxParser::Parse(model, text.c_str()).IsOK()) << text;
  onnx::GraphProto& graph = *model.mutable_graph();
  if (!listed.empty()) {
    annotate(*graph.mutable_metadata_props(),
             "pkg.torch.export.ExportedProgram.graph_signature",
             "\n# inputs\n" + listed + "x: USER_INPUT\n\n# outputs\nmul: USER_OUTPUT\n");
  }
  for (const auto& [name, from] : folded) {
    onnx::ValueInfoProto* info = graph.add_value_info();
    info->set_name(name);
    annotate(*info->mutable_metadata_props(), "pkg.onnxscript.optimizer.folded_from", from);
  }
  const std::filesystem::path path =
      std::filesystem::path(::testing::TempDir()) /
      concat("signature_",
             ::testing::UnitTest::GetInstance()->current_test_info()->name(),
             "_",
             ::getpid());
  std::ofstream(path, std::ios::binary) << model.SerializeAsString();
  OnnxModel loaded = OnnxModel::load(path.string());
  std::filesystem::remove(path);
  return loaded;
}

// An embedding and a head that share a table, written as "head.weight"; and a bias that is lost.
TEST(OnnxSignatureTest, ATiedParameterIsHeldUnderItsOtherName) {
  onnx::GraphProto graph;
  annotate(*graph.mutable_metadata_props(),
           "pkg.torch.export.ExportedProgram.graph_signature",
           "p_wte_weight: PARAMETER target='m.wte.weight'\n"
           "p_head_weight: PARAMETER target='head.weight'\n"
           "p_head_bias: PARAMETER target='head.bias'\n");
  graph.add_initializer()->set_name("head.weight");
  const auto add_node = [&](const std::string& scopes, const std::string& arguments) {
    onnx::NodeProto* node = graph.add_node();
    annotate(*node->mutable_metadata_props(), "pkg.torch.onnx.name_scopes", scopes);
    annotate(
        *node->mutable_metadata_props(),
        "pkg.torch.onnx.fx_node",
        "%y : [num_users=1] = call_function[target=t](args = (" + arguments + "), kwargs = {})");
  };
  add_node("['', 'head', 'linear']", "%x, %p_head_weight, %p_head_bias");
  EXPECT_EQ(read_signature(graph).held, (std::set<std::string>{"head.weight"}));
  add_node("['', 'm', 'm.wte', 'embedding']", "%p_head_weight, %x");
  EXPECT_EQ(read_signature(graph).held, (std::set<std::string>{"head.weight", "m.wte.weight"}));
}

TEST(OnnxSignatureTest, WhatIsNotListedAsAParameterIsAConstant) {
  const OnnxModel model = captured(
      "float[2] \"fc.scale\" = {1, 2}, float \"fc.temperature\" = {2}, "
      "float[2] weights = {3, 4}, float scalar_tensor_default = {2}, "
      "float[2] sub = {2, 3}, float[2] inner = {1, 1}, float[2] inner_zero = {0, 0}",
      R"(
    a = Mul(x, "fc.scale")
    b = Mul(a, "fc.temperature")
    c = Mul(b, weights)
    d = Mul(c, scalar_tensor_default)
    e = Mul(d, sub)
    y = LayerNormalization(e, inner, inner_zero))",
      "p_fc_scale: PARAMETER target='fc.scale'\n"
      "p_fc_temperature: PARAMETER target='fc.temperature'\n"
      "b_weights: BUFFER target='weights' persistent=True\n",
      {{"sub", "['val_0', 'weights']"}});
  EXPECT_EQ(roles(model),
            (Roles{{"fc.scale", "parameter"},
                   {"fc.temperature", "parameter"},
                   {"weights", "constant"},
                   {"scalar_tensor_default", "constant"},
                   {"sub", "constant"},
                   {"inner", "constant"},
                   {"inner_zero", "constant"}}));
  for (const TensorReport& report : model.tensors(testing::at_batch(1))) {
    if (report.name == "weights") {
      EXPECT_THAT(report.why, HasSubstr("lists it as buffer"));
    } else if (report.name == "inner") {
      EXPECT_THAT(report.why, HasSubstr("not among the parameters that the exporter lists"));
    }
  }
}

TEST(OnnxSignatureTest, WhatWasFoldedFromAParameterIsOne) {
  const OnnxModel model =
      captured("float[2, 2] val_0 = {1, 2, 3, 4}, float[2] \"fc.weight_bias\" = {0, 0}",
               "a = MatMul(x, val_0)\ny = Add(a, \"fc.weight_bias\")",
               "p_fc_weight: PARAMETER target='fc.weight'\n",
               {{"val_0", "['fc.weight']"}});
  EXPECT_EQ(roles(model), (Roles{{"val_0", "parameter"}, {"fc.weight_bias", "parameter"}}));
}

// A penalty on the weights, as large as it was when the model was exported.
TEST(OnnxSignatureTest, ANumberFoldedFromParametersAndAddedIsConstant) {
  const OnnxModel model = captured("float[2, 2] \"fc.weight\" = {1, 2, 3, 4}, float mul = {3}",
                                   "a = MatMul(x, \"fc.weight\")\ny = Add(a, mul)",
                                   "p_fc_weight: PARAMETER target='fc.weight'\n",
                                   {{"mul", "['fc.weight']"}});
  EXPECT_EQ(roles(model), (Roles{{"fc.weight", "parameter"}, {"mul", "constant"}}));
}

TEST(OnnxSignatureTest, AListWhoseParametersWereFoldedAwaySaysNothingOfWeights) {
  const OnnxModel model = captured("float[2, 2] folded_w = {1, 2, 3, 4}, float half = {0.5}",
                                   "a = MatMul(x, folded_w)\ny = Mul(a, half)",
                                   "p_fc_weight: PARAMETER target='fc.weight'\n");
  EXPECT_EQ(roles(model), (Roles{{"folded_w", "parameter"}, {"half", "constant"}}));
}

TEST(OnnxSignatureTest, WithoutAListTheContentsDecide) {
  const OnnxModel model = captured("float[2] w = {1, 2}", "y = Mul(x, w)", "");
  EXPECT_EQ(roles(model), (Roles{{"w", "parameter"}}));
}

}  // namespace
}  // namespace trainrt
