// Activations that are made again: which, and that nothing else changes, to the bit.
#include "graph/passes/rematerialize.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "graph/verifier.h"
#include "tests/support/image_graph.h"

namespace trainrt::testing {
namespace {

bool is_read_by_backward(const Graph& graph, const std::string& name) {
  const ValueId id = graph.find_value(name).value();
  return std::any_of(graph.nodes().begin(), graph.nodes().end(), [&](const Node& node) {
    return node.region == Region::kBackward &&
           std::find(node.inputs.begin(), node.inputs.end(), id) != node.inputs.end();
  });
}

void expect_same_bits(const ImageGraph& g, const Graph& again) {
  verify(again, "rematerialized");
  const std::vector<Tensor> expected = g.evaluate(g.graph);
  const std::vector<Tensor> actual = g.evaluate(again);
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(identical(actual[i], expected[i])) << "result " << i;
  }
}

TEST(RematerializeTest, NormalizedActivationIsMadeAgainFromTheConvolution) {
  ImageGraph g;
  const ValueId x = g.conv(g.parameter("x", {2, 3, 24, 24}), 8, "conv1");
  const ValueId h = g.batch_norm(x, "bn");
  g.graph.rename_value(h, "h");
  g.graph.outputs() = {g.conv(h, 2, "conv2")};
  g.graph = with_gradients(g.graph);
  ASSERT_TRUE(is_read_by_backward(g.graph, "h"));  // by conv2's weight gradient
  const Graph again = rematerialize(g.graph);
  EXPECT_FALSE(is_read_by_backward(again, "h"));
  EXPECT_TRUE(is_read_by_backward(again, "h/again"));
  EXPECT_EQ(again.num_nodes(), g.graph.num_nodes() + 1);
  expect_same_bits(g, again);
}

TEST(RematerializeTest, NothingIsKeptLongerForIt) {
  // The gradient of Relu reads its output, so that nobody keeps the input.
  ImageGraph g;
  const ValueId x = g.conv(g.parameter("x", {2, 3, 24, 24}), 8, "conv1");
  const ValueId h = g.builder.op("Relu", {x});
  g.graph.outputs() = {g.conv(h, 2, "conv2")};
  g.graph = with_gradients(g.graph);
  const Graph again = rematerialize(g.graph);
  EXPECT_EQ(again.num_nodes(), g.graph.num_nodes());
  expect_same_bits(g, again);
}

TEST(RematerializeTest, WhatIsMadeAgainIsNotMadeFromWhatIsMadeAgain) {
  ImageGraph g;
  const ValueId x = g.conv(g.parameter("x", {2, 3, 24, 24}), 8, "conv1");
  const ValueId h = g.batch_norm(x, "bn1");
  const ValueId k = g.batch_norm(h, "bn2");  // h is read by bn2's gradient
  g.graph.rename_value(h, "h");
  g.graph.rename_value(k, "k");
  g.graph.outputs() = {g.conv(k, 2, "conv2")};
  g.graph = with_gradients(g.graph);
  const Graph again = rematerialize(g.graph);
  EXPECT_TRUE(again.find_value("h/again").has_value());
  EXPECT_FALSE(again.find_value("k/again").has_value());
  expect_same_bits(g, again);
}

TEST(RematerializeTest, NormalizedRowsAndGeluAreMadeAgain) {
  ImageGraph g;
  const ValueId x = g.builder.matmul(g.parameter("x", {256, 64}), g.parameter("w1", {64, 128}));
  const ValueId normalized = g.builder.op(
      "LayerNormalization", {x, g.parameter("scale", {128}), g.parameter("shift", {128})});
  const ValueId activated =
      g.builder.op("Gelu", {g.builder.matmul(normalized, g.parameter("w2", {128, 128}))});
  g.graph.rename_value(normalized, "normalized");
  g.graph.rename_value(activated, "activated");
  g.graph.outputs() = {g.builder.matmul(activated, g.parameter("w3", {128, 8}))};
  g.graph = with_gradients(g.graph);
  const Graph again = rematerialize(g.graph);
  EXPECT_FALSE(is_read_by_backward(again, "normalized"));
  EXPECT_FALSE(is_read_by_backward(again, "activated"));
  EXPECT_EQ(again.num_nodes(), g.graph.num_nodes() + 2);
  expect_same_bits(g, again);
}

// Few samples follow many, whose tensors are worth it, and the other way round.
TEST(RematerializeTest, AGraphOfAnotherSizeFollowsTheExample) {
  const auto make = [](ImageGraph& g, int64_t samples) {
    const ValueId x = g.conv(g.parameter("x", {samples, 3, 24, 24}), 8, "conv1");
    const ValueId h = g.batch_norm(x, "bn");
    g.graph.rename_value(h, "h");
    g.graph.outputs() = {g.conv(h, 2, "conv2")};
    g.graph = with_gradients(g.graph);
  };
  ImageGraph many, few;
  make(many, 2);
  make(few, 1);
  const Graph many_again = rematerialize(many.graph), few_again = rematerialize(few.graph);
  ASSERT_FALSE(is_read_by_backward(many_again, "h"));
  ASSERT_TRUE(is_read_by_backward(few_again, "h"));
  const Graph as_many = rematerialize_like(few_again, many_again);
  EXPECT_FALSE(is_read_by_backward(as_many, "h"));
  expect_same_bits(few, as_many);
  const Graph as_few = rematerialize_like(many_again, few_again);
  EXPECT_TRUE(is_read_by_backward(as_few, "h"));
  EXPECT_EQ(as_few.num_nodes(), many.graph.num_nodes());
  expect_same_bits(many, as_few);
}

TEST(RematerializeTest, SmallTensorsStay) {
  ImageGraph g;
  const ValueId x = g.conv(g.parameter("x", {1, 3, 4, 4}), 8, "conv1");
  g.graph.outputs() = {g.conv(g.batch_norm(x, "bn"), 2, "conv2")};
  g.graph = with_gradients(g.graph);
  EXPECT_EQ(rematerialize(g.graph).num_nodes(), g.graph.num_nodes());
}

}  // namespace
}  // namespace trainrt::testing
