// One pipeline rank's graph: its nodes, what it receives, what it sends, sorted into phases.
#pragma once

#include <cstdint>
#include <vector>

#include "graph/training_graph.h"
#include "parallel/phase_order.h"
#include "parallel/plan.h"
#include "parallel/stage_cut.h"

namespace trainrt {

struct RankGraph {
  TrainingGraph local;  // value ids are kNoValue for what other ranks compute
  std::vector<PhaseNodes> phases;
};

// Where the update's nodes run: in phases of their own; the sums of accumulated gradients over data
// ranks within the backward, of the step's last micro-batch; all within the backward, where a step
// has one micro-batch and one stage.
enum class UpdatePlace : uint8_t { kAfterBackward, kSumsInBackward, kInBackward };

RankGraph make_rank_graph(const TrainingGraph& whole,
                          const StageCut& cut,
                          const Plan& plan,
                          int stage,
                          UpdatePlace place);

}  // namespace trainrt
