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

}  // namespace
}  // namespace trainrt
