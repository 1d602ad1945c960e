// Puts nodes between the nodes of a training graph: what the passes that run on one rank's graph
// have in common.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "graph/training_graph.h"

namespace trainrt {

class NodeInserter {
 public:
  explicit NodeInserter(TrainingGraph source);

  Graph& graph() { return result_.graph; }
  // The number of nodes that the source had: those that `anchor` may name.
  int num_source_nodes() const { return num_source_nodes_; }

  // A node right behind (before) `anchor`, after what was put there earlier, in the anchor's
  // pipeline stage. Returns output 0, or kNoValue without outputs.
  ValueId after(NodeId anchor,
                Region region,
                const std::string& op_type,
                const std::vector<ValueId>& inputs,
                Attributes attributes,
                const std::string& name);

  // Readers of `from` among the source's nodes that `wanted` accepts read `to` instead.
  template <typename Wanted>
  void redirect(ValueId from, ValueId to, Wanted&& wanted) {
    for (NodeId id = 0; id < num_source_nodes_; ++id) {
      for (ValueId& input : graph().node(id).inputs) {
        if (input == from && wanted(graph().node(id))) {
          input = to;
        }
      }
    }
  }
  // Drops a node of the source; nobody may read it any more.
  void drop(NodeId id) { dropped_[static_cast<size_t>(id)] = true; }

  TrainingGraph finish();

 private:
  TrainingGraph result_;
  int num_source_nodes_ = 0;
  std::vector<std::pair<NodeId, int>> positions_;  // anchor, order behind it
  std::vector<bool> dropped_;
};

// Graph::subgraph of a training graph, whose results get their new ids.
void keep_nodes(TrainingGraph& training, const std::vector<NodeId>& keep, bool drop_unused = false);

// The scalar input that numbers the rank's micro-batch (program.h), added when it is new.
ValueId micro_batch_input(Graph& graph);

}  // namespace trainrt
