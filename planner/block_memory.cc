#include "planner/block_memory.h"

#include <algorithm>
#include <map>

#include "graph/op_def.h"

namespace trainrt {

ValueId storage_of(const Graph& graph, ValueId id) {
  for (;;) {
    const NodeId producer = graph.value(id).producer;
    if (producer == kNoNode || !get_op(graph.node(producer).op_type).view ||
        graph.node(producer).inputs[0] == kNoValue) {
      return id;
    }
    id = graph.node(producer).inputs[0];
  }
}

namespace {

// Walks nodes in order and counts what is alive.
class Walk {
 public:
  Walk(const Graph& graph,
       const std::vector<NodeId>& nodes,
       const std::set<ValueId>& kept,
       const std::function<double(ValueId)>& bytes)
      : graph_(graph), nodes_(nodes), kept_(kept), bytes_(bytes) {
    for (size_t i = 0; i < nodes.size(); ++i) {
      for (const ValueId input : graph.node(nodes[i]).inputs) {
        if (counts(input)) {
          last_use_[storage_of(graph, input)] = i;
        }
      }
    }
  }

  double peak(const std::function<double(NodeId)>& workspace) {
    double most = 0;
    // What comes from outside is there from the beginning.
    for (const auto& [id, last] : last_use_) {
      const NodeId producer = graph_.value(id).producer;
      if (std::find(nodes_.begin(), nodes_.end(), producer) == nodes_.end()) {
        allocate(id);
      }
    }
    for (size_t i = 0; i < nodes_.size(); ++i) {
      const Node& node = graph_.node(nodes_[i]);
      const std::vector<ValueId> ending = ends_at(node, i);
      double reused = 0;  // an output may take the storage of an input that ends here
      for (const Inplace& alias : get_op(node.op_type).inplace) {
        const auto out = static_cast<size_t>(alias.output), in = static_cast<size_t>(alias.input);
        if (out >= node.outputs.size() || in >= node.inputs.size() ||
            node.outputs[out] == kNoValue || node.inputs[in] == kNoValue) {
          continue;
        }
        const ValueId from = storage_of(graph_, node.inputs[in]);
        const bool free = std::find(ending.begin(), ending.end(), from) != ending.end();
        if (free && bytes_(from) == bytes_(node.outputs[out])) {
          reused = std::max(reused, bytes_(from));
        }
      }
      for (const ValueId output : node.outputs) {
        if (counts(output) && !is_held(node, output)) {
          allocate(storage_of(graph_, output));
        }
      }
      most = std::max(most, alive_ - reused + workspace(nodes_[i]));
      for (const ValueId id : ending) {
        release(id);
      }
      for (const ValueId output : node.outputs) {  // nobody here reads it, and it does not leave
        if (counts(output) && last_use_.count(storage_of(graph_, output)) == 0 &&
            !leaves_.count(storage_of(graph_, output))) {
          release(storage_of(graph_, output));
        }
      }
    }
    return most;
  }

  // Values that are read after the last node.
  void keep_until_end(ValueId id) { leaves_.insert(storage_of(graph_, id)); }

 private:
  bool counts(ValueId id) const {
    return id != kNoValue && graph_.value(id).kind == ValueKind::kIntermediate &&
           kept_.count(storage_of(graph_, id)) == 0;
  }

  // An accumulator's new value is the accumulator.
  bool is_held(const Node& node, ValueId output) const {
    for (const Inplace& alias : get_op(node.op_type).inplace) {
      const auto in = static_cast<size_t>(alias.input);
      if (alias.always && in < node.inputs.size() &&
          node.outputs[static_cast<size_t>(alias.output)] == output &&
          is_persistent(graph_.value(node.inputs[in]).kind)) {
        return true;
      }
    }
    return false;
  }

  std::vector<ValueId> ends_at(const Node& node, size_t index) const {
    std::vector<ValueId> ending;
    for (const ValueId input : node.inputs) {
      if (!counts(input)) {
        continue;
      }
      const ValueId id = storage_of(graph_, input);
      if (last_use_.at(id) == index && leaves_.count(id) == 0 &&
          std::find(ending.begin(), ending.end(), id) == ending.end()) {
        ending.push_back(id);
      }
    }
    return ending;
  }

  void allocate(ValueId id) {
    if (live_.insert(id).second) {
      alive_ += bytes_(id);
    }
  }
  void release(ValueId id) {
    if (live_.erase(id) != 0) {
      alive_ -= bytes_(id);
    }
  }

  const Graph& graph_;
  const std::vector<NodeId>& nodes_;
  const std::set<ValueId>& kept_;
  const std::function<double(ValueId)>& bytes_;
  std::map<ValueId, size_t> last_use_;
  std::set<ValueId> leaves_;
  std::set<ValueId> live_;
  double alive_ = 0;
};

}  // namespace

BlockTransients block_transients(const Graph& graph,
                                 const Block& block,
                                 const std::set<ValueId>& kept,
                                 const std::function<double(ValueId)>& bytes,
                                 const std::function<double(NodeId)>& workspace) {
  BlockTransients result;
  Walk forward(graph, block.forward, kept, bytes);
  if (block.output != kNoValue) {
    forward.keep_until_end(block.output);
  }
  result.forward = forward.peak(workspace);
  result.backward = Walk(graph, block.backward, kept, bytes).peak(workspace);
  return result;
}

}  // namespace trainrt
