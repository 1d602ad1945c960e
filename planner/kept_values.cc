// Kept: what a backward node reads of its block's forward values. Selective recompute runs the
// cheap (memory-bound) nodes again and keeps what they read instead; full keeps the block's input
// alone.
#include "planner/kept_values.h"

#include <algorithm>

#include "graph/op_def.h"
#include "planner/block_memory.h"
#include "planner/shard_part.h"

namespace trainrt {

namespace {

class Keeper {
 public:
  Keeper(const Graph& graph, const Block& block)
      : graph_(graph), block_(block), own_(block.forward.begin(), block.forward.end()) {}

  KeptValues run() {
    for (const NodeId id : block_.backward) {
      for (const ValueId input : graph_.node(id).inputs) {
        const ValueId storage = input == kNoValue ? input : storage_of(graph_, input);
        if (storage != kNoValue && is_activation(storage)) {
          result_.whole.insert(storage);
          keep(storage);
        }
      }
    }
    return std::move(result_);
  }

 private:
  bool is_activation(ValueId id) const {
    const Value& value = graph_.value(id);
    // The data of the micro-batch are held by the loader.
    return value.kind == ValueKind::kIntermediate &&
           (id == block_.input || own_.count(value.producer) != 0);
  }

  // Under selective recompute: `id` is kept, or made again from what is.
  void keep(ValueId id) {
    id = storage_of(graph_, id);
    if (!is_activation(id)) {
      return;
    }
    const NodeId producer = graph_.value(id).producer;
    const bool cheap =
        id != block_.input && producer != kNoNode && get_op(graph_.node(producer).op_type).cheap;
    if (!cheap) {
      result_.selective.insert(id);
      return;
    }
    if (!result_.rerun.insert(producer).second) {
      return;
    }
    for (const ValueId input : graph_.node(producer).inputs) {
      if (input != kNoValue) {
        keep(input);
      }
    }
  }

  const Graph& graph_;
  const Block& block_;
  const std::set<NodeId> own_;
  KeptValues result_;
};

// Placements of all values of a block.
std::map<ValueId, Placement> place(const BlockBytesRequest& request, const Block& block) {
  std::map<ValueId, Placement> placements;
  if (request.tensor_parallel == 1) {
    return placements;
  }
  const Graph& graph = request.model->graph;
  const auto told = [&](ValueId id) {
    const std::string& name = graph.value(id).name;
    const auto found = request.placements->find(name);
    if (found != request.placements->end()) {
      placements[id] = found->second;
    }
    return found != request.placements->end() || request.known->find_value(name).has_value();
  };
  for (size_t i = 0; i < block.forward.size() + block.backward.size(); ++i) {
    const Node& node = graph.node(block.node(i));
    for (const ValueId input : node.inputs) {
      if (input != kNoValue && placements.count(input) == 0) {
        told(input);
      }
    }
    const ShardingRule& rule = request.model->facts->rule(graph, block.node(i));
    const int factor = inherited_factor(graph, node, placements, request.tensor_parallel, rule);
    for (size_t o = 0; o < node.outputs.size(); ++o) {
      const ValueId output = node.outputs[o];
      if (output == kNoValue || (i < block.forward.size() && told(output)) || factor < 0 ||
          o >= rule.outputs.size()) {
        continue;
      }
      for (size_t d = 0; d < rule.outputs[o].size(); ++d) {
        if (!rule.outputs[o][d].empty() && rule.outputs[o][d][0] == factor) {
          placements[output] =
              Placement::shard(static_cast<int>(d), rule.factors[static_cast<size_t>(factor)].size);
        }
      }
    }
  }
  return placements;
}

}  // namespace

int inherited_factor(const Graph& graph,
                     const Node& node,
                     const std::map<ValueId, Placement>& placements,
                     int tensor_parallel,
                     const ShardingRule& rule) {
  int best = -1;
  int64_t most = 0;
  for (size_t i = 0; i < node.inputs.size() && i < rule.inputs.size(); ++i) {
    const ValueId id = node.inputs[i];
    const auto found = id == kNoValue ? placements.end() : placements.find(id);
    if (found == placements.end() || found->second.kind != Placement::Kind::kShard) {
      continue;
    }
    const auto dim = static_cast<size_t>(found->second.dim);
    if (dim >= rule.inputs[i].size() || rule.inputs[i][dim].empty()) {
      continue;
    }
    const int factor = rule.inputs[i][dim][0];
    const Factor& f = rule.factors[static_cast<size_t>(factor)];
    const int64_t units = num_units(graph.value(id).type.shape, found->second);
    const bool splits = f.kind != FactorKind::kWhole && f.size >= tensor_parallel &&
                        cut_units(f.size, tensor_parallel) == cut_units(units, tensor_parallel);
    if (splits && graph.value(id).type.bytes() > most) {
      best = factor;
      most = graph.value(id).type.bytes();
    }
  }
  return best;
}

KeptValues kept_values(const Graph& graph, const Block& block) {
  return Keeper(graph, block).run();
}

BlockBytes block_bytes(const BlockBytesRequest& request, int block_class) {
  const Graph& graph = request.model->graph;
  const Block& block = request.model->classes[static_cast<size_t>(block_class)];
  const std::map<ValueId, Placement> placements = place(request, block);
  const auto bytes = [&](ValueId id) {
    const Value& value = graph.value(id);
    double size = static_cast<double>(value.type.bytes());
    size *= value.type.dtype == DType::kFloat32 ? request.float32_scale : 1;
    const auto found = placements.find(id);
    return found == placements.end()
               ? size
               : largest_part(size, value.type.shape, found->second, request.tensor_parallel);
  };
  const KeptValues kept = kept_values(graph, block);
  BlockBytes result;
  for (const ValueId id : kept.whole) {
    result.kept[0] += bytes(id);
  }
  for (const ValueId id : kept.selective) {
    result.kept[1] += bytes(id);
  }
  result.kept[2] = block.input == kNoValue ? 0 : bytes(block.input);
  const std::set<NodeId> own(block.forward.begin(), block.forward.end());
  const std::vector<bool>& awaited = request.model->awaited;
  std::set<ValueId> gradients;
  for (const NodeId id : block.backward) {
    for (const ValueId input : graph.node(id).inputs) {
      const ValueId storage = input == kNoValue ? input : storage_of(graph, input);
      if (awaited[static_cast<size_t>(id)] || storage == kNoValue || storage == block.input ||
          graph.value(storage).kind != ValueKind::kIntermediate) {
        continue;
      }
      const NodeId producer = graph.value(storage).producer;
      const bool of_forward = own.count(producer) != 0;
      if (!of_forward && (producer == kNoNode || awaited[static_cast<size_t>(producer)]) &&
          gradients.insert(storage).second) {
        result.split += bytes(storage);
      }
    }
  }
  const BlockTransients transients =
      block_transients(graph, block, kept.whole, bytes, [&](NodeId id) {
        return request.device == nullptr ? 0.0
                                         : static_cast<double>(request.model->facts->workspace(
                                               graph, id, *request.device));
      });
  result.transient = std::max(transients.forward, transients.backward);
  return result;
}

}  // namespace trainrt
