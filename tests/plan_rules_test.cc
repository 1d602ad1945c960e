// What single plan features promise beyond "the loss of one device": exact sums, synchronised
// BatchNorm, 2BW's rule, and memory to the byte.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "graph/evaluator.h"
#include "parallel/memory_plan.h"
#include "parallel/reduction_tree.h"
#include "runtime/device.h"
#include "runtime/executor.h"
#include "tests/support/family_model.h"
#include "tests/support/plan_layout.h"
#include "tests/support/run_plan.h"
#include "tests/support/training_loop.h"

namespace trainrt::testing {
namespace {

constexpr int64_t kBatch = 13;

FamilyModel small_model(const std::string& family,
                        const std::string& precision,
                        const std::string& optimizer,
                        double dropout = 0.1) {
  OptimizerSpec spec;
  spec.name = optimizer;
  spec.weight_decay = 0;
  ModelSpec model = small_family(family);
  model.dropout = dropout;
  return family_model(model, kBatch, precision, spec);
}

PlanRun run(const FamilyModel& model, const Layout& layout, int steps = 3) {
  RunOptions options;
  options.steps = steps;
  options.reference_kernels = false;
  return run_plan(model.factory, plan_of(layout, kBatch, model.num_nodes), model.feeds, options);
}

// ---- --reduction exact -------------------------------------------------------------------------

TEST(ReductionTreeTest, EveryCutOfTheShardsGivesTheTreeOfOneRank) {
  for (const int64_t shards : {1, 2, 5, 6, 8, 13}) {
    // Sums as text, which shows the order.
    const auto sum_of = [&](const std::vector<int64_t>& ranks) {
      std::vector<std::vector<MicroBatchCut>> cuts;
      std::vector<std::string> subtrees;
      int64_t next = 0;
      for (const int64_t count : ranks) {
        std::vector<MicroBatchCut>& own = cuts.emplace_back();
        for (int64_t i = 0; i < count; ++i, ++next) {
          own.push_back({next, 1, next});
        }
        const TreeAccumulation tree = accumulate_tree(own, shards);
        std::vector<std::string> slots(static_cast<size_t>(tree.num_slots));
        for (size_t m = 0; m < own.size(); ++m) {
          size_t slot = static_cast<size_t>(tree.slot[m]);
          EXPECT_EQ(tree.first[m], 1);
          slots[slot] = std::to_string(own[m].shard);
          for (int64_t merge = 0; merge < tree.merges[m]; ++merge, --slot) {
            slots[slot - 1] = "(" + slots[slot - 1] + "+" + slots[slot] + ")";
          }
        }
        slots.resize(static_cast<size_t>(tree.num_subtrees));
        subtrees.insert(subtrees.end(), slots.begin(), slots.end());
      }
      const std::vector<int64_t> merges = tree_sum_merges(cuts, shards);
      std::vector<std::string> stack;
      for (size_t j = 0; j < merges.size(); ++j) {
        stack.push_back(subtrees[j]);
        for (int64_t merge = 0; merge < merges[j]; ++merge) {
          const std::string right = stack.back();
          stack.pop_back();
          stack.back() = "(" + stack.back() + "+" + right + ")";
        }
      }
      EXPECT_EQ(stack.size(), 1u);
      return stack.empty() ? "" : stack[0];
    };
    const std::string one = sum_of({shards});
    for (int64_t a = 0; a <= shards; ++a) {
      for (int64_t b = 0; a + b <= shards; ++b) {
        EXPECT_EQ(sum_of({a, b, shards - a - b}), one) << a << " " << b << " of " << shards;
      }
    }
  }
}

TEST(ExactReductionTest, BitsDoNotDependOnDataRanksSharesOrZero) {
  for (const char* family : {"gpt2", "cnn"}) {
    const FamilyModel model = small_model(family, "fp32", "adamw");
    for (const int64_t shards : {5, 8}) {
      const PlanRun one = run(model, {.micro_batch = 2, .exact = true, .logical_shards = shards});
      for (Layout layout : std::vector<Layout>{{.dp = 2},
                                               {.dp = 3, .zero = 1},
                                               {.dp = 4, .zero = 2},
                                               {.dp = 2, .pp = 2, .zero = 3},
                                               {.dp = 2, .shares = {1, 3}, .zero = 1},
                                               {.dp = 3, .shares = {2, 0, 1}},
                                               {.dp = 3, .shares = {0, 1, 5}, .zero = 3}}) {
        layout.micro_batch = 2;
        layout.exact = true;
        layout.logical_shards = shards;
        expect_equal_bits(one, run(model, layout), concat(family, " ", layout_string(layout)));
      }
    }
  }
}

// ---- BatchNorm ---------------------------------------------------------------------------------

TEST(SyncBatchNormTest, DataRanksNormalizeAsOneBatch) {
  const FamilyModel model = small_model("cnn", "fp64", "momentum");
  const PlanRun one = run(model, {});
  for (const Layout& layout : std::vector<Layout>{{.dp = 2},
                                                  {.dp = 3, .shares = {1, 2, 4}},
                                                  {.dp = 3, .shares = {1, 0, 1}, .zero = 3},
                                                  {.dp = 2, .tp = 2},
                                                  {.dp = 4, .pp = 2, .zero = 1}}) {
    Layout synced = layout;
    synced.sync_batch_norm = true;
    expect_close(one, run(model, synced), 1e-9, layout_string(synced));
    // Local statistics are others, or the test would show nothing.
    EXPECT_NE(one.losses[1], run(model, layout).losses[1]) << layout_string(layout);
  }
}

// ---- 2BW ---------------------------------------------------------------------------------------

TEST(TwoVersionsTest, TrainByTheDelayedRuleOfOneDevice) {
  const FamilyModel model = small_model("mlp", "fp64", "sgd", 0);
  constexpr int kSteps = 4;
  constexpr double kRate = 0.05;
  // W(t+1) = W(t) - (W(t-1) - plain step from W(t-1)), with W(-1) = W(0).
  TrainingLoop loop(model.factory(kBatch, true));
  std::map<std::string, Tensor> now, before;
  for (const std::string& name : loop.training().parameters) {
    const std::optional<ValueId> id = loop.training().graph.find_value(name);
    now[name] = before[name] = initial_value(loop.training().graph.value(*id));
  }
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    for (const auto& [name, tensor] : before) {
      loop.set_value(name, tensor);
    }
    losses.push_back(loop.step({model.feeds(step)}, kRate).loss);
    for (auto& [name, tensor] : now) {
      const Tensor stepped = loop.value(name);
      Tensor next(DType::kFloat64, tensor.shape());
      for (int64_t i = 0; i < next.num_elements(); ++i) {
        next.data<double>()[i] =
            tensor.data<double>()[i] - before[name].data<double>()[i] + stepped.data<double>()[i];
      }
      before[name] = tensor;
      tensor = next;
    }
  }
  for (const Layout& layout : std::vector<Layout>{
           {.micro_batch = 3}, {.pp = 2, .micro_batch = 2}, {.dp = 2, .pp = 3, .micro_batch = 2}}) {
    Layout delayed = layout;
    delayed.schedule = ScheduleKind::k2BW;
    const PlanRun result = run(model, delayed, kSteps);
    for (int step = 0; step < kSteps; ++step) {
      EXPECT_NEAR(result.losses[static_cast<size_t>(step)], losses[static_cast<size_t>(step)], 1e-9)
          << layout_string(delayed) << ", step " << step;
    }
    for (const auto& [name, tensor] : now) {
      const Tensor& trained = result.persistent.at(name);
      for (int64_t i = 0; i < tensor.num_elements(); ++i) {
        ASSERT_NEAR(trained.data<double>()[i], tensor.data<double>()[i], 1e-9) << name;
      }
    }
  }
}

// ---- memory ------------------------------------------------------------------------------------

TEST(MemoryLimitTest, TheLimitOfThePeakRunsAndOneByteLessIsRefusedBeforeTheFirstStep) {
  const FamilyModel model = small_model("bert", "fp32", "adamw");
  for (const Layout& layout : std::vector<Layout>{{.micro_batch = 2},
                                                  {.pp = 3, .micro_batch = 2},
                                                  {.dp = 2, .micro_batch = 2, .zero = 3},
                                                  {.micro_batch = 2, .offload = true}}) {
    const Plan plan = plan_of(layout, kBatch, model.num_nodes);
    const std::vector<Program> programs =
        partition(model.factory,
                  plan,
                  std::vector<DeviceSpec>(static_cast<size_t>(plan.world_size()),
                                          cpu_device_spec(DeviceOptions{})));
    for (const Program& program : programs) {
      const MemoryPlan memory = plan_memory(program);
      for (const int64_t missing : {0, 1}) {
        DeviceOptions options;
        options.memory_limit = memory.arena_bytes - missing;
        const std::unique_ptr<Device> device = make_cpu_device(program.rank, options);
        Executor executor(*device, {}, {"input_ids", "token_type_ids", "labels"});
        executor.add_program(std::make_shared<Program>(program), memory);
        if (missing == 0) {
          EXPECT_NO_THROW(executor.load()) << layout_string(layout);
          continue;
        }
        try {
          executor.load();
          ADD_FAILURE() << layout_string(layout) << " ran in a byte less than it needs";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kInfeasiblePlan);
          EXPECT_THAT(error.what(), ::testing::HasSubstr("short by 1"));
        }
      }
    }
  }
}

TEST(OffloadTest, OptimizerStateLeavesTheDeviceAndChangesNoBit) {
  const FamilyModel model = small_model("gpt2", "fp32", "adamw");
  const Layout kept{.dp = 2, .micro_batch = 2};
  Layout offloaded = kept;
  offloaded.offload = true;
  const PlanRun a = run(model, kept), b = run(model, offloaded);
  expect_equal_bits(a, b, "offload");
  for (size_t rank = 0; rank < a.programs.size(); ++rank) {
    const MemoryPlan with = plan_memory(b.programs[rank]), without = plan_memory(a.programs[rank]);
    EXPECT_GT(with.host_bytes, 0);
    EXPECT_EQ(with.breakdown.optimizer, 0);
    EXPECT_EQ(with.host_bytes, without.breakdown.optimizer);
    EXPECT_EQ(with.arena_bytes + with.host_bytes, without.arena_bytes);
  }
}

}  // namespace
}  // namespace trainrt::testing
