#include "tests/support/plan_layout.h"

#include <algorithm>

#include "parallel/micro_batches.h"

namespace trainrt::testing {

std::string layout_string(const Layout& layout) {
  std::string shares;
  for (const double share : layout.shares) {
    shares += concat(shares.empty() ? " shares " : ",", share);
  }
  for (const int64_t size : layout.sizes) {
    shares += concat(" size ", size);
  }
  return concat("dp=",
                layout.dp,
                " tp=",
                layout.tp,
                " pp=",
                layout.pp,
                " v=",
                layout.v,
                " micro-batch ",
                layout.micro_batch,
                shares,
                " ",
                schedule_name(layout.schedule),
                " recompute ",
                recompute_name(layout.recompute),
                " zero ",
                layout.zero,
                layout.sequence_parallel ? " sequence parallel" : "",
                layout.exact ? concat(" exact over ", layout.logical_shards) : "",
                layout.sync_batch_norm ? " sync BatchNorm" : "",
                layout.offload ? " offload" : "");
}

Plan plan_of(const Layout& layout, int64_t batch, int num_nodes) {
  Plan plan = single_device_plan(batch, layout.micro_batch, num_nodes);
  plan.data_parallel = layout.dp;
  plan.tensor_parallel = layout.tp;
  plan.pipeline_parallel = layout.pp;
  plan.virtual_stages = layout.v;
  plan.schedule = layout.schedule;
  plan.zero_stage = layout.zero;
  plan.sequence_parallel = layout.sequence_parallel;
  plan.exact_reduction = layout.exact;
  plan.logical_shards = layout.logical_shards;
  plan.sync_batch_norm = layout.sync_batch_norm;
  plan.offload_optimizer = layout.offload;
  plan.shares =
      layout.exact ? make_exact_shares(
                         batch, layout.dp, layout.micro_batch, layout.shares, layout.logical_shards)
      : layout.sizes.empty() ? make_shares(batch, layout.dp, layout.micro_batch, layout.shares)
                             : make_sized_shares(batch, layout.sizes, layout.shares);
  plan.micro_batch_size = 0;
  for (const DataShare& share : plan.shares) {
    plan.micro_batch_size = std::max(plan.micro_batch_size, share.micro_batch_size);
  }
  plan.stages.clear();
  const int num_stages = layout.pp * layout.v;
  for (int s = 0; s < num_stages; ++s) {
    plan.stages.push_back({s,
                           s % layout.pp,
                           s * num_nodes / num_stages,
                           (s + 1) * num_nodes / num_stages - 1,
                           layout.recompute,
                           {}});
  }
  return plan;
}

}  // namespace trainrt::testing
