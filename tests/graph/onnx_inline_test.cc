// Functions, function bodies of ONNX's operators, and branches become plain nodes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/graph/onnx_models.h"

namespace trainrt {
namespace {

using ::testing::AllOf;
using testing::at_batch;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::model_of;
using testing::names_of_kind;
using testing::op_types;

std::vector<double> result_of(const Graph& graph, const std::vector<float>& x) {
  const Tensor input = Tensor::from<float>(x, {1, static_cast<int64_t>(x.size())});
  return evaluate(graph, {{"x", input}}, graph.outputs())[0].to_double();
}

TEST(OnnxInlineTest, NestedFunctionsWithAttributesAreInlined) {
  const OnnxModel model = OnnxModel::parse_text(R"(
<ir_version: 8, opset_import: ["" : 17, "local" : 1]>
g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {2, 3}> {
  [first] h = local.scaled <factor = 10.0> (x, w)
  [second] y = local.scaled (h, w)
}
<opset_import: ["" : 17, "local" : 1], domain: "local">
scaled <factor: float = 0.5> (a, b) => (c) {
  t = local.times (a, b)
  f = Constant <value_float: float = @factor> ()
  c = Mul (t, f)
}
<opset_import: ["" : 17], domain: "local">
times (a, b) => (c) { c = Mul (a, b) }
)");
  const Graph graph = model.bind(at_batch(1));
  EXPECT_THAT(op_types(graph), ElementsAre("Mul", "Mul", "Mul", "Mul"));
  EXPECT_THAT(result_of(graph, {1, 1}), ElementsAre(20, 45));
  EXPECT_THAT(names_of_kind(graph, ValueKind::kParameter), ElementsAre("w"));
  EXPECT_EQ(graph.node(0).name, "first/times:t/Mul:c");
  EXPECT_TRUE(graph.find_value("h").has_value()) << "a call's outputs keep their names";
  // Every node of a function has a position of its own: a plan may cut between them.
  EXPECT_LT(graph.node(0).source_index, graph.node(1).source_index);
  EXPECT_LT(graph.node(1).source_index, graph.node(2).source_index);
}

TEST(OnnxInlineTest, AFunctionKeepsItsOwnOpset) {
  // ReduceSum takes its axes as attribute before opset 13, as input since.
  const OnnxModel model = OnnxModel::parse_text(R"(
<ir_version: 8, opset_import: ["" : 17, "local" : 1]>
g (float[N, 2] x) => (float[N, 1] y) { y = local.sum (x) }
<opset_import: ["" : 11], domain: "local">
sum (a) => (c) { c = ReduceSum <axes = [1], keepdims = 1> (a) }
)");
  EXPECT_THAT(result_of(model.bind(at_batch(1)), {3, 4}), ElementsAre(7));
}

TEST(OnnxInlineTest, AnOperatorThatWeLackIsExpandedIntoItsFunctionBody) {
  // MeanVarianceNormalization is registered nowhere here.
  const OnnxModel model = model_of("(float[N, 4] x) => (float[N, 4] y)",
                                   "",
                                   "[mvn] y = MeanVarianceNormalization<axes = [1]>(x)");
  const Graph graph = model.bind(at_batch(1));
  EXPECT_GT(graph.num_nodes(), 1);
  for (const Node& node : graph.nodes()) {
    EXPECT_EQ(node.source_index, 0) << "all of them stand for one node of the file";
    EXPECT_EQ(node.name.substr(0, 4), "mvn/");
  }
  const std::vector<double> y = result_of(graph, {1, 2, 3, 4});
  const double sd = std::sqrt(1.25);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(y[i], (static_cast<double>(i) - 1.5) / sd, 1e-6);
  }
}

TEST(OnnxInlineTest, AContextDependentBodySeesTheTypes) {
  // CastLike casts to the type of its second operand, which only the context knows.
  const OnnxModel model =
      model_of("(float[N, 3] x, double[1] like) => (double[N, 3] y)", "", "y = CastLike(x, like)");
  const Graph graph = model.bind(at_batch(1));
  EXPECT_EQ(graph.value(graph.outputs().at(0)).type.dtype, DType::kFloat64);
}

TEST(OnnxInlineTest, TheTakenBranchOfAKnownIfIsInlined) {
  // As from squeeze(): the condition asks whether a dim is 1. A branch may return an outer value.
  const std::string body = R"(
    shape = Shape(x)
    axis = Constant<value: tensor = int64 {1}>()
    dim = Gather<axis = 0>(shape, axis)
    one = Constant<value: tensor = int64 {1}>()
    is_one = Equal(dim, one)
    [choose] y = If (is_one) <
      then_branch = narrow () => (float[N, K] narrow_out) <float[1] scale = {5}> {
        narrow_out = Mul(x, scale)
      },
      else_branch = wide () => (float[N, K] x) {}
    >)";
  const OnnxModel narrow = model_of("(float[N, 1] x) => (float[N, 1] y)", "", body);
  const Graph graph = narrow.bind(at_batch(1));
  EXPECT_THAT(op_types(graph), ElementsAre("Mul"));
  EXPECT_THAT(names_of_kind(graph, ValueKind::kParameter), ElementsAre("scale"));
  EXPECT_THAT(result_of(graph, {2}), ElementsAre(10));
  const OnnxModel wide = model_of("(float[N, 3] x) => (float[N, 3] y)", "", body);
  EXPECT_THAT(result_of(wide.bind(at_batch(1)), {1, 2, 3}), ElementsAre(1, 2, 3));
}

TEST(OnnxInlineTest, AConditionThatDependsOnDataIsNamed) {
  const OnnxModel model = model_of("(float[N, 2] x, bool c) => (float[N, 2] y)", "", R"(
    [choose] y = If (c) <
      then_branch = a () => (float[N, 2] p) { p = Relu(x) },
      else_branch = b () => (float[N, 2] q) { q = Neg(x) }
    >)");
  EXPECT_THAT(error_of(ErrorCode::kUnsupported, [&] { model.bind(at_batch(1)); }),
              AllOf(HasSubstr("'choose'"), HasSubstr("condition depends on data")));
}

TEST(OnnxInlineTest, ALoopOfKnownLengthIsUnrolledAroundOneParameter) {
  // h = h * w, three times; the second output collects the steps.
  const OnnxModel model =
      model_of("(float[N, 2] x) => (float[N, 2] y, float[3, N, 2] steps)", "", R"(
    trips = Constant<value: tensor = int64 {3}>()
    go = Constant<value: tensor = bool {1}>()
    [loop] y, steps = Loop(trips, go, x) <
      body = b (int64 i, bool c, float[N, 2] h) => (bool again, float[N, 2] next, float[N, 2] step)
        <float[2] w = {2, 3}> {
        again = Identity(c)
        next = Mul(h, w)
        step = Neg(next)
      }
    >)");
  const Graph graph = model.bind(at_batch(1));
  EXPECT_THAT(names_of_kind(graph, ValueKind::kParameter), ElementsAre("loop/w"));
  const Tensor x = Tensor::from<float>({1, 1}, {1, 2});
  const std::vector<Tensor> results = evaluate(graph, {{"x", x}}, graph.outputs());
  EXPECT_THAT(results[0].to_double(), ElementsAre(8, 27));
  EXPECT_EQ(results[1].shape(), (Shape{3, 1, 2}));
  EXPECT_THAT(results[1].to_double(), ElementsAre(-2, -3, -4, -9, -8, -27));
}

TEST(OnnxInlineTest, AScanRunsAlongItsAxis) {
  // Running sums along axis 1, last first.
  const OnnxModel model = model_of("(float[N, 3] x) => (float[N] total, float[N, 3] sums)", "", R"(
    shape = Shape<end = 1>(x)
    zero = ConstantOfShape(shape)
    total, sums = Scan<num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1],
                       scan_output_axes = [1],
      body = b (float[N] s, float[N] e) => (float[N] t, float[N] u) {
        t = Add(s, e)
        u = Identity(t)
      }
    >(zero, x))");
  const Graph graph = model.bind(at_batch(2));
  const Tensor x = Tensor::from<float>({1, 2, 3, 4, 5, 6}, {2, 3});
  const std::vector<Tensor> results = evaluate(graph, {{"x", x}}, graph.outputs());
  EXPECT_THAT(results[0].to_double(), ElementsAre(6, 15));
  EXPECT_THAT(results[1].to_double(), ElementsAre(3, 5, 6, 6, 11, 15));
}

TEST(OnnxInlineTest, RecursiveFunctionsAreRefused) {
  EXPECT_THAT(error_of(ErrorCode::kInvalidModel,
                       [] {
                         OnnxModel::parse_text(R"(
<ir_version: 8, opset_import: ["" : 17, "local" : 1]>
g (float[N, 2] x) => (float[N, 2] y) { y = local.again (x) }
<opset_import: ["local" : 1], domain: "local">
again (a) => (c) { c = local.again (a) }
)");
                       }),
              HasSubstr("again"));
}

}  // namespace
}  // namespace trainrt
