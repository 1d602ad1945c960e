#include "planner/shared_shardings.h"

#include <algorithm>
#include <map>
#include <string>

namespace trainrt {

namespace {

// Where a class holds a parameter.
struct Holder {
  size_t block_class = 0;
  ValueId parameter = kNoValue;
  bool operator==(const Holder&) const = default;
};

// The holders of the parameters that blocks of several classes hold, by the parameter's name in the
// whole model.
std::map<std::string, std::vector<Holder>> shared_parameters(const ModelBlocks& model) {
  std::map<std::string, std::vector<Holder>> holders;
  for (size_t b = 0; b < model.blocks.size(); ++b) {
    const auto c = static_cast<size_t>(model.blocks[b]);
    for (size_t i = 0; i < model.parameters[c].size(); ++i) {
      std::vector<Holder>& known = holders[model.parameter_names[b][i]];
      const Holder own = {c, model.parameters[c][i]};
      if (std::find(known.begin(), known.end(), own) == known.end()) {
        known.push_back(own);
      }
    }
  }
  std::erase_if(holders, [](const auto& entry) { return entry.second.size() == 1; });
  return holders;
}

Placement placement_in(const BlockSharding& sharding, ValueId parameter) {
  const auto found = sharding.placements.find(parameter);
  return found == sharding.placements.end() ? Placement::replicate() : found->second;
}

}  // namespace

std::vector<BlockSharding> shard_blocks(const ModelBlocks& model, const ShardingRequest& request) {
  std::vector<BlockSharding> shardings;
  for (const Block& block : model.classes) {
    shardings.push_back(search_sharding(request, block));
  }
  if (request.degree == 1) {
    return shardings;
  }
  std::vector<double> count(model.classes.size(), 0);  // of blocks
  for (const int c : model.blocks) {
    ++count[static_cast<size_t>(c)];
  }
  BlockPins pins = request.pins == nullptr ? BlockPins{} : *request.pins;
  for (const auto& [name, holders] : shared_parameters(model)) {
    std::vector<Placement> ways;
    for (const Holder& holder : holders) {
      const Placement own = placement_in(shardings[holder.block_class], holder.parameter);
      if (std::find(ways.begin(), ways.end(), own) == ways.end()) {
        ways.push_back(own);
      }
    }
    double least = 1e300;
    std::map<size_t, BlockSharding> best;  // by class
    BlockPins best_pins;
    for (const Placement& way : ways.size() > 1 ? ways : std::vector<Placement>{}) {
      BlockPins pinned = pins;
      for (const Holder& holder : holders) {
        pinned.placements[model.graph.value(holder.parameter).name] = way;
      }
      ShardingRequest changed = request;
      changed.pins = &pinned;
      double seconds = 0;
      std::map<size_t, BlockSharding> found;
      for (const Holder& holder : holders) {
        const auto [entry, is_new] = found.try_emplace(holder.block_class);
        if (is_new) {
          entry->second = search_sharding(changed, model.classes[holder.block_class]);
          seconds += count[holder.block_class] * entry->second.seconds;
        }
      }
      if (seconds < least) {
        least = seconds;
        best = std::move(found);
        best_pins = std::move(pinned);
      }
    }
    if (!best.empty()) {
      pins = std::move(best_pins);
      for (auto& [block_class, sharding] : best) {
        shardings[block_class] = std::move(sharding);
      }
    }
  }
  return shardings;
}

int64_t most_tensor_ranks(const ModelBlocks& model) {
  int64_t most = 1;
  for (const Block& block : model.classes) {
    for (const NodeId id : block.forward) {
      const Node& node = model.graph.node(id);
      const ShardingRule& rule = model.facts->rule(model.graph, id);
      for (size_t i = 0; i < node.inputs.size() && i < rule.inputs.size(); ++i) {
        if (node.inputs[i] == kNoValue || !is_weight_matrix(model.graph.value(node.inputs[i]))) {
          continue;
        }
        for (const DimFactors& dim : rule.inputs[i]) {
          if (!dim.empty() && is_splittable(rule.factors[static_cast<size_t>(dim[0])])) {
            most = std::max(most, rule.factors[static_cast<size_t>(dim[0])].size);
          }
        }
      }
    }
  }
  return most;
}

}  // namespace trainrt
