// What the step changes beside its weights is the same on every rank that has a copy of it, and the
// same whatever the plan.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>

#include "graph/random.h"
#include "tests/support/plan_layout.h"
#include "tests/support/run_plan.h"
#include "tests/support/training_info_model.h"

namespace trainrt::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kBatch = 12;

std::map<std::string, Tensor> feeds(int step) {
  Tensor x(DType::kFloat64, {kBatch, 3});
  Tensor y(DType::kInt64, {kBatch});
  for (int64_t i = 0; i < x.num_elements(); ++i) {
    const RandomBlock block = philox(7 + static_cast<uint64_t>(step), static_cast<uint64_t>(i), 0);
    x.data<double>()[i] = 2 * uniform_double(block[0], block[1]) - 1;
  }
  for (int64_t i = 0; i < kBatch; ++i) {
    y.data<int64_t>()[i] = (i + step) % 2;
  }
  return {{"x", x}, {"y", y}};
}

// ---- States of a training_info

constexpr int kNodes = 5;
constexpr const char* kForward = R"(
<ir_version: 8, opset_import: ["" : 17, "ai.onnx.preview.training" : 1]>
main (double[batch, 3] x) => (double[batch, 2] scores)
<double[3, 4] w1 = {0.1, -0.2, 0.3, 0.4, -0.5, 0.6, 0.7, 0.2, -0.1, 0.5, 0.3, -0.4},
 double[4, 2] w2 = {0.3, -0.6, 0.2, 0.1, -0.7, 0.4, 0.5, 0.8}, double c = {1.5}>
{
  a = MatMul(x, w1)
  b = Mul(a, c)
  d = Tanh(b)
  e = MatMul(d, w2)
  scores = Mul(e, c)
}
)";

// R and c shrink and are read in all stages, c by the forward; s comes from the last stage's
// gradient and is read in the first; p holds what w2 was.
constexpr const char* kStep = R"(
step (int64[batch] y) => (double loss, double[3, 4] w1_new, double[4, 2] w2_new, double R_new,
                          double c_new, double s_new, double[4, 2] p_new)
<double R = {0.5}, double c_keep = {0.9}, double R_keep = {0.75}, double s = {0},
 double[4, 2] p = {0, 0, 0, 0, 0, 0, 0, 0}, double small = {0.1}>
{
  loss = SoftmaxCrossEntropyLoss (scores, y)
  g1, g2 = ai.onnx.preview.training.Gradient <xs = ["w1", "w2"], y = "loss"> (w1, w2)
  R_new = Mul(R, R_keep)
  c_new = Mul(c, c_keep)
  total = ReduceMax <keepdims = 0> (g2)
  s_new = Add(s, total)
  p_new = Identity(w2)
  g1s = Add(g1, s)
  d1 = Mul(g1s, R)
  w1_new = Sub(w1, d1)
  ps = Mul(p, small)
  g2p = Add(g2, ps)
  d2 = Mul(g2p, R)
  w2_new = Sub(w2, d2)
}
)";

TrainingGraphFactory factory_of(std::shared_ptr<const OnnxModel> model) {
  return [model](int64_t batch, bool accumulate) {
    BindOptions options;
    options.batch = batch;
    return training_info_graph(*model, options, accumulate);
  };
}

std::string with(std::string text, const std::string& from, const std::string& to) {
  return text.replace(text.find(from), from.size(), to);
}

TEST(StatePlansTest, EveryCopyOfAStateIsUpdated) {
  const Bindings bindings = {{{"w1", "w1_new"},
                              {"w2", "w2_new"},
                              {"R", "R_new"},
                              {"c", "c_new"},
                              {"s", "s_new"},
                              {"p", "p_new"}},
                             {}};
  const TrainingGraphFactory factory =
      factory_of(std::make_shared<const OnnxModel>(with_training_info(kForward, kStep, bindings)));
  const PlanRun one = run_plan(factory, plan_of({}, kBatch, kNodes), feeds);
  EXPECT_NEAR(one.persistent.at("R").to_double()[0], 0.5 * 0.75 * 0.75 * 0.75, 1e-15);
  EXPECT_NEAR(one.persistent.at("c").to_double()[0], 1.5 * 0.9 * 0.9 * 0.9, 1e-15);
  for (const Layout& layout :
       {Layout{.micro_batch = 4},
        Layout{.pp = 2, .micro_batch = 4},
        Layout{.pp = 3, .micro_batch = 12},
        Layout{.pp = 2, .v = 2, .micro_batch = 3, .schedule = ScheduleKind::kInterleaved},
        Layout{.pp = 2, .micro_batch = 4, .schedule = ScheduleKind::kZeroBubbleH1},
        Layout{.pp = 2, .micro_batch = 4, .recompute = RecomputeMode::kFull},
        Layout{.dp = 2, .pp = 2, .micro_batch = 3, .zero = 1},
        Layout{.dp = 2, .micro_batch = 3, .zero = 3},
        Layout{.tp = 2, .micro_batch = 4}}) {
    const PlanRun ranks = run_plan(factory, plan_of(layout, kBatch, kNodes), feeds);
    expect_close(ranks, one, 1e-12, layout_string(layout));
  }
  // The forward reads c as the step before has left it, so a step's pipeline drains.
  const Plan plan =
      plan_of({.pp = 2, .micro_batch = 4, .schedule = ScheduleKind::k2BW}, kBatch, kNodes);
  const PlanRun delayed = run_plan(factory, plan, feeds);
  EXPECT_FALSE(delayed.programs[0].runs_on());
  EXPECT_EQ(delayed.persistent.at("R").to_double(), one.persistent.at("R").to_double());
}

TEST(StatePlansTest, AnUpdateByTheNumberOfSamplesIsNotCut) {
  const std::string step =
      with(with(kStep,
                "R_new = Mul(R, R_keep)",
                "n = Size(y)\n  nd = Cast <to = 11> (n)\n  R_new = Div(R, nd)"),
           ", double R_keep = {0.75}",
           "");
  const TrainingGraphFactory factory =
      factory_of(std::make_shared<const OnnxModel>(with_training_info(
          kForward, step, {{{"w1", "w1_new"}, {"w2", "w2_new"}, {"R", "R_new"}}, {}})));
  const Layout whole{.pp = 2, .micro_batch = kBatch};
  const PlanRun run = run_plan(factory, plan_of(whole, kBatch, kNodes), feeds, {.steps = 1});
  EXPECT_NEAR(run.persistent.at("R").to_double()[0], 0.5 / kBatch, 1e-15);
  for (const Layout& layout : {Layout{.micro_batch = 4}, Layout{.dp = 2}}) {
    const Plan plan = plan_of(layout, kBatch, kNodes);
    try {
      partition(factory, plan, std::vector<DeviceSpec>(static_cast<size_t>(plan.world_size())));
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInfeasiblePlan);
      EXPECT_THAT(error.what(), HasSubstr("--micro-batch-size 12"));
    }
  }
}

// ---- A BatchNormalization that is used twice

constexpr const char* kSiamese = R"(
<ir_version: 8, opset_import: ["" : 17]>
main (double[batch, 3] x) => (double[batch, 2] scores)
<double[3] scale = {1, 2, 3}, double[3] bias = {0, 0.5, 1}, double[3] mean = {0, 0, 0},
 double[3] var = {1, 1, 1}, double[3, 2] w = {0.3, -0.6, 0.2, 0.1, -0.7, 0.4}>
{
  a, a_mean, a_var = BatchNormalization <training_mode = 1> (x, scale, bias, mean, var)
  x2 = Add(x, x)
  b, b_mean, b_var = BatchNormalization <training_mode = 1> (x2, scale, bias, mean, var)
  c = Mul(a, b)
  scores = MatMul(c, w)
}
)";

TrainingGraphFactory classifier(const char* text) {
  const auto model = std::make_shared<const OnnxModel>(OnnxModel::parse_text(text));
  return [model](int64_t batch, bool accumulate) {
    BindOptions options;
    options.batch = batch;
    TrainingSpec spec;
    spec.loss.kind = "softmax_cross_entropy";
    spec.loss.output = "scores";
    spec.loss.labels = "y";
    spec.loss.labels_shape = {batch};
    spec.optimizer.name = "sgd";
    spec.optimizer.weight_decay = 0;
    spec.accumulate = accumulate;
    return build_training_graph(model->bind(options), spec);
  };
}

TEST(StatePlansTest, TheSecondUseOfABatchNormAveragesBehindTheFirst) {
  const TrainingGraphFactory factory = classifier(kSiamese);
  const PlanRun one = run_plan(factory, plan_of({}, kBatch, kNodes), feeds, {.steps = 1});
  const Tensor x = feeds(0).at("x");
  for (int64_t c = 0; c < 3; ++c) {
    double mean = 0;
    for (int64_t i = 0; i < kBatch; ++i) {
      mean += x.data<double>()[3 * i + c] / kBatch;
    }
    EXPECT_NEAR(one.persistent.at("mean").to_double()[static_cast<size_t>(c)],
                0.9 * 0.1 * mean + 0.1 * 2 * mean,
                1e-14);
  }
  const PlanRun cut = run_plan(factory, plan_of({.micro_batch = 3}, kBatch, kNodes), feeds);
  for (const Layout& layout :
       {Layout{.pp = 2, .micro_batch = 3},
        Layout{.pp = 2, .v = 2, .micro_batch = 3, .schedule = ScheduleKind::kInterleaved},
        Layout{.pp = 2, .micro_batch = 3, .recompute = RecomputeMode::kFull},
        Layout{.dp = 2, .micro_batch = 3},
        Layout{.dp = 2, .pp = 2, .micro_batch = 3, .zero = 1}}) {
    const PlanRun ranks = run_plan(factory, plan_of(layout, kBatch, kNodes), feeds);
    expect_close(ranks, cut, 1e-12, layout_string(layout));
  }
  const Layout synced{.dp = 2, .sync_batch_norm = true};
  const PlanRun whole = run_plan(factory, plan_of({}, kBatch, kNodes), feeds);
  expect_close(run_plan(factory, plan_of(synced, kBatch, kNodes), feeds), whole, 1e-12, "sync");
}

// float16 skips a step whose loss or gradient is not finite. Nothing of it enters the running
// statistics: what two skipped steps leave behind is what the steps around them do alone.
TEST(StatePlansTest, ASkippedStepLeavesRunningStatisticsAsTheyWere) {
  const char* const text = R"(
<ir_version: 8, opset_import: ["" : 17]>
main (double[batch, 3] x) => (double[batch, 2] scores)
<double[3, 4] v = {0.1, -0.2, 0.3, 0.4, -0.5, 0.6, 0.7, 0.2, -0.1, 0.5, 0.3, -0.4},
 double[4] scale = {1, 2, 3, 1}, double[4] bias = {0, 0.5, 1, 0}, double[4] mean = {0, 0, 0, 0},
 double[4] var = {1, 1, 1, 1}, double[4, 2] w = {0.3, -0.6, 0.2, 0.1, -0.7, 0.4, 0.5, 0.8}>
{
  a = MatMul(x, v)
  b, b_mean, b_var = BatchNormalization <training_mode = 1> (a, scale, bias, mean, var)
  c = Tanh(b)
  scores = MatMul(c, w)
}
)";
  const auto fed = [](int step) {
    std::map<std::string, Tensor> inputs = feeds(step == 3 ? 1 : step);
    if (step == 2) {  // the forward overflows, on one rank
      inputs.at("x").data<double>()[4] = std::numeric_limits<double>::infinity();
    }
    return inputs;
  };
  const auto scale = [](int step) { return step == 1 ? 1e300 : 1.0; };  // the gradient does
  for (const char* model : {text, kSiamese}) {
    const TrainingGraphFactory factory = classifier(model);
    const int nodes = model == text ? 4 : kNodes;
    for (const Layout& layout :
         {Layout{},
          Layout{.micro_batch = 3},
          Layout{.micro_batch = 5},
          Layout{.pp = 2, .micro_batch = 3},
          Layout{.pp = 2, .micro_batch = 3, .schedule = ScheduleKind::kZeroBubbleH1},
          Layout{.pp = 2, .v = 2, .micro_batch = 3, .schedule = ScheduleKind::kInterleaved},
          Layout{.dp = 2, .micro_batch = 3},
          Layout{.dp = 2, .micro_batch = 3, .zero = 1},
          Layout{.dp = 2, .micro_batch = 3, .zero = 3},
          Layout{.dp = 2, .micro_batch = 3, .exact = true, .logical_shards = 4},
          Layout{.dp = 2, .pp = 2, .micro_batch = 3},
          Layout{.dp = 2, .sync_batch_norm = true},
          Layout{.dp = 2, .micro_batch = 2, .shares = {2, 1}, .sync_batch_norm = true},
          Layout{.tp = 2, .micro_batch = 3}}) {
      Plan plan = plan_of(layout, kBatch, nodes);
      const PlanRun wide = run_plan(factory, plan, feeds, {.steps = 2});
      plan.precision = "fp16";
      const PlanRun two = run_plan(factory, plan, feeds, {.steps = 2});
      expect_equal_bits(two, wide, layout_string(layout) + ", no step skipped");
      const PlanRun skipped = run_plan(factory, plan, fed, {.steps = 4, .loss_scale = scale});
      EXPECT_FALSE(std::isfinite(skipped.grad_norms[1])) << layout_string(layout);
      EXPECT_FALSE(std::isfinite(skipped.losses[2])) << layout_string(layout);
      for (const auto& [name, tensor] : two.persistent) {
        EXPECT_TRUE(identical(skipped.persistent.at(name), tensor))
            << name << ", " << layout_string(layout);
      }
    }
  }
}

}  // namespace
}  // namespace trainrt::testing
