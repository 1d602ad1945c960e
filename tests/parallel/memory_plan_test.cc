// Storage is shared only where nobody can notice.
#include "parallel/memory_plan.h"

#include <gtest/gtest.h>

#include "graph/graph_builder.h"

namespace trainrt {
namespace {

// One forward phase over the whole graph, one micro-batch.
Program single_phase(Graph graph) {
  Program program;
  ProgramVariant variant;
  variant.micro_batch_size = 1;
  Phase phase;
  for (NodeId id = 0; id < graph.num_nodes(); ++id) {
    phase.nodes.push_back(id);
  }
  phase.fetches = graph.outputs();
  variant.graph = std::move(graph);
  variant.phases = {phase};
  program.variants.push_back(std::move(variant));
  program.micro_batches = {{0, 0, 1}};
  program.cells = {{PhaseKind::kForward, 0, 0}};
  return program;
}

// a + b may be written over a or over b; taking both would make a and b one tensor.
TEST(MemoryPlanTest, AnOperatorThatMayOverwriteEitherInputKeepsThemApart) {
  Graph graph;
  const TensorType type = {DType::kFloat32, {1024}};
  const ValueId x = graph.add_input("x", type, 0);
  GraphBuilder builder(graph);
  const ValueId a = builder.op("Exp", {x});
  const ValueId b = builder.op("Tanh", {x});
  const ValueId sum = builder.add(a, b);
  graph.outputs().push_back(sum);
  const MemoryPlan plan = plan_memory(single_phase(graph));
  const std::vector<TensorAddress>& at = plan.variants.at(0).values;
  const auto address = [&](ValueId id) { return at[static_cast<size_t>(id)].offset; };
  EXPECT_NE(address(a), address(b));
  EXPECT_TRUE(address(sum) == address(a) || address(sum) == address(b));
}

// A GPU copies what it sends: two copies of a tensor for another rank, of one for itself as many as
// wait at once.
TEST(MemoryPlanTest, GpusHaveRoomForCopiesOfMessages) {
  constexpr int64_t kBytes = 4096;
  Graph graph;
  const TensorType type = {DType::kFloat32, {kBytes / 4}};
  const ValueId x = graph.add_input("x", type, 0);
  GraphBuilder builder(graph);
  const auto message = [](int64_t peer, int64_t tag) {
    return Attributes{{"group", std::string("pipeline")}, {"peer", peer}, {"tag", tag}};
  };
  builder.node("Send", {x}, message(1, 3), "to_other");
  builder.node("Send", {x}, message(0, 4), "to_itself");
  Attributes received = message(0, 4);
  received.set("shape", type.shape);
  received.set("dtype", std::string("float32"));
  builder.node("Recv", {}, received, "from_itself");

  Program program;
  ProgramVariant variant;
  variant.micro_batch_size = 1;
  variant.graph = std::move(graph);
  variant.phases = {{PhaseKind::kForward, 0, {0, 1}, {x}, {}},
                    {PhaseKind::kBackward, 0, {2}, {}, {}}};
  program.variants.push_back(std::move(variant));
  program.micro_batches = {{0, 0, 1}, {0, 1, 1}, {0, 2, 1}};
  for (const PhaseKind phase : {PhaseKind::kForward, PhaseKind::kBackward}) {
    for (const int micro_batch : {0, 1, 2}) {
      program.cells.push_back({phase, 0, micro_batch});
    }
  }
  EXPECT_EQ(plan_memory(program).message_bytes, 0);
  program.device.backend = Backend::kCuda;
  const MemoryPlan plan = plan_memory(program);
  EXPECT_EQ(plan.message_bytes, (2 + 3) * kBytes);
  EXPECT_GE(plan.breakdown.communication, plan.message_bytes);
  EXPECT_EQ(plan.breakdown.total(), plan.arena_bytes);
  const TensorAddress &other = plan.variants[0].workspaces[0],
                      &itself = plan.variants[0].workspaces[1];
  EXPECT_EQ(other.region, ArenaRegion::kPersistent);
  EXPECT_EQ(itself.region, ArenaRegion::kPersistent);
  EXPECT_EQ(other.bytes, 2 * kBytes);
  EXPECT_EQ(itself.bytes, 3 * kBytes);
  EXPECT_TRUE(other.offset + other.bytes <= itself.offset ||
              itself.offset + itself.bytes <= other.offset);
}

}  // namespace
}  // namespace trainrt
