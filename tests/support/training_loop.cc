#include "tests/support/training_loop.h"

namespace trainrt::testing {

namespace {

bool is_update(const Graph& graph, const StateUpdate& update) {
  const NodeId producer = graph.value(update.new_value).producer;
  return producer != kNoNode && graph.node(producer).region == Region::kUpdate;
}

}  // namespace

TrainingLoop::Result TrainingLoop::step(
    const std::vector<std::map<std::string, Tensor>>& micro_batches,
    double learning_rate,
    double loss_scale) {
  const Graph& graph = training_.graph;
  ++step_;
  EvaluateOptions options;
  options.reference_kernels = reference_kernels;
  options.step.step = static_cast<uint64_t>(step_);
  std::vector<std::map<std::string, Tensor>> feeds;
  for (const auto& micro_batch : micro_batches) {
    feeds.push_back(micro_batch);
    feeds.back().emplace(runtime_input::kLearningRate,
                         Tensor::scalar<float>(static_cast<float>(learning_rate)));
    feeds.back().emplace(runtime_input::kGradScale,
                         Tensor::scalar<float>(static_cast<float>(1 / loss_scale)));
    feeds.back().emplace(runtime_input::kStep, Tensor::scalar<int64_t>(step_));
    feeds.back()[runtime_input::kLossSeed] = Tensor::scalar<double>(0);
    feeds.back().insert(persistent_.begin(), persistent_.end());
  }
  Result result;
  for (const auto& feed : feeds) {
    result.num_items += evaluate(graph, feed, {training_.item_count}, options)[0].to_double()[0];
  }
  // The evaluator always runs the whole graph; what the update computes is taken from the last.
  for (size_t m = 0; m < feeds.size(); ++m) {
    options.step.first_micro_batch = m == 0;
    for (const auto& [name, tensor] : persistent_) {
      feeds[m][name] = tensor;
    }
    feeds[m][runtime_input::kLossSeed] = Tensor::scalar<double>(loss_scale / result.num_items);
    std::vector<ValueId> fetches = {training_.loss_sum};
    if (training_.grad_norm != kNoValue) {
      fetches.push_back(training_.grad_norm);
    }
    const size_t offset = fetches.size();
    for (const StateUpdate& update : graph.updates()) {
      fetches.push_back(update.new_value);
    }
    const std::vector<Tensor> values = evaluate(graph, feeds[m], fetches, options);
    result.loss += values[0].to_double()[0];
    result.grad_norm = offset > 1 ? values[1].to_double()[0] : 0;
    for (size_t i = 0; i < graph.updates().size(); ++i) {
      const StateUpdate& update = graph.updates()[i];
      if (m + 1 == feeds.size() || !is_update(graph, update)) {
        persistent_[graph.value(update.target).name] = values[offset + i];
      }
    }
  }
  result.loss /= result.num_items;
  return result;
}

Tensor TrainingLoop::value(const std::string& name) const {
  const auto found = persistent_.find(name);
  if (found != persistent_.end()) {
    return found->second;
  }
  return initial_value(training_.graph.value(training_.graph.find_value(name).value()));
}

}  // namespace trainrt::testing
