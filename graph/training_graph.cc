// forward graph -> training graph. The steps follow each other below: loss, backward, accumulation,
// update; then what nobody reads any more (the forward graph's outputs) is dropped.
//
// A parameter with several uses (a tied embedding) has one accumulator per use, and the uses are
// summed in the update: so that the bits do not depend on whether the uses lie on one pipeline
// stage or on two. That memory is spent for a few uses only; many (an unrolled recurrent net) are
// summed within the micro-batch, and then have to share a stage for equal bits.
#include "graph/training_graph.h"

#include "graph/autodiff.h"
#include "graph/base/log.h"
#include "graph/loss.h"
#include "graph/optimizer.h"
#include "graph/passes/pass.h"
#include "graph/passes/precision.h"
#include "graph/passes/rematerialize.h"
#include "graph/training_parts.h"
#include "graph/verifier.h"

namespace trainrt {

namespace {

constexpr size_t kMostAccumulators = 4;

// Appends to `graph` an accumulator for `term` and returns the accumulated value.
ValueId accumulate(Graph& graph, const std::string& name, ValueId term) {
  Value accumulator;
  accumulator.name = graph.unique_value_name(name);
  accumulator.type = graph.value(term).type;
  accumulator.kind = ValueKind::kGradient;
  const ValueId target = graph.add_value(std::move(accumulator));
  GraphBuilder builder(graph);
  builder.set_region(Region::kBackward);
  const ValueId sum = builder.op("Accumulate", {target, term}, {}, name + "/accumulate");
  graph.updates().push_back({target, sum});
  return sum;
}

ValueId sum_in_order(Graph& graph,
                     const std::vector<ValueId>& terms,
                     Region region,
                     const std::string& name) {
  GraphBuilder builder(graph);
  builder.set_region(region);
  builder.set_name_prefix(name + "/");
  ValueId sum = terms[0];
  for (size_t i = 1; i < terms.size(); ++i) {
    sum = builder.add(sum, terms[i]);
  }
  return sum;
}

}  // namespace

ValueId complete_gradient(Graph& graph,
                          const std::string& parameter,
                          std::vector<ValueId> uses,
                          bool accumulated) {
  const std::string name = parameter + ".grad";
  if (uses.size() > kMostAccumulators || !accumulated) {
    uses = {sum_in_order(graph, uses, Region::kBackward, name)};
  }
  if (accumulated) {
    for (size_t i = 0; i < uses.size(); ++i) {
      uses[i] =
          accumulate(graph, uses.size() == 1 ? name : name + "." + std::to_string(i), uses[i]);
    }
  }
  return sum_in_order(graph, uses, Region::kUpdate, name);
}

namespace {

// A parameter that gets no gradient is no parameter: it keeps its contents.
void demote(Value& parameter) {
  parameter.kind = ValueKind::kConstant;
  parameter.why = "no gradient from the loss";
}

// Names by which the values of a TrainingGraph are found again after nodes were dropped.
constexpr const char* kLossSum = "trainrt.loss_sum";
constexpr const char* kItemCount = "trainrt.item_count";
constexpr const char* kCorrect = "trainrt.correct";
constexpr const char* kGradNorm = "trainrt.grad_norm";

// build_loss() as the only results of `graph`.
LossValues end_with_loss(Graph& graph, const LossSpec& spec, bool count_correct) {
  const LossValues loss = build_loss(graph, spec, count_correct);
  graph.outputs().clear();
  for (const ValueId id : {loss.loss_sum, loss.item_count, loss.correct}) {
    if (id != kNoValue) {
      graph.outputs().push_back(id);
    }
  }
  read_low_scores(graph);
  return loss;
}

void find_results(TrainingGraph& training) {
  const Graph& graph = training.graph;
  training.loss_sum = graph.find_value(kLossSum).value_or(kNoValue);
  training.item_count = graph.find_value(kItemCount).value_or(kNoValue);
  training.correct = graph.find_value(kCorrect).value_or(kNoValue);
  training.grad_norm = graph.find_value(kGradNorm).value_or(kNoValue);
}

}  // namespace

TrainingGraph finish_training_graph(Graph graph,
                                    const LossValues& loss,
                                    ValueId grad_norm,
                                    std::vector<std::string> parameters) {
  graph.outputs().clear();
  const auto keep = [&](ValueId id, const char* name) {
    if (id != kNoValue) {
      graph.rename_value(id, name);
      graph.outputs().push_back(id);
    }
  };
  keep(loss.loss_sum, kLossSum);
  keep(loss.item_count, kItemCount);
  keep(loss.correct, kCorrect);
  keep(grad_norm, kGradNorm);
  TrainingGraph result;
  result.graph = rematerialize(eliminate_dead_code(graph));
  verify(result.graph, "training graph");
  find_results(result);
  result.parameters = std::move(parameters);
  return result;
}

TrainingGraph build_training_graph(Graph forward, const TrainingSpec& spec) {
  Graph graph = std::move(forward);
  check_optimizer(spec.optimizer);
  const std::vector<ValueId> candidates = graph.values_of_kind(ValueKind::kParameter);
  TRAINRT_REQUIRE(!candidates.empty(),
                  kInvalidArgument,
                  "the model has no trainable parameter; loosen --trainable or --freeze "
                  "(`trainrt inspect` lists the candidates)");
  const LossValues loss = end_with_loss(graph, spec.loss, /*count_correct=*/false);
  const ValueId seed = graph.add_input(runtime_input::kLossSeed, {DType::kFloat64, {}});
  const std::vector<std::vector<ValueId>> uses =
      differentiate_uses(graph, {loss.loss_sum}, {seed}, candidates);
  std::vector<ParameterGradient> parameters;
  std::vector<std::string> names;
  std::vector<std::string> without_influence;
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (uses[i].empty()) {
      without_influence.push_back(graph.value(candidates[i]).name);
      demote(graph.value(candidates[i]));
      continue;
    }
    const std::string name = graph.value(candidates[i]).name;
    names.push_back(name);
    parameters.push_back({candidates[i], complete_gradient(graph, name, uses[i], spec.accumulate)});
  }
  TRAINRT_REQUIRE(!parameters.empty(),
                  kInvalidArgument,
                  "the loss (",
                  spec.loss.kind,
                  ") depends on no trainable parameter; nothing would be trained");
  const ValueId grad_norm = build_update(graph, parameters, spec.optimizer);
  TrainingGraph result = finish_training_graph(std::move(graph), loss, grad_norm, std::move(names));
  result.without_influence = std::move(without_influence);
  return result;
}

TrainingGraph rematerialize_like(TrainingGraph training, const TrainingGraph& example) {
  training.graph = rematerialize_like(std::move(training.graph), example.graph);
  find_results(training);
  return training;
}

TrainingGraph build_eval_graph(Graph forward, const LossSpec& loss) {
  Graph graph = std::move(forward);
  graph.updates().clear();
  const LossValues values = end_with_loss(graph, loss, /*count_correct=*/true);
  return finish_training_graph(std::move(graph), values, kNoValue, {});
}

}  // namespace trainrt
