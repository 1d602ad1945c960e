// Turning images channels-last changes no value and no gradient, and turns nothing twice.
#include "graph/passes/layout.h"

#include <gtest/gtest.h>

#include "graph/verifier.h"
#include "tests/support/image_graph.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {
namespace {

// Values and gradients of the turned graph are those of the graph.
void expect_same(ImageGraph& g, ValueId y) {
  g.graph.outputs() = {y};
  const Graph turned = turn_images(g.graph);
  verify(turned, "turned");
  const std::vector<Tensor> expected = g.evaluate(with_gradients(g.graph));
  const std::vector<Tensor> actual = g.evaluate(with_gradients(turned));
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(tensors_near(actual[i], expected[i], 1e-10)) << "result " << i;
  }
}

const Attributes kPool = {{"kernel_shape", Shape{2, 2}}, {"strides", Shape{2, 2}}};
const Attributes kSpatialMean = {{"axes", Shape{2, 3}}, {"keepdims", int64_t{1}}};

TEST(LayoutTest, ImageIsTurnedOnceAndStaysTurnedToTheHead) {
  ImageGraph g;
  ValueId x = g.parameter("x", {2, 3, 8, 8});
  x = g.builder.op("Relu", {g.batch_norm(g.conv(x, 4, "conv1"), "bn1")});
  x = g.builder.op("MaxPool", {x}, kPool);
  x = g.builder.add(x, g.builder.op("Relu", {g.conv(x, 4, "conv2")}));
  x = g.builder.op("AveragePool", {x}, kPool);
  x = g.builder.reshape(g.builder.op("ReduceMean", {x}, kSpatialMean), {2, 4});
  const ValueId y = g.builder.matmul(x, g.parameter("head", {4, 5}));
  g.graph.outputs() = {y};
  const Graph turned = turn_images(g.graph);
  EXPECT_EQ(count_nodes(turned, "Transpose"), 1);  // of x; behind the mean it is a Reshape
  for (const Node& node : turned.nodes()) {
    if (find_image_rule(node.op_type) != nullptr && node.op_type != "ReduceMean" &&
        node.op_type != "Relu" && node.op_type != "Add") {
      EXPECT_EQ(node.attributes.get_string("layout", "nchw"), "nhwc") << node.name;
    }
  }
  expect_same(g, y);
}

// As in a U-Net: statistics of groups are taken where the channels lie side by side, and the
// gradients of what a model makes of them, too.
TEST(LayoutTest, GroupNormKeepsImagesTurned) {
  ImageGraph g;
  ValueId x = g.parameter("x", {2, 3, 5, 7});
  for (const char* name : {"a", "b"}) {
    x = g.conv(x, 6, concat("conv_", name));
    x = g.builder.op("GroupNorm",
                     {x, g.parameter(concat("scale_", name), {6}), g.parameter(name, {6})},
                     {{"num_groups", int64_t{2}}, {"epsilon", 1e-5}});
    x = g.builder.op("Relu", {x});
  }
  g.graph.outputs() = {x};
  const Graph turned = turn_images(g.graph);
  EXPECT_EQ(count_nodes(turned, "Transpose"), 2);  // of x, and of the result
  expect_same(g, x);
}

TEST(LayoutTest, OperandsOfFewerDimsFollow) {
  ImageGraph g;
  const ValueId x = g.conv(g.parameter("x", {2, 3, 4, 5}), 6, "conv");
  ValueId y = g.builder.mul(x, g.parameter("channel_scale", {6, 1, 1}));
  y = g.builder.add(y, g.parameter("position", {4, 5}));
  y = g.builder.mul(y, g.parameter("scalar", {}));
  const ValueId gate = g.builder.op("ReduceMean", {y}, kSpatialMean);
  expect_same(g, g.builder.mul(y, g.builder.op("Sigmoid", {gate})));
}

TEST(LayoutTest, ConcatAndReductionsMoveTheirAxes) {
  ImageGraph g;
  const ValueId x = g.parameter("x", {2, 3, 4, 5});
  const ValueId both =
      g.builder.op("Concat", {g.conv(x, 2, "a"), g.conv(x, 6, "b")}, {{"axis", int64_t{1}}});
  EXPECT_EQ(g.builder.shape(both), (Shape{2, 8, 4, 5}));
  for (const Shape& axes : {Shape{1}, Shape{2, 3}, Shape{-1}, Shape{0, 1}, Shape{0, 2, 3}}) {
    for (const int64_t keepdims : {0, 1}) {
      const Attributes attributes = {{"axes", axes}, {"keepdims", keepdims}};
      SCOPED_TRACE(shape_string(axes) + (keepdims != 0 ? " kept" : ""));
      expect_same(g, g.builder.op("ReduceSum", {both}, attributes));
    }
  }
}

TEST(LayoutTest, OperatorsWithoutARuleSeeOnnxOrder) {
  ImageGraph g;
  const ValueId x = g.conv(g.parameter("x", {2, 3, 4, 6}), 4, "conv1");
  const ValueId shuffled =
      g.builder.transpose(g.builder.reshape(x, {2, 2, 2, 4, 6}), {0, 2, 1, 3, 4});
  const ValueId y = g.builder.reshape(shuffled, {2, 4, 4, 6});
  expect_same(g, g.conv(y, 3, "conv2"));
}

TEST(LayoutTest, NamesOfInputsAndOutputsStay) {
  ImageGraph g;
  const ValueId y = g.builder.op("Relu", {g.conv(g.parameter("x", {2, 3, 4, 6}), 4, "conv")});
  g.graph.rename_value(y, "features");
  g.graph.outputs() = {y};
  const Graph turned = turn_images(g.graph);
  const Value& output = turned.value(turned.outputs().at(0));
  EXPECT_EQ(output.name, "features");
  EXPECT_EQ(output.type.shape, (Shape{2, 4, 4, 6}));
  EXPECT_EQ(turned.value(turned.find_value("features/nhwc").value()).type.shape,
            (Shape{2, 4, 6, 4}));
}

}  // namespace
}  // namespace trainrt::testing
