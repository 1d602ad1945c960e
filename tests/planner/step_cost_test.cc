// Parts of a predicted step that no published row shows alone.
#include "planner/step_cost.h"

#include <gtest/gtest.h>

#include "parallel/cluster_file.h"
#include "parallel/communicator_memory.h"
#include "planner/stage_partition.h"
#include "planner/step_memory.h"
#include "planner/transformer_profile.h"

namespace trainrt {
namespace {

TEST(StepMemoryTest, SlotsAreThoseOfTheSchedule) {
  for (const ScheduleKind kind :
       {ScheduleKind::k1F1B, ScheduleKind::kGPipe, ScheduleKind::kInterleaved}) {
    for (int p = 1; p <= 9; ++p) {
      for (int m = 1; m <= 40; ++m) {
        for (int v = 1; v <= (kind == ScheduleKind::kInterleaved && p > 1 ? 5 : 1); ++v) {
          const Schedule schedule = make_schedule(kind, p, m, v);
          Layout layout;
          layout.schedule = kind;
          layout.pipeline = p;
          layout.virtual_stages = v;
          for (int s = 0; s < p * v; ++s) {
            ASSERT_EQ(num_slots(layout, s, m), max_in_flight(schedule, s))
                << schedule_name(kind) << " p " << p << " m " << m << " v " << v << " s " << s;
          }
        }
      }
    }
  }
}

// Seconds that the gradients of a GPT with a tied head take, without data parallelism: the sum of
// the first and the last stage's copies of the embedding.
double tied_seconds(const Topology& topology, const Engine& engine, int tensor, int pipeline) {
  TransformerShape shape;
  shape.layers = 16;
  shape.hidden = 1024;
  shape.heads = 16;
  shape.kv_heads = 16;
  shape.ffn = 4096;
  shape.seq = 1024;
  shape.vocab = 51200;
  const ModelProfile profile = transformer_profile(shape, engine, 1, tensor, false);
  Layout layout;
  layout.tensor = tensor;
  layout.pipeline = pipeline;
  layout.num_micro_batches = {pipeline};
  layout.first_block = even_cuts(profile.num_blocks(), pipeline);
  const StepRequest request{&profile, {}, &topology, &engine, "bf16", &layout};
  return predict_step(request).breakdown.gradients;
}

TEST(StepCostTest, PairsOfTiedCopiesShareTheNetworkWithTheirLikeOnly) {
  const Topology topology = make_preset("dgx-a100:2");
  const Engine engine = find_engine("megatron");
  const auto expected = [&](int tensor, int last, int pairs) {
    const double bytes = engine.reduce_bytes * 51200 * 1024 / tensor;
    return collective_time(
               Collective::kAllReduce, bytes, group_links(topology, {0, last}, pairs), "ampere")
        .seconds;
  };
  EXPECT_DOUBLE_EQ(tied_seconds(topology, engine, 1, 16), expected(1, 15, 1));
  EXPECT_DOUBLE_EQ(tied_seconds(topology, engine, 4, 4), expected(4, 12, 4));
  EXPECT_DOUBLE_EQ(tied_seconds(topology, engine, 8, 2), expected(8, 8, 8));
}

// Two blocks with a BatchNorm each, on the four data ranks of one host.
class DataRanksTest : public ::testing::Test {
 protected:
  DataRanksTest() {
    BlockClass block;
    block.forward.stream(1e8);
    block.forward.statistics_bytes = {4096};
    block.input_grad.stream(2e8);
    block.input_grad.statistics_bytes = {8192};
    block.parameters = 3e6;
    profile_.classes = {block};
    profile_.blocks = {0, 0};
    layout_.data = 4;
    layout_.num_micro_batches = {3};
    layout_.first_block = {0};
  }

  StepPrediction predict() const {
    return predict_step({&profile_, {}, &topology_, &engine_, "bf16", &layout_});
  }
  double collective(Collective kind, double bytes) const {
    return collective_time(kind, bytes, group_links(topology_, {0, 1, 2, 3}, 1), "ampere").seconds;
  }

  const Topology topology_ =
      parse_cluster("hosts:\n  - {count: 1, devices: [{count: 4, type: a100-80gb-sxm}]}\n", "test");
  const Engine engine_ = find_engine("megatron");
  ModelProfile profile_;
  Layout layout_;
};

TEST_F(DataRanksTest, SynchronisedStatisticsAreSummedInEveryMicroBatch) {
  const StepPrediction local = predict();
  layout_.sync_batch_norm = true;
  const StepPrediction synced = predict();
  const double sums =
      3 * 2 * (collective(Collective::kAllReduce, 4096) + collective(Collective::kAllReduce, 8192));
  EXPECT_NEAR(synced.breakdown.gradients - local.breakdown.gradients, sums, 0.1 * sums);
  EXPECT_NEAR(synced.seconds - local.seconds, sums, 0.1 * sums);
}

TEST_F(DataRanksTest, RoomForCommunicatorsIsKeptOnGpus) {
  EXPECT_EQ(predict().stages[0].reserved_bytes,
            topology_.reserved_bytes(0) + communicator_bytes(layout_.data, 1, 1));
  EXPECT_GT(communicator_bytes(layout_.data, 1, 1), 0);
  EXPECT_EQ(reserved_bytes(make_preset("cpu:4"), layout_, 0),
            make_preset("cpu:4").reserved_bytes(0));
}

TEST_F(DataRanksTest, AnExactReductionExchangesSubtreesOfTheLogicalShards) {
  layout_.exact = exact_sums(/*global_batch=*/24, 4, /*micro_batch=*/2, /*logical_shards=*/12);
  // Shards 0 1 2 | 3 4 5 | 6 7 8 | 9 10 11: [0 1] 2 | 3 [4 5] | [6 7] 8 | 9 [10 11].
  EXPECT_EQ(layout_.exact.own, 2);
  EXPECT_EQ(layout_.exact.exchanged, 8);
  const double bytes = engine_.reduce_bytes * 6e6;
  const auto sum_of = [&](double subtrees, int pieces) {
    return CostModel(topology_.type_of(0), "bf16")
        .stream_seconds((subtrees + 1) * bytes / pieces, 0);
  };
  EXPECT_DOUBLE_EQ(predict().breakdown.gradients,
                   collective(Collective::kAllGather, 8 * bytes) + sum_of(8, 1));
  const int64_t all = predict().stages[0].breakdown.gradients;
  layout_.zero_stage = 2;
  EXPECT_DOUBLE_EQ(predict().breakdown.gradients,
                   collective(Collective::kAllToAll, 2 * bytes) + sum_of(8, 4));
  // Whole sums are kept for each open subtree, whatever ZeRO cuts.
  EXPECT_EQ(predict().stages[0].breakdown.gradients, all);
  EXPECT_EQ(all, static_cast<int64_t>(layout_.exact.held * engine_.gradient_bytes * 6e6));
}

}  // namespace
}  // namespace trainrt
