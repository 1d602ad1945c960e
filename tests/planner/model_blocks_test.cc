// Blocks at sizes that were never built, against the same model built at them.
#include "planner/model_blocks.h"

#include <gtest/gtest.h>

#include "graph/base/error.h"
#include "planner/short_model.h"
#include "tests/support/family_model.h"
#include "tests/support/layered_model.h"

namespace trainrt {
namespace {

std::string text(const Attributes& attributes) {
  std::string all;
  for (const auto& [name, value] : attributes) {
    all += name + "=" + attribute_string(value) + ";";
  }
  return all;
}

class ModelBlocksTest : public ::testing::TestWithParam<const char*> {};

TEST_P(ModelBlocksTest, OfASizeThatWasNotBuiltEqualThoseOfOneThatWas) {
  ModelSpec spec = testing::small_family(GetParam());
  spec.layers = spec.family == "resnet" ? 18 : spec.layers;
  const testing::FamilyModel family = testing::family_model(spec, 6, "fp32", OptimizerSpec{});
  const auto built = [&](int64_t size) { return model_blocks(family.factory(size, true), size); };
  const ModelBlocks one = built(1), two = built(2);
  for (const int64_t size : {3, 6}) {
    const std::optional<ModelBlocks> derived = at_micro_batch(one, two, size);
    ASSERT_TRUE(derived.has_value()) << size;
    const ModelBlocks expected = built(size);
    EXPECT_EQ(derived->blocks, expected.blocks);
    EXPECT_EQ(derived->parameter_names, expected.parameter_names);
    ASSERT_EQ(derived->graph.num_nodes(), expected.graph.num_nodes());
    for (NodeId id = 0; id < expected.graph.num_nodes(); ++id) {
      const Node& node = derived->graph.node(id);
      ASSERT_EQ(node.name, expected.graph.node(id).name);
      EXPECT_EQ(node.op_type, expected.graph.node(id).op_type);
      EXPECT_EQ(text(node.attributes), text(expected.graph.node(id).attributes)) << node.name;
    }
    ASSERT_EQ(derived->graph.num_values(), expected.graph.num_values());
    for (ValueId id = 0; id < expected.graph.num_values(); ++id) {
      const Value& value = derived->graph.value(id);
      EXPECT_EQ(value.name, expected.graph.value(id).name);
      EXPECT_TRUE(value.type == expected.graph.value(id).type) << value.name;
    }
  }
}

// The values are not numbered alike: what the last layer hands on is, in the short model, what the
// first does.
std::string types(const Graph& graph, const std::vector<ValueId>& values) {
  std::string all;
  for (const ValueId id : values) {
    all += id == kNoValue ? "-"
                          : concat(dtype_name(graph.value(id).type.dtype),
                                   shape_string(graph.value(id).type.shape),
                                   value_kind_name(graph.value(id).kind));
  }
  return all;
}

void expect_equal(const ModelBlocks& found, const ModelBlocks& expected) {
  EXPECT_EQ(found.blocks, expected.blocks);
  EXPECT_EQ(found.last_source, expected.last_source);
  EXPECT_EQ(found.parameter_names, expected.parameter_names);
  EXPECT_EQ(found.product_names, expected.product_names);
  EXPECT_EQ(found.products, expected.products);
  EXPECT_EQ(found.awaited, expected.awaited);
  EXPECT_EQ(found.shared_parameters, expected.shared_parameters);
  EXPECT_EQ(found.num_parameters, expected.num_parameters);
  EXPECT_NEAR(found.optimizer_bytes, expected.optimizer_bytes, 1e-2);
  EXPECT_NEAR(found.num_nodes, expected.num_nodes, 0.05 * expected.num_nodes);
  EXPECT_EQ(found.tokens_per_sample, expected.tokens_per_sample);
  ASSERT_EQ(found.graph.num_nodes(), expected.graph.num_nodes());
  for (NodeId id = 0; id < expected.graph.num_nodes(); ++id) {
    const Node &node = found.graph.node(id), &other = expected.graph.node(id);
    if (other.op_type != "Add") {  // a sum of gradients is called after what the block is handed
      ASSERT_EQ(node.name, other.name);
    }
    EXPECT_EQ(node.op_type, other.op_type);
    EXPECT_EQ(types(found.graph, node.inputs), types(expected.graph, other.inputs)) << node.name;
    EXPECT_EQ(types(found.graph, node.outputs), types(expected.graph, other.outputs)) << node.name;
    EXPECT_EQ(text(node.attributes), text(other.attributes)) << node.name;
  }
}

TEST_P(ModelBlocksTest, OfTheShortModelEqualThoseOfTheWhole) {
  ModelSpec spec = testing::small_family(GetParam());
  const bool repeats = spec.family == "gpt2" || spec.family == "llama" || spec.family == "vit" ||
                       spec.family == "bert";
  spec.layers = spec.family == "resnet" ? 18 : repeats ? 5 : spec.layers;
  const testing::FamilyModel family = testing::family_model(spec, 2, "fp32", OptimizerSpec{});
  int trained_nodes = 0;
  const auto train = [&](Graph forward) {
    TrainingGraph made = family.train(std::move(forward), 2, true);
    trained_nodes = made.graph.num_nodes();
    return made;
  };
  const std::optional<SizedModel> found = short_model_blocks(family.forward(2), 2, train);
  ASSERT_TRUE(found.has_value());
  const ModelBlocks expected = model_blocks(family.factory(2, true), 2);
  expect_equal(found->blocks, expected);
  if (repeats) {
    EXPECT_LT(trained_nodes, expected.num_nodes / 2);
  }
}

TEST(WithoutRepetitionsTest, KeepsSoManyOfEachPattern) {
  const std::vector<int> classes = {9, 1, 2, 1, 2, 1, 2, 1, 3, 3, 3, 4};
  EXPECT_EQ(without_repetitions(classes, 0, 12, 1), (std::vector<int>{0, 1, 2, 7, 8, 11}));
  EXPECT_EQ(without_repetitions(classes, 0, 12, 2), (std::vector<int>{0, 1, 2, 3, 4, 7, 8, 9, 11}));
  EXPECT_EQ(without_repetitions(classes, 2, 6, 1), (std::vector<int>{2, 3}));
}

INSTANTIATE_TEST_SUITE_P(
    Families,
    ModelBlocksTest,
    ::testing::Values("mlp", "cnn", "resnet", "vit", "bert", "gpt2", "llama", "t5", "unet", "lstm"),
    [](const auto& row) { return std::string(row.param); });

// Two models that are not one at two sizes have no third.
TEST(MicroBatchSizeTest, OfDifferentModelsAreRefused) {
  const ModelBlocks shallow = model_blocks(testing::layered_model(1, 2, 16, 32, 64, 8), 1);
  const ModelBlocks deep = model_blocks(testing::layered_model(2, 3, 16, 32, 64, 8), 2);
  EXPECT_FALSE(at_micro_batch(shallow, deep, 4).has_value());
}

}  // namespace
}  // namespace trainrt
