#include "parallel/silent_variant.h"

#include <map>

#include "graph/graph_builder.h"

namespace trainrt {

namespace {

bool is_step_phase(PhaseKind kind) {
  return kind == PhaseKind::kCount || kind == PhaseKind::kGather || kind == PhaseKind::kReduce ||
         kind == PhaseKind::kUpdate;
}

bool is_data_collective(const Node& node) {
  return is_communication(node.op_type) && node.attributes.get_string("group", "") == "data";
}

// Collectives, and what can be computed from them and persistent values alone and ends in an update
// of one.
std::vector<bool> nodes_to_run(const ProgramVariant& full) {
  const Graph& graph = full.graph;
  std::vector<bool> run(static_cast<size_t>(graph.num_nodes()), false);
  for (const Phase& phase : full.phases) {
    if (is_step_phase(phase.kind)) {
      continue;
    }
    for (const NodeId id : phase.nodes) {
      const Node& node = graph.node(id);
      bool from_collective = false, available = true;
      for (const ValueId input : node.inputs) {
        if (input == kNoValue || graph.value(input).kind != ValueKind::kIntermediate) {
          // Data of samples that are not there; the runtime's own inputs are scalars without them.
          available = available && (input == kNoValue || graph.value(input).batch_axis < 0);
          continue;
        }
        const NodeId from = graph.value(input).producer;
        const bool runs = run[static_cast<size_t>(from)];
        available = available && runs;
        from_collective = from_collective || runs;
      }
      run[static_cast<size_t>(id)] = is_data_collective(node) || (available && from_collective);
    }
  }
  std::vector<bool> wanted(run.size(), false);
  for (const StateUpdate& update : graph.updates()) {
    const NodeId from = graph.value(update.new_value).producer;
    if (from != kNoNode) {
      wanted[static_cast<size_t>(from)] = true;
    }
  }
  for (NodeId id = graph.num_nodes(); id-- > 0;) {
    const Node& node = graph.node(id);
    run[static_cast<size_t>(id)] = run[static_cast<size_t>(id)] &&
                                   (wanted[static_cast<size_t>(id)] || is_data_collective(node));
    for (const ValueId input : node.inputs) {
      if (run[static_cast<size_t>(id)] && input != kNoValue &&
          graph.value(input).producer != kNoNode) {
        wanted[static_cast<size_t>(graph.value(input).producer)] = true;
      }
    }
  }
  return run;
}

// The phases of `full` that `wanted` accepts, reduced to the nodes in `run`, in their order. What
// nodes of other phases and nodes that do not run would have made is zeros, made where they are
// read; but the persistent value itself where `left` says that another micro-batch has updated it.
template <typename Wanted, typename Left>
ProgramVariant reduced(const ProgramVariant& full,
                       const std::vector<bool>& run,
                       Wanted&& wanted,
                       Left&& left) {
  ProgramVariant result;
  result.micro_batch_size = full.micro_batch_size;
  Graph graph = full.graph;
  std::vector<NodeId> keep;
  std::vector<bool> made(static_cast<size_t>(graph.num_nodes()), false);
  std::map<ValueId, ValueId> targets;  // new value -> what it updates
  for (const StateUpdate& update : graph.updates()) {
    targets[update.new_value] = update.target;
  }
  for (const Phase& phase : full.phases) {
    if (!wanted(phase.kind)) {
      continue;
    }
    Phase& own = result.phases.emplace_back();
    own.kind = phase.kind;
    own.virtual_stage = phase.virtual_stage;
    std::map<ValueId, ValueId> zeros;  // of this phase
    for (const NodeId id : phase.nodes) {
      if (!run[static_cast<size_t>(id)]) {
        continue;
      }
      for (size_t i = 0; i < graph.node(id).inputs.size(); ++i) {
        const ValueId input = graph.node(id).inputs[i];
        const NodeId from = input == kNoValue ? kNoNode : graph.value(input).producer;
        if (from == kNoNode || made[static_cast<size_t>(from)]) {
          continue;
        }
        if (left(from)) {
          graph.node(id).inputs[i] = targets.at(input);
          continue;
        }
        const auto [at, is_new] = zeros.try_emplace(input, kNoValue);
        if (is_new) {
          GraphBuilder builder(graph);
          builder.set_region(graph.node(id).region);
          at->second = builder.fill(0, graph.value(input).type);
          own.nodes.push_back(graph.value(at->second).producer);
          made.push_back(true);
        }
        graph.node(id).inputs[i] = at->second;
      }
      made[static_cast<size_t>(id)] = true;
      own.nodes.push_back(id);
    }
    keep.insert(keep.end(), own.nodes.begin(), own.nodes.end());
  }
  std::vector<ValueId> map;
  result.graph = graph.subgraph(keep, &map, /*drop_unused=*/true);
  NodeId next = 0;  // subgraph numbers the nodes in the order given
  for (Phase& phase : result.phases) {
    for (NodeId& id : phase.nodes) {
      id = next++;
    }
  }
  const ValueId norm = full.grad_norm;
  result.grad_norm = norm == kNoValue ? kNoValue : map[static_cast<size_t>(norm)];
  return result;
}

}  // namespace

ProgramVariant silent_variant(const ProgramVariant& full) {
  return reduced(
      full,
      nodes_to_run(full),
      [](PhaseKind kind) { return !is_step_phase(kind); },
      [](NodeId) { return false; });
}

namespace {

template <typename Left>
ProgramVariant once_per_step(const ProgramVariant& full, Left&& left) {
  return reduced(
      full,
      std::vector<bool>(static_cast<size_t>(full.graph.num_nodes()), true),
      [](PhaseKind kind) { return kind == PhaseKind::kReduce || kind == PhaseKind::kUpdate; },
      left);
}

}  // namespace

ProgramVariant idle_variant(const ProgramVariant& full, bool lockstep) {
  const std::vector<bool> silent =
      lockstep ? nodes_to_run(full)
               : std::vector<bool>(static_cast<size_t>(full.graph.num_nodes()), false);
  return once_per_step(full, [&](NodeId id) { return silent[static_cast<size_t>(id)]; });
}

ProgramVariant update_variant(const ProgramVariant& full) {
  return once_per_step(full, [](NodeId) { return true; });
}

}  // namespace trainrt
