// The example models have the sizes that their papers and reference implementations state.
#include "models/model.h"

#include <gtest/gtest.h>

#include <cmath>

#include "graph/base/error.h"
#include "graph/random.h"

namespace trainrt {
namespace {

int64_t num_parameters(const Graph& graph) {
  int64_t count = 0;
  for (const ValueId id : graph.values_of_kind(ValueKind::kParameter)) {
    count += num_elements(graph.value(id).type.shape);
  }
  return count;
}

int64_t num_parameters(const std::string& name) {
  return num_parameters(build_model(named_model(name)));
}

// torchvision's counts.
TEST(ModelTest, VisionModelsHaveTheParametersOfTorchvision) {
  EXPECT_EQ(num_parameters("resnet18"), 11'689'512);
  EXPECT_EQ(num_parameters("resnet50"), 25'557'032);
  EXPECT_EQ(num_parameters("resnet152"), 60'192'808);
  EXPECT_EQ(num_parameters("densenet121"), 7'978'856);
  EXPECT_EQ(num_parameters("mobilenet_v2"), 3'504'872);
  EXPECT_EQ(num_parameters("vit_b16"), 86'567'656);
}

// GPT-2: 124,439,808 and 1,557,611,200 (the published checkpoints); Llama: Meta's checkpoints.
TEST(ModelTest, LanguageModelsHaveTheParametersOfTheirCheckpoints) {
  EXPECT_EQ(num_parameters("gpt2-124m"), 124'439'808);
  EXPECT_EQ(num_parameters("gpt2-1.5b"), 1'557'611'200);
  EXPECT_EQ(num_parameters("llama-7b"), 6'738'415'616);
  EXPECT_EQ(num_parameters("llama-8b"), 8'030'261'248);
  EXPECT_EQ(num_parameters("llama-405b"), 405'853'388'800);
  EXPECT_NEAR(static_cast<double>(num_parameters("gpt3-175b")), 174.6e9, 0.1e9);
  EXPECT_NEAR(static_cast<double>(num_parameters("gpt-1t")), 1008e9, 1e9);
}

TEST(ModelTest, SmallClassifiersHaveTheirTextbookSizes) {
  EXPECT_EQ(num_parameters("mlp"), 784 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10);
  EXPECT_EQ(num_parameters("lenet"), 61'706);
}

TEST(ModelTest, EveryFamilyPutsTheBatchFirst) {
  for (const std::string& family : model_families()) {
    const Graph graph = build_model(named_model(family), 3);
    for (const ValueId id : graph.values_of_kind(ValueKind::kInput)) {
      EXPECT_EQ(graph.value(id).batch_axis, 0) << family;
      EXPECT_EQ(graph.value(id).type.shape.at(0), 3) << family;
    }
    ASSERT_EQ(graph.outputs().size(), 1u) << family;
    EXPECT_EQ(graph.value(graph.outputs()[0]).type.shape.at(0), 3) << family;
  }
}

TEST(ModelTest, FreeSizesReplaceDefaultsAndKeepProportions) {
  ModelSpec spec = named_model("gpt2");
  spec.layers = 2;
  spec.hidden = 64;
  spec.heads = 4;
  spec.vocab = 100;
  spec.seq = 16;
  const Graph graph = build_model(spec);
  EXPECT_EQ(graph.value(*graph.find_value("h.0.mlp.fc.weight")).type.shape, (Shape{64, 256}));
  EXPECT_FALSE(graph.find_value("h.2.ln_1.weight").has_value());
}

TEST(ModelTest, WeightsDependOnSeedAndNameAlone) {
  ModelSpec spec = named_model("lenet");
  const auto weight = [&](const Graph& graph) {
    return graph.value(*graph.find_value("fc1.weight")).source.load();
  };
  const Tensor first = weight(build_model(spec, 1));
  EXPECT_TRUE(identical(first, weight(build_model(spec, 7))));
  spec.seed = 1;
  EXPECT_FALSE(identical(first, weight(build_model(spec, 1))));
}

// Also where several threads draw it.
TEST(ModelTest, EachElementOfALargeWeightIsDrawnByItself) {
  const Graph graph = build_model(named_model("mlp"));
  const Value& value = graph.value(*graph.find_value("fc2.weight"));
  const Tensor weight = value.source.load();
  const uint64_t key = mix_keys(0, hash_name(value.name));
  for (int64_t i = 0; i < weight.num_elements(); ++i) {
    const RandomBlock words = philox(key, static_cast<uint64_t>(i / 2), 0);
    const size_t first = i % 2 == 0 ? 0 : 2;
    const double unit = 2 * uniform_double(words[first], words[first + 1]) - 1;
    ASSERT_EQ(weight.data<float>()[i], static_cast<float>(unit / std::sqrt(1024.0))) << i;
  }
}

TEST(ModelTest, UnknownNamesAndImpossibleSizesAreExplained) {
  try {
    named_model("resnet5");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(error.message().find("resnet50"), std::string::npos) << error.message();
  }
  for (const auto& [family, least] :
       {std::pair<const char*, int64_t>{"cnn", 4}, {"lenet", 12}, {"densenet", 29}}) {
    ModelSpec image = named_model(family);
    image.image = least;
    EXPECT_GT(build_model(image).num_values(), 0);
    image.image = least - 1;
    EXPECT_THROW(build_model(image), Error) << family;
  }
  ModelSpec spec = named_model("gpt2");
  spec.hidden = 100;
  spec.heads = 7;
  try {
    build_model(spec);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(error.message().find("hidden = 100 must be a positive multiple of heads = 7"),
              std::string::npos)
        << error.message();
  }
}

}  // namespace
}  // namespace trainrt
