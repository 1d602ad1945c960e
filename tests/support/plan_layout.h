// A plan in short, for tests that compare many of them.
#pragma once

#include <string>
#include <vector>

#include "parallel/plan.h"

namespace trainrt::testing {

struct Layout {
  int dp = 1, tp = 1, pp = 1, v = 1;
  int64_t micro_batch = 0;
  std::vector<double> shares = {};
  std::vector<int64_t> sizes = {};  // of micro-batches, by data rank; empty: micro_batch
  ScheduleKind schedule = ScheduleKind::k1F1B;
  RecomputeMode recompute = RecomputeMode::kNone;
  int zero = 0;
  bool sequence_parallel = false;
  bool exact = false;
  int64_t logical_shards = 8;
  bool sync_batch_norm = false;
  bool offload = false;
};

std::string layout_string(const Layout& layout);

// Equal stages over `num_nodes` forward nodes.
Plan plan_of(const Layout& layout, int64_t batch, int num_nodes);

}  // namespace trainrt::testing
