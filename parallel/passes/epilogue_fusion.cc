// A bias joins any product. Another whole tensor joins where it dies in the addition: the product
// is then accumulated onto it in place. One that lives on would have to be copied first on a CPU,
// which is no faster than the addition by itself; cuBLASLt reads it from where it lies, which saves
// writing the product and reading it again.
#include "parallel/passes/epilogue_fusion.h"

#include <algorithm>

#include "parallel/passes/node_inserter.h"

namespace trainrt {

namespace {

// Inputs of MatMulAdd.
constexpr size_t kBias = 2, kTerm = 3;

class EpilogueFusion {
 public:
  EpilogueFusion(RankGraph& rank_graph, Backend backend)
      : rank_graph_(rank_graph),
        backend_(backend),
        graph_(rank_graph.local.graph),
        consumers_(graph_.consumers()),
        phase_of_(static_cast<size_t>(graph_.num_nodes()), -1),
        dropped_(static_cast<size_t>(graph_.num_nodes()), false) {
    for (size_t i = 0; i < rank_graph.phases.size(); ++i) {
      for (const NodeId id : rank_graph.phases[i].nodes) {
        phase_of_[static_cast<size_t>(id)] = static_cast<int>(i);
      }
    }
    for (const ValueId id : graph_.outputs()) {
      fetched_.push_back(id);
    }
    for (const StateUpdate& update : graph_.updates()) {
      fetched_.push_back(update.new_value);
    }
  }

  void run() {
    for (NodeId id = 0; id < graph_.num_nodes(); ++id) {
      if (graph_.node(id).op_type == "Add" && phase_of_[static_cast<size_t>(id)] >= 0) {
        fuse(id);
      }
    }
    remove_dropped();
  }

 private:
  // Read by one node alone, and nobody else.
  bool vanishes(ValueId id) const {
    return graph_.value(id).kind == ValueKind::kIntermediate &&
           consumers_[static_cast<size_t>(id)].size() == 1 &&
           std::find(fetched_.begin(), fetched_.end(), id) == fetched_.end();
  }

  // The product of the same phase that makes `id` and can take one more addition. On a CPU float32
  // alone: narrower types would be rounded once less than by nodes of their own. cuBLASLt adds
  // before it rounds, and knows no float64 here.
  NodeId product_of(ValueId id, NodeId add) const {
    const NodeId producer = graph_.value(id).producer;
    if (producer == kNoNode || !vanishes(id) ||
        graph_.value(id).type != graph_.value(graph_.node(add).outputs[0]).type ||
        phase_of_[static_cast<size_t>(producer)] != phase_of_[static_cast<size_t>(add)]) {
      return kNoNode;
    }
    const Node& node = graph_.node(producer);
    const bool open =
        node.op_type == "MatMul" || (node.op_type == "MatMulAdd" && node.inputs[kTerm] == kNoValue);
    const DType dtype = graph_.value(id).type.dtype;
    const bool low = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
    const bool takes = dtype == DType::kFloat32 || (low && backend_ == Backend::kCuda);
    return open && takes ? producer : kNoNode;
  }

  bool is_bias(ValueId id, const Shape& sum) const {
    const Shape& shape = graph_.value(id).type.shape;
    return shape.size() == 1 && shape[0] == sum.back();
  }

  void fuse(NodeId add) {
    const std::vector<ValueId> terms = graph_.node(add).inputs;
    const NodeId products[] = {product_of(terms[0], add), product_of(terms[1], add)};
    // Of two products the later one finds the other's result.
    const size_t which = products[1] > products[0] ? 1 : 0;
    if (products[which] == kNoNode) {
      return;
    }
    const Node product = graph_.node(products[which]);
    const ValueId other = terms[1 - which];
    const TensorType& type = graph_.value(graph_.node(add).outputs[0]).type;
    std::vector<ValueId> inputs = product.inputs;
    inputs.resize(4, kNoValue);
    if (is_bias(other, type.shape) && inputs[kBias] == kNoValue) {
      inputs[kBias] = other;
    } else if (graph_.value(other).type == type &&
               (vanishes(other) || backend_ == Backend::kCuda) && inputs[kTerm] == kNoValue) {
      inputs[kTerm] = other;
    } else {
      return;
    }
    Node& fused = graph_.node(add);
    fused.op_type = "MatMulAdd";
    fused.attributes = product.attributes;
    fused.inputs = std::move(inputs);
    dropped_[static_cast<size_t>(products[which])] = true;
  }

  void remove_dropped() {
    std::vector<NodeId> keep, new_id(dropped_.size(), kNoNode);
    for (NodeId id = 0; id < graph_.num_nodes(); ++id) {
      if (!dropped_[static_cast<size_t>(id)]) {
        new_id[static_cast<size_t>(id)] = static_cast<NodeId>(keep.size());
        keep.push_back(id);
      }
    }
    if (keep.size() == dropped_.size()) {
      return;
    }
    keep_nodes(rank_graph_.local, keep);
    for (PhaseNodes& phase : rank_graph_.phases) {
      std::erase_if(phase.nodes,
                    [&](NodeId id) { return new_id[static_cast<size_t>(id)] == kNoNode; });
      for (NodeId& id : phase.nodes) {
        id = new_id[static_cast<size_t>(id)];
      }
    }
  }

  RankGraph& rank_graph_;
  Backend backend_;
  Graph& graph_;
  std::vector<std::vector<NodeId>> consumers_;
  std::vector<int> phase_of_;
  std::vector<bool> dropped_;
  std::vector<ValueId> fetched_;
};

}  // namespace

void fuse_epilogues(RankGraph& rank_graph, Backend backend) {
  EpilogueFusion(rank_graph, backend).run();
}

}  // namespace trainrt
