// Random operator chains under random plans: data, tensor and pipeline ranks, schedules,
// recomputation, ZeRO, shares, exact sums and offload mixed, against one device.
#include "tests/support/plan_layout.h"
#include "tests/support/random_model.h"

namespace trainrt::testing {
namespace {

Layout random_layout(std::mt19937_64& random, int64_t batch, int num_nodes) {
  const auto below = [&](uint64_t n) { return static_cast<int>(random() % n); };
  for (;;) {
    Layout layout;
    layout.dp = 1 + below(4);
    layout.tp = 1 + below(4);
    layout.pp = 1 + below(4);
    layout.micro_batch = 1 + below(4);
    layout.schedule = static_cast<ScheduleKind>(below(5));
    layout.v = layout.schedule == ScheduleKind::kInterleaved ? 2 + below(2) : 1;
    layout.recompute = static_cast<RecomputeMode>(below(3));
    layout.zero = below(4);
    layout.sequence_parallel = below(2) == 0;
    layout.exact = below(2) == 0;
    layout.logical_shards = 1 + below(9);
    layout.offload = below(3) == 0;
    double total = 0;
    for (int d = 0; d < layout.dp; ++d) {
      layout.shares.push_back(below(4));
      total += layout.shares.back();
    }
    if (layout.dp * layout.tp * layout.pp > 8 || layout.pp * layout.v > num_nodes || total == 0 ||
        (layout.schedule == ScheduleKind::kInterleaved && layout.pp == 1)) {
      continue;
    }
    bool enough = true;  // micro-batches for 2BW
    for (const DataShare& share : plan_of(layout, batch, num_nodes).shares) {
      enough = enough && (share.num_samples == 0 || share.num_micro_batches >= layout.pp);
    }
    if (layout.schedule != ScheduleKind::k2BW || enough) {
      return layout;
    }
  }
}

void one_case(std::mt19937_64& random, std::string& what) {
  const int64_t batch = 1 + static_cast<int64_t>(random() % 13);
  const RandomModel model = random_model(random, batch);
  const Layout layout = random_layout(random, batch, model.num_nodes);
  what = concat(model.description, ", batch ", batch, ", ", layout_string(layout));
  Layout reference;
  reference.micro_batch = layout.micro_batch;
  reference.exact = layout.exact;
  reference.logical_shards = layout.logical_shards;
  reference.schedule =
      layout.schedule == ScheduleKind::k2BW ? ScheduleKind::k2BW : ScheduleKind::k1F1B;
  RunOptions options;
  options.steps = 2;
  const auto run = [&](const Layout& wanted) {
    return run_plan(model.factory, plan_of(wanted, batch, model.num_nodes), model.feeds, options);
  };
  try {
    partition(model.factory,
              plan_of(layout, batch, model.num_nodes),
              std::vector<DeviceSpec>(static_cast<size_t>(layout.dp * layout.tp * layout.pp)));
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInfeasiblePlan) {
      return;  // refused, with a reason, before anything ran
    }
    throw;
  }
  const PlanRun one = run(reference), result = run(layout);
  if (layout.tp == 1 && (layout.exact || layout.dp == 1)) {
    expect_equal_bits(one, result, what);
  } else {
    expect_close(one, result, 1e-9, what);
  }
}

}  // namespace
}  // namespace trainrt::testing

int main(int argc, char** argv) {
  return trainrt::testing::run_stress(argc, argv, "mixed_plan_stress", trainrt::testing::one_case);
}
