#include "planner/exact_sums.h"

#include <algorithm>

#include "parallel/micro_batches.h"
#include "parallel/reduction_tree.h"

namespace trainrt {

ExactSums exact_sums(int64_t global_batch,
                     int data_parallel,
                     int64_t micro_batch,
                     int64_t logical_shards) {
  Plan plan;
  plan.global_batch = global_batch;
  plan.data_parallel = data_parallel;
  plan.exact_reduction = true;
  plan.logical_shards = logical_shards;
  plan.shares = make_exact_shares(global_batch, data_parallel, micro_batch, {}, logical_shards);
  ExactSums sums;
  for (int data_rank = 0; data_rank < data_parallel; ++data_rank) {
    const TreeAccumulation tree =
        accumulate_tree(cut_micro_batches(plan, data_rank), num_shards(plan));
    sums.held = std::max(sums.held, static_cast<int>(tree.num_slots));
    sums.own = std::max(sums.own, static_cast<int>(tree.num_subtrees));
    sums.exchanged += static_cast<int>(tree.num_subtrees);
  }
  return sums;
}

}  // namespace trainrt
