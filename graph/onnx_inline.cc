// Calls of functions, function bodies of ONNX's own schemas, and If with a known condition: the
// body is translated in a scope of its own, in the place of the node.
#include <onnx/defs/schema.h>

#include "graph/onnx_tensor.h"
#include "graph/onnx_translate.h"
#include "graph/op_def.h"

namespace trainrt {

namespace {

// Deeper than any model goes; the checker refuses recursive functions, schemas have none.
constexpr int kMaxDepth = 64;

onnx::TypeProto type_proto(const TensorType& type) {
  onnx::TypeProto proto;
  onnx::TypeProto::Tensor* tensor = proto.mutable_tensor_type();
  tensor->set_elem_type(dtype_to_onnx(type.dtype));
  tensor->mutable_shape();
  for (const int64_t dim : type.shape) {
    tensor->mutable_shape()->add_dim()->set_dim_value(dim);
  }
  return proto;
}

// The version of the function body that fits `opset`: the newest not above it.
int newest_version(const std::vector<int>& versions, int opset) {
  int newest = -1;
  for (const int version : versions) {
    newest = version <= opset ? std::max(newest, version) : newest;
  }
  return newest;
}

}  // namespace

std::shared_ptr<const onnx::FunctionProto> OnnxTranslator::schema_function(
    const onnx::NodeProto& node, const std::vector<ValueId>& inputs) {
  const std::string domain = canonical_domain(node.domain());
  const onnx::OpSchema* schema =
      onnx::OpSchemaRegistry::Schema(node.op_type(), opset(domain), domain);
  if (schema == nullptr) {
    return nullptr;
  }
  auto function = std::make_shared<onnx::FunctionProto>();
  if (const onnx::FunctionProto* body = schema->GetFunction(opset(domain))) {
    *function = *body;
  } else if (schema->HasContextDependentFunction()) {
    // Attributes that refer to those of an enclosing function are given their values first.
    onnx::NodeProto resolved = node;
    for (onnx::AttributeProto& attribute : *resolved.mutable_attribute()) {
      const auto it = scope_->attributes.find(attribute.ref_attr_name());
      if (!attribute.ref_attr_name().empty() && it != scope_->attributes.end()) {
        const std::string name = attribute.name();
        attribute = it->second;
        attribute.set_name(name);
      }
    }
    std::vector<onnx::TypeProto> types;
    for (const ValueId id : inputs) {
      types.push_back(id == kNoValue ? onnx::TypeProto() : type_proto(graph_.value(id).type));
    }
    const onnx::FunctionBodyBuildContextImpl context(resolved, types);
    const int version =
        newest_version(schema->context_dependent_function_opset_versions(), opset(domain));
    if (version < 0 || !schema->BuildContextDependentFunction(context, *function, version)) {
      return nullptr;
    }
    if (function->input_size() == 0) {
      schema->BuildFunction(*function);  // formal names; some builders have filled them in
    }
  } else {
    return nullptr;
  }
  // Defaults of the schema hold in the body, too.
  for (const auto& [name, attribute] : schema->attributes()) {
    if (attribute.default_value.has_name()) {
      onnx::AttributeProto* value = function->add_attribute_proto();
      *value = attribute.default_value;
      value->set_name(name);
    }
  }
  return function;
}

void OnnxTranslator::inline_function(const onnx::NodeProto& node,
                                     const std::vector<ValueId>& inputs,
                                     std::shared_ptr<const onnx::FunctionProto> function,
                                     OpsetVersions opsets,
                                     bool of_schema) {
  TRAINRT_REQUIRE(scope_->depth < kMaxDepth,
                  kInvalidModel,
                  "functions are nested ",
                  kMaxDepth,
                  " deep at '",
                  node.op_type(),
                  "'");
  Scope body;
  body.opsets = std::move(opsets);
  for (const onnx::OperatorSetIdProto& import : function->opset_import()) {
    body.opsets[canonical_domain(import.domain())] = static_cast<int>(import.version());
  }
  body.prefix = node_name(node) + "/";
  body.counts = scope_->counts && !of_schema;
  body.depth = scope_->depth + 1;
  for (const onnx::AttributeProto& attribute : function->attribute_proto()) {
    body.attributes[attribute.name()] = attribute;
  }
  for (const onnx::AttributeProto& attribute : node.attribute()) {
    if (attribute.ref_attr_name().empty()) {
      body.attributes[attribute.name()] = attribute;
    } else if (const auto it = scope_->attributes.find(attribute.ref_attr_name());
               it != scope_->attributes.end()) {
      body.attributes[attribute.name()] = it->second;
    }
  }
  for (int i = 0; i < function->input_size(); ++i) {
    body.values[function->input(i)] =
        i < static_cast<int>(inputs.size()) ? inputs[static_cast<size_t>(i)] : kNoValue;
  }
  body.owner = function;
  const ValueId first_value = graph_.num_values();
  std::vector<std::optional<ValueId>> results;
  within(body, [&] {
    translate_nodes(function->node());
    for (int i = 0; i < std::min(function->output_size(), node.output_size()); ++i) {
      results.push_back(node.output(i).empty() ? kNoValue : find(function->output(i)));
    }
  });
  poison_outputs(node);
  for (int i = 0; i < static_cast<int>(results.size()); ++i) {
    const std::optional<ValueId>& result = results[static_cast<size_t>(i)];
    if (!result || *result == kNoValue) {
      continue;
    }
    if (*result >= first_value && graph_.value(*result).producer != kNoNode) {
      graph_.rename_value(*result, graph_.unique_value_name(scope_->prefix + node.output(i)));
    }
    set_output(node, i, *result);
  }
}

bool OnnxTranslator::inline_branch(const onnx::NodeProto& node,
                                   const std::vector<ValueId>& inputs) {
  const std::optional<Tensor> condition = contents(required_input(inputs, 0));
  TRAINRT_REQUIRE(
      condition && condition->num_elements() == 1,
      kUnsupported,
      "its condition depends on data; only the taken branch of a known condition can be "
      "trained");
  const std::string wanted = condition->to_int64()[0] != 0 ? "then_branch" : "else_branch";
  for (const onnx::AttributeProto& attribute : node.attribute()) {
    if (attribute.name() != wanted) {
      continue;
    }
    Scope branch;
    branch.outer = scope_;
    branch.owner = scope_->owner;
    branch.opsets = scope_->opsets;
    branch.attributes = scope_->attributes;
    branch.prefix = scope_->prefix;
    branch.counts = scope_->counts;
    branch.depth = scope_->depth + 1;
    std::vector<std::optional<ValueId>> results;
    within(branch, [&] {
      add_initializers(attribute.g());
      translate_nodes(attribute.g().node());
      for (const onnx::ValueInfoProto& output : attribute.g().output()) {
        results.push_back(find(output.name()));
      }
    });
    poison_outputs(node);
    for (int i = 0; i < std::min(node.output_size(), static_cast<int>(results.size())); ++i) {
      if (const std::optional<ValueId>& result = results[static_cast<size_t>(i)]) {
        set_output(node, i, *result);
      }
    }
    return true;
  }
  TRAINRT_FAIL(kInvalidModel, "If has no ", wanted);
}

}  // namespace trainrt
