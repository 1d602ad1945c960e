// The example models (models/) at a size at which hundreds of plans train in seconds, with data.
#pragma once

#include <functional>
#include <string>

#include "graph/training_graph.h"
#include "models/model.h"
#include "tests/support/run_plan.h"

namespace trainrt::testing {

struct FamilyModel {
  std::string name;
  TrainingGraphFactory factory;
  // Its two halves: the forward graph, in the precision, and the training graph of one.
  std::function<Graph(int64_t size)> forward;
  std::function<TrainingGraph(Graph forward, int64_t size, bool accumulate)> train;
  int num_nodes = 0;  // of the forward graph, for the stages
  bool has_batch_norm = false;
  BatchFeeds feeds;  // for the whole batch
};

// Odd sizes on purpose: 7 heads, a vocabulary that no degree divides. A sixth of the labels, most
// of them in the first samples, is ignored.
ModelSpec small_family(const std::string& family);
FamilyModel family_model(const ModelSpec& spec,
                         int64_t batch,
                         const std::string& precision,
                         const OptimizerSpec& optimizer);

}  // namespace trainrt::testing
