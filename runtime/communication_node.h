// Communication nodes of a program, carried out by the communicator of their mesh axis.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "graph/kernel.h"
#include "parallel/program.h"
#include "runtime/bound_program.h"
#include "runtime/executor.h"

namespace trainrt {

// Of messages between all ranks that no program has; past those of pipelines.
enum StepTag : int { kSumsTag = 1 << 20, kSignalTag, kAnswerTag };

// The message that a node sends or receives; nothing for other nodes.
std::optional<Message> message_of(const BoundNode& node);
// The messages between the ranks of `group`, in the order in which a program's cells send and
// receive them: those of a step by itself, and of three that go over into each other.
std::vector<Message> messages_of(BoundProgram& bound, const std::string& group);
// The lane that a node's communication is put on.
Lane communication_lane(const BoundNode& node, const RankCommunicators& communicators);

// Runs one node of comm_op, on its lane. `workspace` holds the packed
// tensor when a gather or scatter is along an axis that is not the outermost.
void run_communication_node(const Node& node,
                            std::span<const TensorRef> inputs,
                            std::span<const TensorRef> outputs,
                            std::span<std::byte> workspace,
                            const RankCommunicators& communicators,
                            Device& device);

// What a step adds up, by logical shard: added shard by shard, the sums do not depend on which data
// rank has which shard.
struct StepSums {
  std::vector<double> loss, items, correct;

  explicit StepSums(int64_t num_shards = 1)
      : loss(static_cast<size_t>(num_shards)), items(loss), correct(loss) {}
};

// The item count of all data ranks.
double count_items(StepSums& sums, const RankCommunicators& communicators);

// Fills in what is the same on every rank: loss and correct items are summed over data ranks and
// come from the ranks that compute them; `totals.item_count` is the sum over data ranks already.
void combine_step(StepResult& totals,
                  const StepSums& sums,
                  const RankCoordinates& coordinates,
                  const RankCommunicators& communicators);

// The same on rank 0 alone, which is told by all others: they go on at once.
void gather_step(StepResult& totals,
                 const StepSums& sums,
                 const RankCoordinates& coordinates,
                 const RankCommunicators& communicators);

}  // namespace trainrt
