#include "planner/model_sizes.h"

namespace trainrt {

ModelBlocks ModelSizes::build(int64_t micro_batch) const {
  return model_blocks(graph_(micro_batch), micro_batch, pins_);
}

void ModelSizes::prepare() {
  if (built_.count(2) == 0 && !second_.valid()) {
    second_ = std::async(std::launch::async, [this] { return build(2); });
  }
}

const ModelBlocks& ModelSizes::at(int64_t micro_batch, bool built) {
  const auto known = built_.find(micro_batch);
  if (known != built_.end()) {
    return known->second;
  }
  if (micro_batch > 2 && !built) {
    const auto derived = derived_.find(micro_batch);
    if (derived != derived_.end()) {
      return derived->second;
    }
    std::optional<ModelBlocks> made = at_micro_batch(at(1), at(2), micro_batch);
    if (made.has_value()) {
      return derived_.emplace(micro_batch, std::move(*made)).first->second;
    }
  }
  ModelBlocks made = micro_batch == 2 && second_.valid() ? second_.get() : build(micro_batch);
  return built_.emplace(micro_batch, std::move(made)).first->second;
}

}  // namespace trainrt
