#include "planner/model_sizes.h"

#include "planner/parallel_for.h"

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
  parallel_for(2, [this](size_t i, size_t) { at(static_cast<int64_t>(i) + 1); });
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
  if (micro_batch > 2 && !built) {
    const std::optional<SizedModel>& derived =
        derived_.at(micro_batch, [this, micro_batch] { return derive(at(1), at(2), micro_batch); });
    if (derived) {
      return *derived;
    }
  }
  return built_.at(micro_batch, [this, micro_batch] { return build(micro_batch); });
}

}  // namespace trainrt
