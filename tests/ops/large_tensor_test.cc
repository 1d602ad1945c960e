// Tensors of several blocks and segments: the examples of operators fit into one, where the order
// of blocks and the cutting of reductions show nothing.
#include <gtest/gtest.h>

#include "graph/op_def.h"
#include "tests/support/op_example.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {
namespace {

using Ints = std::vector<int64_t>;

OpExample example(const std::string& name, Attributes attributes, std::vector<Shape> shapes) {
  OpExample result;
  result.name = name;
  result.attributes = std::move(attributes);
  for (Shape& shape : shapes) {
    result.inputs.push_back({DType::kFloat32, std::move(shape)});
  }
  return result;
}

// Fast equals reference, and blocks in reverse order give the same bits.
void expect_block_independence(const std::string& op_type, const OpExample& op_example) {
  SCOPED_TRACE(op_type + " " + op_example.name);
  const NodeCase test_case = make_case(get_op(op_type), op_example);
  const std::vector<Tensor> expected = run_case(test_case);
  const std::vector<Tensor> forward = run_case(test_case, {.reference = false});
  const std::vector<Tensor> backward =
      run_case(test_case, {.reference = false, .reverse_blocks = true});
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(tensors_near(forward[i], expected[i], kernel_tolerance(expected[i].dtype())));
    EXPECT_TRUE(tensors_identical(backward[i], forward[i]));
  }
}

TEST(LargeTensorTest, ElementwiseBlocksMayEndInsideARow) {
  for (const std::vector<Shape>& shapes : {std::vector<Shape>{{100003}, {100003}},
                                           std::vector<Shape>{{331, 317}, {317}},
                                           std::vector<Shape>{{331, 317}, {331, 1}},
                                           std::vector<Shape>{{40007, 3}, {40007, 1}},
                                           std::vector<Shape>{{40007, 3}, {3}},
                                           std::vector<Shape>{{7, 1, 131}, {113, 1}}}) {
    expect_block_independence("Sub", example(shape_string(shapes[0]), {}, shapes));
  }
  expect_block_independence("Tanh", example("vector", {}, {{100003}}));
}

TEST(LargeTensorTest, ReductionsAreCutIntoSegments) {
  const auto reduce = [](const std::string& name, Shape shape, Ints axes) {
    return example(name, {{"axes", std::move(axes)}, {"keepdims", int64_t{0}}}, {std::move(shape)});
  };
  for (const char* op_type :
       {"ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2", "ReduceLogSumExp"}) {
    expect_block_independence(op_type, reduce("all of a vector", {300007}, {0}));
    expect_block_independence(op_type, reduce("long rows", {3, 100003}, {1}));
    expect_block_independence(op_type, reduce("long narrow columns", {50021, 7}, {0}));
    expect_block_independence(op_type, reduce("wide columns", {211, 1031}, {0}));
    expect_block_independence(op_type, reduce("batch and space", {37, 5, 997}, {0, 2}));
    expect_block_independence(op_type, reduce("many short rows", {30011, 9}, {1}));
    expect_block_independence(op_type, reduce("both ends kept", {13, 811, 17}, {1}));
  }
}

TEST(LargeTensorTest, FloatSumsAccumulateInDouble) {
  // In float, 2^24 + 1 + 1 + ... stays 2^24.
  OpExample ones = example("ones", {{"axes", Ints{0}}, {"keepdims", int64_t{0}}}, {{200001}});
  std::vector<float> values(200001, 1.0f);
  values[0] = 16777216.0f;
  ones.values = {Tensor::from(values, {200001})};
  const NodeCase test_case = make_case(get_op("ReduceSum"), ones);
  for (const bool reference : {true, false}) {
    EXPECT_EQ(run_case(test_case, {.reference = reference})[0].data<float>()[0], 16977216.0f);
  }
}

TEST(LargeTensorTest, MovesCopyEveryElement) {
  const auto moved = [](const std::string& op_type, Attributes attributes, Shape shape) {
    expect_block_independence(op_type,
                              example(shape_string(shape), std::move(attributes), {shape}));
  };
  moved("Transpose", {{"perm", Ints{1, 0}}}, {313, 419});
  moved("Transpose", {{"perm", Ints{0, 2, 1, 3}}}, {3, 67, 5, 129});
  moved("Transpose", {{"perm", Ints{0, 3, 1, 2}}}, {3, 37, 41, 33});
  moved("Expand", {{"shape", Ints{33, 71, 65}}}, {71, 1});
  // Against an independent formula: element (i, j) of the transposed matrix is (j, i).
  const NodeCase test_case =
      make_case(get_op("Transpose"), example("matrix", {{"perm", Ints{1, 0}}}, {{313, 419}}));
  const Tensor out = run_case(test_case)[0];
  int64_t wrong = 0;
  for (int64_t i = 0; i < 419; ++i) {
    for (int64_t j = 0; j < 313; ++j) {
      wrong += out.data<float>()[i * 313 + j] != test_case.inputs[0].data<float>()[j * 419 + i];
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST(LargeTensorTest, EmbeddingGradientSumsInOrderOfPosition) {
  constexpr int64_t kTokens = 3001, kRows = 97, kWidth = 300;
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < kTokens; ++i) {
    tokens.push_back(i * i % kRows);
  }
  OpExample gather;
  gather.name = "embedding";
  gather.attributes = {{"axis", int64_t{0}}, {"shape", Ints{kRows, kWidth}}};
  gather.inputs = {{DType::kInt64, {kTokens}}, {DType::kFloat32, {kTokens, kWidth}}};
  gather.values = {Tensor::from(tokens, {kTokens}), {}};
  expect_block_independence("GatherGrad", gather);
}

}  // namespace
}  // namespace trainrt::testing
