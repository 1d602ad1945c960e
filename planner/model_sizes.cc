#include "planner/model_sizes.h"

namespace trainrt {

SizedModel ModelSizes::build(int64_t micro_batch) const {
  // What pins demand they demand of single blocks.
  const bool pinned = !pins_.cuts.empty() || !pins_.placements.empty() || !pins_.padding.empty();
  if (source_.forward && !pinned) {
    const auto at_size = [&](const ModelSource::Train& train) -> TrainForward {
      return !train ? TrainForward{} : [&train, micro_batch](Graph forward) {
        return train(std::move(forward), micro_batch);
      };
    };
    std::optional<SizedModel> made = short_model_blocks(*source_.forward(micro_batch),
                                                        micro_batch,
                                                        at_size(source_.train),
                                                        at_size(source_.train_as_run));
    if (made) {
      return std::move(*made);
    }
  }
  return {model_blocks(source_.training(micro_batch), micro_batch, pins_), std::nullopt};
}

void ModelSizes::prepare() {
  if (built_.count(2) == 0 && !second_.valid()) {
    second_ = std::async(std::launch::async, [this] { return build(2); });
  }
}

std::optional<SizedModel> ModelSizes::derive(const SizedModel& one,
                                             const SizedModel& two,
                                             int64_t micro_batch) {
  std::optional<ModelBlocks> blocks = at_micro_batch(one.blocks, two.blocks, micro_batch);
  if (!blocks || one.as_run.has_value() != two.as_run.has_value()) {
    return std::nullopt;
  }
  SizedModel made{std::move(*blocks), std::nullopt};
  if (one.as_run) {
    made.as_run = at_micro_batch(*one.as_run, *two.as_run, micro_batch);
  }
  return made.as_run.has_value() == one.as_run.has_value() ? std::optional(std::move(made))
                                                           : std::nullopt;
}

const SizedModel& ModelSizes::at(int64_t micro_batch, bool built) {
  const auto known = built_.find(micro_batch);
  if (known != built_.end()) {
    return known->second;
  }
  if (micro_batch > 2 && !built) {
    const auto derived = derived_.find(micro_batch);
    if (derived != derived_.end()) {
      return derived->second;
    }
    std::optional<SizedModel> made = derive(at(1), at(2), micro_batch);
    if (made.has_value()) {
      return derived_.emplace(micro_batch, std::move(*made)).first->second;
    }
  }
  SizedModel made = micro_batch == 2 && second_.valid() ? second_.get() : build(micro_batch);
  return built_.emplace(micro_batch, std::move(made)).first->second;
}

}  // namespace trainrt
