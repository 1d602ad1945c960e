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
      const std::string& type = graph_.node(id).op_type;
      if (phase_of_[static_cast<size_t>(id)] < 0) {
        continue;
      }
      if (type == "Add") {
        fuse(id);
      } else if (type == "ReluGrad" && backend_ == Backend::kCuda) {
        fuse_relu_grad(id);
      } else if (type == "ReduceSum" && backend_ == Backend::kCuda) {
        fuse_bias_grad(id);
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

  const Shape& shape(ValueId id) const { return graph_.value(id).type.shape; }
  bool trans(const Node& product, const char* which) const {
    return product.attributes.get_int(which, 0) != 0;
  }

  void fuse_relu_grad(NodeId id) {
    const ValueId result = graph_.node(id).inputs[0], grad = graph_.node(id).inputs[1];
    const NodeId producer = product_of(grad, id);
    if (producer == kNoNode || graph_.node(producer).op_type != "MatMul") {
      return;
    }
    const Node& product = graph_.node(producer);
    const size_t ndim = shape(product.inputs[0]).size();
    const bool one_matrix =
        shape(product.inputs[1]).size() == 2 && (ndim == 2 || !trans(product, "trans_a"));
    if (!one_matrix || num_elements(shape(product.inputs[0])) == 0 ||
        num_elements(shape(grad)) == 0) {
      return;
    }
    Node& fused = graph_.node(id);
    fused.op_type = "MatMulReluGrad";
    fused.attributes = product.attributes;
    fused.inputs = {product.inputs[0], product.inputs[1], result};
    dropped_[static_cast<size_t>(producer)] = true;
  }

  // A sum over all leading dims goes with a weight's gradient that reads the same tensor.
  void fuse_bias_grad(NodeId id) {
    const Node& sum = graph_.node(id);
    const TensorType& summed = graph_.value(sum.inputs[0]).type;
    const TensorType& sums = graph_.value(sum.outputs[0]).type;
    const std::vector<int64_t>& axes = sum.attributes.get_ints("axes");
    const int64_t last = static_cast<int64_t>(summed.shape.size()) - 1;
    const bool over_rows = last > 0 && static_cast<int64_t>(axes.size()) == last &&
                           std::none_of(axes.begin(), axes.end(), [last](int64_t axis) {
                             return axis == last || axis == -1;
                           });
    if (!over_rows || sums.dtype != summed.dtype || num_elements(summed.shape) == 0 ||
        !in_16_or_32_bits(summed.dtype)) {
      return;
    }
    for (const NodeId reader : consumers_[static_cast<size_t>(sum.inputs[0])]) {
      if (is_weight_grad(reader, id) && join_sum(reader, id)) {
        return;
      }
    }
  }

  static bool in_16_or_32_bits(DType dtype) {
    return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  }

  bool is_weight_grad(NodeId id, NodeId sum) const {
    const Node& node = graph_.node(id);
    if (dropped_[static_cast<size_t>(id)] ||
        phase_of_[static_cast<size_t>(id)] != phase_of_[static_cast<size_t>(sum)]) {
      return false;
    }
    const bool of_matrices = node.op_type == "MatMul" && trans(node, "trans_a") &&
                             !trans(node, "trans_b") && shape(node.inputs[0]).size() == 2 &&
                             shape(node.inputs[1]).size() == 2;
    return (of_matrices || node.op_type == "MatMulWeightGrad") &&
           node.inputs[0] != node.inputs[1] && num_elements(shape(node.inputs[0])) > 0 &&
           graph_.value(node.outputs[0]).type.dtype == graph_.value(node.inputs[0]).type.dtype;
  }

  // The joined node takes the place of the earlier of the two, where what both read must be there.
  bool join_sum(NodeId product_id, NodeId sum_id) {
    const Node product = graph_.node(product_id), sum = graph_.node(sum_id);
    const NodeId first = std::min(product_id, sum_id);
    for (const ValueId input : product.inputs) {
      if (graph_.value(input).producer >= first) {
        return false;
      }
    }
    Node& joined = graph_.node(first);
    joined = product;
    joined.op_type = "MatMulWeightBiasGrad";
    joined.attributes = {{"summed", int64_t{sum.inputs[0] == product.inputs[0] ? 0 : 1}},
                         {"keepdims", sum.attributes.get_int("keepdims", 1)}};
    joined.outputs = {product.outputs[0], sum.outputs[0]};
    for (size_t i = 0; i < joined.outputs.size(); ++i) {
      graph_.value(joined.outputs[i]).producer = first;
      graph_.value(joined.outputs[i]).output_index = static_cast<int>(i);
    }
    dropped_[static_cast<size_t>(std::max(product_id, sum_id))] = true;
    return true;
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
