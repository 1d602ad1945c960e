// What one rank does in a step, node by node and in order, each node priced: its compiled program
// as the simulator sees it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "parallel/memory_plan.h"
#include "parallel/program.h"
#include "planner/collective_cost.h"
#include "planner/cost_model.h"

namespace trainrt {

struct RankAct {
  enum class Kind : uint8_t { kCompute, kCollective, kSend, kRecv };
  Kind kind = Kind::kCompute;
  int cell = 0;  // index into RankWork::cells
  // Of a kernel; of communication what the rank does for it alone, as packing a tensor: what
  // follows depends on the peers.
  double seconds = 0;
  std::string name;
  std::string op_type;
  // Communication.
  Collective collective = Collective::kAllReduce;
  double bytes = 0;
  std::string group;  // "data", "tensor", "pipeline", "world"
  int peer = 0;       // rank in the group
  int tag = 0;
};

struct RankWork {
  RankCoordinates at;
  std::vector<Cell> cells;
  std::vector<RankAct> acts;
  // Where steps go over into each other, others have come before the one that is meant: its cells,
  // of the row StepWindow::kSteady, begin here.
  size_t first_cell = 0;
};

// Of a step in the middle of training: memory is as the step before has left it in the caches.
std::shared_ptr<const RankWork> rank_work(const Program& program,
                                          const MemoryPlan& memory,
                                          const CostModel& cost);

}  // namespace trainrt
