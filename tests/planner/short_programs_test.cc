// Memory told from the programs of a few blocks, against that of the whole model's programs.
#include "planner/short_programs.h"

#include <gtest/gtest.h>

#include "graph/passes/precision.h"
#include "parallel/micro_batches.h"
#include "planner/block_finder.h"
#include "tests/support/family_model.h"

namespace trainrt {
namespace {

struct ShortCase {
  const char* name;
  const char* family;
  const char* precision;
  int layers;
  Plan plan;              // degrees, schedule, batch, micro-batch size
  std::vector<int> cuts;  // first block of each virtual stage but the first; empty: even
  RecomputeMode recompute = RecomputeMode::kNone;
};

Plan layout(int data, int tensor, int pipeline, int v, ScheduleKind schedule, int zero) {
  Plan plan;
  plan.data_parallel = data;
  plan.tensor_parallel = tensor;
  plan.pipeline_parallel = pipeline;
  plan.virtual_stages = v;
  plan.schedule = schedule;
  plan.zero_stage = zero;
  return plan;
}

// The stages' nodes, from blocks of the forward graph.
void cut(const Graph& forward, const ShortCase& c, Plan* plan) {
  std::vector<int> last_source;
  for (const Block& block : find_blocks(forward).blocks) {
    last_source.push_back(last_source.empty() ? 0 : last_source.back());
    for (const NodeId id : block.forward) {
      last_source.back() = std::max(last_source.back(), forward.node(id).source_index);
    }
  }
  const int stages = plan->pipeline_parallel * plan->virtual_stages;
  const int blocks = static_cast<int>(last_source.size());
  for (int s = 0; s < stages; ++s) {
    const int end = s + 1 == stages  ? blocks
                    : c.cuts.empty() ? blocks * (s + 1) / stages
                                     : c.cuts[static_cast<size_t>(s)];
    PlanStage stage;
    stage.virtual_stage = s;
    stage.rank_stage = s % plan->pipeline_parallel;
    stage.first_node = s == 0 ? 0 : plan->stages.back().last_node + 1;
    stage.last_node = last_source[static_cast<size_t>(end) - 1];
    stage.recompute = c.recompute;
    plan->stages.push_back(stage);
  }
}

class ShortProgramsTest : public ::testing::TestWithParam<ShortCase> {};

TEST_P(ShortProgramsTest, TellTheMemoryOfTheWholes) {
  const ShortCase& c = GetParam();
  ModelSpec spec = testing::small_family(c.family);
  spec.layers = c.layers;
  spec.hidden = 64;
  spec.heads = 4;
  spec.kv_heads = 4;
  spec.ffn = 256;
  spec.seq = 80;
  spec.vocab = 101;
  Plan plan = c.plan;
  const int64_t size = std::max<int64_t>(1, plan.micro_batch_size);
  const testing::FamilyModel full = testing::family_model(spec, size, "fp32", OptimizerSpec{});
  const testing::FamilyModel own = testing::family_model(spec, size, c.precision, OptimizerSpec{});
  plan.micro_batch_size = size;
  plan.shares = make_shares(plan.global_batch, plan.data_parallel, size, {});
  cut(full.forward(size), c, &plan);
  const auto device = [](int) {
    DeviceSpec gpu;
    gpu.backend = Backend::kCuda;
    gpu.isa = "sm_80";
    return gpu;
  };
  const ProgramSource source = {
      [&](int64_t micro_batch) { return std::make_shared<const Graph>(full.forward(micro_batch)); },
      [&](Graph forward, int64_t micro_batch, bool accumulate) {
        return own.train(apply_precision(forward, c.precision), micro_batch, accumulate);
      }};
  const std::optional<std::vector<RankMemory>> found = short_program_memory(source, plan, device);
  ASSERT_TRUE(found.has_value());
  const std::vector<RankMemory>& ranks = *found;
  const std::vector<RankMemory> expected = ProgramMemory(own.factory, plan, device).all();
  ASSERT_EQ(ranks.size(), expected.size());
  for (size_t rank = 0; rank < expected.size(); ++rank) {
    EXPECT_EQ(ranks[rank].peak_bytes, expected[rank].peak_bytes) << "rank " << rank;
    EXPECT_EQ(ranks[rank].breakdown.total(), ranks[rank].peak_bytes) << "rank " << rank;
    EXPECT_EQ(ranks[rank].breakdown.parameters, expected[rank].breakdown.parameters);
    EXPECT_EQ(ranks[rank].breakdown.optimizer, expected[rank].breakdown.optimizer);
  }
}

Plan batch(Plan plan, int64_t global_batch, int64_t micro_batch) {
  plan.global_batch = global_batch;
  plan.micro_batch_size = micro_batch;
  return plan;
}

using enum ScheduleKind;

INSTANTIATE_TEST_SUITE_P(
    Layouts,
    ShortProgramsTest,
    ::testing::Values(
        ShortCase{"Pipeline", "gpt2", "bf16", 24, batch(layout(1, 1, 8, 1, k1F1B, 0), 10, 1), {}},
        ShortCase{"Unequal",
                  "gpt2",
                  "fp32",
                  16,
                  batch(layout(1, 1, 8, 1, kGPipe, 0), 4, 1),
                  {4, 8, 12, 16, 20, 24, 30},
                  RecomputeMode::kSelective},
        ShortCase{"TensorAndData",
                  "gpt2",
                  "bf16",
                  20,
                  batch(layout(2, 2, 8, 1, k1F1B, 1), 38, 2),
                  {},
                  RecomputeMode::kFull},
        ShortCase{"Interleaved",
                  "gpt2",
                  "bf16",
                  24,
                  batch(layout(1, 1, 2, 6, kInterleaved, 0), 6, 1),
                  {}},
        ShortCase{"InterleavedZero",
                  "gpt2",
                  "bf16",
                  32,
                  batch(layout(2, 2, 4, 4, kInterleaved, 2), 12, 1),
                  {}},
        ShortCase{"ZeroBubble",
                  "bert",
                  "fp16",
                  24,
                  batch(layout(1, 1, 8, 1, kZeroBubbleH1, 0), 9, 1),
                  {}},
        ShortCase{"Rotary",
                  "llama",
                  "bf16",
                  24,
                  batch(layout(1, 1, 8, 1, k1F1B, 0), 10, 1),
                  {},
                  RecomputeMode::kSelective},
        ShortCase{"Long", "gpt2", "bf16", 60, batch(layout(1, 1, 5, 1, k1F1B, 0), 8, 1), {}}),
    [](const auto& row) { return std::string(row.param.name); });

}  // namespace
}  // namespace trainrt
