// One pipeline rank's graph: its nodes, what it receives, what it sends, sorted into phases.
#pragma once

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

// `merge_update`: one micro-batch per step and one stage, so the update runs within the backward.
RankGraph make_rank_graph(const TrainingGraph& whole,
                          const StageCut& cut,
                          const Plan& plan,
                          int stage,
                          bool merge_update);

}  // namespace trainrt
