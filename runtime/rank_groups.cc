#include "runtime/rank_groups.h"

namespace trainrt {

RankGroups::RankGroups(const Plan& plan, Communicator* world, Device& device) {
  communicators_.world = world;
  if (world == nullptr) {
    return;
  }
  const RankCoordinates at = rank_coordinates(plan, world->rank());
  const int dp = plan.data_parallel, tp = plan.tensor_parallel;
  // A color per group: what the other two coordinates are.
  if (plan.data_parallel > 1) {
    data_ = world->split(at.stage * tp + at.tensor_rank, at.data_rank);
    communicators_.data = data_.get();
  }
  if (plan.tensor_parallel > 1) {
    tensor_ = world->split(at.stage * dp + at.data_rank, at.tensor_rank);
    communicators_.tensor = tensor_.get();
  }
  if (plan.pipeline_parallel > 1) {
    pipeline_ = world->split(at.data_rank * tp + at.tensor_rank, at.stage);
    communicators_.pipeline = pipeline_.get();
  }
  for (const auto& [name, group] :
       {std::pair{"data", data_.get()}, {"tensor", tensor_.get()}, {"pipeline", pipeline_.get()}}) {
    if (group != nullptr) {
      if (std::unique_ptr<Communicator> tensors = device.make_communicator(*group)) {
        communicators_.on_device[name] = tensors.get();
        on_device_.push_back(std::move(tensors));
      }
    }
  }
}

}  // namespace trainrt
