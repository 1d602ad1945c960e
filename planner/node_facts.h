// What operators say of the nodes of a graph by their types alone. Profiles of one micro-batch size
// have that in common: each fact is asked for once.
#pragma once

#include <memory>
#include <mutex>

#include "graph/op_def.h"

namespace trainrt {

// `graph` is always the same. For any thread.
class NodeFacts {
 public:
  explicit NodeFacts(int num_nodes) : facts_(new Facts[static_cast<size_t>(num_nodes)]) {}

  const ShardingRule& rule(const Graph& graph, NodeId id) {
    Facts& facts = facts_[static_cast<size_t>(id)];
    std::call_once(facts.has_rule, [&] {
      const Node& node = graph.node(id);
      facts.rule = get_op(node.op_type).sharding(OpContext(graph, node));
    });
    return facts.rule;
  }

  double matmul_flops(const Graph& graph, NodeId id) {
    Facts& facts = facts_[static_cast<size_t>(id)];
    std::call_once(facts.has_flops, [&] {
      const Node& node = graph.node(id);
      facts.matmul_flops = get_op(node.op_type).cost(OpContext(graph, node)).matmul_flops();
    });
    return facts.matmul_flops;
  }

  // Of the kernel's workspace; that on the first device that was asked for is remembered.
  int64_t workspace(const Graph& graph, NodeId id, const DeviceSpec& device) {
    Facts& facts = facts_[static_cast<size_t>(id)];
    const auto tell = [&] { return workspace_bytes(OpContext(graph, graph.node(id)), device); };
    std::call_once(facts.has_workspace, [&] {
      facts.workspace = tell();
      facts.device = device;
    });
    return facts.device == device ? facts.workspace : tell();
  }

 private:
  struct Facts {
    std::once_flag has_rule, has_flops, has_workspace;
    ShardingRule rule;
    double matmul_flops = 0;
    int64_t workspace = 0;
    DeviceSpec device;
  };
  std::unique_ptr<Facts[]> facts_;
};

}  // namespace trainrt
