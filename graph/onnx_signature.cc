#include "graph/onnx_signature.h"

#include <algorithm>
#include <cctype>
#include <sstream>

#include "graph/base/error.h"

namespace trainrt {

namespace {

constexpr const char* kProgramInputs = "pkg.torch.export.ExportedProgram.graph_signature";
constexpr const char* kInputKind = "pkg.torch.export.graph_signature.InputSpec.kind";
constexpr const char* kFoldedFrom = "pkg.onnxscript.optimizer.folded_from";
constexpr const char* kOperation = "pkg.torch.onnx.fx_node";
constexpr const char* kScopes = "pkg.torch.onnx.name_scopes";

template <typename Entries>
const std::string* find_entry(const Entries& entries, const char* key) {
  for (const onnx::StringStringEntryProto& entry : entries) {
    if (entry.key() == key) {
      return &entry.value();
    }
  }
  return nullptr;
}

// The texts between single quotes.
std::vector<std::string> quoted(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t begin = text.find('\''); begin != std::string::npos;) {
    const size_t end = text.find('\'', begin + 1);
    if (end == std::string::npos) {
      break;
    }
    parts.push_back(text.substr(begin + 1, end - begin - 1));
    begin = text.find('\'', end + 1);
  }
  return parts;
}

// Lines "p_fc_weight: PARAMETER target='fc.weight' ..."; those of outputs have no target.
void read_inputs(const std::string& text, ExportSignature& signature) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t colon = line.find(": ");
    const size_t target = line.find(" target=");
    if (colon == std::string::npos || target == std::string::npos || target < colon) {
      continue;
    }
    const std::vector<std::string> names = quoted(line.substr(target));
    const std::string kind = line.substr(colon + 2, target - colon - 2);
    if (names.empty()) {
      continue;
    }
    signature.kinds[names[0]] = kind;
    if (kind == "PARAMETER") {
      signature.parameters[line.substr(0, colon)] = names[0];
    }
  }
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) {
    return c == '_' ? ' ' : static_cast<char>(std::tolower(c));
  });
  return text;
}

// Tied parameters are listed under each of their names and written under one: a node of module
// "wte" then takes "lm_head.weight", where it would take a "wte.weight".
void hold_tied(const onnx::GraphProto& graph, ExportSignature& signature) {
  for (const onnx::NodeProto& node : graph.node()) {
    const std::string* scopes = find_entry(node.metadata_props(), kScopes);
    const std::vector<std::string> names =
        scopes == nullptr ? std::vector<std::string>() : quoted(*scopes);
    if (names.size() < 2) {
      continue;
    }
    const std::string& module = names[names.size() - 2];  // the last one is the operation
    for (const std::string& taken : parameters_of(node, signature)) {
      const std::string own = concat(module, ".", taken.substr(taken.rfind('.') + 1));
      if (signature.held.count(taken) != 0 && signature.is_parameter(own)) {
        signature.held.insert(own);
      }
    }
  }
}

}  // namespace

bool ExportSignature::is_parameter(const std::string& tensor) const {
  const auto it = kinds.find(tensor);
  return it != kinds.end() && it->second == "PARAMETER";
}

bool ExportSignature::holds_all() const {
  return std::all_of(parameters.begin(), parameters.end(), [&](const auto& parameter) {
    return held.count(parameter.second) != 0;
  });
}

std::vector<std::string> ExportSignature::origins(const std::string& tensor) const {
  if (is_parameter(tensor)) {
    return {tensor};
  }
  std::vector<std::string> result;
  if (const auto it = folded_from.find(tensor); it != folded_from.end()) {
    std::copy_if(it->second.begin(),
                 it->second.end(),
                 std::back_inserter(result),
                 [&](const std::string& name) { return is_parameter(name); });
  }
  return result;
}

std::optional<ExportSignature::Role> ExportSignature::role(const std::string& tensor) const {
  if (const auto it = kinds.find(tensor); it != kinds.end()) {
    return Role{it->second == "PARAMETER", concat("the exporter lists it as ", lower(it->second))};
  }
  if (const std::vector<std::string> from = origins(tensor); !from.empty()) {
    return Role{true, concat("folded by the exporter from parameter '", from[0], "'")};
  }
  // "conv.weight_bias" is what a BatchNormalization left behind in the convolution before it.
  for (const auto& [input, parameter] : parameters) {
    if (tensor.size() > parameter.size() + 1 && tensor.rfind(parameter, 0) == 0 &&
        (tensor[parameter.size()] == '_' || tensor[parameter.size()] == '.')) {
      return Role{true, concat("made by the exporter of parameter '", parameter, "'")};
    }
  }
  if (is_complete()) {
    return Role{false, "not among the parameters that the exporter lists"};
  }
  return std::nullopt;
}

ExportSignature read_signature(const onnx::GraphProto& graph) {
  ExportSignature signature;
  if (const std::string* inputs = find_entry(graph.metadata_props(), kProgramInputs)) {
    read_inputs(*inputs, signature);
  }
  for (const onnx::ValueInfoProto& info : graph.value_info()) {
    if (const std::string* kind = find_entry(info.metadata_props(), kInputKind)) {
      signature.kinds[info.name()] = *kind;
    }
    if (const std::string* from = find_entry(info.metadata_props(), kFoldedFrom)) {
      signature.folded_from[info.name()] = quoted(*from);
    }
  }
  for (const onnx::TensorProto& tensor : graph.initializer()) {
    for (const std::string& origin : signature.origins(tensor.name())) {
      signature.held.insert(origin);
    }
  }
  hold_tied(graph, signature);
  return signature;
}

std::vector<std::string> parameters_of(const onnx::NodeProto& node,
                                       const ExportSignature& signature) {
  std::vector<std::string> result;
  const std::string* operation = find_entry(node.metadata_props(), kOperation);
  const size_t arguments = operation == nullptr ? std::string::npos : operation->find("args = (");
  if (arguments == std::string::npos) {
    return result;
  }
  // "%linear : ... = call_function[target=...](args = (%x, %p_fc_weight, %p_fc_bias), ...)"
  for (size_t at = operation->find('%', arguments); at != std::string::npos;
       at = operation->find('%', at + 1)) {
    size_t end = at + 1;
    while (end < operation->size() &&
           (std::isalnum(static_cast<unsigned char>((*operation)[end])) != 0 ||
            (*operation)[end] == '_')) {
      ++end;
    }
    const auto it = signature.parameters.find(operation->substr(at + 1, end - at - 1));
    if (it != signature.parameters.end() &&
        std::find(result.begin(), result.end(), it->second) == result.end()) {
      result.push_back(it->second);
    }
  }
  return result;
}

}  // namespace trainrt
