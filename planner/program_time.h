// Time of one step by replaying the compiled programs of all ranks against each other: kernels one
// after the other on each rank, as a CPU runs them, collectives when all of a group have come,
// messages when they have been sent. What `run --trace` draws, predicted.
#pragma once

#include <memory>
#include <vector>

#include "parallel/plan.h"
#include "parallel/topology.h"
#include "parallel/trace_events.h"
#include "planner/rank_work.h"
#include "planner/step_cost.h"

namespace trainrt {

struct RankTime {
  double end = 0;        // seconds since the step began, on the first rank to begin it
  double compute = 0;    // in kernels of forward, backward and recompute
  double optimizer = 0;  // ... of the update
  double tensor = 0;     // in collectives of the tensor group
  double gradients = 0;  // ... that reduce over data ranks
  double gather = 0;     // ... that gather over data ranks
  double transfer = 0;   // copying messages
  double waiting = 0;    // for others, in whatever communication
  std::vector<TraceEvent> events;
  std::vector<double> cell_start, cell_end;  // by RankWork::cells from first_cell on
};

struct ProgramTime {
  double seconds = 0;
  std::vector<RankTime> ranks;
};

// `work` by rank, `devices` the device of each. Throws kInternal when the programs wait for each
// other in a circle.
ProgramTime replay_programs(const Plan& plan,
                            const Topology& topology,
                            const std::vector<int>& devices,
                            const std::vector<std::shared_ptr<const RankWork>>& work);

// The same as the search's own replay would put it, for reports: breakdown of the rank that is done
// last, cells of one data rank. `prediction` has that data rank's timeline from the search.
void take_time(const ProgramTime& time,
               const std::vector<std::shared_ptr<const RankWork>>& work,
               const Plan& plan,
               int data_rank,
               StepPrediction* prediction);

}  // namespace trainrt
