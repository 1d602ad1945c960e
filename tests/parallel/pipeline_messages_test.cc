// What the stages of a pipeline send each other once per step: the gradient of a parameter that two
// of them share, between these two alone, and the numbers of which the gradient's norm is made, in
// one message from each stage to each other.
#include <gtest/gtest.h>

#include "parallel/buffer_plan.h"
#include "parallel/partition.h"
#include "tests/support/family_model.h"
#include "tests/support/plan_layout.h"

namespace trainrt::testing {
namespace {

TEST(PipelineMessagesTest, OnlyNumbersGoToEveryStage) {
  constexpr int kStages = 4;
  constexpr int64_t kBatch = 8;
  ModelSpec spec = small_family("gpt2");  // its embedding is its output layer, too
  spec.layers = 4;
  const FamilyModel model = family_model(spec, kBatch, "fp32", {});
  const std::vector<Program> programs =
      partition(model.factory,
                plan_of({.pp = kStages, .micro_batch = 1}, kBatch, model.num_nodes),
                std::vector<DeviceSpec>(kStages));
  for (int rank = 0; rank < kStages; ++rank) {
    SCOPED_TRACE(rank);
    const ProgramVariant& variant = programs[static_cast<size_t>(rank)].variants[0];
    std::vector<int64_t> numbers, tensors;  // whom they go to
    for (const Phase& phase : variant.phases) {
      for (const NodeId id : phase.nodes) {
        const Node& node = variant.graph.node(id);
        // parallel/communicator_memory keeps no room for collectives of a pipeline.
        EXPECT_TRUE(!is_communication(node.op_type) || node.op_type == comm_op::kSend ||
                    node.op_type == comm_op::kRecv ||
                    node.attributes.get_string("group") != "pipeline");
        if (is_step_phase(phase.kind) && node.op_type == comm_op::kSend) {
          const bool packed = node.attributes.has(comm_op::kNumbers);
          (packed ? numbers : tensors).push_back(node.attributes.get_int("peer"));
          EXPECT_EQ(packed, variant.graph.value(node.inputs[0]).type.dtype == DType::kFloat64);
        }
      }
    }
    std::sort(numbers.begin(), numbers.end());
    std::vector<int64_t> others;
    for (int64_t peer = 0; peer < kStages; ++peer) {
      if (peer != rank) {
        others.push_back(peer);
      }
    }
    EXPECT_EQ(numbers, others);
    const bool shares = rank == 0 || rank == kStages - 1;
    EXPECT_EQ(tensors, shares ? std::vector<int64_t>{kStages - 1 - rank} : std::vector<int64_t>{});
  }
}

}  // namespace
}  // namespace trainrt::testing
