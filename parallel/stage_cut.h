// Which pipeline stage runs which node.
#pragma once

#include <vector>

#include "graph/graph.h"
#include "parallel/plan.h"

namespace trainrt {

struct StageCut {
  // Count, forward and backward nodes: their virtual stage. -1 for nodes of the update.
  std::vector<int> virtual_stage;
  // Nodes of the update: the pipeline ranks that run it, ascending. A node whose inputs lie on
  // several ranks (the global norm, the sum of a shared parameter's gradients) runs wherever its
  // result is wanted; any other runs where its inputs are, and the result travels.
  std::vector<std::vector<int>> update_ranks;
  // Pipeline ranks that hold each persistent value; empty for others and for what is everywhere.
  std::vector<std::vector<int>> holders;
};

// Forward nodes go by Plan::stages and their source_index (nodes of ours behind their inputs),
// backward nodes where their forward node is. Throws kInvalidArgument when the stages of the plan
// leave out a node or overlap. The results of the step are wanted on all pipeline ranks;
// `first_reports`: on the first alone.
StageCut cut_stages(const Graph& graph, const Plan& plan, bool first_reports = false);

}  // namespace trainrt
