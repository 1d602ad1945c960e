// Models that bring their own training step, and ONNX's Gradient and optimizers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "graph/graph_builder.h"
#include "graph/whole_batch.h"
#include "tests/support/training_info_model.h"
#include "tests/support/training_loop.h"

namespace trainrt {
namespace {

using testing::Bindings;
using ::testing::HasSubstr;

constexpr const char* kForward = R"(
<ir_version: 8, opset_import: ["" : 17, "ai.onnx.preview.training" : 1]>
main (double[batch, 3] x) => (double[batch, 2] scores)
<double[3, 2] w = {0.1, -0.2, 0.3, 0.4, -0.5, 0.6}, double[2] b = {0.05, -0.05}>
{
  h = MatMul(x, w)
  scores = Add(h, b)
}
)";

OnnxModel with_training_info(const std::string& algorithm,
                             const Bindings& bindings,
                             const std::string& initialization = "") {
  return testing::with_training_info(kForward, algorithm, bindings, initialization);
}

// Momentum as PyTorch has it: alpha is its momentum, beta 1 leaves the gradient whole.
constexpr const char* kMomentumStep = R"(
step (int64[batch] y) => (double loss, double[3, 2] w_new, double[2] b_new, double[3, 2] vw_new,
                          double[2] vb_new, int64 T_new)
<double R = {0.125}, int64 T = {0}, int64 one = {1},
 double[3, 2] vw = {0, 0, 0, 0, 0, 0}, double[2] vb = {0, 0}>
{
  loss = SoftmaxCrossEntropyLoss <reduction = "mean", ignore_index = -100> (scores, y)
  gw, gb = ai.onnx.preview.training.Gradient <xs = ["w", "b"], y = "loss"> (w, b)
  w_new, b_new, vw_new, vb_new = ai.onnx.preview.training.Momentum
      <alpha = 0.5, beta = 1.0, mode = "standard", norm_coefficient = 0.0>
      (R, T, w, b, gw, gb, vw, vb)
  T_new = Add(T, one)
}
)";

const Bindings kMomentumBindings = {
    {{"w", "w_new"}, {"b", "b_new"}, {"vw", "vw_new"}, {"vb", "vb_new"}, {"T", "T_new"}}, {}};

using Feeds = std::map<std::string, Tensor>;

std::vector<Feeds> micro_batches(int64_t size, const std::string& labels) {
  const std::vector<int64_t> y = {0, 1, -100, 1, -100, -100};
  std::vector<Feeds> feeds;
  for (int64_t begin = 0; begin < 6; begin += size) {
    std::vector<double> x;
    for (int64_t i = begin * 3; i < (begin + size) * 3; ++i) {
      x.push_back(std::sin(1.7 * static_cast<double>(i)));
    }
    feeds.push_back(
        {{"x", Tensor::from<double>(x, {size, 3})},
         {labels, Tensor::from<int64_t>({y.begin() + begin, y.begin() + begin + size}, {size})}});
  }
  return feeds;
}

TrainingGraph ours(int64_t batch) {
  const OnnxModel model = OnnxModel::parse_text(kForward);
  BindOptions options;
  options.batch = batch;
  const Graph forward = model.bind(options);
  TrainingSpec spec;
  spec.loss = resolve_loss(forward, {}, nullptr);
  spec.optimizer.name = "momentum";
  spec.optimizer.momentum = 0.5;
  spec.optimizer.weight_decay = 0;
  return build_training_graph(forward, spec);
}

TEST(TrainingInfoTest, MomentumEqualsOurMomentum) {
  const OnnxModel model = with_training_info(kMomentumStep, kMomentumBindings);
  EXPECT_TRUE(model.has_training_info());
  for (const bool accumulate : {true, false}) {
    const int64_t size = accumulate ? 2 : 6;
    BindOptions options;
    options.batch = size;
    testing::TrainingLoop theirs(testing::training_info_graph(model, options, accumulate));
    testing::TrainingLoop wanted(ours(size));
    EXPECT_EQ(theirs.training().parameters, (std::vector<std::string>{"w", "b"}));
    for (int step = 0; step < 5; ++step) {
      const auto a = theirs.step(micro_batches(size, "y"), 0.0);  // R is the model's own
      const auto b = wanted.step(micro_batches(size, "labels"), 0.125);
      EXPECT_NEAR(a.loss, b.loss, 1e-12);
      EXPECT_EQ(a.num_items, 3);
      EXPECT_NEAR(a.grad_norm, b.grad_norm, 1e-6);
    }
    for (const char* name : {"w", "b"}) {
      const std::vector<double> a = theirs.value(name).to_double();
      const std::vector<double> b = wanted.value(name).to_double();
      for (size_t i = 0; i < a.size(); ++i) {
        EXPECT_NEAR(a[i], b[i], 1e-12) << name;
      }
    }
    EXPECT_EQ(theirs.value("T").to_int64(), (std::vector<int64_t>{5}));
  }
}

TEST(TrainingInfoTest, CounterAndOptimizerRunOncePerStep) {
  const OnnxModel model = with_training_info(kMomentumStep, kMomentumBindings);
  BindOptions options;
  options.batch = 2;
  const TrainingGraph training = testing::training_info_graph(model, options, true);
  for (const Node& node : training.graph.nodes()) {
    if (node.op_type == "OnnxMomentum" || node.name.find("T_new") != std::string::npos) {
      EXPECT_EQ(node.region, Region::kUpdate) << node.name;
    }
    if (node.op_type == "MatMul") {
      EXPECT_NE(node.region, Region::kUpdate) << node.name;
    }
  }
}

TEST(TrainingInfoTest, InitializationSetsTheStart) {
  const OnnxModel model = with_training_info(
      kMomentumStep,
      {kMomentumBindings.update, {{"w", "w_start"}}},
      "start () => (double[3, 2] w_start)\n<double[3, 2] a = {1, 2, 3, 4, 5, 6}>\n"
      "{ w_start = Add(a, a) }");
  const TrainingGraph training = testing::training_info_graph(model, {}, true);
  const Value& w = training.graph.value(*training.graph.find_value("w"));
  EXPECT_EQ(initial_value(w).to_double(), (std::vector<double>{2, 4, 6, 8, 10, 12}));
  const Value& b = training.graph.value(*training.graph.find_value("b"));
  EXPECT_EQ(initial_value(b).to_double(), (std::vector<double>{0.05, -0.05}));
}

TEST(TrainingInfoTest, LearningRateInputFollowsTheRuntime) {
  // R and T are inputs of the algorithm here: --lr feeds the one, the step number the other.
  std::string step = kMomentumStep;
  const auto replace = [&](const std::string& from, const std::string& to) {
    step.replace(step.find(from), from.size(), to);
  };
  replace("(int64[batch] y)", "(int64[batch] y, double R, int64 T)");
  replace("double R = {0.125}, int64 T = {0}, int64 one = {1},\n", "");
  replace("  T_new = Add(T, one)\n", "");
  replace(", int64 T_new", "");
  const OnnxModel model = with_training_info(
      step, {{{"w", "w_new"}, {"b", "b_new"}, {"vw", "vw_new"}, {"vb", "vb_new"}}, {}});
  BindOptions options;
  options.batch = 6;
  testing::TrainingLoop theirs(testing::training_info_graph(model, options, true));
  testing::TrainingLoop wanted(ours(6));
  for (const double lr : {0.125, 0.0625, 0.25}) {
    theirs.step(micro_batches(6, "y"), lr);
    wanted.step(micro_batches(6, "labels"), lr);
  }
  const std::vector<double> a = theirs.value("w").to_double();
  const std::vector<double> b = wanted.value("w").to_double();
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_NEAR(a[i], b[i], 1e-12);
  }
}

std::string failure(const std::string& algorithm, const Bindings& bindings) {
  try {
    testing::training_info_graph(with_training_info(algorithm, bindings), {}, true);
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "accepted";
  return "";
}

TEST(TrainingInfoTest, RefusesWhatItCannotRun) {
  EXPECT_THAT(failure("step (int64[batch] y) => (double[3, 2] w_new)\n{ w_new = Add(w, w) }",
                      {{{"w", "w_new"}}, {}}),
              HasSubstr("no Gradient node"));
  std::string unbound = kMomentumStep;
  Bindings bindings = kMomentumBindings;
  bindings.update.erase(bindings.update.begin());
  EXPECT_THAT(failure(unbound, bindings), HasSubstr("'w'"));
  std::string elsewhere = kMomentumStep;
  elsewhere.replace(elsewhere.find("(w, b)"), 6, "(b, b)");
  EXPECT_THAT(failure(elsewhere, kMomentumBindings), HasSubstr("another point"));
  std::string mixed = kMomentumStep;
  mixed.replace(
      mixed.find("  T_new ="), 0, "  m = ReduceMax <keepdims = 0> (h)\n  n = Mul(m, v)\n");
  mixed.replace(mixed.find("(R, T, w, b,"), 5, "(n, T");
  mixed.replace(mixed.find("  w_new,"), 0, "  v = ReduceMax <keepdims = 0> (gw)\n");
  EXPECT_THAT(failure(mixed, kMomentumBindings), HasSubstr("one micro-batch"));
}

// A step that also keeps the exponential average of the batch's mean of h.
TEST(TrainingInfoTest, AStateMadeOfSamplesWantsThemInOneMicroBatch) {
  std::string step = kMomentumStep;
  const auto replace = [&](const std::string& from, const std::string& to) {
    step.replace(step.find(from), from.size(), to);
  };
  replace("int64 T_new)", "int64 T_new, double[2] M_new)");
  replace("int64 one = {1},", "int64 one = {1}, double[2] M = {1, 1}, double keep = {0.5},");
  replace("  T_new = Add(T, one)\n",
          "  T_new = Add(T, one)\n  kept = Mul(M, keep)\n"
          "  mean = ReduceMean <axes = [0], keepdims = 0> (h)\n  M_new = Add(kept, mean)\n");
  Bindings bindings = kMomentumBindings;
  bindings.update.emplace_back("M", "M_new");
  const OnnxModel model = with_training_info(step, bindings);
  BindOptions options;
  options.batch = 6;
  const TrainingGraph training = testing::training_info_graph(model, options, false);
  EXPECT_THAT(whole_batch_because(training.graph), HasSubstr("'M'"));
  const Graph& graph = training.graph;
  EXPECT_EQ(graph.value(*graph.find_value("M")).kind, ValueKind::kState);
  const Node& kept = graph.node(graph.value(*graph.find_value("kept")).producer);
  EXPECT_EQ(kept.region, Region::kForward);  // as the node that reads it with the mean
}

TEST(TrainingInfoTest, AnUpdateThatCountsSamplesWantsThemInOneMicroBatch) {
  std::string step = kMomentumStep;
  const auto replace = [&](const std::string& from, const std::string& to) {
    step.replace(step.find(from), from.size(), to);
  };
  replace("  w_new, b_new,",
          "  n = Size(y)\n  nd = Cast <to = 11> (n)\n  rate = Div(R, nd)\n  w_new, b_new,");
  replace("(R, T, w, b,", "(rate, T, w, b,");
  const OnnxModel model = with_training_info(step, kMomentumBindings);
  EXPECT_THAT(whole_batch_because(testing::training_info_graph(model, {}, true).graph),
              HasSubstr("number of samples"));
  const OnnxModel plain = with_training_info(kMomentumStep, kMomentumBindings);
  EXPECT_EQ(whole_batch_because(testing::training_info_graph(plain, {}, true).graph), "");
}

// At whatever size of micro-batches: numbers of the model are no numbers of samples.
TEST(TrainingInfoTest, TheLossIsToldAsOneOutsideWouldBe) {
  const auto described = [](const std::string& reduction, const std::string& rest) {
    std::string step = kMomentumStep;
    const std::string own =
        "loss = SoftmaxCrossEntropyLoss <reduction = \"mean\", ignore_index = -100> (scores, y)";
    step.replace(step.find(own),
                 own.size(),
                 concat("part = SoftmaxCrossEntropyLoss <reduction = \"",
                        reduction,
                        "\"> (scores, y)\n  six = Constant <value = double {6}> ()\n  ",
                        rest));
    const OnnxModel model = with_training_info(step, kMomentumBindings);
    BindOptions one, six;
    one.batch = 1;
    six.batch = 6;
    const ScalarLoss loss = loss_of_training_info(model, one);
    EXPECT_EQ(loss.warning, loss_of_training_info(model, six).warning);
    return loss;
  };
  const ScalarLoss sum = described("sum", "loss = Div(part, six)");
  EXPECT_TRUE(sum.sums_samples);
  EXPECT_THAT(sum.warning, HasSubstr("is a sum"));
  for (const char* rest :
       {"loss = Mul(part, six)", "q = ReduceSumSquare <keepdims = 0> (w)\n  loss = Add(part, q)"}) {
    const ScalarLoss mean = described("mean", rest);
    EXPECT_FALSE(mean.sums_samples) << rest;
    EXPECT_EQ(mean.warning, "") << rest;
  }
}

TEST(TrainingInfoTest, WhatIsUnsupportedIsNamedWhereGradientWantsIt) {
  std::string forward = kForward, step = kMomentumStep;
  const auto replace = [](std::string& text, const std::string& from, const std::string& to) {
    text.replace(text.find(from), from.size(), to);
  };
  replace(forward, "\"ai.onnx", "\"other\" : 1, \"ai.onnx");
  replace(forward, "  scores = Add(h, b)\n", "  scores = Add(h, b)\n  s = other.Mystery(x)\n");
  replace(step,
          "<xs = [\"w\", \"b\"], y = \"loss\"> (w, b)",
          "<xs = [\"w\", \"s\"], y = \"loss\"> (w)");
  const OnnxModel model = testing::with_training_info(forward.c_str(), step, kMomentumBindings);
  try {
    testing::training_info_graph(model, {}, true);
    FAIL() << "a gradient by the output of an unknown operator was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_THAT(error.message(), HasSubstr("Mystery"));
  }
}

// ---- Gradient in a graph that is only evaluated

TEST(OnnxGradientTest, DerivativeOfAProduct) {
  const OnnxModel model = OnnxModel::parse_text(R"(
<ir_version: 8, opset_import: ["" : 17, "ai.onnx.preview.training" : 1]>
main (float[2] a, float[2] b) => (float[2] d, float[2] da, float[2] db)
{
  c = Add(a, b)
  d = Mul(c, a)
  da, db = ai.onnx.preview.training.Gradient <xs = ["a", "b"], y = "d"> (a, b)
}
)");
  BindOptions options;
  options.batch = 2;
  const Graph graph = model.bind(options);
  const std::vector<Tensor> values =
      evaluate(graph,
               {{"a", Tensor::from<float>({1, 2}, {2})}, {"b", Tensor::from<float>({3, 5}, {2})}},
               graph.outputs());
  EXPECT_EQ(values[0].to_double(), (std::vector<double>{4, 14}));
  EXPECT_EQ(values[1].to_double(), (std::vector<double>{5, 9}));  // 2 a + b
  EXPECT_EQ(values[2].to_double(), (std::vector<double>{1, 2}));
}

}  // namespace
}  // namespace trainrt
