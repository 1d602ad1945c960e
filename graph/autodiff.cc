// Reverse mode over the node list (Griewank & Walther, "Evaluating Derivatives", ch. 3): walk the
// nodes backwards, ask each operator for the gradients of its inputs, and sum the contributions of
// the uses of a value once all of them are known. O(nodes + edges).
#include "graph/autodiff.h"

#include <algorithm>
#include <set>

#include "graph/op_def.h"

namespace trainrt {

GradientBuilder::GradientBuilder(Graph& graph,
                                 NodeId forward,
                                 std::vector<ValueId> output_grads,
                                 std::vector<bool> needs_grad)
    : GraphBuilder(graph),
      forward_(forward),
      output_grads_(std::move(output_grads)),
      needs_grad_(std::move(needs_grad)),
      input_grads_(needs_grad_.size(), kNoValue) {
  set_region(Region::kBackward);
  set_source_index(node_ref().source_index);
  set_forward_node(forward);
  set_name_prefix(node_ref().name + "/grad/");
}

ValueId GradientBuilder::input(int i) const {
  return i < num_inputs() ? node_ref().inputs[static_cast<size_t>(i)] : kNoValue;
}

ValueId GradientBuilder::output(int i) const {
  return node_ref().outputs.at(static_cast<size_t>(i));
}

ValueId GradientBuilder::saved_output(int i) {
  const size_t index = static_cast<size_t>(i);
  if (node_ref().outputs.at(index) == kNoValue) {
    Value value;
    value.name = graph_.unique_value_name(concat(node_ref().name, ".", i));
    value.type = get_op(node_ref().op_type).infer_types(OpContext(graph_, node_ref())).at(index);
    const ValueId id = graph_.add_value(std::move(value));
    graph_.value(id).producer = forward_;
    graph_.value(id).output_index = i;
    graph_.node(forward_).outputs[index] = id;
  }
  return node_ref().outputs[index];
}

ValueId GradientBuilder::output_grad(int i) const {
  return output_grads_.at(static_cast<size_t>(i));
}

bool GradientBuilder::needs_grad(int i) const {
  return i < num_inputs() && needs_grad_[static_cast<size_t>(i)];
}

void GradientBuilder::set_input_grad(int i, ValueId grad) {
  TRAINRT_CHECK(type(grad) == type(input(i)),
                "gradient of input ",
                i,
                " of ",
                node_ref().op_type,
                " is ",
                dtype_name(dtype(grad)),
                shape_string(shape(grad)),
                ", the input ",
                dtype_name(dtype(input(i))),
                shape_string(input_shape(i)));
  input_grads_[static_cast<size_t>(i)] = grad;
}

std::vector<bool> depends_on(const Graph& graph, const std::vector<ValueId>& wanted) {
  std::vector<bool> depends(static_cast<size_t>(graph.num_values()), false);
  for (const ValueId id : wanted) {
    depends[static_cast<size_t>(id)] = true;
  }
  for (const Node& node : graph.nodes()) {
    const OpDef* def = find_op(node.op_type);
    if (def == nullptr || def->not_differentiable) {
      continue;
    }
    const bool any = std::any_of(node.inputs.begin(), node.inputs.end(), [&](ValueId id) {
      return id != kNoValue && depends[static_cast<size_t>(id)];
    });
    for (const ValueId output : node.outputs) {
      if (any && output != kNoValue && is_floating(graph.value(output).type.dtype)) {
        depends[static_cast<size_t>(output)] = true;
      }
    }
  }
  return depends;
}

namespace {

// contributions[v]: gradients from the uses of v, in the order in which they are created.
using Contributions = std::vector<std::vector<ValueId>>;

// The sum is taken when the value's producer is reached: every use is known by then. Uses are
// visited backwards, so the sum runs over the reversed list: node order.
ValueId total_gradient(Graph& graph, Contributions& contributions, ValueId id) {
  std::vector<ValueId>& list = contributions[static_cast<size_t>(id)];
  if (list.empty()) {
    return kNoValue;
  }
  GraphBuilder builder(graph);
  builder.set_region(Region::kBackward);
  builder.set_name_prefix(graph.value(id).name + "/grad/");
  ValueId sum = list.back();
  for (size_t i = list.size() - 1; i-- > 0;) {
    sum = builder.add(sum, list[i]);
  }
  list = {sum};
  return sum;
}

// Walks the nodes backwards; leaves in the result the contributions to values without a producer.
Contributions walk_backward(Graph& graph,
                            const std::vector<ValueId>& outputs,
                            const std::vector<ValueId>& seeds,
                            const std::vector<ValueId>& wanted) {
  TRAINRT_CHECK(outputs.size() == seeds.size());
  const std::vector<bool> needs = depends_on(graph, wanted);
  const NodeId num_forward = graph.num_nodes();
  Contributions contributions(needs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    contributions[static_cast<size_t>(outputs[i])].push_back(seeds[i]);
  }
  std::set<std::string> unsupported;
  for (NodeId id = num_forward; id-- > 0;) {
    const std::vector<ValueId> node_outputs = graph.node(id).outputs;
    const std::vector<ValueId> node_inputs = graph.node(id).inputs;
    std::vector<ValueId> output_grads;
    bool any_grad = false;
    for (const ValueId output : node_outputs) {
      const ValueId grad = output != kNoValue && needs[static_cast<size_t>(output)]
                               ? total_gradient(graph, contributions, output)
                               : kNoValue;
      output_grads.push_back(grad);
      any_grad = any_grad || grad != kNoValue;
    }
    std::vector<bool> needs_input;
    bool any_needed = false;
    for (const ValueId input : node_inputs) {
      needs_input.push_back(input != kNoValue && needs[static_cast<size_t>(input)] &&
                            is_floating(graph.value(input).type.dtype));
      any_needed = any_needed || needs_input.back();
    }
    const OpDef& def = get_op(graph.node(id).op_type);
    if (!any_grad || !any_needed || def.not_differentiable) {
      continue;
    }
    if (!def.gradient) {
      unsupported.insert(concat(def.name, " (node '", graph.node(id).name, "')"));
      continue;
    }
    GradientBuilder builder(graph, id, std::move(output_grads), needs_input);
    try {
      def.gradient(builder);
    } catch (Error& error) {
      error.add_context(
          concat("in the gradient of node '", graph.node(id).name, "' (", def.name, ")"));
      throw;
    }
    for (size_t i = 0; i < node_inputs.size(); ++i) {
      if (needs_input[i] && builder.input_grads()[i] != kNoValue) {
        contributions[static_cast<size_t>(node_inputs[i])].push_back(builder.input_grads()[i]);
      }
    }
  }
  if (!unsupported.empty()) {
    std::string list;
    for (const std::string& item : unsupported) {
      list += (list.empty() ? "" : ", ") + item;
    }
    TRAINRT_FAIL(kUnsupported,
                 "no gradient for ",
                 list,
                 "; freeze the parameters before these nodes with --freeze");
  }
  return contributions;
}

}  // namespace

std::vector<ValueId> differentiate(Graph& graph,
                                   const std::vector<ValueId>& outputs,
                                   const std::vector<ValueId>& seeds,
                                   const std::vector<ValueId>& wanted) {
  Contributions contributions = walk_backward(graph, outputs, seeds, wanted);
  std::vector<ValueId> grads;
  for (const ValueId id : wanted) {
    grads.push_back(total_gradient(graph, contributions, id));
  }
  return grads;
}

std::vector<std::vector<ValueId>> differentiate_uses(Graph& graph,
                                                     const std::vector<ValueId>& outputs,
                                                     const std::vector<ValueId>& seeds,
                                                     const std::vector<ValueId>& wanted) {
  const Contributions contributions = walk_backward(graph, outputs, seeds, wanted);
  std::vector<std::vector<ValueId>> uses;
  for (const ValueId id : wanted) {
    const std::vector<ValueId>& list = contributions[static_cast<size_t>(id)];
    uses.emplace_back(list.rbegin(), list.rend());
  }
  return uses;
}

}  // namespace trainrt
