// How the nodes of a graph can be split. An operator tells it from the types, and profiles of one
// micro-batch size have these in common: each node's rule is made once, when it is first asked for.
#pragma once

#include <memory>
#include <mutex>

#include "graph/op_def.h"

namespace trainrt {

class NodeRules {
 public:
  explicit NodeRules(int num_nodes) : rules_(new Entry[static_cast<size_t>(num_nodes)]) {}

  // `graph`: always the same. For any thread.
  const ShardingRule& of(const Graph& graph, NodeId id) {
    Entry& entry = rules_[static_cast<size_t>(id)];
    std::call_once(entry.made, [&] {
      const Node& node = graph.node(id);
      entry.rule = get_op(node.op_type).sharding(OpContext(graph, node));
    });
    return entry.rule;
  }

 private:
  struct Entry {
    std::once_flag made;
    ShardingRule rule;
  };
  std::unique_ptr<Entry[]> rules_;
};

}  // namespace trainrt
