// Weights that an exporter merged because they were equal are trained apart, and those that the
// module shares as one.
#include "graph/onnx_merged_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <onnx/defs/parser.h>

#include "tests/graph/onnx_models.h"

namespace trainrt {
namespace {

using testing::at_batch;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::names_of_kind;

const char* const kSignature = "(float[N, 2] x) => (float[N, 2] y)";

OnnxModel model_of(const std::string& signature,
                   const std::string& initializers,
                   const std::string& body,
                   const std::string& producer = "pytorch") {
  return OnnxModel::parse_text("<ir_version: 8, opset_import: [\"\" : 17], producer_name: \"" +
                               producer + "\">\ng " + signature + "\n<" + initializers + ">\n{\n" +
                               body + "\n}\n");
}

std::vector<std::string> parameters(const OnnxModel& model) {
  return names_of_kind(model.bind(at_batch(1)), ValueKind::kParameter);
}

TEST(OnnxMergedWeightsTest, AnIdentityNamedLikeAWeightWasOne) {
  // Fresh norms, and the trained weights of cloned layers.
  for (const std::string values : {"{1, 1}", "{0.3, 0.7}"}) {
    const OnnxModel model =
        model_of(kSignature, "float[2] \"layers.0.norm.weight\" = " + values, R"(
      "layers.1.norm.weight" = Identity("layers.0.norm.weight")
      h = Mul(x, "layers.0.norm.weight")
      y = Mul(h, "layers.1.norm.weight"))");
    EXPECT_THAT(parameters(model), ElementsAre("layers.0.norm.weight", "layers.1.norm.weight"));
    EXPECT_THAT(model.tensors(at_batch(1))[1].why, HasSubstr("merged by the exporter"));
    const Graph graph = model.bind(at_batch(1));
    EXPECT_EQ(initial_value(graph.value(*graph.find_value("layers.0.norm.weight"))).to_double(),
              initial_value(graph.value(*graph.find_value("layers.1.norm.weight"))).to_double());
  }
}

TEST(OnnxMergedWeightsTest, InOtherToolsFilesAnIdentityIsATie) {
  for (const std::string producer : {"", "another"}) {
    const OnnxModel model = model_of(kSignature,
                                     "float[2, 2] \"a.weight\" = {1, 2, 3, 4}",
                                     R"(
      "b.weight" = Identity("a.weight")
      h = MatMul(x, "a.weight")
      y = MatMul(h, "b.weight"))",
                                     producer);
    EXPECT_THAT(parameters(model), ElementsAre("a.weight"));
  }
}

TEST(OnnxMergedWeightsTest, AMadeUpNameOfAnIdentityIsNoWeightOfItsOwn) {
  const OnnxModel model = model_of(kSignature, "float[2] bias = {0, 0}", R"(
    onnx_Add_12 = Identity(bias)
    h = Add(x, bias)
    y = Add(h, onnx_Add_12))");
  EXPECT_THAT(parameters(model), ElementsAre("bias"));
}

TEST(OnnxMergedWeightsTest, OfFoldedWeightsTheModulesThatReadThemDecide) {
  // lin is called twice, then its clones layers.0, twice, and layers.1.
  const OnnxModel model = model_of(kSignature, "float[2, 2] \"onnx::MatMul_1\" = {1, 2, 3, 4}", R"(
    "onnx::MatMul_5" = Identity("onnx::MatMul_1")
    "onnx::MatMul_4" = Identity("onnx::MatMul_1")
    "onnx::MatMul_3" = Identity("onnx::MatMul_1")
    "onnx::MatMul_2" = Identity("onnx::MatMul_1")
    ["/lin/MatMul"] a = MatMul(x, "onnx::MatMul_1")
    ["/lin_1/MatMul"] b = MatMul(a, "onnx::MatMul_2")
    ["/layers.0/MatMul"] c = MatMul(b, "onnx::MatMul_3")
    ["/layers.0_1/MatMul"] d = MatMul(c, "onnx::MatMul_4")
    ["/layers.1/MatMul"] y = MatMul(d, "onnx::MatMul_5"))");
  const Graph graph = model.bind(at_batch(1));
  std::vector<std::string> read;
  for (const Node& node : graph.nodes()) {
    read.push_back(graph.value(node.inputs[1]).name);
  }
  EXPECT_EQ(parameters(model).size(), 3u);
  EXPECT_EQ(read[0], read[1]);
  EXPECT_NE(read[1], read[2]);
  EXPECT_EQ(read[2], read[3]);
  EXPECT_NE(read[3], read[4]);
  EXPECT_NE(read[0], read[4]);
}

TEST(OnnxMergedWeightsTest, WhatCannotBeToldIsTrainedAsOneAndSaid) {
  const char* const body = R"(
    "onnx::MatMul_2" = Identity("onnx::MatMul_1")
    [first] a = MatMul(x, "onnx::MatMul_1")
    [second] y = MatMul(a, "onnx::MatMul_2"))";
  ::testing::internal::CaptureStderr();
  const OnnxModel model =
      model_of(kSignature, "float[2, 2] \"onnx::MatMul_1\" = {1, 2, 3, 4}", body);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("'first'"));
  EXPECT_EQ(parameters(model).size(), 1u);
  EXPECT_EQ(parameters(model_of(kSignature, "float[2, 2] \"onnx::MatMul_1\" = {0, 0, 0, 0}", body))
                .size(),
            2u);
}

// A graph as torch.export's exporter leaves it: `operations` are the arguments of the operation
// behind each node, `listed` the module's parameters.
onnx::GraphProto captured(const std::string& initializers,
                          const std::string& body,
                          const std::vector<std::string>& operations,
                          const std::vector<std::string>& listed) {
  onnx::ModelProto model;
  const std::string text =
      "<ir_version: 10, opset_import: [\"\" : 20]>\ng (float[N, 2] x) => "
      "(float[N, 2] y)\n<" +
      initializers + ">\n{" + body + "}";
  EXPECT_TRUE(onnx::OnnxParser::Parse(model, text.c_str()).IsOK()) << text;
  onnx::GraphProto& graph = *model.mutable_graph();
  std::string signature = "\n# inputs\n";
  for (const std::string& name : listed) {
    std::string input = "p_" + name;
    std::replace(input.begin(), input.end(), '.', '_');
    signature += input + ": PARAMETER target='" + name + "'\n";
  }
  onnx::StringStringEntryProto* entry = graph.add_metadata_props();
  entry->set_key("pkg.torch.export.ExportedProgram.graph_signature");
  entry->set_value(signature + "x: USER_INPUT\n\n# outputs\nmul: USER_OUTPUT\n");
  for (int i = 0; i < graph.node_size(); ++i) {
    entry = graph.mutable_node(i)->add_metadata_props();
    entry->set_key("pkg.torch.onnx.fx_node");
    entry->set_value("%op : [num_users=1] = call_function[target=torch.ops.aten.op](args = (" +
                     operations[static_cast<size_t>(i)] + "), kwargs = {})");
  }
  return graph;
}

std::vector<std::string> inputs_of(const onnx::GraphProto& graph, int node) {
  return {graph.node(node).input().begin(), graph.node(node).input().end()};
}

TEST(OnnxMergedWeightsTest, TheProgramsArgumentsTellWhatANodeReads) {
  // Two norms and, tied by the module itself, the first once more.
  onnx::GraphProto graph = captured("float[2] \"a.weight\" = {1, 1}, float[2] \"a.bias\" = {0, 0}",
                                    R"(
    h = LayerNormalization(x, "a.weight", "a.bias")
    g = LayerNormalization(h, "a.weight", "a.bias")
    y = LayerNormalization(g, "a.weight", "a.bias"))",
                                    {"%x, [2], %p_a_weight, %p_a_bias",
                                     "%layer_norm, [2], %p_b_weight, %p_b_bias",
                                     "%layer_norm_1, [2], %p_a_weight, %p_a_bias"},
                                    {"a.weight", "a.bias", "b.weight", "b.bias"});
  const auto notes = split_merged_weights(graph, WeightFiles(), true);
  EXPECT_EQ(notes.size(), 2u);
  EXPECT_THAT(notes.at("b.weight"), HasSubstr("copy of 'a.weight'"));
  EXPECT_THAT(inputs_of(graph, 0), ElementsAre("x", "a.weight", "a.bias"));
  EXPECT_THAT(inputs_of(graph, 1), ElementsAre("h", "b.weight", "b.bias"));
  EXPECT_THAT(inputs_of(graph, 2), ElementsAre("g", "a.weight", "a.bias"));
  ASSERT_EQ(graph.initializer_size(), 4);
}

TEST(OnnxMergedWeightsTest, AWeightFoldedBeforeTheMergeIsSplitByItsOrigin) {
  onnx::GraphProto graph =
      captured("float[2, 2] val_0 = {1, 2, 3, 4}, float[2] \"a.bias\" = {0, 1}",
               R"(
    m = MatMul(x, val_0)
    h = Add(m, "a.bias")
    n = MatMul(h, val_0)
    y = Add(n, "a.bias"))",
               {"%x, %p_a_weight, %p_a_bias",
                "%x, %p_a_weight, %p_a_bias",
                "%linear, %p_b_weight, %p_b_bias",
                "%linear, %p_b_weight, %p_b_bias"},
               {"a.weight", "a.bias", "b.weight", "b.bias"});
  onnx::ValueInfoProto* info = graph.add_value_info();
  info->set_name("val_0");
  onnx::StringStringEntryProto* entry = info->add_metadata_props();
  entry->set_key("pkg.onnxscript.optimizer.folded_from");
  entry->set_value("['a.weight']");
  split_merged_weights(graph, WeightFiles(), true);
  EXPECT_THAT(inputs_of(graph, 2), ElementsAre("h", "b.weight"));
  EXPECT_THAT(inputs_of(graph, 3), ElementsAre("n", "b.bias"));
}

TEST(OnnxMergedWeightsTest, AnOperationThatNamesNoParameterSaysNothing) {
  onnx::GraphProto graph = captured("float[2] \"a.scale\" = {1, 1}",
                                    "h = Mul(x, \"a.scale\")\ny = Mul(h, \"a.scale\")",
                                    {"%x, %alias", "%mul, %alias"},
                                    {"a.scale", "b.scale"});
  EXPECT_THAT(split_merged_weights(graph, WeightFiles(), true), IsEmpty());
}

// The head of a language model: the embedding transposed, which the exporter has folded.
TEST(OnnxMergedWeightsTest, AFoldedTransposeOfAWeightInTheFileIsTiedAgain) {
  const auto graph_with = [](const std::string& head) {
    onnx::GraphProto graph =
        captured("float[2, 2] \"wte.weight\" = {1, 2, 3, 4}, float[2, 2] val_7 = " + head,
                 R"(
    h = MatMul(x, "wte.weight")
    y = MatMul(h, val_7))",
                 {"%x, %p_wte_weight", "%h, %p_wte_weight"},
                 {"wte.weight"});
    onnx::ValueInfoProto& info = *graph.add_value_info();
    info.set_name("val_7");
    onnx::StringStringEntryProto& entry = *info.add_metadata_props();
    entry.set_key("pkg.onnxscript.optimizer.folded_from");
    entry.set_value("['wte.weight']");
    return graph;
  };
  onnx::GraphProto tied = graph_with("{1, 3, 2, 4}");
  split_merged_weights(tied, WeightFiles(), true);
  ASSERT_EQ(tied.node_size(), 3);
  EXPECT_EQ(tied.node(0).op_type(), "Transpose");
  EXPECT_THAT(inputs_of(tied, 0), ElementsAre("wte.weight"));
  EXPECT_THAT(inputs_of(tied, 2), ElementsAre("h", "val_7"));
  EXPECT_EQ(tied.initializer_size(), 1);
  onnx::GraphProto changed = graph_with("{1, 3, 2, 5}");  // by whoever came after the exporter
  split_merged_weights(changed, WeightFiles(), true);
  EXPECT_EQ(changed.node_size(), 2);
  EXPECT_EQ(changed.initializer_size(), 2);
}

}  // namespace
}  // namespace trainrt
