// Kahn's algorithm with a heap of positions, over data dependencies and the order "readers of a
// persistent value before the node that overwrites it", and over the order of messages: a Recv
// stays behind the Sends and Recvs before it in the graph. The ranks' graphs are cut out of one
// whole, and who keeps its order waits for nobody who waits for him, whatever else is moved. A
// position is where a node would like to be: its place in the graph, except that an update and what
// reduces a gradient for it stand right behind the last thing they wait for (a gradient is then
// freed at once), and a node without inputs right before its first reader.
#include "parallel/phase_order.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <queue>
#include <unordered_map>
#include <unordered_set>

#include "graph/graph_builder.h"
#include "graph/op_def.h"

namespace trainrt {

namespace {

// Which persistent values `node` overwrites, with the input index it overwrites each through; what
// is gathered is written where it is to be, through none.
struct Overwrite {
  ValueId target = kNoValue;
  int input = -1;
};

std::unordered_map<ValueId, ValueId> targets_by_new_value(const Graph& graph) {
  std::unordered_map<ValueId, ValueId> targets;
  for (const StateUpdate& update : graph.updates()) {
    targets[update.new_value] = update.target;
  }
  return targets;
}

std::vector<Overwrite> overwrites(const Graph& graph,
                                  const Node& node,
                                  const std::unordered_map<ValueId, ValueId>& targets) {
  std::vector<Overwrite> result;
  for (const Inplace& alias : inplace_of(node)) {
    if (alias.input >= static_cast<int>(node.inputs.size()) ||
        alias.output >= static_cast<int>(node.outputs.size())) {
      continue;
    }
    const ValueId input = node.inputs[static_cast<size_t>(alias.input)];
    const ValueId output = node.outputs[static_cast<size_t>(alias.output)];
    if (input == kNoValue || output == kNoValue || !is_persistent(graph.value(input).kind)) {
      continue;
    }
    const auto target = targets.find(output);
    if (alias.always || (target != targets.end() && target->second == input)) {
      result.push_back({input, alias.input});
    }
  }
  for (const ValueId output : node.outputs) {
    const auto target = output == kNoValue ? targets.end() : targets.find(output);
    if (target != targets.end() && node.op_type == comm_op::kAllGather) {
      result.push_back({target->second, -1});
    }
  }
  return result;
}

// Readers of a persistent value come before the node that overwrites it.
void add_overwrites(const Graph& graph,
                    const std::vector<NodeId>& nodes,
                    std::vector<std::pair<NodeId, NodeId>>& pairs) {
  std::unordered_map<ValueId, std::vector<NodeId>> readers;
  for (const NodeId id : nodes) {
    for (const ValueId input : graph.node(id).inputs) {
      if (input != kNoValue && is_persistent(graph.value(input).kind)) {
        readers[input].push_back(id);
      }
    }
  }
  const std::unordered_map<ValueId, ValueId> targets = targets_by_new_value(graph);
  for (const NodeId id : nodes) {
    for (const Overwrite& overwrite : overwrites(graph, graph.node(id), targets)) {
      for (const NodeId reader : readers[overwrite.target]) {
        if (reader != id) {
          pairs.emplace_back(reader, id);
        }
      }
    }
  }
}

// A Recv comes after the Sends and Recvs before it in the graph.
void add_messages(const Graph& graph,
                  const std::vector<NodeId>& nodes,
                  std::vector<std::pair<NodeId, NodeId>>& pairs) {
  std::vector<NodeId> before;  // the last Recv, and Sends since
  for (const NodeId id : nodes) {
    const bool receives = graph.node(id).op_type == comm_op::kRecv;
    if (receives) {
      for (const NodeId earlier : before) {
        pairs.emplace_back(earlier, id);
      }
      before.clear();
    }
    if (receives || graph.node(id).op_type == comm_op::kSend) {
      before.push_back(id);
    }
  }
}

}  // namespace

std::vector<std::pair<NodeId, NodeId>> order_without_data(const Graph& graph,
                                                          std::vector<NodeId> nodes) {
  std::sort(nodes.begin(), nodes.end());
  std::vector<std::pair<NodeId, NodeId>> pairs;
  add_overwrites(graph, nodes, pairs);
  add_messages(graph, nodes, pairs);
  return pairs;
}

namespace {

// Position of each node of a phase, or -1 for nodes of other phases.
class PhaseGraph {
 public:
  PhaseGraph(const Graph& graph, const std::vector<NodeId>& nodes, bool reduce_early)
      : graph_(graph),
        reduce_early_(reduce_early),
        nodes_(nodes),
        index_(static_cast<size_t>(graph.num_nodes()), -1) {
    std::sort(nodes_.begin(), nodes_.end());
    for (size_t i = 0; i < nodes_.size(); ++i) {
      index_[static_cast<size_t>(nodes_[i])] = static_cast<int>(i);
    }
    successors_.resize(nodes_.size());
    missing_.resize(nodes_.size(), 0);
    for (size_t i = 0; i < nodes_.size(); ++i) {
      for (const ValueId input : graph.node(nodes_[i]).inputs) {
        const NodeId producer = input == kNoValue ? kNoNode : graph.value(input).producer;
        if (producer != kNoNode && index_[static_cast<size_t>(producer)] >= 0) {
          add_edge(index_[static_cast<size_t>(producer)], static_cast<int>(i));
        }
      }
    }
    for (const auto& [earlier, later] : order_without_data(graph, nodes_)) {
      add_edge(index_[static_cast<size_t>(earlier)], index_[static_cast<size_t>(later)]);
    }
  }

  std::vector<NodeId> order() const {
    const std::vector<int64_t> positions = wanted_positions();
    std::vector<int> missing = missing_;
    using Entry = std::pair<int64_t, int>;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> ready;
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (missing[i] == 0) {
        ready.emplace(positions[i], static_cast<int>(i));
      }
    }
    std::vector<NodeId> result;
    while (!ready.empty()) {
      const int i = ready.top().second;
      ready.pop();
      result.push_back(nodes_[static_cast<size_t>(i)]);
      for (const int next : successors_[static_cast<size_t>(i)]) {
        if (--missing[static_cast<size_t>(next)] == 0) {
          ready.emplace(positions[static_cast<size_t>(next)], next);
        }
      }
    }
    TRAINRT_CHECK(result.size() == nodes_.size(),
                  "the updates of a phase wait for each other (",
                  nodes_.size() - result.size(),
                  " of ",
                  nodes_.size(),
                  " nodes, '",
                  first_stuck(missing),
                  "' among them)");
    return result;
  }

  // Is `later` reached from `earlier`?
  bool reaches(NodeId earlier, NodeId later) const {
    std::vector<int> open = {index_[static_cast<size_t>(earlier)]};
    std::vector<bool> seen(nodes_.size(), false);
    while (!open.empty()) {
      const int i = open.back();
      open.pop_back();
      if (i < 0 || seen[static_cast<size_t>(i)]) {
        continue;
      }
      seen[static_cast<size_t>(i)] = true;
      if (nodes_[static_cast<size_t>(i)] == later) {
        return true;
      }
      open.insert(open.end(),
                  successors_[static_cast<size_t>(i)].begin(),
                  successors_[static_cast<size_t>(i)].end());
    }
    return false;
  }

 private:
  void add_edge(int from, int to) {
    successors_[static_cast<size_t>(from)].push_back(to);
    ++missing_[static_cast<size_t>(to)];
  }

  std::string first_stuck(const std::vector<int>& missing) const {
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (missing[i] > 0) {
        return graph_.node(nodes_[i]).name;
      }
    }
    return "";
  }

  // What sums of ranks are used for frees nothing before the update: the backward goes on beside
  // the sums (where communication has a lane of its own) rather than wait for them.
  bool reads_sum(const Node& node) const {
    return std::any_of(node.inputs.begin(), node.inputs.end(), [&](ValueId input) {
      const NodeId from = input == kNoValue ? kNoNode : graph_.value(input).producer;
      return from != kNoNode && index_[static_cast<size_t>(from)] >= 0 &&
             (graph_.node(from).op_type == comm_op::kAllReduce ||
              graph_.node(from).op_type == comm_op::kReduceScatter);
    });
  }

  // Positions are doubled node indices: even for a node in its own place, odd for one that stands
  // right behind (updates) or right before (sources) another.
  std::vector<int64_t> wanted_positions() const {
    std::vector<int64_t> positions(nodes_.size());
    std::vector<int64_t> latest_input(nodes_.size(), -1);
    const std::unordered_map<ValueId, ValueId> targets = targets_by_new_value(graph_);
    for (size_t i = 0; i < nodes_.size(); ++i) {
      const Node& node = graph_.node(nodes_[i]);
      positions[i] = 2 * static_cast<int64_t>(i);
      const bool soon = (node.region == Region::kUpdate && !reads_sum(node)) ||
                        node.op_type == comm_op::kSend ||
                        (reduce_early_ && node.op_type == comm_op::kReduceScatter &&
                         node.region == Region::kBackward) ||
                        !overwrites(graph_, node, targets).empty();
      if (soon && latest_input[i] >= 0) {
        positions[i] = latest_input[i] | 1;
      }
      for (const int next : successors_[i]) {
        if (next > static_cast<int>(i)) {
          latest_input[static_cast<size_t>(next)] =
              std::max(latest_input[static_cast<size_t>(next)], positions[i]);
        }
      }
    }
    for (size_t i = nodes_.size(); i-- > 0;) {
      const bool waits = missing_[i] > 0 && graph_.node(nodes_[i]).op_type != comm_op::kRecv;
      if (waits || successors_[i].empty() || graph_.node(nodes_[i]).region == Region::kForward) {
        continue;
      }
      int64_t first = std::numeric_limits<int64_t>::max();
      for (const int next : successors_[i]) {
        first = std::min(first, positions[static_cast<size_t>(next)]);
      }
      positions[i] = std::max(positions[i], first - 1);
    }
    return positions;
  }

  const Graph& graph_;
  const bool reduce_early_;
  std::vector<NodeId> nodes_;
  std::vector<int> index_;
  std::vector<std::vector<int>> successors_;
  std::vector<int> missing_;
};

// What updates need to know of a graph that they do not change yet.
class Settling {
 public:
  Settling(const Graph& graph, const std::vector<PhaseNodes>& phases)
      : graph_(graph),
        phases_(phases),
        consumers_(graph.consumers()),
        phase_(static_cast<size_t>(graph.num_nodes()), -1),
        orders_(phases.size()) {
    for (size_t p = 0; p < phases.size(); ++p) {
      for (const NodeId id : phases[p].nodes) {
        phase_[static_cast<size_t>(id)] = static_cast<int>(p);
      }
    }
  }

  // Of the update's producer; -1: there is none.
  int phase_of(const StateUpdate& update) const {
    const NodeId producer = graph_.value(update.new_value).producer;
    return producer == kNoNode ? -1 : phase_[static_cast<size_t>(producer)];
  }

  // Can the producer of `update` write over the target itself?
  bool works_in_place(const StateUpdate& update) {
    const Value& new_value = graph_.value(update.new_value);
    const Node& node = graph_.node(new_value.producer);
    if (node.op_type != comm_op::kAllGather) {
      const std::vector<Inplace> aliases = inplace_of(node);
      const auto alias = std::find_if(aliases.begin(), aliases.end(), [&](const Inplace& a) {
        return a.output == new_value.output_index &&
               a.input < static_cast<int>(node.inputs.size()) &&
               node.inputs[static_cast<size_t>(a.input)] == update.target;
      });
      if (alias == aliases.end()) {
        return false;
      }
      if (alias->always) {
        return true;
      }
      if (std::count(node.inputs.begin(), node.inputs.end(), update.target) != 1) {
        return false;
      }
    }
    const int phase = phase_of(update);
    const std::vector<NodeId>& readers = consumers_[static_cast<size_t>(update.target)];
    return std::none_of(readers.begin(), readers.end(), [&](NodeId reader) {
      return reader != new_value.producer && phase_[static_cast<size_t>(reader)] == phase &&
             order(phase).reaches(new_value.producer, reader);  // wants the old contents later
    });
  }

 private:
  const PhaseGraph& order(int phase) {
    std::optional<PhaseGraph>& found = orders_[static_cast<size_t>(phase)];
    if (!found) {
      found.emplace(graph_, phases_[static_cast<size_t>(phase)].nodes, false);
    }
    return *found;
  }

  const Graph& graph_;
  const std::vector<PhaseNodes>& phases_;
  const std::vector<std::vector<NodeId>> consumers_;
  std::vector<int> phase_;  // by node
  std::vector<std::optional<PhaseGraph>> orders_;
};

}  // namespace

void settle_updates(Graph& graph, std::vector<PhaseNodes>& phases) {
  std::vector<StateUpdate> settled;
  std::vector<StateUpdate> pending;
  std::unordered_set<ValueId> targets;
  for (const StateUpdate& update : graph.updates()) {
    targets.insert(update.target);
  }
  std::unordered_set<ValueId> moved;
  std::vector<int> pending_phase;
  Settling settling(graph, phases);
  for (const StateUpdate& update : graph.updates()) {
    const int phase = settling.phase_of(update);
    if (phase >= 0 && moved.insert(update.new_value).second && settling.works_in_place(update)) {
      settled.push_back(update);
    } else {
      pending.push_back(update);
      pending_phase.push_back(phase);
    }
  }
  GraphBuilder builder(graph);
  builder.set_region(Region::kUpdate);
  for (size_t i = 0; i < pending.size(); ++i) {
    const StateUpdate& update = pending[i];
    PhaseNodes* phase =
        pending_phase[i] < 0 ? nullptr : &phases[static_cast<size_t>(pending_phase[i])];
    if (phase == nullptr) {
      // A value from another phase or no node at all: once per step, with the update.
      const auto last = std::find_if(phases.begin(), phases.end(), [](const PhaseNodes& p) {
        return p.kind == PhaseKind::kUpdate;
      });
      phase = last == phases.end() ? &phases.back() : &*last;
    }
    ValueId source = update.new_value;
    if (targets.count(source) != 0) {
      // All updates happen at once: the old contents of another target must be saved first.
      source = builder.op("Reshape",
                          {source},
                          {{"shape", graph.value(source).type.shape}},
                          graph.value(source).name + "/old");
      phase->nodes.push_back(graph.value(source).producer);
    }
    const ValueId assigned = builder.op(
        "Assign", {update.target, source}, {}, graph.value(update.target).name + "/assign");
    phase->nodes.push_back(graph.value(assigned).producer);
    settled.push_back({update.target, assigned});
  }
  graph.updates() = std::move(settled);
}

std::vector<Phase> order_phases(const Graph& graph,
                                const std::vector<PhaseNodes>& phases,
                                bool reduce_early) {
  std::vector<Phase> result;
  for (const PhaseNodes& phase : phases) {
    if (phase.nodes.empty()) {
      continue;
    }
    result.push_back({phase.kind,
                      phase.virtual_stage,
                      PhaseGraph(graph, phase.nodes, reduce_early).order(),
                      {},
                      {}});
  }
  return result;
}

}  // namespace trainrt
