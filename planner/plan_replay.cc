// Time by programs, where CPUs will run them: of the best few candidates, of which it chooses, and
// of the plan that is chosen, which reports state.
#include <algorithm>
#include <tuple>

#include "planner/plan_search.h"

namespace trainrt {

namespace {

// Candidates that the search's sums put within this of the best are timed by their programs: the
// best few of each kind, as long as all of them compile in about a second.
constexpr double kWithin = 1.2;
constexpr size_t kMostTimed = 12;
constexpr int kMostAlike = 2;
constexpr int64_t kMostWork = 16000;  // ProgramMemory::work()

}  // namespace

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

std::optional<ProgramTime> PlanSearch::replay_programs_of(const Candidate& candidate,
                                                          const Plan& plan) const {
  std::vector<std::shared_ptr<const RankWork>> work;
  std::vector<int> devices;
  for (size_t rank = 0; rank < candidate.rank_memory.size(); ++rank) {
    work.push_back(candidate.rank_memory[rank].work);
    devices.push_back(candidate.layout.device(static_cast<int>(rank)));
  }
  if (work.empty() || std::any_of(work.begin(), work.end(), [](const auto& w) { return !w; })) {
    return std::nullopt;
  }
  return replay_programs(plan, request_.topology, devices, work);
}

// Of the chosen plan, where its programs are priced.
void PlanSearch::take_program_time(Candidate* candidate) {
  if (!result_.feasible) {
    return;
  }
  const std::optional<ProgramTime> time = replay_programs_of(*candidate, result_.plan);
  if (!time) {
    return;
  }
  int data_rank = 0;  // the first with a share
  while (candidate->layout.micro_batches(data_rank) == 0) {
    ++data_rank;
  }
  std::vector<std::shared_ptr<const RankWork>> work;
  for (const RankMemory& rank : candidate->rank_memory) {
    work.push_back(rank.work);
  }
  const double searched = candidate->prediction.seconds;
  take_time(*time, work, result_.plan, data_rank, &candidate->prediction);
  result_.programs_factor = candidate->prediction.seconds / searched;
  result_.lower_bound *= result_.programs_factor;
}

void PlanSearch::rank_by_programs() {
  const auto time_of = [&](const Candidate& candidate) {
    const GraphProfile& own = *profiles_[static_cast<size_t>(candidate.profile)];
    const std::optional<ProgramTime> time =
        replay_programs_of(candidate, plan_of(request_, candidate, own));
    return time ? std::optional<double>(time->seconds) : std::nullopt;
  };
  const std::optional<double> first = best_ < 1e300 ? time_of(chosen_) : std::nullopt;
  if (!first || request_.memory_where_tight) {
    return;
  }
  program_seconds_[chosen_.shape] = *first;
  double least = value_of(chosen_, *first);
  std::vector<Candidate> ranked;
  for (Candidate& candidate : replayed_) {
    if (value_of(candidate, candidate.prediction.seconds) < kWithin * best_) {
      ranked.push_back(candidate);
    }
  }
  std::stable_sort(ranked.begin(), ranked.end(), [this](const Candidate& a, const Candidate& b) {
    return value_of(a, a.prediction.seconds) < value_of(b, b.prediction.seconds);
  });
  const auto kind_of = [](const Candidate& c) {
    return std::make_tuple(c.profile,
                           c.rank_profiles,
                           c.layout.pipeline * c.layout.virtual_stages,
                           c.layout.device_order);
  };
  std::map<decltype(kind_of(chosen_)), int> alike;
  std::map<Group, int> of_group;
  ++alike[kind_of(chosen_)];
  ++of_group[{chosen_.layout.tensor, chosen_.layout.pipeline}];
  int64_t work = 0;
  // First one of each degrees, which differ most in what sums leave out.
  for (const bool of_other_degrees : {true, false}) {
    for (Candidate& candidate : ranked) {
      int& degrees = of_group[{candidate.layout.tensor, candidate.layout.pipeline}];
      int& kind = alike[kind_of(candidate)];
      if (program_seconds_.size() >= kMostTimed || program_seconds_.count(candidate.shape) != 0 ||
          kind >= kMostAlike || (of_other_degrees && degrees > 0)) {
        continue;
      }
      write_shares(&candidate);
      const GraphProfile& own = *profiles_[static_cast<size_t>(candidate.profile)];
      const int64_t more = ProgramMemory::work(plan_of(request_, candidate, own), own.num_nodes);
      if (work + more > kMostWork) {
        continue;
      }
      work += more;
      ++kind;
      ++degrees;
      const std::optional<double> time =
          settle_memory(&candidate) ? time_of(candidate) : std::nullopt;
      if (!time) {
        continue;
      }
      program_seconds_[candidate.shape] = *time;
      const double value = value_of(candidate, *time);
      if (value < least) {
        least = value;
        chosen_ = candidate;
      }
    }
  }
}

}  // namespace trainrt
