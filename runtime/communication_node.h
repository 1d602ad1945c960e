// Communication nodes of a program, carried out by the communicator of their mesh axis.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "graph/kernel.h"
#include "parallel/program.h"
#include "runtime/executor.h"

namespace trainrt {

// Runs one node of comm_op. `workspace` holds the packed tensor when a gather or scatter is along
// an axis that is not the outermost.
void run_communication_node(const Node& node,
                            std::span<const TensorRef> inputs,
                            std::span<const TensorRef> outputs,
                            std::span<std::byte> workspace,
                            const RankCommunicators& communicators);

// The item counts of all data ranks.
double sum_over_data_ranks(double value, const RankCommunicators& communicators);

// Makes the step's sums the same on every rank: loss and correct items are summed over data ranks
// and come from the ranks that compute them; item_count is already the sum over data ranks.
void combine_step(StepResult& totals,
                  const RankCoordinates& coordinates,
                  const RankCommunicators& communicators);

}  // namespace trainrt
