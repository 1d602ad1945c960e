#include "graph/passes/fusion.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "graph/op_def.h"
#include "graph/passes/pass.h"

namespace trainrt {

FusionContext::FusionContext(Graph& graph,
                             NodeId root,
                             const std::vector<std::vector<NodeId>>& consumers)
    : GraphBuilder(graph), root_(root), consumers_(consumers) {
  set_region(graph.node(root).region);
  set_source_index(graph.node(root).source_index);
}

NodeId FusionContext::producer(ValueId value, const std::string& op_type) const {
  if (value == kNoValue) {
    return kNoNode;
  }
  const NodeId id = graph_.value(value).producer;
  return id != kNoNode && graph_.node(id).op_type == op_type ? id : kNoNode;
}

bool FusionContext::single_use(ValueId value) const {
  if (static_cast<size_t>(value) >= consumers_.size() ||
      consumers_[static_cast<size_t>(value)].size() != 1) {
    return false;
  }
  for (const ValueId output : graph_.outputs()) {
    if (output == value) {
      return false;
    }
  }
  return true;
}

std::optional<double> FusionContext::scalar_constant(ValueId value) const {
  if (value == kNoValue) {
    return std::nullopt;
  }
  const Value& candidate = graph_.value(value);
  if (candidate.kind != ValueKind::kConstant || num_elements(candidate.type.shape) != 1 ||
      !candidate.constant.defined()) {
    return std::nullopt;
  }
  return candidate.constant.to_double()[0];
}

void FusionContext::replace(ValueId old_value, ValueId new_value) {
  replacements_.emplace_back(old_value, new_value);
}

namespace {

// replace_uses() that looks only where a value can be read, so that n rewrites take no n^2 steps.
class UseReplacer {
 public:
  UseReplacer(Graph& graph, const std::vector<std::vector<NodeId>>& consumers)
      : graph_(graph), consumers_(consumers), num_nodes_(graph.num_nodes()) {}

  void replace(ValueId from, ValueId to) {
    std::vector<NodeId> readers = gained_[from];
    if (static_cast<size_t>(from) < consumers_.size()) {
      const std::vector<NodeId>& known = consumers_[static_cast<size_t>(from)];
      readers.insert(readers.end(), known.begin(), known.end());
    }
    for (NodeId id = num_nodes_; id < graph_.num_nodes(); ++id) {
      readers.push_back(id);  // those that rewrites have added
    }
    const auto rename = [&](ValueId& id) { id = id == from ? to : id; };
    for (const NodeId id : readers) {
      std::vector<ValueId>& inputs = graph_.node(id).inputs;
      std::for_each(inputs.begin(), inputs.end(), rename);
    }
    std::vector<NodeId>& gained = gained_[to];
    gained.insert(gained.end(), readers.begin(), readers.end());
    std::for_each(graph_.outputs().begin(), graph_.outputs().end(), rename);
    for (StateUpdate& update : graph_.updates()) {
      rename(update.new_value);
    }
  }

 private:
  Graph& graph_;
  const std::vector<std::vector<NodeId>>& consumers_;
  NodeId num_nodes_;
  std::unordered_map<ValueId, std::vector<NodeId>> gained_;  // readers through replacements
};

}  // namespace

std::vector<std::string> run_fusions(Graph& graph) {
  std::vector<std::string> applied;
  for (const Fusion& fusion : fusions()) {
    const std::vector<std::vector<NodeId>> consumers = graph.consumers();
    const NodeId num_nodes = graph.num_nodes();
    UseReplacer replacer(graph, consumers);
    bool changed = false;
    std::vector<int> positions(static_cast<size_t>(num_nodes));
    std::iota(positions.begin(), positions.end(), 0);
    // Roots last to first: a larger pattern that ends later is seen before its own inner ones.
    for (NodeId root = num_nodes; root-- > 0;) {
      if (graph.node(root).op_type != fusion.root_op_type) {
        continue;
      }
      FusionContext context(graph, root, consumers);
      const bool rewrote = fusion.rewrite(context);
      positions.resize(static_cast<size_t>(graph.num_nodes()), root);
      if (!rewrote) {
        continue;
      }
      for (const auto& [from, to] : context.replacements()) {
        replacer.replace(from, to);
      }
      applied.push_back(fusion.name);
      changed = true;
    }
    if (changed) {
      graph = eliminate_dead_code(graph.subgraph(topological_order(graph, positions)));
    }
  }
  return applied;
}

}  // namespace trainrt
