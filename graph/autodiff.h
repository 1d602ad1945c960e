// Reverse-mode differentiation that builds graph: a gradient rule emits ordinary nodes, so backward
// has types, cost and sharding like any other part.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "graph/graph_builder.h"

namespace trainrt {

// What an operator's gradient rule is written in.
class GradientBuilder : public GraphBuilder {
 public:
  GradientBuilder(Graph& graph,
                  NodeId forward,
                  std::vector<ValueId> output_grads,
                  std::vector<bool> needs_grad);

  const Node& node_ref() const { return graph_.node(forward_); }
  const Attributes& attributes() const { return node_ref().attributes; }
  int num_inputs() const { return static_cast<int>(node_ref().inputs.size()); }
  int num_outputs() const { return static_cast<int>(node_ref().outputs.size()); }
  ValueId input(int i) const;  // kNoValue when absent
  ValueId output(int i) const;
  // Output i, brought into being when nobody wanted it so far: what a forward operator saves for
  // its gradient (statistics) was dropped as dead code before.
  ValueId saved_output(int i);
  Shape input_shape(int i) const { return shape(input(i)); }
  Shape output_shape(int i) const { return shape(output(i)); }

  // Gradient of the loss with respect to output i; kNoValue when none flows there.
  ValueId output_grad(int i) const;
  // Whether anybody wants the gradient of input i. Rules skip the work when not.
  bool needs_grad(int i) const;
  void set_input_grad(int i, ValueId grad);  // shape and dtype must be the input's
  const std::vector<ValueId>& input_grads() const { return input_grads_; }

 private:
  NodeId forward_;
  std::vector<ValueId> output_grads_;
  std::vector<bool> needs_grad_;
  std::vector<ValueId> input_grads_;
};

// Appends to `graph` the gradients of `outputs`, seeded with `seeds` (same types; one each), with
// respect to `wanted`. Returns one value per entry of `wanted`; kNoValue where no gradient flows.
// Gradients of a value with several uses are summed in node order of the uses (last in the backward
// order first created), which fixes the bits. Throws kUnsupported listing every operator on a path
// from `wanted` to `outputs` that has no gradient.
std::vector<ValueId> differentiate(Graph& graph,
                                   const std::vector<ValueId>& outputs,
                                   const std::vector<ValueId>& seeds,
                                   const std::vector<ValueId>& wanted);

// The same, with the contributions of the uses of each wanted value kept apart, in node order of
// the uses; empty where no gradient flows. A wanted value must have no producer.
std::vector<std::vector<ValueId>> differentiate_uses(Graph& graph,
                                                     const std::vector<ValueId>& outputs,
                                                     const std::vector<ValueId>& seeds,
                                                     const std::vector<ValueId>& wanted);

// For each value: does it depend, through differentiable operators, on one of `wanted`?
std::vector<bool> depends_on(const Graph& graph, const std::vector<ValueId>& wanted);

}  // namespace trainrt
