// 2BW pipelines that go over from step to step: whatever is in flight between two steps, they train
// as those that drain, to the last bit, in the memory that is planned.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "parallel/memory_plan.h"
#include "runtime/device.h"
#include "tests/support/family_model.h"
#include "tests/support/plan_layout.h"
#include "tests/support/run_plan.h"

namespace trainrt::testing {
namespace {

constexpr int64_t kBatch = 13;
constexpr int kSteps = 5;

FamilyModel model_of(const std::string& family, const std::string& precision, double clip = 0) {
  OptimizerSpec spec;
  spec.name = "adamw";
  spec.clip_norm = clip;
  ModelSpec model = small_family(family);
  model.dropout = 0.1;
  return family_model(model, kBatch, precision, spec);
}

PlanRun run(const FamilyModel& model, Layout layout, std::function<bool(int)> drains_after) {
  layout.schedule = ScheduleKind::k2BW;
  RunOptions options;
  options.steps = kSteps;
  options.reference_kernels = false;
  options.drains_after = std::move(drains_after);
  return run_plan(model.factory, plan_of(layout, kBatch, model.num_nodes), model.feeds, options);
}

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all = {
      {.pp = 2, .micro_batch = 2},
      {.pp = 4, .micro_batch = 3, .recompute = RecomputeMode::kFull},
      {.dp = 2, .pp = 3, .micro_batch = 2, .zero = 1},
      {.dp = 2, .pp = 2, .micro_batch = 2, .shares = {1, 2}, .zero = 3},
      {.dp = 2, .pp = 2, .micro_batch = 2, .exact = true},
      {.tp = 2, .pp = 2, .micro_batch = 4}};
  return all;
}

TEST(RunOnTest, TrainsToTheBitAsPipelinesThatDrain) {
  for (const auto& [family, precision] :
       {std::pair("mlp", "fp32"), std::pair("gpt2", "fp32"), std::pair("gpt2", "bf16")}) {
    const FamilyModel model = model_of(family, precision);
    for (const Layout& layout : layouts()) {
      const std::string what = concat(family, " ", precision, " ", layout_string(layout));
      SCOPED_TRACE(what);
      const PlanRun drained = run(model, layout, [](int) { return true; });
      EXPECT_TRUE(drained.programs[0].runs_on());
      expect_equal_bits(drained, run(model, layout, nullptr), what);
      expect_equal_bits(drained, run(model, layout, [](int step) { return step == 2; }), what);
    }
  }
}

TEST(RunOnTest, RunningAveragesFollowTheForwards) {
  const FamilyModel model = model_of("cnn", "fp32");
  const Layout layout{.pp = 3, .micro_batch = 2};
  expect_equal_bits(
      run(model, layout, [](int) { return true; }), run(model, layout, nullptr), "cnn");
}

TEST(RunOnTest, TheNormLeavesTheUpdateAsItWas) {
  const FamilyModel free = model_of("gpt2", "fp32"), clipped = model_of("gpt2", "fp32", 1e9);
  for (const Layout& layout : layouts()) {
    const PlanRun drained = run(clipped, layout, nullptr);
    EXPECT_FALSE(drained.programs[0].runs_on());
    expect_equal_bits(drained, run(free, layout, nullptr), layout_string(layout));
  }
}

// Beside the slots, which are full when the update runs, lies what was over them.
TEST(RunOnTest, NothingLiesOverTheSlotsOfTheNextStep) {
  const FamilyModel model = model_of("gpt2", "fp32");
  Layout layout{.pp = 3, .micro_batch = 2};
  layout.schedule = ScheduleKind::k2BW;
  const std::vector<Program> programs =
      partition(model.factory,
                plan_of(layout, kBatch, model.num_nodes),
                std::vector<DeviceSpec>(3, cpu_device_spec(DeviceOptions{})));
  for (const Program& program : programs) {
    const int stage = program.coordinates.stage;
    EXPECT_EQ(program.num_ahead, 2 - stage);
    const MemoryPlan memory = plan_memory(program);
    const int64_t slots = memory.num_slots[0] * memory.slot_bytes[0];
    EXPECT_EQ(memory.transient_bytes,
              program.num_ahead > 0 ? slots + std::max(memory.stage_bytes[0], memory.step_bytes)
                                    : std::max(slots + memory.stage_bytes[0], memory.step_bytes));
  }
}

TEST(RunOnTest, DrainsWhereAllStagesDecideTogether) {
  const auto runs_on = [](const FamilyModel& model, Layout layout, const std::string& precision) {
    layout.schedule = ScheduleKind::k2BW;
    Plan plan = plan_of(layout, kBatch, model.num_nodes);
    plan.precision = precision;
    Partitioner partitioner(model.factory, plan);
    return partitioner.program(0, cpu_device_spec(DeviceOptions{})).runs_on();
  };
  const Layout two{.pp = 2, .micro_batch = 2}, four{.dp = 2, .pp = 2, .micro_batch = 2};
  EXPECT_TRUE(runs_on(model_of("mlp", "fp32"), two, "fp32"));
  EXPECT_FALSE(runs_on(model_of("mlp", "fp32"), {.micro_batch = 2}, "fp32"));
  EXPECT_FALSE(runs_on(model_of("mlp", "fp32", 1), two, "fp32"));
  EXPECT_FALSE(runs_on(model_of("mlp", "fp16"), two, "fp16"));
  EXPECT_TRUE(runs_on(model_of("cnn", "fp32"), two, "fp32"));
  EXPECT_FALSE(runs_on(model_of("cnn", "fp32"), four, "fp32"));
}

}  // namespace
}  // namespace trainrt::testing
