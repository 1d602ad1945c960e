// Validation in three parts: versions; names (our own pass over every graph, since the checker's
// messages name no node and it never looks at training_info); and ONNX's checker for the rest.
//
// The checker opens external files and insists on known operators. `plan` must do without the first
// and we report unknown operators all at once when the model is bound, so it sees a skeleton: every
// tensor is emptied, and operators without a schema are moved to a domain that it does not know.
#include "graph/onnx_validate.h"

#include <onnx/checker.h>
#include <onnx/defs/schema.h>

#include <unordered_set>

#include "graph/base/error.h"
#include "graph/onnx_tensor.h"

namespace trainrt {

namespace {

constexpr int kOldestIr = 3;
constexpr int kNewestIr = 14;
constexpr int kNewestOpset = 28;
constexpr const char* kUnknownDomain = "trainrt.unknown";
constexpr const char* kReservedPrefix = "trainrt.";
constexpr const char* kReservedKey = "__metadata__";  // of safetensors

// Names visible at one place: those of this graph and, through `outer`, of the enclosing ones.
struct Names {
  const Names* outer = nullptr;
  std::unordered_set<std::string> defined;

  bool visible(const std::string& name) const {
    return defined.count(name) != 0 || (outer != nullptr && outer->visible(name));
  }
};

std::string describe(const onnx::NodeProto& node) {
  const std::string output = node.output_size() > 0 ? node.output(0) : "";
  return node.name().empty() ? concat("the ", node.op_type(), " node that produces '", output, "'")
                             : concat("node '", node.name(), "' (", node.op_type(), ")");
}

// Tensors keep their names in the training graph, beside our own, and in checkpoints, beside the
// one key that their format reserves.
void check_not_reserved(const std::string& name, const std::string& where) {
  TRAINRT_REQUIRE(name.rfind(kReservedPrefix, 0) != 0 && name != kReservedKey,
                  kUnsupported,
                  where,
                  ": tensor '",
                  name,
                  "' has a reserved name (those that begin with '",
                  kReservedPrefix,
                  "' belong to the training step, '",
                  kReservedKey,
                  "' to the checkpoint format); rename it");
}

void check_graph(const onnx::GraphProto& graph, const std::string& where, const Names* outer);

void check_node(const onnx::NodeProto& node, const std::string& where, Names& names) {
  TRAINRT_REQUIRE(
      !node.op_type().empty(), kInvalidModel, where, ": ", describe(node), " has no operator type");
  for (const std::string& input : node.input()) {
    TRAINRT_REQUIRE(input.empty() || names.visible(input),
                    kInvalidModel,
                    where,
                    ": ",
                    describe(node),
                    " reads '",
                    input,
                    "', which nothing defines");
  }
  for (const onnx::AttributeProto& attribute : node.attribute()) {
    const std::string inside = concat(where, ", ", attribute.name(), " of ", describe(node));
    if (attribute.has_t()) {
      check_tensor_data(attribute.t());
    }
    if (attribute.has_g()) {
      check_graph(attribute.g(), inside, &names);
    }
    for (const onnx::GraphProto& graph : attribute.graphs()) {
      check_graph(graph, inside, &names);
    }
  }
  for (const std::string& output : node.output()) {
    TRAINRT_REQUIRE(output.empty() || names.defined.insert(output).second,
                    kInvalidModel,
                    where,
                    ": '",
                    output,
                    "' is defined twice, the second time by ",
                    describe(node),
                    "; a name may be assigned once");
    check_not_reserved(output, where);
  }
}

void define_initializers(const onnx::GraphProto& graph, const std::string& where, Names& names) {
  std::unordered_set<std::string> seen;
  const auto define = [&](const std::string& name) {
    TRAINRT_REQUIRE(!name.empty(), kInvalidModel, where, ": an initializer has no name");
    TRAINRT_REQUIRE(seen.insert(name).second,
                    kInvalidModel,
                    where,
                    ": two initializers are named '",
                    name,
                    "'");
    check_not_reserved(name, where);
    names.defined.insert(name);  // may also be an input: a default value
  };
  for (const onnx::TensorProto& tensor : graph.initializer()) {
    define(tensor.name());
    check_tensor_data(tensor);
  }
  for (const onnx::SparseTensorProto& tensor : graph.sparse_initializer()) {
    define(tensor.values().name());
  }
}

void define_inputs(const onnx::GraphProto& graph, const std::string& where, Names& names) {
  for (const onnx::ValueInfoProto& input : graph.input()) {
    TRAINRT_REQUIRE(!input.name().empty(), kInvalidModel, where, ": an input has no name");
    check_not_reserved(input.name(), where);
    TRAINRT_REQUIRE(names.defined.insert(input.name()).second,
                    kInvalidModel,
                    where,
                    ": two inputs are named '",
                    input.name(),
                    "'");
  }
}

void check_body(const onnx::GraphProto& graph, const std::string& where, Names& names) {
  for (const onnx::NodeProto& node : graph.node()) {
    check_node(node, where, names);
  }
  for (const onnx::ValueInfoProto& output : graph.output()) {
    TRAINRT_REQUIRE(names.visible(output.name()),
                    kInvalidModel,
                    where,
                    ": nothing defines output '",
                    output.name(),
                    "'");
  }
}

void check_graph(const onnx::GraphProto& graph, const std::string& where, const Names* outer) {
  Names names;
  names.outer = outer;
  define_inputs(graph, where, names);
  define_initializers(graph, where, names);
  check_body(graph, where, names);
}

void check_function(const onnx::FunctionProto& function) {
  const std::string where = concat("function '", function.domain(), ".", function.name(), "'");
  Names names;
  for (const std::string& input : function.input()) {
    TRAINRT_REQUIRE(names.defined.insert(input).second,
                    kInvalidModel,
                    where,
                    ": two inputs are named '",
                    input,
                    "'");
  }
  for (const onnx::NodeProto& node : function.node()) {
    check_node(node, where, names);
  }
  for (const std::string& output : function.output()) {
    TRAINRT_REQUIRE(
        names.visible(output), kInvalidModel, where, ": nothing defines output '", output, "'");
  }
}

std::unordered_set<std::string> initializer_names(const onnx::GraphProto& graph) {
  std::unordered_set<std::string> names;
  for (const onnx::TensorProto& tensor : graph.initializer()) {
    names.insert(tensor.name());
  }
  return names;
}

std::unordered_set<std::string> output_names(const onnx::GraphProto& graph) {
  std::unordered_set<std::string> names;
  for (const onnx::ValueInfoProto& output : graph.output()) {
    names.insert(output.name());
  }
  return names;
}

// A step runs graph ++ algorithm, so algorithm sees the names of the main graph; bindings assign
// outputs to initializers of either.
void check_training_info(const onnx::ModelProto& model) {
  std::unordered_set<std::string> updated;
  for (int i = 0; i < model.training_info_size(); ++i) {
    const onnx::TrainingInfoProto& info = model.training_info(i);
    const std::string where = concat("training_info ", i);
    Names names;
    define_inputs(model.graph(), "main graph", names);
    Names algorithm_inputs;
    define_inputs(info.algorithm(), where, algorithm_inputs);
    for (const std::string& name : algorithm_inputs.defined) {
      TRAINRT_REQUIRE(names.defined.insert(name).second,
                      kInvalidModel,
                      where,
                      ": '",
                      name,
                      "' is an input of the main graph, too");
    }
    define_initializers(model.graph(), "main graph", names);
    for (const std::string& name : initializer_names(info.algorithm())) {
      TRAINRT_REQUIRE(names.defined.count(name) == 0 || algorithm_inputs.defined.count(name) != 0,
                      kInvalidModel,
                      where,
                      ": initializer '",
                      name,
                      "' has the name of a tensor of the main graph");
    }
    define_initializers(info.algorithm(), where, names);
    check_body(model.graph(), "main graph", names);
    check_body(info.algorithm(), where + ", algorithm", names);
    TRAINRT_REQUIRE(info.initialization().input_size() == 0,
                    kInvalidModel,
                    where,
                    ": its initialization graph has inputs; it must have none");
    check_graph(info.initialization(), where + ", initialization", nullptr);

    std::unordered_set<std::string> state = initializer_names(model.graph());
    state.merge(initializer_names(info.algorithm()));
    std::unordered_set<std::string> results = output_names(info.algorithm());
    results.merge(output_names(model.graph()));
    const std::unordered_set<std::string> fresh = output_names(info.initialization());
    const auto check_binding = [&](const char* kind,
                                   const onnx::StringStringEntryProto& binding,
                                   const std::unordered_set<std::string>& values,
                                   const char* of_graph) {
      TRAINRT_REQUIRE(state.count(binding.key()) != 0,
                      kInvalidModel,
                      where,
                      ": ",
                      kind,
                      " assigns '",
                      binding.key(),
                      "', which is no initializer of the main graph or the algorithm");
      TRAINRT_REQUIRE(values.count(binding.value()) != 0,
                      kInvalidModel,
                      where,
                      ": ",
                      kind,
                      " gives '",
                      binding.key(),
                      "' the value '",
                      binding.value(),
                      "', which is no output of ",
                      of_graph);
    };
    std::unordered_set<std::string> initialized;
    for (const onnx::StringStringEntryProto& binding : info.initialization_binding()) {
      check_binding("initialization_binding", binding, fresh, "the initialization graph");
      TRAINRT_REQUIRE(initialized.insert(binding.key()).second,
                      kInvalidModel,
                      where,
                      ": initialization_binding assigns '",
                      binding.key(),
                      "' twice");
    }
    for (const onnx::StringStringEntryProto& binding : info.update_binding()) {
      check_binding("update_binding", binding, results, "the algorithm or the main graph");
      TRAINRT_REQUIRE(updated.insert(binding.key()).second,
                      kInvalidModel,
                      where,
                      ": update_binding assigns '",
                      binding.key(),
                      "', which is assigned already");
    }
  }
}

void check_versions(const onnx::ModelProto& model) {
  TRAINRT_REQUIRE(model.has_ir_version() && model.ir_version() >= 1,
                  kInvalidModel,
                  "the model states no IR version: it is not an ONNX model, or a damaged one");
  TRAINRT_REQUIRE(model.ir_version() >= kOldestIr && model.ir_version() <= kNewestIr,
                  kUnsupported,
                  "the model has IR version ",
                  model.ir_version(),
                  "; versions ",
                  kOldestIr,
                  " to ",
                  kNewestIr,
                  " are read");
  TRAINRT_REQUIRE(model.has_graph(), kInvalidModel, "the model has no graph");
  std::unordered_set<std::string> domains;
  for (const onnx::OperatorSetIdProto& opset : model.opset_import()) {
    const bool main_domain = opset.domain().empty() || opset.domain() == "ai.onnx";
    TRAINRT_REQUIRE(domains.insert(main_domain ? "" : opset.domain()).second,
                    kInvalidModel,
                    "the model imports the operator set '",
                    opset.domain(),
                    "' twice");
    if (main_domain) {
      TRAINRT_REQUIRE(
          opset.version() >= 1, kInvalidModel, "the model imports opset ", opset.version());
      TRAINRT_REQUIRE(opset.version() <= kNewestOpset,
                      kUnsupported,
                      "the model uses opset ",
                      opset.version(),
                      "; up to ",
                      kNewestOpset,
                      " is known. Export with an older opset");
    }
  }
  TRAINRT_REQUIRE(!domains.empty(), kInvalidModel, "the model imports no operator set");
}

// --- The skeleton for ONNX's checker.

void strip_tensor(onnx::TensorProto& tensor) {
  onnx::TensorProto empty;
  empty.set_name(tensor.name());
  empty.set_data_type(tensor.data_type());
  empty.add_dims(0);
  tensor.Swap(&empty);
}

void add_stripped(const onnx::TensorProto& tensor, onnx::TensorProto* out) {
  out->set_name(tensor.name());
  out->set_data_type(tensor.data_type());
  out->add_dims(0);
}

void skeleton_graph(const onnx::GraphProto& graph, onnx::GraphProto* out);

// The checker wants a branch's outputs to be computed in the branch; exporters return values of the
// graph around it, too.
void name_outer_outputs(onnx::GraphProto& graph) {
  std::unordered_set<std::string> own;
  for (const onnx::ValueInfoProto& input : graph.input()) {
    own.insert(input.name());
  }
  for (const onnx::TensorProto& tensor : graph.initializer()) {
    own.insert(tensor.name());
  }
  for (const onnx::NodeProto& node : graph.node()) {
    own.insert(node.output().begin(), node.output().end());
  }
  for (onnx::ValueInfoProto& output : *graph.mutable_output()) {
    if (own.count(output.name()) == 0) {
      onnx::NodeProto* identity = graph.add_node();
      identity->set_op_type("Identity");
      identity->add_input(output.name());
      output.set_name(concat("trainrt.outer.", graph.node_size()));
      identity->add_output(output.name());
    }
  }
}

void skeleton_node(const onnx::NodeProto& node, onnx::NodeProto* out) {
  out->set_name(node.name());
  out->set_op_type(node.op_type());
  out->set_domain(node.domain());
  out->set_overload(node.overload());
  *out->mutable_input() = node.input();
  *out->mutable_output() = node.output();
  for (const onnx::AttributeProto& attribute : node.attribute()) {
    onnx::AttributeProto* copy = out->add_attribute();
    if (attribute.has_t()) {
      copy->set_name(attribute.name());
      copy->set_type(attribute.type());
      add_stripped(attribute.t(), copy->mutable_t());
    } else if (attribute.has_g()) {
      copy->set_name(attribute.name());
      copy->set_type(attribute.type());
      skeleton_graph(attribute.g(), copy->mutable_g());
      name_outer_outputs(*copy->mutable_g());
    } else {
      *copy = attribute;
      for (onnx::TensorProto& tensor : *copy->mutable_tensors()) {
        strip_tensor(tensor);
      }
    }
  }
}

void skeleton_graph(const onnx::GraphProto& graph, onnx::GraphProto* out) {
  out->set_name(graph.name());
  *out->mutable_input() = graph.input();
  *out->mutable_output() = graph.output();
  for (onnx::ValueInfoProto& output : *out->mutable_output()) {
    // The checker wants a shape; it is inferred here, and runtimes do without.
    if (output.type().has_tensor_type() && !output.type().tensor_type().has_shape()) {
      output.mutable_type()->mutable_tensor_type()->mutable_shape();
    }
  }
  for (const onnx::TensorProto& tensor : graph.initializer()) {
    add_stripped(tensor, out->add_initializer());
  }
  // Sparse initializers become dense ones, which the checker has nothing to say about.
  for (const onnx::SparseTensorProto& tensor : graph.sparse_initializer()) {
    add_stripped(tensor.values(), out->add_initializer());
  }
  for (const onnx::NodeProto& node : graph.node()) {
    skeleton_node(node, out->add_node());
  }
}

// Operators that the opset lacks or calls deprecated (GroupNormalization of opset 18, which files
// use all the same): the importer says which of them it takes.
void hide_unknown_operators(onnx::GraphProto& graph, int opset) {
  for (onnx::NodeProto& node : *graph.mutable_node()) {
    const bool main_domain = node.domain().empty() || node.domain() == "ai.onnx";
    const onnx::OpSchema* schema =
        main_domain ? onnx::OpSchemaRegistry::Schema(node.op_type(), opset) : nullptr;
    if (main_domain && (schema == nullptr || schema->deprecated())) {
      node.set_domain(kUnknownDomain);
    }
    for (onnx::AttributeProto& attribute : *node.mutable_attribute()) {
      if (attribute.has_g()) {
        hide_unknown_operators(*attribute.mutable_g(), opset);
      }
    }
  }
}

// Which the checker wants as well, but does not say of what.
void check_input_types(const onnx::GraphProto& graph) {
  for (const onnx::ValueInfoProto& input : graph.input()) {
    const bool lacks_shape =
        input.type().has_tensor_type() && !input.type().tensor_type().has_shape();
    TRAINRT_REQUIRE(input.has_type() && !lacks_shape,
                    kInvalidModel,
                    "input '",
                    input.name(),
                    input.has_type() ? "' has no shape" : "' has no type",
                    "; wanted its element type and a size or a name for each of its axes, as "
                    "exporters write them");
  }
}

void run_checker(const onnx::ModelProto& model) {
  onnx::ModelProto skeleton;
  // IR 3 wants initializers to be inputs, too, which many producers ignored and nobody needs.
  skeleton.set_ir_version(std::max<int64_t>(model.ir_version(), 4));
  *skeleton.mutable_opset_import() = model.opset_import();
  skeleton_graph(model.graph(), skeleton.mutable_graph());
  *skeleton.mutable_functions() = model.functions();
  int opset = 1;
  bool has_unknown_domain = false;
  for (const onnx::OperatorSetIdProto& import : model.opset_import()) {
    if (import.domain().empty() || import.domain() == "ai.onnx") {
      opset = static_cast<int>(import.version());
    }
    has_unknown_domain = has_unknown_domain || import.domain() == kUnknownDomain;
  }
  hide_unknown_operators(*skeleton.mutable_graph(), opset);
  if (!has_unknown_domain) {
    onnx::OperatorSetIdProto* unknown = skeleton.add_opset_import();
    unknown->set_domain(kUnknownDomain);
    unknown->set_version(1);
  }
  if (skeleton.graph().name().empty()) {
    skeleton.mutable_graph()->set_name("graph");  // demanded, but of no use
  }
  try {
    // A function may import another opset than the model: it is translated with its own.
    onnx::checker::check_model(skeleton,
                               /*full_check=*/false,
                               /*skip_opset_compatibility_check=*/true);
  } catch (const std::exception& error) {
    TRAINRT_FAIL(kInvalidModel, "ONNX's checker refuses the model: ", error.what());
  }
}

}  // namespace

void validate_model(const onnx::ModelProto& model) {
  check_versions(model);
  check_graph(model.graph(), "main graph", nullptr);
  for (const onnx::FunctionProto& function : model.functions()) {
    check_function(function);
  }
  check_training_info(model);
  check_input_types(model.graph());
  run_checker(model);
}

}  // namespace trainrt
