// Collectives of small tensors travel together: how many there are in a step, how large, and when.
#include "parallel/passes/buckets.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <map>

#include "parallel/partition.h"
#include "tests/support/family_model.h"
#include "tests/support/plan_layout.h"

namespace trainrt::testing {
namespace {

constexpr int64_t kBatch = 8;

ModelSpec gpt(int64_t layers, int64_t hidden) {
  ModelSpec spec = small_family("gpt2");
  spec.layers = layers;
  spec.hidden = hidden;
  spec.heads = 4;
  spec.ffn = 4 * hidden;
  return spec;
}

struct Message {
  std::string op_type;
  size_t num_tensors = 0;
  int64_t bytes = 0;  // of whole tensors
  bool operator==(const Message&) const = default;
};

// What data ranks exchange in the phases of the kinds given, in order.
std::vector<Message> messages(const Program& program, const std::vector<PhaseKind>& kinds) {
  std::vector<Message> found;
  const ProgramVariant& variant = program.variants[0];
  for (const Phase& phase : variant.phases) {
    for (const NodeId id : phase.nodes) {
      const Node& node = variant.graph.node(id);
      if (std::find(kinds.begin(), kinds.end(), phase.kind) == kinds.end() ||
          !is_communication(node.op_type) || node.attributes.get_string("group") != "data") {
        continue;
      }
      Message message{node.op_type, node.inputs.size(), 0};
      for (const ValueId tensor :
           node.op_type == comm_op::kReduceScatter ? node.inputs : node.outputs) {
        message.bytes += variant.graph.value(tensor).type.bytes();
      }
      found.push_back(message);
    }
  }
  return found;
}

std::vector<Program> programs_of(const ModelSpec& spec, const Layout& layout) {
  const FamilyModel model = family_model(spec, kBatch, "fp32", {});
  return partition(model.factory,
                   plan_of(layout, kBatch, model.num_nodes),
                   std::vector<DeviceSpec>(static_cast<size_t>(layout.dp * layout.tp * layout.pp)));
}

int64_t parameter_bytes(const Program& program) {
  int64_t bytes = 0;
  for (const Value& value : program.variants[0].graph.values()) {
    bytes += value.kind == ValueKind::kParameter ? value.type.bytes() : 0;
  }
  return bytes;
}

const std::vector<PhaseKind> kOfGradients = {
    PhaseKind::kBackward, PhaseKind::kWeightGrad, PhaseKind::kReduce, PhaseKind::kUpdate};

// All gradients of a small model fit into one message.
TEST(BucketsTest, ASmallModelSumsItsGradientsInOneMessage) {
  const std::vector<Program> programs = programs_of(gpt(2, 24), {.dp = 2, .micro_batch = 2});
  const int64_t bytes = parameter_bytes(programs[0]);
  ASSERT_LT(bytes, bucket_bytes(Backend::kCpu, 2));
  const size_t gradients =
      programs[0].variants[0].graph.values_of_kind(ValueKind::kGradient).size();
  const std::vector<Message> found = messages(programs[0], kOfGradients);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].op_type, comm_op::kAllReduce);
  EXPECT_EQ(found[0].bytes, bytes);
  EXPECT_GE(found[0].num_tensors + 1, gradients);  // a tied weight has two accumulators
}

// ZeRO-1: gradients are scattered, row sums of the norm and new parameters gathered, each in one
// message; a parameter too small to be cut is summed whole.
TEST(BucketsTest, ZeroScattersAndGathersInFewMessages) {
  for (const int zero : {1, 2, 3}) {
    const std::vector<Program> programs =
        programs_of(gpt(2, 24), {.dp = 2, .micro_batch = 2, .zero = zero});
    std::map<std::string, int> count;
    for (const Message& message : messages(
             programs[0],
             {PhaseKind::kForward, PhaseKind::kBackward, PhaseKind::kReduce, PhaseKind::kUpdate})) {
      ++count[message.op_type];
    }
    EXPECT_EQ(count["ReduceScatter"], 1) << "ZeRO " << zero;
    // New parameters or, for ZeRO-3, those of the forward and once more of the backward; and the
    // norm's row sums.
    EXPECT_EQ(count["AllGather"], zero == 3 ? 3 : 2) << "ZeRO " << zero;
    EXPECT_EQ(count["AllReduce"], 0) << "ZeRO " << zero;
  }
}

TEST(BucketsTest, NoBucketIsLargerThanTheLimitAndAllRanksFormTheSame) {
  for (const int zero : {0, 1, 2, 3}) {
    const std::vector<Program> programs =
        programs_of(gpt(4, 128), {.dp = 3, .micro_batch = 1, .zero = zero});
    const std::vector<PhaseKind> all = {
        PhaseKind::kForward, PhaseKind::kBackward, PhaseKind::kReduce, PhaseKind::kUpdate};
    const std::vector<Message> found = messages(programs[0], all);
    size_t tensors = 0;
    for (const Message& message : found) {
      tensors += message.num_tensors;
      EXPECT_TRUE(message.num_tensors == 1 || message.bytes <= bucket_bytes(Backend::kCpu, 3));
    }
    EXPECT_GT(tensors, 3 * found.size()) << "ZeRO " << zero;
    EXPECT_EQ(messages(programs[1], all), found);
    EXPECT_EQ(messages(programs[2], all), found);
  }
}

// --reduction exact, with its exchange of subtrees.
TEST(BucketsTest, SubtreesOfExactSumsTravelTogether) {
  for (const int zero : {0, 1, 2, 3}) {
    const std::vector<Program> programs =
        programs_of(gpt(2, 24), {.dp = 2, .micro_batch = 1, .zero = zero, .exact = true});
    std::map<std::string, int> count;
    for (const Message& message : messages(programs[0], kOfGradients)) {
      ++count[message.op_type];
    }
    EXPECT_EQ(count["AllToAll"], zero == 0 ? 0 : 1) << "ZeRO " << zero;
    EXPECT_LE(count["AllGather"], 4) << "ZeRO " << zero;
    EXPECT_EQ(messages(programs[1], kOfGradients).size(),
              messages(programs[0], kOfGradients).size());
  }
}

// One micro-batch a step: the sums are part of the backward, and the last layers' are under way
// while the first layers still compute.
TEST(BucketsTest, BackwardGoesOnBehindABucket) {
  const std::vector<Program> programs = programs_of(gpt(4, 128), {.dp = 2, .micro_batch = 4});
  const ProgramVariant& variant = programs[0].variants[0];
  const Phase* backward = variant.find_phase(PhaseKind::kBackward, 0);
  ASSERT_NE(backward, nullptr);
  std::vector<size_t> sums;  // products that follow each sum
  for (size_t i = 0; i < backward->nodes.size(); ++i) {
    if (variant.graph.node(backward->nodes[i]).op_type == comm_op::kAllReduce) {
      sums.push_back(static_cast<size_t>(std::count_if(
          backward->nodes.begin() + static_cast<std::ptrdiff_t>(i),
          backward->nodes.end(),
          [&](NodeId id) { return variant.graph.node(id).op_type.starts_with("MatMul"); })));
    }
  }
  ASSERT_GE(sums.size(), 3u);
  EXPECT_GT(sums[0], sums[1]);
  EXPECT_GT(sums[0], 8u);
  EXPECT_EQ(sums.back(), 0u);
  // Nobody waits for a sum before the last product.
  bool last_product_seen = false;
  for (size_t i = backward->nodes.size(); i-- > 0 && !last_product_seen;) {
    last_product_seen = variant.graph.node(backward->nodes[i]).op_type.starts_with("MatMul");
    for (size_t j = 0; last_product_seen && j < i; ++j) {
      EXPECT_NE(variant.graph.node(backward->nodes[j]).op_type, "RowSquareSums");
    }
  }
}

// Data-parallel sums among a phase's nodes, each with the products that follow it.
std::vector<size_t> products_behind_sums(const ProgramVariant& variant, const Phase& phase) {
  std::vector<size_t> sums;
  for (size_t i = 0; i < phase.nodes.size(); ++i) {
    const Node& node = variant.graph.node(phase.nodes[i]);
    if ((node.op_type == comm_op::kAllReduce || node.op_type == comm_op::kReduceScatter) &&
        node.attributes.get_string("group") == "data") {
      sums.push_back(static_cast<size_t>(std::count_if(
          phase.nodes.begin() + static_cast<std::ptrdiff_t>(i), phase.nodes.end(), [&](NodeId id) {
            return variant.graph.node(id).op_type.starts_with("MatMul");
          })));
    }
  }
  return sums;
}

// Several micro-batches a step: the backward of the last sums, whatever the schedule, ZeRO stage
// and number of micro-batches of each data rank; the others do not.
TEST(BucketsTest, TheLastBackwardSumsWhatAllHaveAccumulated) {
  for (const Layout& layout : std::vector<Layout>{{.dp = 2, .micro_batch = 2},
                                                  {.dp = 2, .micro_batch = 2, .zero = 1},
                                                  {.dp = 2, .micro_batch = 2, .shares = {1, 3}},
                                                  {.dp = 2, .pp = 2, .micro_batch = 1},
                                                  {.dp = 2,
                                                  .pp = 2,
                                                  .v = 2,
                                                  .micro_batch = 1,
                                                  .schedule = ScheduleKind::kInterleaved,
                                                  .zero = 1},
                                                  {.dp = 2,
                                                  .pp = 2,
                                                  .micro_batch = 1,
                                                  .shares = {3, 5},
                                                  .schedule = ScheduleKind::kZeroBubbleH1}}) {
    SCOPED_TRACE(layout_string(layout));
    const std::vector<Program> programs = programs_of(gpt(4, 128), layout);
    for (const Program& program : programs) {
      EXPECT_EQ(program.micro_batches.back().variant, 0);
      for (size_t i = 0; i + 1 < program.micro_batches.size(); ++i) {
        EXPECT_NE(program.micro_batches[i].variant, 0);
      }
      bool overlaps = false;
      for (size_t v = 0; v < program.variants.size(); ++v) {
        for (const Phase& phase : program.variants[v].phases) {
          const std::vector<size_t> sums = products_behind_sums(program.variants[v], phase);
          const bool in_micro_batch =
              phase.kind == PhaseKind::kBackward || phase.kind == PhaseKind::kWeightGrad;
          EXPECT_TRUE(sums.empty() || v == 0);
          overlaps = overlaps || (in_micro_batch && !sums.empty());
          if (in_micro_batch && !sums.empty() && layout.pp == 1) {
            EXPECT_GT(sums[0], sums.back());
          }
        }
      }
      EXPECT_TRUE(overlaps) << "rank " << program.rank;
    }
    // Data ranks meet in the same order.
    const auto of_stage = [&](int data_rank) {
      const int rank = data_rank;  // of stage 0, without tensor ranks
      return messages(programs[static_cast<size_t>(rank)], kOfGradients);
    };
    EXPECT_EQ(of_stage(0), of_stage(1));
  }
}

// Sizes that differ make gradients in orders that may differ: then they are summed afterwards.
TEST(BucketsTest, LastMicroBatchesOfDifferentSizesSumAfterwards) {
  for (const Program& program : programs_of(gpt(2, 24), {.dp = 2, .micro_batch = 3})) {
    for (const ProgramVariant& variant : program.variants) {
      for (const Phase& phase : variant.phases) {
        EXPECT_TRUE(phase.kind == PhaseKind::kReduce ||
                    products_behind_sums(variant, phase).empty());
      }
    }
  }
}

}  // namespace
}  // namespace trainrt::testing
