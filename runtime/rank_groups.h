// The communicators of one rank: the world, and its groups along the plan's mesh axes.
#pragma once

#include <memory>
#include <vector>

#include "parallel/plan.h"
#include "runtime/executor.h"

namespace trainrt {

class RankGroups {
 public:
  // Collective over `world`, which may be null for a single rank.
  RankGroups(const Plan& plan, Communicator* world, Device& device);
  const RankCommunicators& communicators() const { return communicators_; }

 private:
  std::unique_ptr<Communicator> data_;
  std::unique_ptr<Communicator> tensor_;
  std::unique_ptr<Communicator> pipeline_;
  std::vector<std::unique_ptr<Communicator>> on_device_;
  RankCommunicators communicators_;
};

}  // namespace trainrt
