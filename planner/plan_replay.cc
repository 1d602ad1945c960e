// The time of the chosen plan from its programs: the rest of PlanSearch where CPUs will run them.
#include <algorithm>

#include "planner/plan_search.h"
#include "planner/program_time.h"

namespace trainrt {

// What a CPU device's kernels are priced by in programs; null for others.
const CostModel* PlanSearch::cpu_cost(int device) {
  const int type = request_.topology.device(device).type;
  const DeviceType& described = request_.topology.types[static_cast<size_t>(type)];
  if (!described.is_cpu()) {
    return nullptr;
  }
  const auto found = cpu_costs_.find(type);
  return found != cpu_costs_.end()
             ? &found->second
             : &cpu_costs_.emplace(type, CostModel(described, request_.precision)).first->second;
}

// Takes the time of a step of the chosen plan from its programs, where they are priced.
void PlanSearch::replay_programs_of(Candidate* candidate) {
  std::vector<std::shared_ptr<const RankWork>> work;
  std::vector<int> devices;
  for (size_t rank = 0; rank < candidate->rank_memory.size(); ++rank) {
    work.push_back(candidate->rank_memory[rank].work);
    devices.push_back(candidate->layout.device(static_cast<int>(rank)));
  }
  if (!result_.feasible || work.empty() ||
      std::any_of(work.begin(), work.end(), [](const auto& w) { return !w; })) {
    return;
  }
  int data_rank = 0;  // the first with a share
  while (candidate->layout.micro_batches(data_rank) == 0) {
    ++data_rank;
  }
  const double searched = candidate->prediction.seconds;
  take_time(replay_programs(result_.plan, request_.topology, devices, work),
            work,
            result_.plan,
            data_rank,
            &candidate->prediction);
  result_.programs_factor = candidate->prediction.seconds / searched;
  result_.lower_bound *= result_.programs_factor;
}

}  // namespace trainrt
