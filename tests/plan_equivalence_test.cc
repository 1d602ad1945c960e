// The test above all: whatever the plan, N ranks train as one device does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "graph/random.h"
#include "tests/support/model_writer.h"
#include "tests/support/plan_layout.h"
#include "tests/support/run_plan.h"

namespace trainrt::testing {
namespace {

constexpr int64_t kVocabulary = 12, kSequence = 4, kHidden = 8, kHeads = 4;

TrainingGraph train(Graph graph, DType dtype, Shape labels, bool accumulate, double clip_norm) {
  TrainingSpec spec;
  spec.loss.kind = "softmax_cross_entropy";
  spec.loss.output = graph.value(graph.outputs().at(0)).name;
  spec.loss.labels = "labels";
  spec.loss.labels_shape = std::move(labels);
  spec.accumulate = accumulate;
  // Closeness wants an update that is linear in the gradient; bits do not care.
  spec.optimizer.name = dtype == DType::kFloat64 ? "momentum" : "adamw";
  spec.optimizer.clip_norm = clip_norm;
  return build_training_graph(std::move(graph), spec);
}

struct Model {
  std::string name;
  TrainingGraphFactory factory;
  int num_nodes = 0;
  BatchFeeds feeds;
};

Tensor random_ints(uint64_t key, Shape shape, uint32_t below) {
  Tensor tensor(DType::kInt64, std::move(shape));
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    tensor.data<int64_t>()[i] = philox(key, static_cast<uint64_t>(i), 1)[0] % below;
  }
  return tensor;
}

constexpr int64_t kBatch = 12;

Model mlp(DType dtype, double clip_norm = 0) {
  Model model;
  model.name = "mlp";
  const auto write = [dtype](int64_t batch, Graph& graph) {
    ModelWriter m(graph, dtype);
    ValueId x = graph.add_input("x", {dtype, {batch, 10}}, 0);
    x = m.emit("Relu", {m.linear("a", x, 10, 16)});
    x = m.emit("Relu", {m.linear("b", x, 16, 16)});
    x = m.emit("Relu", {m.linear("c", x, 16, 16)});
    graph.outputs() = {m.linear("d", x, 16, 7)};
    return m.num_nodes();
  };
  Graph probe;
  model.num_nodes = write(1, probe);
  model.factory = [write, dtype, clip_norm](int64_t batch, bool accumulate) {
    Graph graph;
    write(batch, graph);
    return train(std::move(graph), dtype, {batch}, accumulate, clip_norm);
  };
  model.feeds = [dtype](int step) {
    Tensor x(DType::kFloat64, {kBatch, 10});
    for (int64_t i = 0; i < x.num_elements(); ++i) {
      const RandomBlock block =
          philox(99 + static_cast<uint64_t>(step), static_cast<uint64_t>(i), 0);
      x.data<double>()[i] = 2 * uniform_double(block[0], block[1]) - 1;
    }
    return std::map<std::string, Tensor>{
        {"x", x.cast(dtype)}, {"labels", random_ints(static_cast<uint64_t>(step), {kBatch}, 7)}};
  };
  return model;
}

// Attention over heads, a residual stream, a gain on it, and a head tied to the embedding.
Model gpt(DType dtype, double clip_norm = 0) {
  Model model;
  model.name = "gpt";
  const auto write = [dtype](int64_t batch, Graph& graph) {
    ModelWriter m(graph, dtype);
    const ValueId ids = graph.add_input("ids", {DType::kInt64, {batch, kSequence}}, 0);
    const ValueId embedding = m.parameter("embedding", {kVocabulary, kHidden});
    ValueId x = m.emit("Gather", {embedding, ids}, {{"axis", int64_t{0}}});
    const auto heads = [&](ValueId y) {
      y = m.emit("Reshape", {y}, {{"shape", Shape{batch, kSequence, kHeads, kHidden / kHeads}}});
      return m.emit("Transpose", {y}, {{"perm", Shape{0, 2, 1, 3}}});
    };
    for (int layer = 0; layer < 3; ++layer) {
      const std::string p = concat("layer", layer);
      const ValueId gained = m.emit("Mul", {x, m.parameter(p + ".gain", {kHidden})});
      const ValueId q = heads(m.linear(p + ".q", gained, kHidden, kHidden));
      const ValueId k = heads(m.linear(p + ".k", gained, kHidden, kHidden));
      const ValueId v = heads(m.linear(p + ".v", gained, kHidden, kHidden));
      const ValueId scores = m.emit("Exp", {m.emit("MatMul", {q, k}, {{"trans_b", int64_t{1}}})});
      const ValueId total =
          m.emit("ReduceSum", {scores}, {{"axes", Shape{3}}, {"keepdims", int64_t{1}}});
      ValueId mixed = m.emit("MatMul", {m.emit("Div", {scores, total}), v});
      mixed = m.emit("Transpose", {mixed}, {{"perm", Shape{0, 2, 1, 3}}});
      mixed = m.emit("Reshape", {mixed}, {{"shape", Shape{batch, kSequence, kHidden}}});
      x = m.emit("Add", {x, m.linear(p + ".out", mixed, kHidden, kHidden)});
      const ValueId wide = m.emit("Relu", {m.linear(p + ".up", x, kHidden, 4 * kHidden)});
      x = m.emit("Add", {x, m.linear(p + ".down", wide, 4 * kHidden, kHidden)});
    }
    graph.outputs() = {m.emit("MatMul", {x, embedding}, {{"trans_b", int64_t{1}}})};
    return m.num_nodes();
  };
  Graph probe;
  model.num_nodes = write(1, probe);
  model.factory = [write, dtype, clip_norm](int64_t batch, bool accumulate) {
    Graph graph;
    write(batch, graph);
    return train(std::move(graph), dtype, {batch, kSequence}, accumulate, clip_norm);
  };
  model.feeds = [](int step) {
    return std::map<std::string, Tensor>{
        {"ids", random_ints(50 + static_cast<uint64_t>(step), {kBatch, kSequence}, kVocabulary)},
        {"labels", random_ints(static_cast<uint64_t>(step), {kBatch, kSequence}, kVocabulary)}};
  };
  return model;
}

PlanRun run(const Model& model, const Layout& layout) {
  SCOPED_TRACE(model.name + " " + layout_string(layout));
  return run_plan(model.factory, plan_of(layout, kBatch, model.num_nodes), model.feeds);
}

class PlanEquivalenceTest : public ::testing::TestWithParam<const char*> {
 protected:
  Model model(DType dtype = DType::kFloat32, double clip_norm = 0) const {
    return std::string(GetParam()) == "mlp" ? mlp(dtype, clip_norm) : gpt(dtype, clip_norm);
  }
};

TEST_P(PlanEquivalenceTest, MicroBatchesTrainAsTheWholeBatch) {
  const PlanRun one = run(model(DType::kFloat64), {});
  EXPECT_GT(one.losses[0], one.losses[2]);
  for (const int64_t size : {1, 3, 5}) {
    expect_close(one,
                 run(model(DType::kFloat64), {.micro_batch = size}),
                 1e-9,
                 concat("micro-batches of ", size));
  }
}

TEST_P(PlanEquivalenceTest, PipelinesAndSchedulesGiveTheBitsOfOneDevice) {
  const Model m = model(DType::kFloat32, 0.5);
  const PlanRun one = run(m, {.micro_batch = 2});
  for (const ScheduleKind schedule :
       {ScheduleKind::kGPipe, ScheduleKind::k1F1B, ScheduleKind::kZeroBubbleH1}) {
    for (const int pp : {1, 2, 4}) {
      expect_equal_bits(one,
                        run(m, {.pp = pp, .micro_batch = 2, .schedule = schedule}),
                        concat(schedule_name(schedule), " pp=", pp));
    }
  }
  expect_equal_bits(
      one,
      run(m, {.pp = 2, .v = 2, .micro_batch = 2, .schedule = ScheduleKind::kInterleaved}),
      "interleaved");
  const PlanRun whole = run(m, {});
  expect_equal_bits(whole, run(m, {.pp = 3}), "pp=3 with one micro-batch");
}

TEST_P(PlanEquivalenceTest, RecomputationChangesNoBit) {
  const Model m = model();
  const PlanRun kept = run(m, {.micro_batch = 3});
  for (const RecomputeMode mode : {RecomputeMode::kSelective, RecomputeMode::kFull}) {
    expect_equal_bits(kept, run(m, {.micro_batch = 3, .recompute = mode}), recompute_name(mode));
    expect_equal_bits(kept,
                      run(m, {.pp = 2, .micro_batch = 3, .recompute = mode}),
                      concat("pp=2, ", recompute_name(mode)));
  }
}

// Wherever they begin and end.
TEST_P(PlanEquivalenceTest, RunsOfNodesHaveARecomputationOfTheirOwn) {
  const Model m = model();
  for (const int pp : {1, 2}) {
    const Layout layout{.pp = pp, .micro_batch = 4};
    const PlanRun none = run(m, layout);
    Plan plan = plan_of(layout, kBatch, m.num_nodes);
    for (PlanStage& stage : plan.stages) {
      const int first = stage.first_node, third = (stage.last_node - first) / 3;
      stage.recompute = RecomputeMode::kSelective;
      stage.recompute_runs = {{first, first + third, RecomputeMode::kFull},
                              {first + third + 1, first + 2 * third, RecomputeMode::kNone}};
    }
    plan = plan_from_json(plan_to_json(plan));
    EXPECT_EQ(plan.stages[0].recompute_runs.size(), 2u);
    expect_equal_bits(none, run_plan(m.factory, plan, m.feeds), concat("pp=", pp));
  }
}

TEST_P(PlanEquivalenceTest, DataRanksTrainAsOneDeviceWhateverTheirShares) {
  const Model m = model(DType::kFloat64, 0.5);
  const PlanRun one = run(m, {});
  for (const Layout& layout :
       std::vector<Layout>{{.dp = 2},
                           {.dp = 3, .micro_batch = 2},
                           {.dp = 2, .shares = {1, 2}},
                           {.dp = 3, .micro_batch = 2, .shares = {1, 4, 1}},
                           {.dp = 3, .shares = {1, 0, 1}},
                           {.dp = 2, .pp = 2, .micro_batch = 2, .shares = {1, 2}},
                           {.dp = 2, .pp = 2, .micro_batch = 4, .shares = {0, 1}}}) {
    expect_close(one, run(m, layout), 1e-9, concat("dp=", layout.dp, " pp=", layout.pp));
  }
}

// Gradients summed within the last backward are summed in the ranks' order all the same.
TEST_P(PlanEquivalenceTest, DataRanksThatSumInTheLastBackwardGiveTheSameBits) {
  const Model m = model();
  for (const std::vector<double>& shares : std::vector<std::vector<double>>{{}, {1, 2}, {1, 5}}) {
    const PlanRun one = run(m, {.dp = 2, .micro_batch = 2, .shares = shares});
    for (Layout layout : std::vector<Layout>{
             {.zero = 1},
             {.pp = 2},
             {.pp = 3, .schedule = ScheduleKind::kZeroBubbleH1, .zero = 1},
             {.pp = 2, .schedule = ScheduleKind::kGPipe, .recompute = RecomputeMode::kSelective},
             {.pp = 2, .v = 2, .schedule = ScheduleKind::kInterleaved},
             {.pp = 2, .v = 2, .schedule = ScheduleKind::kInterleaved, .zero = 1}}) {
      layout.dp = 2;
      layout.micro_batch = 2;
      layout.shares = shares;
      expect_equal_bits(one, run(m, layout), layout_string(layout));
    }
  }
}

TEST_P(PlanEquivalenceTest, MicroBatchesOfADataRankHaveASizeOfTheirOwn) {
  const Model m = model(DType::kFloat64, 0.5);
  const PlanRun one = run(m, {});
  for (const Layout& layout :
       std::vector<Layout>{{.dp = 2, .shares = {2, 1}, .sizes = {4, 2}},
                           {.dp = 2, .shares = {3, 1}, .sizes = {4, 3}},
                           {.dp = 3, .shares = {5, 1, 6}, .sizes = {2, 1, 3}, .zero = 1},
                           {.dp = 2, .shares = {2, 1}, .sizes = {4, 2}, .zero = 2},
                           {.dp = 2, .shares = {2, 1}, .sizes = {4, 2}, .zero = 3},
                           {.dp = 2, .tp = 2, .shares = {2, 1}, .sizes = {8, 2}},
                           {.dp = 2, .pp = 2, .shares = {2, 1}, .sizes = {2, 1}},
                           {.dp = 2,
                           .pp = 2,
                           .v = 2,
                           .shares = {1, 2},
                           .sizes = {1, 2},
                           .schedule = ScheduleKind::kInterleaved}}) {
    expect_close(one, run(m, layout), 1e-9, layout_string(layout));
  }
}

TEST_P(PlanEquivalenceTest, ZeroStagesTrainAsPlainDataParallel) {
  const Model m = model(DType::kFloat64, 0.5);
  const PlanRun plain = run(m, {.dp = 3, .micro_batch = 2});
  for (int zero = 1; zero <= 3; ++zero) {
    expect_close(
        plain, run(m, {.dp = 3, .micro_batch = 2, .zero = zero}), 1e-9, concat("zero ", zero));
    expect_close(
        plain, run(m, {.dp = 3, .zero = zero}), 1e-9, concat("zero ", zero, ", one micro-batch"));
    expect_close(plain,
                 run(m, {.dp = 3, .pp = 2, .micro_batch = 2, .zero = zero}),
                 1e-9,
                 concat("zero ", zero, " pp=2"));
  }
}

TEST_P(PlanEquivalenceTest, TensorRanksTrainAsOneDevice) {
  const Model m = model(DType::kFloat64, 0.5);
  const PlanRun one = run(m, {});
  for (const int tp : {2, 3, 4}) {
    expect_close(one, run(m, {.tp = tp}), 1e-9, concat("tp=", tp));
  }
  expect_close(one, run(m, {.tp = 2, .sequence_parallel = true}), 1e-9, "sequence parallel");
  expect_close(one, run(m, {.dp = 2, .tp = 2, .micro_batch = 3, .zero = 1}), 1e-9, "dp=2 tp=2");
  expect_close(one,
               run(m, {.tp = 2, .pp = 2, .micro_batch = 3, .recompute = RecomputeMode::kFull}),
               1e-9,
               "tp=2 pp=2");
}

INSTANTIATE_TEST_SUITE_P(Models,
                         PlanEquivalenceTest,
                         ::testing::Values("mlp", "gpt"),
                         [](const auto& tested) { return std::string(tested.param); });

}  // namespace
}  // namespace trainrt::testing
