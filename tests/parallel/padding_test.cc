// Padding changes shapes and nothing else.
#include "parallel/passes/padding.h"

#include <gtest/gtest.h>

#include "graph/graph_builder.h"
#include "graph/verifier.h"
#include "tests/support/tolerance.h"
#include "tests/support/training_loop.h"

namespace trainrt {
namespace {

using testing::TrainingLoop;

std::map<std::string, int64_t> all_products(const Graph& graph, int64_t multiple) {
  std::map<std::string, int64_t> multiples;
  for (const Node& node : graph.nodes()) {
    if (node_padding(OpContext(graph, node), multiple).any) {
      multiples[node.name] = multiple;
    }
  }
  return multiples;
}

TrainingGraph trained(Graph forward, Shape labels) {
  TrainingSpec spec;
  spec.loss.kind = "softmax_cross_entropy";
  spec.loss.output = forward.value(forward.outputs().at(0)).name;
  spec.loss.labels = "labels";
  spec.loss.labels_shape = std::move(labels);
  return build_training_graph(std::move(forward), spec);
}

ValueId parameter(Graph& graph, const std::string& name, const Shape& shape) {
  Value value;
  value.name = name;
  value.type = {DType::kFloat64, shape};
  value.kind = ValueKind::kParameter;
  value.source.load = [shape] {
    Tensor tensor(DType::kFloat64, shape);
    for (int64_t i = 0; i < tensor.num_elements(); ++i) {
      tensor.data<double>()[i] = static_cast<double>((i * 7919 + 13) % 101) / 101 - 0.5;
    }
    return tensor;
  };
  return graph.add_value(std::move(value));
}

// x [2, 7, 9, 9] -> conv of 13 channels -> conv of 5 -> dense: all odd.
Graph conv_graph() {
  Graph graph;
  GraphBuilder builder(graph);
  const auto weight = [&](const char* name, Shape shape) { return parameter(graph, name, shape); };
  const Attributes same = {{"kernel_shape", std::vector<int64_t>{3, 3}},
                           {"pads", std::vector<int64_t>{1, 1, 1, 1}}};
  ValueId x = graph.add_input("x", {DType::kFloat64, {2, 7, 9, 9}}, 0);
  x = builder.op("Relu", {builder.op("Conv", {x, weight("w1", {13, 7, 3, 3})}, same, "conv1")});
  x = builder.op("Conv", {x, weight("w2", {5, 13, 3, 3})}, same, "conv2");
  x = builder.reshape(x, {2, 5 * 81});
  graph.outputs() = {builder.op("MatMul", {x, weight("w3", {405, 11})}, {}, "dense")};
  return graph;
}

void expect_equal_training(const TrainingGraph& plain,
                           const std::map<std::string, Tensor>& feeds,
                           int64_t multiple) {
  const std::map<std::string, int64_t> multiples = all_products(plain.graph, multiple);
  ASSERT_GT(multiples.size(), 3u);
  const TrainingGraph padded = pad_products(plain, multiples);
  verify(padded.graph, "padded");
  TrainingLoop expected(plain), actual(padded);
  for (int step = 0; step < 3; ++step) {
    const TrainingLoop::Result a = expected.step({feeds}, 0.01);
    const TrainingLoop::Result b = actual.step({feeds}, 0.01);
    EXPECT_NEAR(a.loss, b.loss, 1e-12 * std::abs(a.loss));
    EXPECT_NEAR(a.grad_norm, b.grad_norm, 1e-6 * a.grad_norm);  // reported in float32
    EXPECT_EQ(a.num_items, b.num_items);
  }
  for (const std::string& name : plain.parameters) {
    EXPECT_TRUE(testing::tensors_near(actual.value(name), expected.value(name), 1e-10)) << name;
    EXPECT_EQ(actual.value(name).shape(), expected.value(name).shape());
  }
}

Tensor ints(Shape shape, int64_t below) {
  Tensor tensor(DType::kInt64, std::move(shape));
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    tensor.data<int64_t>()[i] = (i * 31 + 7) % below;
  }
  return tensor;
}

TEST(PaddingTest, ConvolutionsOfOddChannelsTrainAsBefore) {
  Tensor x(DType::kFloat64, {2, 7, 9, 9});
  for (int64_t i = 0; i < x.num_elements(); ++i) {
    x.data<double>()[i] = static_cast<double>((i * 37) % 97) / 97 - 0.5;
  }
  for (const int64_t multiple : {8, 64}) {
    expect_equal_training(
        trained(conv_graph(), {2}), {{"x", x}, {"labels", ints({2}, 11)}}, multiple);
  }
}

// Attention of 7 heads of 9 over 5 tokens, 57 words, the head tied to the embedding.
Graph attention_graph() {
  Graph graph;
  GraphBuilder builder(graph);
  const auto weight = [&](const char* name, Shape shape) { return parameter(graph, name, shape); };
  const ValueId ids = graph.add_input("ids", {DType::kInt64, {2, 5}}, 0);
  const ValueId table = weight("table", {57, 63});
  const ValueId x = builder.op("Gather", {table, ids}, {{"axis", int64_t{0}}}, "embedding");
  const auto heads = [&](const char* name) {
    const ValueId projected = builder.op("MatMul", {x, weight(name, {63, 63})});
    return builder.transpose(builder.reshape(projected, {2, 5, 7, 9}), {0, 2, 1, 3});
  };
  const ValueId scores = builder.matmul(heads("q"), heads("k"), false, true);
  const ValueId weights = builder.op("Softmax", {scores}, {{"axis", int64_t{-1}}});
  const ValueId mixed = builder.transpose(builder.matmul(weights, heads("v")), {0, 2, 1, 3});
  const ValueId y =
      builder.op("MatMul", {builder.reshape(mixed, {2, 5, 63}), weight("o", {63, 63})});
  graph.outputs() = {builder.matmul(builder.add(x, y), table, false, true)};
  return graph;
}

TEST(PaddingTest, ATransformerOfOddSizesTrainsAsBefore) {
  expect_equal_training(trained(attention_graph(), {2, 5}),
                        {{"ids", ints({2, 5}, 57)}, {"labels", ints({2, 5}, 57)}},
                        8);
}

// What a product makes is handed to the next one uncut.
TEST(PaddingTest, AChainOfProductsIsPaddedOnce) {
  Graph graph;
  GraphBuilder builder(graph);
  ValueId x = graph.add_input("x", {DType::kFloat32, {4, 12}}, 0);
  for (int i = 0; i < 3; ++i) {
    Value w;
    w.name = concat("w", i);
    w.type = {DType::kFloat32, {12, 12}};
    w.kind = ValueKind::kParameter;
    x = builder.op("MatMul", {x, graph.add_value(w)}, {}, concat("product", i));
  }
  graph.outputs() = {x};
  TrainingGraph chain;
  chain.graph = graph;
  const TrainingGraph padded = pad_products(chain, all_products(graph, 8));
  int num_pads = 0, num_cuts = 0;
  for (const Node& node : padded.graph.nodes()) {
    num_pads += node.op_type == "Pad" ? 1 : 0;
    num_cuts += node.op_type == "Slice" ? 1 : 0;
  }
  EXPECT_EQ(num_pads, 4);  // x and three weights
  EXPECT_EQ(num_cuts, 1);  // the last
}

TEST(PaddingTest, AlignedProductsAreLeftAlone) {
  Graph graph;
  GraphBuilder builder(graph);
  const ValueId x = graph.add_input("x", {DType::kFloat64, {3, 16}}, 0);
  const ValueId hidden = builder.op("MatMul", {x, parameter(graph, "w", {16, 24})});
  graph.outputs() = {builder.op("MatMul", {hidden, parameter(graph, "v", {24, 8})})};
  EXPECT_TRUE(all_products(trained(std::move(graph), {3}).graph, 8).empty());
}

TEST(PaddingTest, OperatorsThatAreNotLinearAreRefused) {
  Graph graph;
  GraphBuilder builder(graph);
  const ValueId x = graph.add_input("x", {DType::kFloat32, {4, 7}}, 0);
  const NodeId softmax = graph.value(builder.op("Softmax", {x}, {{"axis", int64_t{-1}}})).producer;
  EXPECT_FALSE(node_padding(OpContext(graph, graph.node(softmax)), 8).any);
}

TEST(PaddingTest, TheCostOfTheCopiesAndThePaddedProductAreStated) {
  Graph graph;
  GraphBuilder builder(graph);
  const ValueId a = graph.add_input("a", {DType::kFloat32, {16, 252}}, 0);
  const ValueId b = graph.add_input("b", {DType::kFloat32, {252, 64}});
  const NodeId product = graph.value(builder.matmul(a, b)).producer;
  const NodePadding padding = node_padding(OpContext(graph, graph.node(product)), 64);
  ASSERT_TRUE(padding.any);
  EXPECT_EQ(padding.inputs[0], (Shape{16, 256}));
  EXPECT_EQ(padding.inputs[1], (Shape{256, 64}));
  EXPECT_EQ(padding.output, (Shape{16, 64}));
  EXPECT_EQ(padding.copied_bytes, 4 * (16 * (252 + 256) + 64 * (252 + 256)));
  ASSERT_EQ(padding.products.size(), 1u);
  EXPECT_EQ(padding.products[0].k, 256);
}

}  // namespace
}  // namespace trainrt
