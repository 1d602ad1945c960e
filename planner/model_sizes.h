// One model at the micro-batch sizes that searches ask for.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "parallel/made_once.h"
#include "planner/short_model.h"

namespace trainrt {

// Where a model's graphs come from, at a size; called from several threads.
struct ModelSource {
  std::function<TrainingGraph(int64_t micro_batch)> training;
  // Optional: the forward graph, and the training graph of one, or of a part of it; the latter also
  // as a run has it, where that differs (in another precision).
  using Train = std::function<TrainingGraph(Graph forward, int64_t micro_batch)>;
  ForwardGraph forward = {};
  Train train = {};
  Train train_as_run = {};
};

// For any thread.
class ModelSizes {
 public:
  explicit ModelSizes(ModelSource source, BlockPins pins = {})
      : source_(std::move(source)), pins_(std::move(pins)) {}

  // Builds those that at() derives the others from.
  void prepare();
  // Sizes above 2 follow from 1 and 2 where they can (at_micro_batch()), unless `built` is
  // demanded. References stay valid.
  const SizedModel& at(int64_t micro_batch, bool built = false);

 private:
  SizedModel build(int64_t micro_batch) const;
  static std::optional<SizedModel> derive(const SizedModel& one,
                                          const SizedModel& two,
                                          int64_t micro_batch);

  ModelSource source_;
  BlockPins pins_;
  MadeOnce<int64_t, SizedModel> built_;
  MadeOnce<int64_t, std::optional<SizedModel>> derived_;
};

}  // namespace trainrt
