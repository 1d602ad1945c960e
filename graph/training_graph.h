// forward Graph -> training Graph: loss, backward, gradient accumulation and optimizer, all as
// ordinary nodes.
//
// The one normalisation point: loss = sum of item losses / N, N = sum of the weights of the valid
// items over the whole step, whatever the split. The training graph computes, per micro-batch, the
// *sum* of item losses (`loss_sum`, float64) and in Region::kCount the micro-batch's share of N
// (`item_count`, float64). The runtime sums item_count over all micro-batches and data ranks before
// the first backward and feeds 1/N (times the loss scale) as runtime_input::kLossSeed, which seeds
// the backward. Gradients are then summed, never averaged.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/onnx_import.h"
#include "graph/passes/sample_rows.h"
#include "graph/scalar_loss.h"

namespace trainrt {

// What the loss is. `auto` is resolved by resolve_loss() and never reaches build_training_graph().
struct LossSpec {
  std::string kind = "auto";  // softmax_cross_entropy nll mse bce_with_logits l1 output
  std::string output;         // graph output the loss reads, or the scalar itself for `output`
  std::string labels;         // name of the label input (added to the graph when it has none)
  bool next_token = false;    // labels are the input shifted by one (language models)
  int64_t ignore_index = -100;
  DType labels_dtype = DType::kInt64;
  Shape labels_shape;         // at the graph's micro-batch size
  int labels_batch_axis = 0;  // of labels_shape: as the samples lie in the output
  SamplePlace place;          // of the samples in the output
  // Of `output`: ScalarLoss::sums_samples, the same for micro-batches of every size; unset: as the
  // graph at hand tells.
  std::optional<bool> sums_samples;
};

struct OptimizerSpec {
  std::string name = "adamw";  // sgd momentum adam adamw adagrad lamb
  double weight_decay = 0.01;
  double momentum = 0.9;
  bool nesterov = false;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double clip_norm = 0;  // 0: no clipping
};

struct TrainingSpec {
  LossSpec loss;
  OptimizerSpec optimizer;
  // Whether gradients are accumulated over micro-batches. Without, a gradient is an intermediate
  // value of the one micro-batch.
  bool accumulate = true;
};

struct TrainingGraph {
  Graph graph;
  ValueId loss_sum = kNoValue;    // float64 scalar, Region::kForward
  ValueId item_count = kNoValue;  // float64 scalar, Region::kCount
  ValueId grad_norm = kNoValue;   // float32 scalar, Region::kUpdate (global norm before clipping)
  ValueId correct = kNoValue;     // float64 scalar, Region::kForward: correctly classified items,
                                  // kNoValue unless the labels are classes
  std::vector<std::string> parameters;  // trained, in graph order
  std::vector<std::string>
      without_influence;  // would be trained, but the loss does not depend on them
};

// The forward graph at another number of samples; nothing where the model has no other size.
using GraphAtBatch = std::function<std::optional<Graph>(int64_t batch)>;

// Fills in `auto` from the graph and the data's labels (`labels` may be null when there are none;
// their samples come first). Throws kInvalidArgument, saying what was found, when no loss can be
// inferred. `at_batch` tells where the samples of the output lie when `forward` alone does not.
LossSpec resolve_loss(const Graph& forward,
                      const LossSpec& wanted,
                      const TensorType* labels,
                      const GraphAtBatch& at_batch = nullptr);

// Throws kInvalidArgument for zero trainable parameters, kUnsupported for missing gradients.
TrainingGraph build_training_graph(Graph forward, const TrainingSpec& spec);

// `training`, which makes again in its backward what `example` does, the same at another
// micro-batch size (graph/passes/rematerialize).
TrainingGraph rematerialize_like(TrainingGraph training, const TrainingGraph& example);

// Forward and loss only, Region::kCount and kForward: for `eval`.
TrainingGraph build_eval_graph(Graph forward, const LossSpec& loss);

// What the loss of the model's own training_info makes of its samples: the same at every size of
// micro-batches.
ScalarLoss loss_of_training_info(const OnnxModel& model, BindOptions options);

// The training graph that the model's own training_info describes. `accumulate` as above,
// `sums_samples` as of its loss.
TrainingGraph build_from_training_info(const OnnxModel& model,
                                       const BindOptions& options,
                                       bool accumulate,
                                       bool sums_samples);

}  // namespace trainrt
