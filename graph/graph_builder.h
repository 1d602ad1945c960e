// Appends nodes to a Graph with inferred types: the vocabulary in which models, gradients, fusions
// and optimizers are written.
#pragma once

#include <string>
#include <vector>

#include "graph/graph.h"

namespace trainrt {

class GraphBuilder {
 public:
  explicit GraphBuilder(Graph& graph) : graph_(graph) {}
  virtual ~GraphBuilder() = default;

  Graph& graph() { return graph_; }
  const Graph& graph() const { return graph_; }

  // Appends one node and returns all its outputs. `name` empty: a unique name from the op type.
  std::vector<ValueId> node(const std::string& op_type,
                            const std::vector<ValueId>& inputs,
                            Attributes attributes = {},
                            std::string name = "",
                            std::vector<std::string> output_names = {});
  // The same for a node of which output 0 is wanted.
  ValueId op(const std::string& op_type,
             const std::vector<ValueId>& inputs,
             Attributes attributes = {},
             std::string name = "",
             std::string output_name = "");

  // By value: a reference into the graph would dangle as soon as a node is appended.
  TensorType type(ValueId id) const { return graph_.value(id).type; }
  Shape shape(ValueId id) const { return graph_.value(id).type.shape; }
  DType dtype(ValueId id) const { return graph_.value(id).type.dtype; }
  int ndim(ValueId id) const { return static_cast<int>(graph_.value(id).type.shape.size()); }

  ValueId constant(Tensor data, std::string name = "");
  ValueId scalar(double value, DType dtype);    // equal scalars are shared
  ValueId zeros_like(ValueId id);               // a ConstantOfShape-free constant-fill node
  ValueId fill(double value, TensorType type);  // node "Fill": no memory until it runs

  ValueId add(ValueId a, ValueId b) { return op("Add", {a, b}); }
  ValueId sub(ValueId a, ValueId b) { return op("Sub", {a, b}); }
  ValueId mul(ValueId a, ValueId b) { return op("Mul", {a, b}); }
  ValueId div(ValueId a, ValueId b) { return op("Div", {a, b}); }
  ValueId neg(ValueId a) { return op("Neg", {a}); }
  ValueId mul(ValueId a, double factor);
  ValueId add(ValueId a, double term);
  ValueId where(ValueId condition, ValueId a, ValueId b) { return op("Where", {condition, a, b}); }
  ValueId matmul(ValueId a, ValueId b, bool trans_a = false, bool trans_b = false);
  ValueId reduce_sum(ValueId a, std::vector<int64_t> axes, bool keepdims = true);
  ValueId reshape(ValueId a, Shape shape);
  ValueId transpose(ValueId a, std::vector<int64_t> permutation);
  ValueId expand(ValueId a, Shape shape);
  ValueId cast(ValueId a, DType dtype);
  // Sums a gradient of a broadcast operand back to the operand's shape; the identity if equal.
  ValueId reduce_to(ValueId a, const Shape& shape);

  // Attributes that every node appended from now on gets.
  void set_region(Region region) { region_ = region; }
  Region region() const { return region_; }
  void set_source_index(int index) { source_index_ = index; }
  void set_forward_node(NodeId id) { forward_node_ = id; }
  void set_name_prefix(std::string prefix) { name_prefix_ = std::move(prefix); }

 protected:
  Graph& graph_;

 private:
  Region region_ = Region::kForward;
  int source_index_ = -1;
  NodeId forward_node_ = kNoNode;
  std::string name_prefix_;
};

}  // namespace trainrt
