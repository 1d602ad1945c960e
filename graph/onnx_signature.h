// What PyTorch's exporter for captured programs (torch.export) writes beside the model about its
// tensors: the program's inputs, each with a kind and the name of the module's tensor, and on
// single values their kind, and the tensors they were folded from.
#pragma once

#include <onnx/onnx_pb.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace trainrt {

struct ExportSignature {
  // Program input -> tensor of the module, parameters alone: "p_fc_weight" -> "fc.weight".
  std::map<std::string, std::string> parameters;
  // Tensor -> "PARAMETER", "BUFFER", "CONSTANT_TENSOR" ...
  std::map<std::string, std::string> kinds;
  std::map<std::string, std::vector<std::string>> folded_from;
  // Parameters of which the file holds a tensor, under their name, tied to or folded into another.
  std::set<std::string> held;

  // Whether the list of inputs is there, so that what it does not name is none of them.
  bool is_complete() const { return !parameters.empty(); }
  // Whether each parameter can be found in the file: then every other tensor is a constant.
  bool holds_all() const;

  bool is_parameter(const std::string& tensor) const;
  // The parameters that are, or went into, this tensor.
  std::vector<std::string> origins(const std::string& tensor) const;

  struct Role {
    bool parameter = false;
    std::string why;
  };
  // Nothing when the file does not say.
  std::optional<Role> role(const std::string& tensor) const;
};

ExportSignature read_signature(const onnx::GraphProto& graph);

// The parameters that the program's operation behind this node takes, in order.
std::vector<std::string> parameters_of(const onnx::NodeProto& node,
                                       const ExportSignature& signature);

}  // namespace trainrt
