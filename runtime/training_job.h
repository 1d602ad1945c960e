// What is trained, on which data, how: the options resolved against the model and the data. Knows
// nothing of ranks.
#pragma once

#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "graph/onnx_import.h"
#include "graph/training_graph.h"
#include "runtime/checkpoint.h"
#include "runtime/data_loader.h"
#include "runtime/dataset.h"
#include "runtime/lr_schedule.h"
#include "runtime/options.h"
#include "runtime/token_batches.h"

namespace trainrt {

struct TrainingJob {
  std::shared_ptr<const OnnxModel> model;
  BindOptions bind;
  TrainingSpec spec;
  std::string precision;            // "fp32", "fp64", ...: resolved
  bool evaluate = false;            // forward and loss only
  bool from_training_info = false;  // the model itself says how it is trained
  bool reads_learning_rate = true;  // --lr and its schedule say how fast, whoever says how
  std::shared_ptr<const Dataset> dataset;
  std::vector<InputBinding> bindings;
  std::vector<std::string> input_names;  // of the bindings, in order
  int num_forward_nodes = 0;
  std::vector<std::string> frozen_norms;  // of the forward graph: see runtime/frozen_norms.h
  std::map<std::string, TensorType> model_types;  // parameters and state as the file has them
  // Of a resumed run: frozen weights are read from it, since they may have been trained before.
  std::shared_ptr<const Checkpoint> checkpoint;

  // The accumulating graph that the data were matched with, and its micro-batch size: build() need
  // not make it again.
  std::shared_ptr<const TrainingGraph> example;
  int64_t example_micro_batch = 0;
  std::shared_ptr<const Graph> example_forward;  // JobUse::kPlan: its forward graph, and no example
  // JobUse::kPlan: that of two samples, made beside it; may throw what forward() does.
  std::shared_future<std::shared_ptr<const Graph>> forward_of_two;

  std::shared_ptr<const TokenBatches> token_batches;  // of --max-tokens; null without
  int label_token_axis = -1;                          // of labels that the loss has brought along

  // The graph of one kind of micro-batch; a ShapedGraphFactory.
  TrainingGraph build(const MicroBatchShape& shape, bool accumulate) const;
  // The same from forward(shape).
  TrainingGraph build_from(Graph forward, const MicroBatchShape& shape, bool accumulate) const;
  // The same from a forward graph of full precision.
  TrainingGraph build_from_full(const Graph& forward,
                                const MicroBatchShape& shape,
                                bool accumulate) const;
  // The forward graph alone, in the run's precision.
  Graph forward(const MicroBatchShape& shape) const;
};

// Says that these parameters are not trained after all.
void warn_of_no_influence(const std::vector<std::string>& names);

// Throws kIo, kInvalidModel, kUnsupported or kInvalidArgument with what does not fit together.
enum class JobUse : uint8_t { kTrain, kEvaluate, kPlan };
TrainingJob make_training_job(const Options& options, JobUse use);

// How far to go. `steps` and `epochs` count from the beginning of training.
struct StepRange {
  int64_t first_step = 0;
  int64_t total_steps = 0;
  int64_t start = 0;  // global sample counts
  int64_t stop = 0;
  std::vector<int64_t> sizes;  // the different numbers of samples of a step, largest first
};
StepRange step_range(const Options& options,
                     int64_t num_samples,
                     int64_t first_step,
                     int64_t start);

BindOptions bind_options(const Options& options, bool training);
// Throws kInvalidArgument when --bind names a dim that enumerates samples.
void check_bound_dims(const OnnxModel& model, const BindOptions& bind);

}  // namespace trainrt
