// Random operator chains on 2 to 5 tensor ranks, with random placements pinned, against one device.
#include "tests/support/plan_layout.h"
#include "tests/support/random_model.h"

namespace trainrt::testing {
namespace {

void one_case(std::mt19937_64& random, std::string& what) {
  const int64_t batch = 1 + static_cast<int64_t>(random() % 6);
  const RandomModel model = random_model(random, batch);
  Layout layout;
  layout.tp = 2 + static_cast<int>(random() % 4);
  layout.micro_batch = static_cast<int64_t>(random() % 4);
  layout.sequence_parallel = random() % 2 == 0;
  Plan plan = plan_of(layout, batch, model.num_nodes);
  std::string pins;
  for (const auto& [name, shape] : model.parameters) {
    const uint64_t dice = random() % 6;
    const int dim = static_cast<int>(random() % shape.size());
    if (dice == 0) {
      plan.placements[name].tensor = Placement::replicate();
    } else if (dice == 1 && shape[static_cast<size_t>(dim)] >= layout.tp) {
      plan.placements[name].tensor = Placement::shard(dim);
    } else {
      continue;
    }
    pins += concat(" ", name, "=", placement_string(plan.placements[name].tensor));
  }
  what =
      concat(model.description, ", batch ", batch, ", ", layout_string(layout), ", pinned:", pins);
  RunOptions options;
  options.steps = 2;
  const PlanRun one = run_plan(model.factory,
                               plan_of({.micro_batch = layout.micro_batch}, batch, model.num_nodes),
                               model.feeds,
                               options);
  expect_close(one, run_plan(model.factory, plan, model.feeds, options), 1e-9, what);
}

}  // namespace
}  // namespace trainrt::testing

int main(int argc, char** argv) {
  return trainrt::testing::run_stress(
      argc, argv, "tensor_parallel_stress", trainrt::testing::one_case);
}
