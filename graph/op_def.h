// What an operator must say about itself, and the registry it says it to. An operator is one file
// in ops/; nobody includes that file: everything is reached through find_op().
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "graph/cost.h"
#include "graph/graph.h"
#include "graph/kernel.h"
#include "graph/shard_spec.h"

namespace trainrt {

class GradientBuilder;  // graph/autodiff.h
class UpgradeContext;   // graph/upgrade.h
class FusionContext;    // graph/passes/fusion.h
struct OpDef;

// A node as its own operator sees it before it runs: types and attributes.
class OpContext {
 public:
  OpContext(const Graph& graph, const Node& node);
  // For a node that is not in a graph yet: `outputs` may be empty (during inference).
  OpContext(const Node& node, TensorTypes inputs, std::vector<bool> present, TensorTypes outputs);

  const Node& node() const { return *node_; }
  const Attributes& attributes() const { return node_->attributes; }
  int num_inputs() const { return static_cast<int>(inputs_.size()); }
  int num_outputs() const { return static_cast<int>(outputs_.size()); }
  bool has_input(int i) const { return i < num_inputs() && present_[static_cast<size_t>(i)]; }
  bool has_output(int i) const;
  const TensorType& input_type(int i) const { return inputs_.at(static_cast<size_t>(i)); }
  const TensorType& output_type(int i) const { return outputs_.at(static_cast<size_t>(i)); }
  const Shape& input_shape(int i) const { return input_type(i).shape; }
  const Shape& output_shape(int i) const { return output_type(i).shape; }
  DType input_dtype(int i) const { return input_type(i).dtype; }
  int64_t num_elements(int input) const { return trainrt::num_elements(input_shape(input)); }

  int64_t input_bytes() const;   // of all present inputs
  int64_t output_bytes() const;  // of all present outputs

  // attribute `axis` normalised against input 0.
  int axis(int64_t fallback = -1) const;

 private:
  const Node* node_;
  TensorTypes inputs_;
  std::vector<bool> present_;
  TensorTypes outputs_;
};

// The operator has no gradient and needs none: integer, boolean or shape-like results.
struct NotDifferentiable {};

// "Output `output` may be written over input `input`": the memory plan gives both one address when
// the input is not read later. With `always`, the operator works only in place (optimizers,
// Accumulate): the input must be persistent or dead afterwards.
struct Inplace {
  int output = 0;
  int input = 0;
  bool always = false;
};

// What mixed precision does with the operator's floating-point tensors (graph/passes/precision).
enum class PrecisionRule : uint8_t {
  kFull,       // computed in float32 from float32
  kLow,        // in the low type: matrix products, convolutions
  kFollow,     // in the widest type of its activations; parameters are cast to that
  kLowResult,  // computed in float32, its result rounded to the low type: embeddings
};

// A small, complete use of the operator, from which its tests are generated: fast against reference
// kernel, gradient against finite differences, sharded against whole, cost above zero.
struct OpExample {
  std::string name;
  Attributes attributes = {};
  // float inputs are drawn from the range below, unless `values` has a tensor for them.
  TensorTypes inputs = {};
  std::vector<Tensor> values = {};       // undefined Tensor: draw at random
  std::vector<int> absent = {};          // indices of inputs that are left out
  double low = -1, high = 1;             // range of drawn floats (log wants > 0 ...)
  std::vector<int> check_gradient = {};  // inputs checked; empty: every float input; -1: none
  bool check_sharding = true;
};

struct OpDef {
  std::string name;

  // Types of all outputs from types and attributes. Throws kInvalidModel with what was wanted.
  std::function<TensorTypes(const OpContext&)> infer_types = {};

  // Required: cost, sharding (how it splits), and the plain kernel, templated over f32 and f64.
  std::function<Cost(const OpContext&)> cost = {};
  std::function<ShardingRule(const OpContext&)> sharding = {};
  Kernel reference_kernel = {};

  // Gradient: emits ordinary nodes; or refuse aloud with not_differentiable = true.
  std::function<void(GradientBuilder&)> gradient = {};
  bool not_differentiable = false;

  // Optional.
  std::function<void(UpgradeContext&)> upgrade = {};  // ONNX node of any opset -> our one form
  LocalizeFn localize = {};
  std::vector<Inplace> inplace = {};
  bool random = false;  // draws random numbers: never folded, never merged
  bool effect = false;  // must run though nobody reads its outputs (Assign, collectives)
  bool cheap = false;   // memory-bound: selective recompute may run it again
  // Output 0 is input 0 under another shape (Reshape): the memory plan may give both one address
  // even when both live on. The kernel copies only when the addresses differ.
  bool view = false;
  PrecisionRule precision = PrecisionRule::kFull;
  std::function<int64_t(const OpContext&, const DeviceSpec&)> workspace =
      {};                  // bytes, pure function
  Kernel cpu_kernel = {};  // the fast kernel; absent: the reference kernel is good enough
  // Instead of cpu_kernel, where set-up is worth keeping (oneDNN primitives): called once when a
  // program is loaded. Must return a kernel that holds no reference to the OpContext.
  std::function<Kernel(const OpContext&, const DeviceSpec&)> cpu_factory = {};
  std::vector<OpExample> examples = {};
};

// The default cost of element-wise and data-moving operators.
Cost memory_bound_cost(const OpContext& op, double flops_per_output_element = 1);

struct RegisterOp {
  explicit RegisterOp(OpDef def);  // NOLINT: registration object
};

// A kernel for another back end, registered from its own file.
struct RegisterKernel {
  RegisterKernel(const char* op_type,
                 Backend backend,
                 std::function<Kernel(const OpContext&, const DeviceSpec&)> factory);
};

// ONNX operators that have no form of their own here and are rewritten at import (Gemm, Sum, ...).
struct RegisterUpgrade {
  RegisterUpgrade(const char* onnx_op_type, std::function<void(UpgradeContext&)> upgrade);
  RegisterUpgrade(const char* onnx_domain,
                  const char* onnx_op_type,
                  std::function<void(UpgradeContext&)> upgrade);
};

// A fusion: rewrites a pattern that ends at `root_op_type` into single operators, before autodiff.
// Returns true when it rewrote. Fusions run in order of `priority`, largest pattern first.
struct Fusion {
  std::string name;
  std::string root_op_type;
  int priority = 0;
  std::function<bool(FusionContext&)> rewrite;
};
struct RegisterFusion {
  explicit RegisterFusion(Fusion fusion);  // NOLINT: registration object
};

const OpDef* find_op(const std::string& op_type);  // null when unknown
const OpDef& get_op(const std::string& op_type);   // throws kUnsupported
std::vector<std::string> op_names();               // sorted
std::vector<Fusion> fusions();                     // sorted by priority, then name
const std::function<void(UpgradeContext&)>* find_upgrade(const std::string& domain,
                                                         const std::string& op_type);
std::vector<std::string> upgrade_names();  // "Gemm", "com.microsoft.Gelu", ... sorted

// The kernel that `spec` runs for this node. Throws kUnsupported naming node and operator when the
// back end has none: never a silent fallback.
Kernel make_kernel(const OpContext& op, const DeviceSpec& spec);
bool has_kernel(const std::string& op_type, Backend backend);
int64_t workspace_bytes(const OpContext& op, const DeviceSpec& spec);

}  // namespace trainrt
