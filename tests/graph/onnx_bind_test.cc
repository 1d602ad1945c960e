// From a loaded model to a Graph at concrete sizes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "graph/evaluator.h"
#include "graph/onnx_import.h"
#include "graph/printer.h"

namespace trainrt {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

OnnxModel model_of(const std::string& signature,
                   const std::string& initializers,
                   const std::string& body) {
  return OnnxModel::parse_text("<ir_version: 8, opset_import: [\"\" : 17]>\ng " + signature +
                               "\n<" + initializers + ">\n{\n" + body + "\n}\n");
}

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

std::vector<std::string> op_types(const Graph& graph) {
  std::vector<std::string> types;
  for (const Node& node : graph.nodes()) {
    types.push_back(node.op_type);
  }
  return types;
}

std::vector<std::string> names_of_kind(const Graph& graph, ValueKind kind) {
  std::vector<std::string> names;
  for (const ValueId id : graph.values_of_kind(kind)) {
    names.push_back(graph.value(id).name);
  }
  return names;
}

TEST(OnnxBindTest, ASmallModelComputesWhatItSays) {
  const OnnxModel model = model_of("(float[batch, 4] x) => (float[batch, 4] y)",
                                   "float[4] scale = {1, 2, 3, 4}, float[4] shift = {0, 1, 0, -9}",
                                   "[a] h = Mul(x, scale)\n[b] s = Add(h, shift)\n[c] y = Relu(s)");
  BindOptions options;
  options.batch = 2;
  const Graph graph = model.bind(options);
  EXPECT_THAT(op_types(graph), ElementsAre("Mul", "Add", "Relu"));
  EXPECT_THAT(names_of_kind(graph, ValueKind::kParameter), ElementsAre("scale", "shift"));
  ASSERT_EQ(graph.outputs().size(), 1u);
  const Value& y = graph.value(graph.outputs()[0]);
  EXPECT_EQ(y.name, "y");
  EXPECT_EQ(y.type.shape, (Shape{2, 4}));
  EXPECT_EQ(graph.value(*graph.find_value("x")).batch_axis, 0);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(graph.node(i).source_index, i);
    EXPECT_EQ(graph.node(i).name, std::string(1, static_cast<char>('a' + i)));
  }
  const Tensor x = Tensor::from<float>({1, 1, 1, 1, 2, 2, 2, 2}, {2, 4});
  const Tensor result = evaluate(graph, {{"x", x}}, graph.outputs())[0];
  EXPECT_THAT(result.to_double(), ElementsAre(1, 3, 3, 0, 2, 5, 6, 0));
}

TEST(OnnxBindTest, UnboundDimsAreAllNamedAtOnce) {
  const OnnxModel model = model_of("(float[batch, seq, hidden] x) => (float[batch, seq, hidden] y)",
                                   "float[1] w = {2}",
                                   "y = Mul(x, w)");
  EXPECT_THAT(model.symbols(), ElementsAre("batch", "seq", "hidden"));
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { model.bind({}); }),
              AllOf(HasSubstr("'seq'"), HasSubstr("'hidden'"), HasSubstr("--bind")));
  BindOptions options;
  options.batch = 3;
  options.dims = {{"seq", 5}, {"hidden", 7}};
  const Graph graph = model.bind(options);
  EXPECT_EQ(graph.value(graph.outputs()[0]).type.shape, (Shape{3, 5, 7}));
  options.dims["sek"] = 1;
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { model.bind(options); }),
              HasSubstr("did you mean 'seq'"));
}

TEST(OnnxBindTest, UnsupportedOperatorsAreReportedTogetherWithTheirNodes) {
  const OnnxModel model =
      OnnxModel::parse_text(R"(<ir_version: 8, opset_import: ["" : 17, "my.domain" : 3]>
g (float[N, 4] x) => (float[N, 4] y) {
  [one] a = my.domain.Frobnicate(x)
  [two] b = Relu(a)
  [three] c = NoSuchOperator(b)
  [four] y = my.domain.Frobnicate(c)
})");
  const std::string message = error_of(ErrorCode::kUnsupported, [&] { model.bind({}); });
  EXPECT_THAT(message,
              AllOf(HasSubstr("my.domain.Frobnicate (opset 3), 2 nodes: 'one', 'four'"),
                    HasSubstr("NoSuchOperator (opset 17), 1 node: 'three'")));
  EXPECT_EQ(model.unsupported({}).size(), 2u);
}

TEST(OnnxBindTest, WhatNoOutputNeedsIsReportedUnused) {
  const OnnxModel model = model_of("(float[N, 4] x) => (float[N, 4] y)",
                                   "float[4] w = {1, 2, 3, 4}, float[3] lost = {1, 2, 3}",
                                   "y = Relu(x)\nz = Mul(x, w)");
  std::map<std::string, std::string> roles;
  for (const TensorReport& tensor : model.tensors({})) {
    roles[tensor.name] = tensor.role;
  }
  EXPECT_EQ(roles["w"], "unused");
  EXPECT_EQ(roles["lost"], "unused");
  EXPECT_TRUE(names_of_kind(model.bind({}), ValueKind::kParameter).empty());
}

}  // namespace
}  // namespace trainrt
