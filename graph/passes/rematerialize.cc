#include "graph/passes/rematerialize.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "graph/op_def.h"

namespace trainrt {

namespace {

constexpr int64_t kSmallestBytes = 64 << 10;  // below, a node costs more than the memory is worth
constexpr int64_t kNegligible = 8;  // an input this many times smaller than the output may stay
// Per element: no more than a few passes over memory (LayerNorm, Gelu). Of a transformer block's 16
// units of activations 6 are such, for some 2 % of the step.
constexpr double kMostFlops = 12;
constexpr const char* kAgain = "/again";  // behind the names of what is made a second time

class Rematerializer {
 public:
  explicit Rematerializer(Graph graph)
      : graph_(std::move(graph)),
        num_nodes_(graph_.num_nodes()),
        first_read_(static_cast<size_t>(graph_.num_values()), kNoNode),
        last_read_(first_read_),
        again_(static_cast<size_t>(graph_.num_values()), kNoValue) {
    for (NodeId id = 0; id < num_nodes_; ++id) {
      positions_.emplace_back(id, 1);
      if (graph_.node(id).region != Region::kBackward) {
        continue;
      }
      for (const ValueId input : graph_.node(id).inputs) {
        if (input != kNoValue) {
          NodeId& first = first_read_[static_cast<size_t>(input)];
          first = first == kNoNode ? id : first;
          last_read_[static_cast<size_t>(input)] = id;
        }
      }
    }
  }

  // What the size of its tensors tells to make again.
  Graph run() {
    return run([this](const Node& node) { return is_worth_it(node); });
  }

  // What `wanted` says of the nodes that the backward reads.
  template <typename Wanted>
  Graph run(Wanted&& wanted) {
    for (NodeId id = 0; id < num_nodes_; ++id) {
      if (is_read_in_backward(graph_.node(id)) && wanted(graph_.node(id))) {
        clone(id);
      }
    }
    for (NodeId id = 0; id < num_nodes_; ++id) {
      if (graph_.node(id).region == Region::kBackward) {
        for (ValueId& input : graph_.node(id).inputs) {
          if (input != kNoValue && again_[static_cast<size_t>(input)] != kNoValue) {
            input = again_[static_cast<size_t>(input)];
          }
        }
      }
    }
    std::vector<NodeId> order(positions_.size());
    for (size_t i = 0; i < order.size(); ++i) {
      order[i] = static_cast<NodeId>(i);
    }
    std::stable_sort(order.begin(), order.end(), [&](NodeId a, NodeId b) {
      return positions_[static_cast<size_t>(a)] < positions_[static_cast<size_t>(b)];
    });
    return graph_.subgraph(order);
  }

 private:
  bool is_read_in_backward(const Node& node) const {
    const ValueId output = node.outputs.empty() ? kNoValue : node.outputs[0];
    return node.region == Region::kForward && output != kNoValue &&
           last_read_[static_cast<size_t>(output)] != kNoNode;
  }

  bool is_worth_it(const Node& node) const {
    const OpDef& op = get_op(node.op_type);
    if (!op.cheap || op.random || op.effect || op.view) {
      return false;
    }
    const ValueId output = node.outputs[0];
    const TensorType& type = graph_.value(output).type;
    // Further outputs (row statistics) stay as they are, which must not be what counts.
    const bool others_are_small =
        std::all_of(node.outputs.begin() + 1, node.outputs.end(), [&](ValueId id) {
          return id == kNoValue || graph_.value(id).type.bytes() * kNegligible <= type.bytes();
        });
    if (!others_are_small) {
      return false;
    }
    return type.bytes() >= kSmallestBytes &&
           op.cost(OpContext(graph_, node)).flops <=
               kMostFlops * static_cast<double>(num_elements(type.shape)) &&
           std::all_of(node.inputs.begin(), node.inputs.end(), [&](ValueId input) {
             return input == kNoValue || is_kept(input, output);
           });
  }

  // Is `input` there anyhow when the backward reads `output` for the last time?
  bool is_kept(ValueId input, ValueId output) const {
    const Value& value = graph_.value(input);
    return is_persistent(value.kind) ||
           value.type.bytes() * kNegligible <= graph_.value(output).type.bytes() ||
           (again_[static_cast<size_t>(input)] == kNoValue &&
            last_read_[static_cast<size_t>(input)] >= last_read_[static_cast<size_t>(output)]);
  }

  void clone(NodeId id) {
    const ValueId output = graph_.node(id).outputs[0];
    Node copy = graph_.node(id);
    copy.name += kAgain;
    copy.region = Region::kBackward;
    copy.forward_node = id;
    TensorTypes types(copy.outputs.size());
    std::vector<std::string> names(copy.outputs.size());
    types[0] = graph_.value(output).type;
    names[0] = graph_.value(output).name + kAgain;
    const NodeId again = graph_.add_node(std::move(copy), types, names);
    std::vector<ValueId>& outputs = graph_.node(again).outputs;
    std::fill(outputs.begin() + 1, outputs.end(), kNoValue);
    again_[static_cast<size_t>(output)] = outputs[0];
    positions_.emplace_back(first_read_[static_cast<size_t>(output)], 0);
  }

  Graph graph_;                                    // with clones behind its own nodes
  int num_nodes_;                                  // of its own
  std::vector<NodeId> first_read_, last_read_;     // by backward nodes; by value
  std::vector<ValueId> again_;                     // by value: its second coming
  std::vector<std::pair<NodeId, int>> positions_;  // sort keys: clones stand before a node
};

// The forward node that `node` is the second coming of; kNoNode: of none.
NodeId first_coming(const Graph& graph, const Node& node) {
  const bool is_clone = node.region == Region::kBackward && node.forward_node != kNoNode &&
                        node.name == graph.node(node.forward_node).name + kAgain;
  return is_clone ? node.forward_node : kNoNode;
}

// Names of the forward nodes that are made again.
std::set<std::string> made_again(const Graph& graph) {
  std::set<std::string> names;
  for (const Node& node : graph.nodes()) {
    if (const NodeId first = first_coming(graph, node); first != kNoNode) {
      names.insert(graph.node(first).name);
    }
  }
  return names;
}

// The graph as it was: everything made once.
Graph made_once(Graph graph) {
  std::vector<ValueId> first(static_cast<size_t>(graph.num_values()), kNoValue);
  std::vector<NodeId> keep;
  for (NodeId id = 0; id < graph.num_nodes(); ++id) {
    const NodeId original = first_coming(graph, graph.node(id));
    if (original == kNoNode) {
      keep.push_back(id);
    } else {
      first[static_cast<size_t>(graph.node(id).outputs[0])] = graph.node(original).outputs[0];
    }
  }
  for (NodeId id = 0; id < graph.num_nodes(); ++id) {
    for (ValueId& input : graph.node(id).inputs) {
      if (input != kNoValue && first[static_cast<size_t>(input)] != kNoValue) {
        input = first[static_cast<size_t>(input)];
      }
    }
  }
  return graph.subgraph(keep);
}

}  // namespace

Graph rematerialize(Graph graph) {
  return Rematerializer(std::move(graph)).run();
}

Graph rematerialize_like(Graph graph, const Graph& example) {
  const std::set<std::string> names = made_again(example);
  if (names == made_again(graph)) {
    return graph;
  }
  return Rematerializer(made_once(std::move(graph))).run([&](const Node& node) {
    return names.count(node.name) != 0;
  });
}

}  // namespace trainrt
