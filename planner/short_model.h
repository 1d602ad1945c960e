// A model without the repetitions among its blocks. Of a hundred equal layers a few tell all that
// there is to know of the others, and are differentiated, lowered and compiled in their stead.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "planner/model_blocks.h"

namespace trainrt {

// The forward graph at a micro-batch size.
using ForwardGraph = std::function<std::shared_ptr<const Graph>(int64_t micro_batch)>;
// The same, made once for each size; for any thread.
ForwardGraph remembered(ForwardGraph forward);

// Of blocks [first, end) of a chain with these classes: those that are left, ascending, when a
// pattern that follows itself immediately stands `times` times at most.
std::vector<int> without_repetitions(const std::vector<int>& classes,
                                     int first,
                                     int end,
                                     int times);

// The forward graph with the blocks `kept` (ascending) alone, each reading what the one before it
// leaves. Nothing where the blocks do not fit together so.
std::optional<Graph> keep_blocks(const Graph& forward,
                                 const BlockList& list,
                                 const std::vector<int>& kept);

// A model, and its blocks once more as a run has them where that differs (another precision): of
// the latter `graph` and `classes` alone, which correspond, tell of the whole.
struct SizedModel {
  ModelBlocks blocks;
  std::optional<ModelBlocks> as_run;
};

// What model_blocks() says of the model's training graph, which `train` makes of a forward graph,
// without making the whole of it; `train_as_run` (optional) likewise. Nothing where the model does
// not allow it: then only the whole tells.
using TrainForward = std::function<TrainingGraph(Graph forward)>;
std::optional<SizedModel> short_model_blocks(const Graph& forward,
                                             int64_t micro_batch,
                                             const TrainForward& train,
                                             const TrainForward& train_as_run = nullptr);

}  // namespace trainrt
