#include "planner/priced_profile.h"

#include <algorithm>

namespace trainrt {

namespace {

PricedPhase price(const PhaseProfile& phase,
                  const CostModel& cost,
                  const GroupLinks& group,
                  const Engine& engine,
                  double launch_seconds) {
  PricedPhase priced;
  double products = 0;
  for (const KernelProfile& kernel : phase.kernels) {
    const double seconds = cost.device().kernels.empty()
                               ? cost.op_seconds(kernel.cost, kernel.fused_attention)
                               : cost.kernel_seconds(kernel.name, kernel.size, kernel.cost, 0);
    priced.compute += seconds;
    products += kernel.cost.matmuls.empty() ? 0 : seconds;
  }
  for (const TensorCollective& c : phase.collectives) {
    priced.communication +=
        collective_time(c.kind, c.bytes, group, cost.device().architecture).seconds;
  }
  if (engine.overlap_tensor &&
      priced.communication > 0) {  // chunks of a product and its collective
    const double hidden = std::min(products, priced.communication) * 0.75;
    priced.communication -= hidden * (2 - cost.constants().overlap_slowdown);
  }
  // An interpreter runs ahead of the device until it is the slower of the two; unless it waits.
  const double host =
      launch_seconds * static_cast<double>(phase.kernels.size() + phase.collectives.size());
  priced.compute = engine.waits_for_device ? priced.compute + host
                                           : std::max(priced.compute, host - priced.communication);
  return priced;
}

}  // namespace

PricedProfile::PricedProfile(const ModelProfile& profile,
                             const CostModel& cost,
                             const GroupLinks& tensor_group,
                             const Engine& engine) {
  for (const BlockClass& block : profile.classes) {
    PricedClass priced;
    priced.forward = price(block.forward, cost, tensor_group, engine, engine.launch_seconds);
    priced.input_grad =
        price(block.input_grad, cost, tensor_group, engine, engine.backward_launch_seconds);
    priced.weight_grad =
        price(block.weight_grad, cost, tensor_group, engine, engine.backward_launch_seconds);
    priced.selective = price(block.selective, cost, tensor_group, engine, engine.launch_seconds);
    classes_.push_back(priced);
    for (const RecomputeMode mode :
         {RecomputeMode::kNone, RecomputeMode::kSelective, RecomputeMode::kFull}) {
      const PricedPhase again = !block.recomputed || mode == RecomputeMode::kNone ? PricedPhase{}
                                : mode == RecomputeMode::kFull                    ? priced.forward
                                                               : priced.selective;
      blocks_[static_cast<size_t>(mode)].push_back(
          {{priced.forward.total(),
            priced.input_grad.total() + priced.weight_grad.total() + again.total(),
            priced.weight_grad.total()},
           priced.forward.communication + priced.input_grad.communication +
               priced.weight_grad.communication + again.communication});
    }
  }
  for (size_t mode = 0; mode < before_.size(); ++mode) {
    PricedRun sum;
    for (const int block : profile.blocks) {
      before_[mode].push_back(sum);
      const PricedRun& own = blocks_[mode][static_cast<size_t>(block)];
      sum.times.forward += own.times.forward;
      sum.times.backward += own.times.backward;
      sum.times.weight_grad += own.times.weight_grad;
      sum.communication += own.communication;
    }
    before_[mode].push_back(sum);
  }
}

PricedRun PricedProfile::run(int first, int end, RecomputeMode mode) const {
  const std::vector<PricedRun>& before = before_[static_cast<size_t>(mode)];
  const PricedRun &a = before[static_cast<size_t>(first)], &b = before[static_cast<size_t>(end)];
  return {{b.times.forward - a.times.forward,
           b.times.backward - a.times.backward,
           b.times.weight_grad - a.times.weight_grad},
          b.communication - a.communication};
}

}  // namespace trainrt
