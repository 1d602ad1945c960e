#include "graph/op_def.h"

#include <algorithm>
#include <map>

namespace trainrt {

namespace {

// The registry: the only global state of the library, filled before main() and constant after.
struct Registry {
  std::map<std::string, OpDef> ops;
  std::map<std::pair<std::string, Backend>,
           std::function<Kernel(const OpContext&, const DeviceSpec&)>>
      kernels;
  std::map<std::string, std::function<void(UpgradeContext&)>> upgrades;
  std::vector<Fusion> fusions;
};

Registry& registry() {
  static Registry instance;
  return instance;
}

std::string upgrade_key(const std::string& domain, const std::string& op_type) {
  return domain.empty() || domain == "ai.onnx" ? op_type : domain + "." + op_type;
}

}  // namespace

OpContext::OpContext(const Graph& graph, const Node& node) : node_(&node) {
  inputs_.reserve(node.inputs.size());
  present_.reserve(node.inputs.size());
  outputs_.reserve(node.outputs.size());
  for (const ValueId id : node.inputs) {
    present_.push_back(id != kNoValue);
    inputs_.push_back(id == kNoValue ? TensorType{} : graph.value(id).type);
  }
  for (const ValueId id : node.outputs) {
    outputs_.push_back(id == kNoValue ? TensorType{} : graph.value(id).type);
  }
}

OpContext::OpContext(const Node& node,
                     TensorTypes inputs,
                     std::vector<bool> present,
                     TensorTypes outputs)
    : node_(&node),
      inputs_(std::move(inputs)),
      present_(std::move(present)),
      outputs_(std::move(outputs)) {}

bool OpContext::has_output(int i) const {
  if (i >= num_outputs()) {
    return false;
  }
  // A node that is not in a graph yet has no output ids: all its outputs are wanted.
  return static_cast<size_t>(i) >= node_->outputs.size() ||
         node_->outputs[static_cast<size_t>(i)] != kNoValue;
}

int64_t OpContext::input_bytes() const {
  int64_t sum = 0;
  for (int i = 0; i < num_inputs(); ++i) {
    sum += has_input(i) ? input_type(i).bytes() : 0;
  }
  return sum;
}

int64_t OpContext::output_bytes() const {
  int64_t sum = 0;
  for (int i = 0; i < num_outputs(); ++i) {
    sum += has_output(i) ? output_type(i).bytes() : 0;
  }
  return sum;
}

int OpContext::axis(int64_t fallback) const {
  return normalize_axis(attributes().get_int("axis", fallback),
                        static_cast<int>(input_shape(0).size()));
}

Cost memory_bound_cost(const OpContext& op, double flops_per_output_element) {
  double elements = 0;
  for (int i = 0; i < op.num_outputs(); ++i) {
    elements += static_cast<double>(trainrt::num_elements(op.output_shape(i)));
  }
  Cost cost;
  cost.flops = flops_per_output_element * elements;
  cost.bytes = static_cast<double>(op.input_bytes() + op.output_bytes());
  return cost;
}

RegisterOp::RegisterOp(OpDef def) {
  if (def.upgrade) {
    registry().upgrades[def.name] = def.upgrade;
  }
  const std::string name = def.name;
  const bool inserted = registry().ops.emplace(name, std::move(def)).second;
  TRAINRT_CHECK(inserted, "operator '", name, "' is registered twice");
}

RegisterKernel::RegisterKernel(const char* op_type,
                               Backend backend,
                               std::function<Kernel(const OpContext&, const DeviceSpec&)> factory) {
  registry().kernels[{op_type, backend}] = std::move(factory);
}

RegisterUpgrade::RegisterUpgrade(const char* onnx_op_type,
                                 std::function<void(UpgradeContext&)> upgrade)
    : RegisterUpgrade("", onnx_op_type, std::move(upgrade)) {}

RegisterUpgrade::RegisterUpgrade(const char* onnx_domain,
                                 const char* onnx_op_type,
                                 std::function<void(UpgradeContext&)> upgrade) {
  const bool inserted =
      registry()
          .upgrades.emplace(upgrade_key(onnx_domain, onnx_op_type), std::move(upgrade))
          .second;
  TRAINRT_CHECK(inserted, "upgrade of '", onnx_op_type, "' is registered twice");
}

RegisterFusion::RegisterFusion(Fusion fusion) {
  registry().fusions.push_back(std::move(fusion));
}

const OpDef* find_op(const std::string& op_type) {
  const auto it = registry().ops.find(op_type);
  return it == registry().ops.end() ? nullptr : &it->second;
}

const OpDef& get_op(const std::string& op_type) {
  const OpDef* def = find_op(op_type);
  TRAINRT_REQUIRE(def != nullptr, kUnsupported, "operator '", op_type, "' is not supported");
  return *def;
}

std::vector<std::string> op_names() {
  std::vector<std::string> names;
  for (const auto& [name, def] : registry().ops) {
    names.push_back(name);
  }
  return names;
}

std::vector<Fusion> fusions() {
  // Registration order depends on the linker: order by priority and name instead.
  std::vector<Fusion> sorted = registry().fusions;
  std::sort(sorted.begin(), sorted.end(), [](const Fusion& a, const Fusion& b) {
    return a.priority != b.priority ? a.priority > b.priority : a.name < b.name;
  });
  return sorted;
}

const std::function<void(UpgradeContext&)>* find_upgrade(const std::string& domain,
                                                         const std::string& op_type) {
  const auto it = registry().upgrades.find(upgrade_key(domain, op_type));
  return it == registry().upgrades.end() ? nullptr : &it->second;
}

std::vector<std::string> upgrade_names() {
  std::vector<std::string> names;
  for (const auto& [name, upgrade] : registry().upgrades) {
    names.push_back(name);
  }
  return names;
}

Kernel make_kernel(const OpContext& op, const DeviceSpec& spec) {
  const OpDef& def = get_op(op.node().op_type);
  if (spec.backend == Backend::kCpu) {
    if (!spec.reference_kernels) {
      if (def.cpu_factory) {
        return def.cpu_factory(op, spec);
      }
      if (def.cpu_kernel) {
        return def.cpu_kernel;
      }
    }
    TRAINRT_REQUIRE(def.reference_kernel != nullptr,
                    kUnsupported,
                    "node '",
                    op.node().name,
                    "': operator '",
                    def.name,
                    "' has no CPU kernel");
    return def.reference_kernel;
  }
  const auto it = registry().kernels.find({def.name, spec.backend});
  TRAINRT_REQUIRE(it != registry().kernels.end(),
                  kUnsupported,
                  "node '",
                  op.node().name,
                  "': operator '",
                  def.name,
                  "' has no CUDA kernel");
  return it->second(op, spec);
}

bool has_kernel(const std::string& op_type, Backend backend) {
  const OpDef* def = find_op(op_type);
  if (def == nullptr) {
    return false;
  }
  return backend == Backend::kCpu ? def->reference_kernel || def->cpu_kernel || def->cpu_factory
                                  : registry().kernels.count({op_type, backend}) != 0;
}

int64_t workspace_bytes(const OpContext& op, const DeviceSpec& spec) {
  const OpDef& def = get_op(op.node().op_type);
  if (!def.workspace || (spec.reference_kernels && spec.backend == Backend::kCpu)) {
    return 0;
  }
  return def.workspace(op, spec);
}

}  // namespace trainrt
