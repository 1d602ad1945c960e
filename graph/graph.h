// The intermediate representation: nodes in execution order over values with concrete types.
//
// A Graph is what every stage of the system hands to the next: the imported forward graph, the
// training graph (forward, backward, update), and a rank's local graph inside a Program. Everything
// that costs time or memory is a node; everything a node reads or writes is a value.
//
// Invariants (checked by graph/verifier):
//   * every value has at most one producer; inputs, parameters, state and constants have none;
//   * a node's inputs are produced by earlier nodes (nodes are stored in a topological order);
//   * value names and node names are unique and not empty;
//   * types agree with the operator's inference rule.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "graph/attribute.h"
#include "graph/dtype.h"
#include "graph/shape.h"
#include "graph/tensor.h"

namespace trainrt {

using ValueId = int32_t;
using NodeId = int32_t;
constexpr ValueId kNoValue = -1;  // an optional input or output that is absent
constexpr NodeId kNoNode = -1;

struct TensorType {
  DType dtype = DType::kFloat32;
  Shape shape;

  int64_t bytes() const { return num_elements(shape) * dtype_bytes(dtype); }
  bool operator==(const TensorType&) const = default;
};
using TensorTypes = std::vector<TensorType>;

enum class ValueKind : uint8_t {
  kIntermediate,    // produced by a node
  kInput,           // fed for every micro-batch (data), or by the runtime (see RuntimeInput)
  kParameter,       // trained: persistent, gets a gradient
  kState,           // persistent, changed by the step without a gradient (BatchNorm statistics)
  kOptimizerState,  // persistent, changed by the update (momentum, variance, step counters)
  kGradient,        // persistent gradient accumulator
  kConstant,        // known at compile time
};

const char* value_kind_name(ValueKind kind);

// Persistent values keep their contents from one step to the next.
inline bool is_persistent(ValueKind kind) {
  return kind != ValueKind::kIntermediate && kind != ValueKind::kInput;
}

// Which part of the step a node belongs to. kCount, kForward and kBackward run once per micro-batch
// (kCount for all micro-batches before the first forward), kUpdate once per step.
enum class Region : uint8_t { kCount, kForward, kBackward, kUpdate };

const char* region_name(Region region);

struct Value {
  std::string name;
  TensorType type;
  ValueKind kind = ValueKind::kIntermediate;
  NodeId producer = kNoNode;
  int output_index = 0;
  int batch_axis = -1;  // the axis that enumerates samples, -1 if none; set on graph inputs
  Tensor constant;      // kConstant: the data, unless only `source` is set
  TensorSource source;  // parameters, state: initial value; load is empty when it starts as zeros
  std::string why;      // parameters and state: how they were told apart, for `inspect`
};

struct Node {
  std::string name;     // stable over compilations: random streams and plans refer to it
  std::string op_type;  // key into the operator registry
  Attributes attributes;
  std::vector<ValueId> inputs;   // kNoValue where an optional input is absent
  std::vector<ValueId> outputs;  // kNoValue where an optional output is not wanted
  Region region = Region::kForward;
  int source_index = -1;  // position of the originating node in the imported model, -1: ours
  NodeId forward_node = kNoNode;  // backward nodes: whose gradient this is; recompute: the original
};

// "After the step, `target` (persistent) takes the contents of `new_value`." All updates of a
// region take place at once, after every node of the region that reads the old contents. When the
// producing operator works in place on `target` (OpDef::inplace) nothing is copied.
struct StateUpdate {
  ValueId target = kNoValue;
  ValueId new_value = kNoValue;
};

// Inputs that the runtime itself feeds, by name; all are scalars.
namespace runtime_input {
inline constexpr const char* kLearningRate = "trainrt.learning_rate";  // float32
inline constexpr const char* kStep = "trainrt.step";             // int64, update number, from 1
inline constexpr const char* kLossSeed = "trainrt.loss_seed";    // d loss / d loss_sum = scale / N
inline constexpr const char* kGradScale = "trainrt.grad_scale";  // 1 / loss scale
}  // namespace runtime_input

class Graph {
 public:
  // Values without a producer. Names must be new.
  ValueId add_value(Value value);
  ValueId add_input(std::string name, TensorType type, int batch_axis = -1);
  ValueId add_constant(std::string name, Tensor data);

  // Appends a node whose outputs have the given types, naming each output `names[i]`, or
  // "<node>.<i>" when `names` is shorter. Prefer GraphBuilder, which infers the types.
  NodeId add_node(Node node, const TensorTypes& output_types, std::vector<std::string> names = {});

  const Value& value(ValueId id) const { return values_.at(static_cast<size_t>(id)); }
  Value& value(ValueId id) { return values_.at(static_cast<size_t>(id)); }
  const Node& node(NodeId id) const { return nodes_.at(static_cast<size_t>(id)); }
  Node& node(NodeId id) { return nodes_.at(static_cast<size_t>(id)); }
  int num_values() const { return static_cast<int>(values_.size()); }
  int num_nodes() const { return static_cast<int>(nodes_.size()); }
  const std::vector<Value>& values() const { return values_; }
  const std::vector<Node>& nodes() const { return nodes_; }

  std::optional<ValueId> find_value(const std::string& name) const;
  void rename_value(ValueId id, std::string name);

  // Values of one kind in order of creation.
  std::vector<ValueId> values_of_kind(ValueKind kind) const;

  std::vector<ValueId>& outputs() { return outputs_; }
  const std::vector<ValueId>& outputs() const { return outputs_; }
  std::vector<StateUpdate>& updates() { return updates_; }
  const std::vector<StateUpdate>& updates() const { return updates_; }

  // For each value the nodes that read it, in execution order (a node twice if it reads it twice).
  std::vector<std::vector<NodeId>> consumers() const;

  // A name not yet used by a value or a node: `stem`, or `stem` with a number.
  std::string unique_value_name(const std::string& stem);
  std::string unique_node_name(const std::string& stem);

  // The same graph restricted to `keep` (node ids, in the new order), without values that are then
  // neither used nor persistent nor an input. `value_map`, if given, receives old id -> new id.
  // `drop_unused`: without persistent values and inputs that no kept node reads, too.
  Graph subgraph(const std::vector<NodeId>& keep,
                 std::vector<ValueId>* value_map = nullptr,
                 bool drop_unused = false) const;

 private:
  std::vector<Value> values_;
  std::vector<Node> nodes_;
  std::vector<ValueId> outputs_;
  std::vector<StateUpdate> updates_;
  std::unordered_map<std::string, ValueId> value_by_name_;
  std::unordered_map<std::string, NodeId> node_by_name_;
  std::unordered_map<std::string, int> next_value_number_;
  std::unordered_map<std::string, int> next_node_number_;
};

}  // namespace trainrt
