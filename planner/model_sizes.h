// One model at the micro-batch sizes that searches ask for.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <map>

#include "planner/model_blocks.h"

namespace trainrt {

class ModelSizes {
 public:
  // `graph`: the training graph at a size; called from two threads.
  explicit ModelSizes(std::function<TrainingGraph(int64_t micro_batch)> graph, BlockPins pins = {})
      : graph_(std::move(graph)), pins_(std::move(pins)) {}

  // Begins to build those that at() derives the others from.
  void prepare();
  // Sizes above 2 follow from 1 and 2 where they can (at_micro_batch()), unless `built` is
  // demanded. References stay valid.
  const ModelBlocks& at(int64_t micro_batch, bool built = false);

 private:
  ModelBlocks build(int64_t micro_batch) const;

  std::function<TrainingGraph(int64_t micro_batch)> graph_;
  BlockPins pins_;
  std::map<int64_t, ModelBlocks> built_, derived_;
  std::future<ModelBlocks> second_;  // of size 2, while that of 1 is built
};

}  // namespace trainrt
