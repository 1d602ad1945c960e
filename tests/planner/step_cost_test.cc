// Parts of a predicted step that no published row shows alone.
#include "planner/step_cost.h"

#include <gtest/gtest.h>

#include "parallel/cluster_file.h"
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
  const StepRequest request{&profile, &topology, &engine, "bf16", &layout};
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

}  // namespace
}  // namespace trainrt
