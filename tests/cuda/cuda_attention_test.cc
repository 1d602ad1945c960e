// Which attention goes to cuDNN's fused engines, and that it is the same attention.
#include <gtest/gtest.h>

#include <limits>

#include "graph/evaluator.h"
#include "graph/op_def.h"
#include "runtime/load_cuda.h"
#include "tests/cuda_double/cuda_double.h"
#include "tests/support/device_case.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {
namespace {

struct Case {
  std::string name;
  Shape q, k, v;  // v's width may differ
  bool causal = true;
  std::vector<int64_t> sequence_major = {0, 0, 0, 0};
  DType dtype = DType::kBFloat16;
  std::optional<int64_t> workspace_cap = std::nullopt;
  std::optional<Shape> mask = std::nullopt;
  bool fused = true;
  bool hides_sample = false;  // all keys of the mask's second sample
};

class CudaAttentionTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override { cuda_double::reset(); }
  void TearDown() override { EXPECT_EQ(cuda_double::alive(), ""); }

  OpExample example(const Case& c) const {
    const auto type = [](const Shape& shape) { return TensorType{DType::kFloat32, shape}; };
    OpExample example;
    example.name = c.name;
    example.attributes = {
        {"scale", 0.35}, {"causal", int64_t{c.causal}}, {"sequence_major", c.sequence_major}};
    example.inputs = {type(c.q), type(c.k), type(c.v)};
    if (c.mask) {
      example.inputs.push_back(type(*c.mask));
    }
    if (c.hides_sample) {
      std::vector<float> mask(static_cast<size_t>(num_elements(*c.mask)), 0.0f);
      std::fill(mask.begin() + c.mask->back(), mask.end(), std::numeric_limits<float>::lowest());
      example.values = {{}, {}, {}, Tensor::from(mask, *c.mask)};
    }
    return example;
  }

  // The same in float32 by the CPU's reference, of the rounded inputs.
  static NodeCase widened(NodeCase narrow) {
    for (size_t i = 0; i < narrow.inputs.size(); ++i) {
      if (narrow.present[i]) {
        narrow.inputs[i] = narrow.inputs[i].cast(DType::kFloat32);
        narrow.input_types[i].dtype = DType::kFloat32;
      }
    }
    for (TensorType& type : narrow.output_types) {
      type.dtype = DType::kFloat32;
    }
    return narrow;
  }

  static void expect_same(const std::vector<Tensor>& actual,
                          const std::vector<Tensor>& expected,
                          DType dtype) {
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_TRUE(
          tensors_near(actual[i].cast(DType::kFloat32), expected[i], kernel_tolerance(dtype)))
          << "output " << i;
    }
  }
};

TEST_P(CudaAttentionTest, ForwardAndGradientAreThoseOfTheCpu) {
  const Case& c = GetParam();
  const std::unique_ptr<Device> device = cuda_module().make_device(0, {});
  const NodeCase forward = make_case(get_op("FusedAttention"), example(c), c.dtype);
  const std::vector<Tensor> results = run_on_device(forward, *device, c.workspace_cap);
  expect_same(results, run_case(widened(forward)), c.dtype);
  EXPECT_EQ(cuda_double::num_graphs("log") > 0, c.fused);

  OpExample more = example(c);
  more.inputs.resize(3);
  more.values.clear();
  if (c.mask) {
    more.inputs.push_back({DType::kFloat32, *c.mask});
  } else {
    more.inputs.emplace_back();
    more.absent = {3};
  }
  const TensorType y{DType::kFloat32, results[0].shape()};
  more.inputs.insert(more.inputs.end(), {y, {DType::kFloat32, results[1].shape()}, y});
  NodeCase backward = make_case(get_op("FusedAttentionGrad"), more, c.dtype);
  for (size_t i = 0; i < forward.inputs.size(); ++i) {
    backward.inputs[i] = forward.inputs[i];
  }
  backward.inputs[4] = results[0];
  backward.inputs[5] = results[1];
  backward.input_types[5].dtype = results[1].dtype();
  expect_same(
      run_on_device(backward, *device, c.workspace_cap), run_case(widened(backward)), c.dtype);
  EXPECT_EQ(cuda_double::num_graphs("identity") > 0, c.fused);
}

INSTANTIATE_TEST_SUITE_P(
    Cases,
    CudaAttentionTest,
    ::testing::Values(Case{"causal", {2, 3, 20, 16}, {2, 3, 20, 16}, {2, 3, 20, 8}},
                      Case{"all_keys", {2, 2, 9, 8}, {2, 2, 13, 8}, {2, 2, 13, 24}, false},
                      Case{"as_projected",
                           {2, 20, 3, 16},
                           {2, 20, 3, 16},
                           {2, 20, 3, 16},
                           true,
                           {1, 1, 1, 1},
                           DType::kFloat16},
                      Case{"grouped", {2, 6, 12, 8}, {2, 2, 12, 8}, {2, 2, 12, 8}},
                      Case{"grouped_as_projected",
                           {1, 12, 4, 8},
                           {1, 12, 2, 8},
                           {1, 2, 12, 8},
                           true,
                           {1, 1, 0, 1}},
                      // Room for the gradient's sums of a few samples at a time.
                      Case{"in_parts",
                           {11, 2, 6, 8},
                           {11, 2, 6, 8},
                           {11, 2, 6, 8},
                           true,
                           {0, 0, 0, 0},
                           DType::kBFloat16,
                           4096},
                      Case{"odd_heads",
                           {2, 2, 9, 12},
                           {2, 2, 9, 12},
                           {2, 2, 9, 12},
                           true,
                           {0, 0, 0, 0},
                           DType::kBFloat16,
                           std::nullopt,
                           std::nullopt,
                           false},
                      Case{"masked",
                           {2, 2, 9, 8},
                           {2, 2, 9, 8},
                           {2, 2, 9, 8},
                           false,
                           {0, 0, 0, 0},
                           DType::kBFloat16,
                           std::nullopt,
                           Shape{2, 1, 1, 9},
                           false},
                      Case{"hidden_altogether",
                           {2, 2, 9, 8},
                           {2, 2, 9, 8},
                           {2, 2, 9, 8},
                           false,
                           {0, 0, 0, 0},
                           DType::kFloat16,
                           std::nullopt,
                           Shape{2, 1, 1, 9},
                           false,
                           true},
                      Case{"float32",
                           {2, 2, 9, 8},
                           {2, 2, 9, 8},
                           {2, 2, 9, 8},
                           true,
                           {0, 0, 0, 0},
                           DType::kFloat32,
                           std::nullopt,
                           std::nullopt,
                           false}),
    [](const auto& row) { return row.param.name; });

// The fused gradient adds in any order, which deterministic runs must not.
TEST_F(CudaAttentionTest, DeterministicGradientsAreNotFused) {
  const Case c{"", {2, 2, 9, 8}, {2, 2, 9, 8}, {2, 2, 9, 8}};
  for (const bool deterministic : {true, false}) {
    DeviceOptions options;
    options.deterministic = deterministic;
    const std::unique_ptr<Device> device = cuda_module().make_device(0, options);
    OpExample more = example(c);
    more.inputs.insert(
        more.inputs.end(),
        {{}, {DType::kFloat32, c.q}, {DType::kFloat32, {2, 2, 9}}, {DType::kFloat32, c.q}});
    more.absent = {3};
    NodeCase backward = make_case(get_op("FusedAttentionGrad"), more, DType::kBFloat16);
    backward.inputs[5] = backward.inputs[5].cast(DType::kFloat32);
    backward.input_types[5].dtype = DType::kFloat32;
    run_on_device(backward, *device);
    EXPECT_EQ(cuda_double::num_graphs("identity") == 0, deterministic);
  }
}

}  // namespace
}  // namespace trainrt::testing
