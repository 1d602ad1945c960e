// Blocks at sizes that were never built, against the same model built at them.
#include "planner/model_blocks.h"

#include <gtest/gtest.h>

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
