// Names and scopes, weights as values, and the way of one node through the registry. Operators that
// are done here stand in onnx_builtin.cc, functions and branches in onnx_inline.cc.
#include "graph/onnx_translate.h"

#include <onnx/defs/schema.h>

#include <stdexcept>

#include "graph/onnx_tensor.h"
#include "graph/onnx_validate.h"
#include "graph/op_def.h"
#include "graph/passes/constant_folding.h"

namespace trainrt {

namespace {

// In place of the value of a name that depends on an unsupported operator.
constexpr ValueId kPoisoned = -2;

// Operands that an operator wants as numbers are few elements; more is a weight and is not read.
constexpr int64_t kMaxOperandElements = 64 << 10;

std::optional<AttributeValue> attribute_value(const onnx::AttributeProto& attribute,
                                              const OnnxModel::Impl& model) {
  using onnx::AttributeProto;
  const auto list = [](const auto& items) { return std::make_pair(items.begin(), items.end()); };
  switch (attribute.type()) {
    case AttributeProto::INT:
      return attribute.i();
    case AttributeProto::FLOAT:
      return static_cast<double>(attribute.f());
    case AttributeProto::STRING:
      return attribute.s();
    case AttributeProto::INTS: {
      const auto [begin, end] = list(attribute.ints());
      return std::vector<int64_t>(begin, end);
    }
    case AttributeProto::FLOATS: {
      const auto [begin, end] = list(attribute.floats());
      return std::vector<double>(begin, end);
    }
    case AttributeProto::STRINGS: {
      const auto [begin, end] = list(attribute.strings());
      return std::vector<std::string>(begin, end);
    }
    case AttributeProto::TENSOR:
      return tensor_source(model.proto, attribute.t(), model.files).load().clone();
    default:
      return std::nullopt;  // graphs: read by those who inline them
  }
}

}  // namespace

OnnxTranslator::OnnxTranslator(const OnnxModel::Impl& model, Graph& graph, TranslateOptions options)
    : model_(model), graph_(graph), options_(options), scope_(&top_) {
  top_.opsets = model.opsets;
  top_.owner = model.proto;
}

void OnnxTranslator::define(const std::string& name, ValueId value) {
  scope_->values[name] = value;
}

void OnnxTranslator::define_unsupported(const std::string& name, const std::string& why) {
  scope_->values[name] = kPoisoned;
  unsupported_.push_back({"input", opset(""), {name}, why});
}

void OnnxTranslator::add_initializers(const onnx::GraphProto& graph) {
  for (const onnx::TensorProto& tensor : graph.initializer()) {
    scope_->initializers[tensor.name()] = &tensor;
  }
  for (const onnx::SparseTensorProto& tensor : graph.sparse_initializer()) {
    scope_->sparse_initializers[tensor.values().name()] = &tensor;
  }
}

void OnnxTranslator::translate(const onnx::GraphProto& graph) {
  for (const onnx::ValueInfoProto& output : graph.output()) {
    output_names_.insert(output.name());
  }
  translate_nodes(graph.node());
}

void OnnxTranslator::translate_nodes(
    const google::protobuf::RepeatedPtrField<onnx::NodeProto>& nodes) {
  for (const onnx::NodeProto& node : nodes) {
    translate_node(node);
  }
}

// --- Names.

ValueId* OnnxTranslator::lookup(const std::string& name) {
  for (Scope* scope = scope_; scope != nullptr; scope = scope->outer) {
    if (const auto it = scope->values.find(name); it != scope->values.end()) {
      return &it->second;
    }
    const std::string full_name = scope->prefix + name;
    if (const auto it = scope->initializers.find(name); it != scope->initializers.end()) {
      return &(scope->values[name] = materialize(*it->second, full_name));
    }
    const auto sparse = scope->sparse_initializers.find(name);
    if (sparse != scope->sparse_initializers.end()) {
      return &(scope->values[name] = materialize(*sparse->second, full_name));
    }
  }
  return nullptr;
}

std::optional<ValueId> OnnxTranslator::find(const std::string& name) {
  const ValueId* value = lookup(name);
  TRAINRT_REQUIRE(value != nullptr, kInvalidModel, "nothing defines '", name, "'");
  return *value == kPoisoned ? std::nullopt : std::optional<ValueId>(*value);
}

std::vector<ValueId> OnnxTranslator::inputs(const onnx::NodeProto& node) {
  std::vector<ValueId> ids;
  for (const std::string& name : node.input()) {
    ids.push_back(name.empty() ? kNoValue : find(name).value());
  }
  while (!ids.empty() && ids.back() == kNoValue) {
    ids.pop_back();  // an absent operand at the end is no operand
  }
  return ids;
}

ValueId OnnxTranslator::required_input(const std::vector<ValueId>& inputs, int i) {
  TRAINRT_REQUIRE(i < static_cast<int>(inputs.size()) && inputs[static_cast<size_t>(i)] != kNoValue,
                  kInvalidModel,
                  "input ",
                  i,
                  " is missing");
  return inputs[static_cast<size_t>(i)];
}

Attributes OnnxTranslator::attributes(const onnx::NodeProto& node) const {
  Attributes result;
  for (const onnx::AttributeProto& attribute : node.attribute()) {
    const onnx::AttributeProto* source = &attribute;
    if (!attribute.ref_attr_name().empty()) {
      const auto it = scope_->attributes.find(attribute.ref_attr_name());
      if (it == scope_->attributes.end()) {
        continue;  // the call left it out
      }
      source = &it->second;
    }
    if (std::optional<AttributeValue> value = attribute_value(*source, model_)) {
      result.set(attribute.name(), std::move(*value));
    }
  }
  return result;
}

int OnnxTranslator::opset(const std::string& domain) const {
  const auto it = scope_->opsets.find(canonical_domain(domain));
  return it == scope_->opsets.end() ? 1 : it->second;
}

std::string OnnxTranslator::node_name(const onnx::NodeProto& node) const {
  return scope_->prefix + trainrt::node_name(node);
}

void OnnxTranslator::set_output(const onnx::NodeProto& node, int i, ValueId value) {
  if (i < node.output_size() && !node.output(i).empty()) {
    scope_->values[node.output(i)] = value;
  }
}

void OnnxTranslator::set_outputs(const std::vector<std::string>& names) {
  std::set<ValueId> taken;
  for (const std::string& name : names) {
    const std::optional<ValueId> found = find(name);
    if (!found) {
      continue;
    }
    ValueId id = *found;
    if (graph_.value(id).name != name) {
      // The name of another one: an output is found by its own.
      if (graph_.value(id).producer != kNoNode && taken.count(id) == 0 &&
          output_names_.count(graph_.value(id).name) == 0 && !graph_.find_value(name)) {
        graph_.rename_value(id, name);
      } else {
        GraphBuilder builder(graph_);
        id = builder.op("Identity", {id}, {}, "Identity:" + name, name);
      }
    }
    taken.insert(id);
    graph_.outputs().push_back(id);
  }
}

// --- Weights.

ValueId OnnxTranslator::add_weight(Value value, WeightCandidate::Origin origin, bool inlined) {
  const bool floating = is_floating(value.type.dtype);
  const bool single_constant =
      origin == WeightCandidate::Origin::kConstantNode && num_elements(value.type.shape) <= 1;
  const bool candidate = floating && !single_constant;
  value.name = graph_.unique_value_name(value.name);
  value.kind = ValueKind::kConstant;
  if (!candidate && inlined) {
    value.constant = value.source.load();
  }
  const ValueId id = graph_.add_value(std::move(value));
  if (candidate) {
    candidates_.push_back({id, origin, inlined, "", "", nullptr});
  }
  return id;
}

ValueId OnnxTranslator::materialize(const onnx::TensorProto& tensor, const std::string& name) {
  Value value;
  value.name = name;
  value.type = tensor_type(tensor, concat("initializer '", name, "'"));
  value.source = tensor_source(scope_->owner, tensor, model_.files);
  const ValueId id = add_weight(
      std::move(value), WeightCandidate::Origin::kInitializer, !has_external_data(tensor));
  if (!candidates_.empty() && candidates_.back().value == id && is_detached(tensor)) {
    candidates_.back().peek = detached_peek(scope_->owner, tensor, model_.files);
  }
  return id;
}

ValueId OnnxTranslator::materialize(const onnx::SparseTensorProto& tensor,
                                    const std::string& name) {
  Value value;
  value.name = name;
  value.type = tensor_type(tensor, concat("initializer '", name, "'"));
  value.source = tensor_source(scope_->owner, tensor, model_.files);
  return add_weight(
      std::move(value), WeightCandidate::Origin::kInitializer, !has_external_data(tensor.values()));
}

void OnnxTranslator::mark_read(ValueId id) const {
  const Value& value = graph_.value(id);
  if (read_.insert(value.name).second && value.producer != kNoNode) {
    for (const ValueId input : graph_.node(value.producer).inputs) {
      if (input != kNoValue) {
        mark_read(input);
      }
    }
  }
}

std::optional<Tensor> OnnxTranslator::contents(ValueId id) const {
  const Value& value = graph_.value(id);
  mark_read(id);
  if (value.constant.defined()) {
    return value.constant;
  }
  if (num_elements(value.type.shape) > kMaxOperandElements) {
    return std::nullopt;
  }
  try {
    return known_contents(graph_, id);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInvalidModel) {
      return std::nullopt;  // in a weights file that is not there: as good as unknown
    }
    throw;
  }
}

// --- One node.

bool OnnxTranslator::has_poisoned_input(const onnx::NodeProto& node) {
  for (const std::string& name : node.input()) {
    if (!name.empty() && !find(name)) {
      return true;
    }
  }
  return false;
}

void OnnxTranslator::poison_outputs(const onnx::NodeProto& node) {
  for (int i = 0; i < node.output_size(); ++i) {
    set_output(node, i, kPoisoned);
  }
}

void OnnxTranslator::note_unsupported(const onnx::NodeProto& node, const std::string& why) {
  const std::string op_type = node.domain().empty() || node.domain() == "ai.onnx"
                                  ? node.op_type()
                                  : node.domain() + "." + node.op_type();
  poison_outputs(node);
  for (UnsupportedOp& op : unsupported_) {
    if (op.op_type == op_type && op.why == why) {
      op.nodes.push_back(node_name(node));
      return;
    }
  }
  unsupported_.push_back({op_type, opset(node.domain()), {node_name(node)}, why});
}

std::vector<UnsupportedOp> OnnxTranslator::unsupported() const {
  return unsupported_;
}

namespace {

// Operators that are ours and ONNX's alike. Those that are ours alone (MeanLoss, Accumulate) come
// of others, with operands and attributes that nobody checks in a file.
bool is_taken_as_it_is(const std::string& domain, const std::string& op_type) {
  return domain.empty() && find_op(op_type) != nullptr &&
         onnx::OpSchemaRegistry::Schema(op_type) != nullptr;
}

}  // namespace

bool OnnxTranslator::is_known_operator(const onnx::NodeProto& node) const {
  const std::string domain = canonical_domain(node.domain());
  if (model_.functions.count(function_key(domain, node.op_type(), node.overload())) != 0 ||
      find_upgrade(domain, node.op_type()) != nullptr) {
    return true;
  }
  static const std::set<std::string> kBuiltin = {
      "Constant", "Identity", "Shape", "Size", "Range", "ConstantOfShape", "If", "Loop", "Scan"};
  if (is_taken_as_it_is(domain, node.op_type()) ||
      (domain.empty() && kBuiltin.count(node.op_type()) != 0)) {
    return true;
  }
  const onnx::OpSchema* schema =
      onnx::OpSchemaRegistry::Schema(node.op_type(), opset(domain), domain);
  return schema != nullptr && (schema->HasFunction() || schema->HasContextDependentFunction());
}

void OnnxTranslator::translate_node(const onnx::NodeProto& node) {
  if (scope_->counts) {
    source_index_ = next_source_index_++;
  }
  if (has_poisoned_input(node)) {
    if (is_known_operator(node)) {
      poison_outputs(node);
    } else {
      note_unsupported(node, "no such operator here");
    }
    return;
  }
  try {
    dispatch(node, inputs(node));
    if (!options_.training) {
      settle(node);
    }
    if (options_.record != nullptr) {
      record_output(node);
    }
  } catch (Error& error) {
    if (error.code() == ErrorCode::kUnsupported) {
      note_unsupported(node, error.message());
      return;
    }
    error.add_context(
        concat("while importing node '", node_name(node), "' (", node.op_type(), ")"));
    throw;
  } catch (const std::logic_error& error) {
    // A rule read a dim that is not there (std::vector::at) or asked for a negative number of them:
    // shapes that no exporter writes and that the rule did not think of.
    TRAINRT_FAIL(kInvalidModel,
                 "shapes or attributes of node '",
                 node_name(node),
                 "' (",
                 node.op_type(),
                 ") contradict each other (",
                 error.what(),
                 ")");
  }
}

void OnnxTranslator::dispatch(const onnx::NodeProto& node, std::vector<ValueId> inputs) {
  if (options_.record != nullptr || options_.rewriter != nullptr) {
    inputs = follow_batch(node, inputs);
  }
  if ((handler_ && handler_(*this, node)) || translate_builtin(node, inputs) ||
      translate_legacy(node, inputs)) {
    return;
  }
  const std::string domain = canonical_domain(node.domain());
  const auto local = model_.functions.find(function_key(domain, node.op_type(), node.overload()));
  if (local != model_.functions.end()) {
    OpsetVersions opsets;
    for (const onnx::OperatorSetIdProto& import : local->second->opset_import()) {
      opsets[canonical_domain(import.domain())] = static_cast<int>(import.version());
    }
    inline_function(node, inputs, {model_.proto, local->second}, std::move(opsets), false);
    return;
  }
  const std::function<void(UpgradeContext&)>* rule = find_upgrade(domain, node.op_type());
  if (rule != nullptr || is_taken_as_it_is(domain, node.op_type())) {
    upgrade(node, inputs, rule);
    return;
  }
  if (std::shared_ptr<const onnx::FunctionProto> body = schema_function(node, inputs)) {
    inline_function(node, inputs, std::move(body), scope_->opsets, true);
    return;
  }
  note_unsupported(node, "no such operator here");
}

void OnnxTranslator::upgrade(const onnx::NodeProto& node,
                             const std::vector<ValueId>& inputs,
                             const std::function<void(UpgradeContext&)>* rule) {
  if (node.op_type() == "QuantizeLinear" || node.op_type() == "DequantizeLinear") {
    mark_quantization_scale(node, inputs);
  }
  const NodeId first_node = graph_.num_nodes();
  const ValueId first_value = graph_.num_values();
  UpgradeContext context(graph_,
                         node.op_type(),
                         canonical_domain(node.domain()),
                         opset(node.domain()),
                         node_name(node),
                         inputs,
                         {node.output().begin(), node.output().end()},
                         attributes(node));
  context.set_source_index(source_index_);
  context.set_resolver([this](ValueId id) { return contents(id); });
  if (rule != nullptr) {
    (*rule)(context);
  } else {
    context.pass_through();
  }
  finish(node, context.results(), first_node, first_value);
}

// It was measured by whoever quantized the model; its gradient says nothing of use, since rounding
// has none.
void OnnxTranslator::mark_quantization_scale(const onnx::NodeProto& node,
                                             const std::vector<ValueId>& inputs) {
  for (WeightCandidate& candidate : candidates_) {
    if (candidate.value == required_input(inputs, 1)) {
      candidate.constant_reason =
          concat("the scale of ", node.op_type(), " '", node_name(node), "'");
    }
  }
}

// Folds what became known, then names the results after the node's outputs.
void OnnxTranslator::finish(const onnx::NodeProto& node,
                            std::vector<ValueId> results,
                            NodeId first_node,
                            ValueId first_value) {
  std::unordered_map<ValueId, ValueId> folded;
  const auto current = [&](ValueId& id) {
    const auto it = folded.find(id);
    id = it == folded.end() ? id : it->second;
  };
  for (NodeId id = first_node; id < graph_.num_nodes(); ++id) {
    for (ValueId& input : graph_.node(id).inputs) {
      current(input);
    }
    if (is_foldable(graph_, graph_.node(id))) {
      const std::vector<ValueId> constants = fold_node(graph_, id);
      for (size_t i = 0; i < constants.size(); ++i) {
        if (constants[i] != kNoValue) {
          folded[graph_.node(id).outputs[i]] = constants[i];
        }
      }
    }
  }
  std::set<ValueId> named;
  for (int i = 0; i < node.output_size(); ++i) {
    if (node.output(i).empty()) {
      continue;
    }
    ValueId id = results.at(static_cast<size_t>(i));
    TRAINRT_REQUIRE(id != kNoValue,
                    kUnsupported,
                    "node '",
                    node_name(node),
                    "' (",
                    node.op_type(),
                    "): output ",
                    i,
                    " ('",
                    node.output(i),
                    "') is not computed here");
    current(id);
    if (id >= first_value && named.insert(id).second) {
      const std::string name = scope_->prefix + node.output(i);
      if (graph_.value(id).name != name) {
        graph_.rename_value(id, graph_.unique_value_name(name));
      }
    }
    set_output(node, i, id);
  }
}

}  // namespace trainrt
