// Pattern fusion: decomposed LayerNorm, GELU, attention ... become single operators before
// autodiff, or their gradients would keep five tensors too many. The patterns stand in the
// operators' files.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "graph/graph_builder.h"

namespace trainrt {

// One attempt at one root node. The matcher walks from the root towards its inputs.
class FusionContext : public GraphBuilder {
 public:
  FusionContext(Graph& graph, NodeId root, const std::vector<std::vector<NodeId>>& consumers);

  NodeId root() const { return root_; }
  // The node that produces `value` if it is an `op_type`, else kNoNode.
  NodeId producer(ValueId value, const std::string& op_type) const;
  // True if `value` is read by exactly one node and is no graph output: it may vanish.
  bool single_use(ValueId value) const;
  // The scalar that `value` holds if it is a constant with one element.
  std::optional<double> scalar_constant(ValueId value) const;
  // For a commutative node: if one operand satisfies the predicate return the other, else kNoValue.
  template <typename Predicate>
  ValueId other_operand(NodeId node, Predicate&& matches) const {
    const std::vector<ValueId>& in = graph_.node(node).inputs;
    if (in.size() == 2) {
      if (matches(in[0])) {
        return in[1];
      }
      if (matches(in[1])) {
        return in[0];
      }
    }
    return kNoValue;
  }

  // Every reader of `old_value` shall read `new_value` from now on.
  void replace(ValueId old_value, ValueId new_value);
  const std::vector<std::pair<ValueId, ValueId>>& replacements() const { return replacements_; }

 private:
  NodeId root_;
  const std::vector<std::vector<NodeId>>& consumers_;
  std::vector<std::pair<ValueId, ValueId>> replacements_;
};

// Runs every registered fusion until none applies. Nodes emitted by a fusion take the place of its
// root; what is then dead is removed. Returns the names of the fusions applied, once per time.
std::vector<std::string> run_fusions(Graph& graph);

}  // namespace trainrt
