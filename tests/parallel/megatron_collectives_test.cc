// Megatron's placement comes out of the lowering by itself: how many collectives a Transformer
// block costs, and how many bytes. A block is what a model of three layers has more than one of
// two.
#include <gtest/gtest.h>

#include <map>

#include "parallel/partition.h"
#include "tests/support/family_model.h"
#include "tests/support/plan_layout.h"

namespace trainrt::testing {
namespace {

constexpr int64_t kBatch = 2, kSequence = 6, kHidden = 24;
constexpr int64_t kActivation = kBatch * kSequence * kHidden * 4;  // bytes

struct Traffic {
  int count = 0;
  int64_t bytes = 0;  // of the whole tensor
  bool operator==(const Traffic&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Traffic& traffic) {
  return out << traffic.count << " of " << traffic.bytes << " bytes";
}

// (phase letter, operator) -> traffic of one micro-batch on rank 0.
using Table = std::map<std::pair<std::string, std::string>, Traffic>;

std::vector<Program> programs_of(int64_t layers, const Layout& layout) {
  ModelSpec spec = small_family("gpt2");
  spec.layers = layers;
  spec.hidden = kHidden;
  spec.heads = 4;
  spec.ffn = 4 * kHidden;
  spec.seq = kSequence;
  spec.dropout = 0;
  const FamilyModel model = family_model(spec, kBatch, "fp32", {});
  return partition(model.factory,
                   plan_of(layout, kBatch, model.num_nodes),
                   std::vector<DeviceSpec>(static_cast<size_t>(layout.tp)));
}

Table collectives(int64_t layers, const Layout& layout) {
  const std::vector<Program> programs = programs_of(layers, layout);
  Table table;
  const ProgramVariant& variant = programs[0].variants[0];
  for (const Phase& phase : variant.phases) {
    for (const NodeId id : phase.nodes) {
      const Node& node = variant.graph.node(id);
      if (!is_communication(node.op_type)) {
        continue;
      }
      const ValueId whole =
          node.op_type == comm_op::kReduceScatter ? node.inputs[0] : node.outputs[0];
      const char* region = node.region == Region::kForward    ? "forward"
                           : node.region == Region::kBackward ? "backward"
                                                              : "update";
      Traffic& traffic = table[{region, node.op_type}];
      ++traffic.count;
      traffic.bytes += variant.graph.value(whole).type.bytes();
    }
  }
  return table;
}

// What one more block adds.
Table block(const Layout& layout) {
  Table more = collectives(3, layout);
  for (const auto& [key, traffic] : collectives(2, layout)) {
    more[key].count -= traffic.count;
    more[key].bytes -= traffic.bytes;
  }
  std::erase_if(more, [](const auto& entry) { return entry.second == Traffic{}; });
  return more;
}

TEST(MegatronCollectivesTest, ABlockSumsTwiceForwardAndTwiceBackward) {
  for (const int tp : {2, 4}) {
    const Table table = block({.tp = tp});
    EXPECT_EQ(table.at({"forward", "AllReduce"}), (Traffic{2, 2 * kActivation})) << tp;
    EXPECT_EQ(table.at({"backward", "AllReduce"}), (Traffic{2, 2 * kActivation})) << tp;
    EXPECT_EQ(table.count({"forward", "AllGather"}), 0u);
    EXPECT_EQ(table.count({"backward", "AllGather"}), 0u);
  }
}

TEST(MegatronCollectivesTest, SequenceParallelismTurnsEachSumIntoScatterAndGather) {
  const Table table = block({.tp = 2, .sequence_parallel = true});
  EXPECT_EQ(table.at({"forward", "ReduceScatter"}), (Traffic{2, 2 * kActivation}));
  EXPECT_EQ(table.at({"forward", "AllGather"}), (Traffic{2, 2 * kActivation}));
  EXPECT_EQ(table.at({"backward", "ReduceScatter"}), (Traffic{2, 2 * kActivation}));
  // The gradient's way in, and what the forward had gathered once more instead of keeping it.
  EXPECT_EQ(table.at({"backward", "AllGather"}), (Traffic{4, 4 * kActivation}));
  EXPECT_EQ(table.count({"forward", "AllReduce"}), 0u);
}

// Also of the embedding, whose gradient has no factor that its inputs are cut along.
TEST(MegatronCollectivesTest, ARankAccumulatesGradientsOfItsOwnPiecesAlone) {
  for (const bool sequence_parallel : {false, true}) {
    const std::vector<Program> programs =
        programs_of(1, {.tp = 2, .micro_batch = 1, .sequence_parallel = sequence_parallel});
    const Graph& graph = programs[1].variants[0].graph;
    int accumulators = 0, cut = 0;
    for (const ValueId id : graph.values_of_kind(ValueKind::kGradient)) {
      const Value& accumulator = graph.value(id);
      const std::string parameter = accumulator.name.substr(0, accumulator.name.find(".grad"));
      const Shape& piece = graph.value(*graph.find_value(parameter)).type.shape;
      EXPECT_EQ(accumulator.type.shape, piece) << accumulator.name;
      ++accumulators;
      cut += programs[1].pieces.count(parameter) != 0 ? 1 : 0;
    }
    EXPECT_GT(accumulators, cut);
    EXPECT_GE(cut, 4);
  }
}

}  // namespace
}  // namespace trainrt::testing
