#include "graph/upgrade.h"

namespace trainrt {

UpgradeContext::UpgradeContext(Graph& graph,
                               std::string op_type,
                               std::string domain,
                               int opset,
                               std::string node_name,
                               std::vector<ValueId> inputs,
                               std::vector<std::string> output_names,
                               Attributes attributes)
    : GraphBuilder(graph),
      op_type_(std::move(op_type)),
      domain_(std::move(domain)),
      opset_(opset),
      node_name_(std::move(node_name)),
      inputs_(std::move(inputs)),
      output_names_(std::move(output_names)),
      attributes_(std::move(attributes)),
      results_(output_names_.size(), kNoValue) {}

ValueId UpgradeContext::input(int i) const {
  TRAINRT_REQUIRE(has_input(i),
                  kInvalidModel,
                  "node '",
                  node_name_,
                  "' (",
                  op_type_,
                  "): input ",
                  i,
                  " is missing");
  return inputs_[static_cast<size_t>(i)];
}

std::optional<Tensor> UpgradeContext::constant_input(int i) const {
  if (!has_input(i)) {
    return std::nullopt;
  }
  if (resolver_) {
    return resolver_(inputs_[static_cast<size_t>(i)]);
  }
  const Value& value = graph_.value(inputs_[static_cast<size_t>(i)]);
  if (value.kind != ValueKind::kConstant) {
    return std::nullopt;
  }
  if (value.constant.defined()) {
    return value.constant;
  }
  return value.source.load ? std::optional<Tensor>(value.source.load()) : std::nullopt;
}

std::vector<int64_t> UpgradeContext::int_input(int i) const {
  const std::optional<Tensor> tensor = constant_input(i);
  if (!tensor) {
    fail(concat("input ",
                i,
                " ('",
                graph_.value(input(i)).name,
                "') must be known when the model is imported, but it depends on data; bind the "
                "dims it comes from with --bind"));
  }
  return tensor->to_int64();
}

double UpgradeContext::float_input(int i) const {
  const std::optional<Tensor> tensor = constant_input(i);
  if (!tensor || tensor->num_elements() != 1) {
    fail(concat("input ", i, " must be a constant scalar"));
  }
  return tensor->to_double()[0];
}

std::vector<ValueId> UpgradeContext::emit(const std::string& op_type,
                                          const std::vector<ValueId>& inputs,
                                          Attributes attributes) {
  return node(op_type, inputs, std::move(attributes), node_name_);
}

void UpgradeContext::set_output(int i, ValueId value) {
  if (i < num_outputs()) {
    results_[static_cast<size_t>(i)] = value;
  }
}

void UpgradeContext::set_outputs(const std::vector<ValueId>& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    set_output(static_cast<int>(i), values[i]);
  }
}

void UpgradeContext::pass_through() {
  set_outputs(emit(op_type_, inputs_, attributes_));
}

void UpgradeContext::bind_state(int state_input, ValueId new_value, const std::string& why) {
  const ValueId id = input(state_input);
  // Behind another node that binds it, or reading what that node has left.
  for (StateUpdate& update : graph_.updates()) {
    if (update.target == id || update.new_value == id) {
      update.new_value = new_value;
      return;
    }
  }
  Value& state = graph_.value(id);
  if (state.producer != kNoNode || state.constant.defined()) {
    return;  // statistics that are computed or made up in the graph are remembered by nobody
  }
  state.kind = ValueKind::kState;
  state.why = why;
  graph_.updates().push_back({id, new_value});
}

void UpgradeContext::fail(const std::string& message) const {
  TRAINRT_FAIL(kUnsupported, "node '", node_name_, "' (", op_type_, "-", opset_, "): ", message);
}

}  // namespace trainrt
