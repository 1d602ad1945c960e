// Stochastic depth and Dropout in plain nodes: random in training, switched off in evaluation and
// in what is exported.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "graph/onnx_export.h"
#include "graph/op_def.h"
#include "tests/graph/onnx_models.h"

namespace trainrt {
namespace {

using testing::at_batch;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::model_of;
using ::testing::Not;
using testing::op_types;

const char* const kSignature = "(float[N, 2] x) => (float[N, 2] y)";

BindOptions evaluation() {
  BindOptions options = at_batch(2);
  options.training = false;
  return options;
}

std::vector<std::string> random_types(const Graph& graph) {
  std::vector<std::string> types;
  for (const Node& node : graph.nodes()) {
    if (find_op(node.op_type)->random) {
      types.push_back(node.op_type);
    }
  }
  return types;
}

std::vector<double> output_of(const Graph& graph) {
  return evaluate(graph, {{"x", Tensor::from<float>({1, 2, 3, 4}, {2, 2})}}, graph.outputs())[0]
      .to_double();
}

OnnxModel exported(const OnnxModel& model) {
  namespace fs = std::filesystem;
  const fs::path path =
      fs::path(::testing::TempDir()) /
      concat("masks_", ::testing::UnitTest::GetInstance()->current_test_info()->name(), ::getpid());
  export_trained(
      model, [](const std::string&) { return Tensor(); }, {}, path.string());
  OnnxModel result = OnnxModel::load(path.string());
  fs::remove(path);
  return result;
}

// The body is random in training; evaluated and exported it gives `expected`.
void expect_switched_off(const std::string& initializers,
                         const std::string& body,
                         const std::vector<double>& expected) {
  SCOPED_TRACE(body);
  const OnnxModel model = model_of(kSignature, initializers, body);
  EXPECT_EQ(random_types(model.bind(at_batch(2))).size(), 1u);
  const OnnxModel written = exported(model);
  for (const OnnxModel* form : {&model, &written}) {
    const Graph graph = form->bind(evaluation());
    EXPECT_THAT(random_types(graph), ElementsAre());
    EXPECT_THAT(output_of(graph), ::testing::Pointwise(::testing::DoubleNear(1e-6), expected));
  }
}

TEST(OnnxRandomMasksTest, StochasticDepthAndDecomposedDropoutAreTheIdentity) {
  const std::vector<double> x = {1, 2, 3, 4};
  // As PyTorch's exporters write both, rows or elements being the drawn ones.
  for (const std::string shape : {"{2, 1}", "{2, 2}"}) {
    expect_switched_off("int64[2] shape = " + shape + ", float p = {0.8}",
                        R"(
      empty = ConstantOfShape(shape)
      rands = RandomUniformLike<low = 0.0, high = 1.0>(empty)
      sampled = Less(rands, p)
      bernoulli = Cast<to = 1>(sampled)
      div = Div(bernoulli, p)
      y = Mul(div, x))",
                        x);
  }
  // The keep rate raised by a uniform draw and cut off, after x was divided by it.
  expect_switched_off("float p = {0.8}",
                      R"(
      rands = RandomUniform<shape = [2, 1], dtype = 1>()
      raised = Add(p, rands)
      mask = Floor(raised)
      scaled = Div(x, p)
      y = Mul(scaled, mask))",
                      x);
  expect_switched_off("",
                      R"(
      p = Constant<value: tensor = float {0.75}>()
      scale = Constant<value: tensor = float {1.3333334}>()
      shape = Shape(x)
      rates = Expand(p, shape)
      mask = Bernoulli(rates)
      scaled = Mul(mask, scale)
      y = Mul(x, scaled))",
                      x);
}

TEST(OnnxRandomMasksTest, AMaskThatIsNotRescaledIsItsMean) {
  expect_switched_off("float dropped = {0.25}",
                      R"(
      rands = RandomUniformLike(x)
      kept = Greater(rands, dropped)
      mask = Cast<to = 1>(kept)
      y = Mul(x, mask))",
                      {0.75, 1.5, 2.25, 3});
}

TEST(OnnxRandomMasksTest, AnExportedIdentityLeavesNoTraceOfTheMask) {
  const OnnxModel model = model_of(kSignature, "float p = {0.8}", R"(
      rands = RandomUniformLike(x)
      sampled = Less(rands, p)
      mask = Cast<to = 1>(sampled)
      div = Div(mask, p)
      y = Mul(x, div))");
  EXPECT_THAT(op_types(exported(model).bind(at_batch(2))), Not(Contains("Mul")));
}

TEST(OnnxRandomMasksTest, OtherRandomNodesStayAndAreNamed) {
  // A sampled latent; and a mask whose shape is wanted, so that no number can take its place.
  const OnnxModel model = model_of(kSignature, "float p = {0.8}, int64[2] shape = {-1, 2}", R"(
      [noise] eps = RandomNormalLike(x)
      z = Add(x, eps)
      rands = RandomUniformLike(x)
      sampled = Less(rands, p)
      mask = Cast<to = 1>(sampled)
      flat = Reshape(mask, shape)
      y = Mul(z, flat))");
  ::testing::internal::CaptureStderr();
  const Graph graph = model.bind(evaluation());
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("node 'noise'"));
  EXPECT_EQ(random_types(graph).size(), 2u);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(random_types(exported(model).bind(at_batch(2))).size(), 2u);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("in node 'noise'"));
}

}  // namespace
}  // namespace trainrt
