#include "runtime/frozen_norms.h"

#include <algorithm>

#include "graph/base/error.h"

namespace trainrt {

namespace {

// By its moments: the node that applies them loses its name to fusions.
std::string name_of(const Graph& graph, const Node& apply) {
  const std::string suffix = "/moments";
  const Value& moments = graph.value(apply.inputs[1]);
  std::string name = moments.producer == kNoNode ? apply.name : graph.node(moments.producer).name;
  const size_t at = name.rfind(suffix);
  return at == std::string::npos ? name : name.substr(0, at);
}

}  // namespace

std::vector<std::string> frozen_norms(const Graph& forward) {
  std::vector<bool> trained(static_cast<size_t>(forward.num_values()));
  for (const ValueId id : forward.values_of_kind(ValueKind::kParameter)) {
    trained[static_cast<size_t>(id)] = true;
  }
  std::vector<std::string> names;
  for (const Node& node : forward.nodes()) {  // in topological order
    const bool is_trained =
        std::any_of(node.inputs.begin(), node.inputs.end(), [&](const ValueId id) {
          return id != kNoValue && trained[static_cast<size_t>(id)];
        });
    if (!is_trained) {
      continue;
    }
    for (const ValueId id : node.outputs) {
      if (id != kNoValue) {
        trained[static_cast<size_t>(id)] = true;
      }
    }
    if (node.op_type == "BatchNormApply" && node.attributes.get_int("fixed", 0) != 0) {
      names.push_back(name_of(forward, node));
    }
  }
  return names;
}

std::string frozen_norms_text(const std::vector<std::string>& names) {
  constexpr size_t kMostNamed = 3;
  std::string list;
  for (size_t i = 0; i < std::min(names.size(), kMostNamed); ++i) {
    list += concat(i == 0 ? "'" : ", '", names[i], "'");
  }
  return concat(names.size(),
                names.size() == 1 ? " BatchNormalization node" : " BatchNormalization nodes",
                " in inference form (",
                list,
                names.size() > kMostNamed ? ", ..." : "",
                "): trained with the statistics in the file, which stay as they are; to train "
                "them, export the model in training mode (PyTorch: "
                "training=TrainingMode.TRAINING, do_constant_folding=False)");
}

}  // namespace trainrt
