// Runs a training graph on the host without plan or program: the meaning of a TrainingGraph, step
// by step, that the executor is held against.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "graph/evaluator.h"
#include "graph/training_graph.h"

namespace trainrt::testing {

class TrainingLoop {
 public:
  explicit TrainingLoop(TrainingGraph training) : training_(std::move(training)) {}

  struct Result {
    double loss = 0;
    double grad_norm = 0;
    double num_items = 0;
  };

  // One optimizer step over micro-batches of feeds, all of the shapes the graph was built for.
  Result step(const std::vector<std::map<std::string, Tensor>>& micro_batches,
              double learning_rate,
              double loss_scale = 1);

  // The contents of a persistent value.
  Tensor value(const std::string& name) const;
  void set_value(const std::string& name, Tensor tensor) { persistent_[name] = std::move(tensor); }
  const TrainingGraph& training() const { return training_; }

  bool reference_kernels = true;

 private:
  TrainingGraph training_;
  std::map<std::string, Tensor> persistent_;
  int64_t step_ = 0;
};

}  // namespace trainrt::testing
