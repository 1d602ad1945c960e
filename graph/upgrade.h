// What an operator's `upgrade` rule sees: one ONNX node of any opset, to be rewritten into our one
// form of the operator. Our forms keep shape-like operands as attributes (Reshape's shape, Slice's
// starts, axes of reductions, Clip's constant bounds ...): dims are concrete, so every such operand
// is known when a model is imported, and autodiff, sharding and kernels read one place.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "graph/graph_builder.h"

namespace trainrt {

class UpgradeContext : public GraphBuilder {
 public:
  UpgradeContext(Graph& graph,
                 std::string op_type,
                 std::string domain,
                 int opset,
                 std::string node_name,
                 std::vector<ValueId> inputs,
                 std::vector<std::string> output_names,
                 Attributes attributes);

  const std::string& op_type() const { return op_type_; }
  const std::string& domain() const { return domain_; }
  int opset() const { return opset_; }  // of the node's domain
  const std::string& node_name() const { return node_name_; }
  Attributes& attributes() { return attributes_; }

  int num_inputs() const { return static_cast<int>(inputs_.size()); }
  bool has_input(int i) const { return i < num_inputs() && inputs_[i] != kNoValue; }
  ValueId input(int i) const;  // throws kInvalidModel when absent
  const std::vector<ValueId>& inputs() const { return inputs_; }
  int num_outputs() const { return static_cast<int>(output_names_.size()); }
  bool wants_output(int i) const { return i < num_outputs() && !output_names_[i].empty(); }

  // The contents of input i if it is known at import, else nothing.
  std::optional<Tensor> constant_input(int i) const;
  // Asked for the contents of inputs that are no constants themselves but follow from such.
  using Resolver = std::function<std::optional<Tensor>(ValueId)>;
  void set_resolver(Resolver resolver) { resolver_ = std::move(resolver); }
  // The same as integers; throws kUnsupported (naming node and input) when it is not known.
  std::vector<int64_t> int_input(int i) const;
  double float_input(int i) const;

  // Emits our form under the ONNX node's own name (stable: random streams hang on it).
  std::vector<ValueId> emit(const std::string& op_type,
                            const std::vector<ValueId>& inputs,
                            Attributes attributes = {});
  void set_output(int i, ValueId value);
  void set_outputs(const std::vector<ValueId>& values);
  // emit() + set_outputs() of a node with the same op type, inputs and (edited) attributes.
  void pass_through();
  // For a BatchNorm-like node: after the step `state_input` takes `new_value`.
  void bind_state(int state_input, ValueId new_value, const std::string& why);

  const std::vector<ValueId>& results() const { return results_; }
  [[noreturn]] void fail(const std::string& message) const;  // kUnsupported with node and op

 private:
  std::string op_type_;
  std::string domain_;
  int opset_;
  std::string node_name_;
  std::vector<ValueId> inputs_;
  std::vector<std::string> output_names_;
  Attributes attributes_;
  std::vector<ValueId> results_;
  Resolver resolver_;
};

}  // namespace trainrt
