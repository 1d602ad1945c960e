// Two passes that rebuild a graph node by node with other types.
//
// lower_precision() walks the nodes in order and knows for each old value the new one and its type.
// A node's own rule (OpDef::precision) says in which type it is computed, and its floating-point
// inputs are cast to that. "Activations" are the values that depend on an input of the graph; the
// type of a kFollow node is the widest of theirs, as in PyTorch's autocast [torch/amp], except that
// parameters do not widen it: a bias is rounded rather than the activations it is added to blown
// up. A result that the graph gives out is cast back, so losses are built on float32: of those that
// read 16 bits as well read_low_scores() then leaves the cast out.
#include "graph/passes/precision.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "graph/graph_builder.h"
#include "graph/op_def.h"
#include "graph/passes/pass.h"

namespace trainrt {

namespace {

const char* precision_name(DType low) {
  return low == DType::kFloat16 ? "fp16" : "bf16";
}

// What becomes of a type.
struct Conversion {
  DType to;
  bool doubles;  // float64, too

  DType operator()(DType dtype) const {
    return is_floating(dtype) && (doubles || dtype != DType::kFloat64) ? to : dtype;
  }
};

bool trains_doubles(const Graph& graph) {
  return std::any_of(graph.values().begin(), graph.values().end(), [](const Value& value) {
    return value.kind == ValueKind::kParameter && value.type.dtype == DType::kFloat64;
  });
}

// Attributes that name an element type follow the values.
void convert_attributes(Node& node, const Conversion& convert) {
  for (const char* name : {"to", "dtype", "result"}) {
    if (!node.attributes.has(name)) {
      continue;
    }
    const std::optional<DType> dtype = dtype_from_name(node.attributes.get_string(name));
    if (dtype) {
      node.attributes.set(name, std::string(dtype_name(convert(*dtype))));
    }
  }
}

Value convert_value(Value value, const Conversion& convert) {
  const DType dtype = convert(value.type.dtype);
  if (dtype == value.type.dtype) {
    return value;
  }
  value.type.dtype = dtype;
  if (value.constant.defined()) {
    value.constant = value.constant.cast(dtype);
  }
  if (value.source.load) {
    value.source.load = [load = value.source.load, dtype] { return load().cast(dtype); };
  }
  return value;
}

}  // namespace

bool has_overflowed(const Tensor& wide, const Tensor& narrow) {
  const std::vector<double> before = wide.to_double(), after = narrow.to_double();
  return !std::equal(before.begin(), before.end(), after.begin(), [](double a, double b) {
    return !std::isinf(b) || !std::isfinite(a);
  });
}

Graph convert_floats(const Graph& graph, DType to) {
  const Conversion convert{to, trains_doubles(graph)};
  Graph converted;
  std::vector<ValueId> map(static_cast<size_t>(graph.num_values()), kNoValue);
  for (ValueId id = 0; id < graph.num_values(); ++id) {
    if (graph.value(id).producer == kNoNode) {
      map[static_cast<size_t>(id)] = converted.add_value(convert_value(graph.value(id), convert));
    }
  }
  for (const Node& original : graph.nodes()) {
    Node node = original;
    convert_attributes(node, convert);
    for (ValueId& input : node.inputs) {
      input = input == kNoValue ? kNoValue : map[static_cast<size_t>(input)];
    }
    TensorTypes types;
    std::vector<std::string> names;
    for (const ValueId output : original.outputs) {
      TensorType type = output == kNoValue ? TensorType{} : graph.value(output).type;
      type.dtype = convert(type.dtype);
      types.push_back(std::move(type));
      names.push_back(output == kNoValue ? "" : graph.value(output).name);
    }
    const NodeId id = converted.add_node(std::move(node), types, std::move(names));
    for (size_t i = 0; i < original.outputs.size(); ++i) {
      if (original.outputs[i] == kNoValue) {
        converted.node(id).outputs[i] = kNoValue;
      } else {
        map[static_cast<size_t>(original.outputs[i])] = converted.node(id).outputs[i];
      }
    }
  }
  for (const ValueId id : graph.outputs()) {
    converted.outputs().push_back(map[static_cast<size_t>(id)]);
  }
  for (const StateUpdate& update : graph.updates()) {
    converted.updates().push_back(
        {map[static_cast<size_t>(update.target)], map[static_cast<size_t>(update.new_value)]});
  }
  return converted;
}

namespace {

// Inputs that kernels want in float32 beside 16-bit ones: an attention's mask.
bool stays_full(const Node& node, size_t input) {
  return node.op_type == "FusedAttention" && input == 3;
}

class Lowering {
 public:
  Lowering(const Graph& graph, DType low)
      : graph_(graph),
        low_(low),
        builder_(result_),
        map_(static_cast<size_t>(graph.num_values()), kNoValue),
        is_activation_(static_cast<size_t>(graph.num_values()), false),
        wanted_full_(static_cast<size_t>(graph.num_values()), false) {}

  Graph run() {
    for (const ValueId id : graph_.outputs()) {
      wanted_full_[index(id)] = true;
    }
    for (const StateUpdate& update : graph_.updates()) {
      wanted_full_[index(update.new_value)] = true;
    }
    for (ValueId id = 0; id < graph_.num_values(); ++id) {
      const Value& value = graph_.value(id);
      if (value.producer == kNoNode) {
        map_[index(id)] = result_.add_value(value);
        is_activation_[index(id)] = value.kind == ValueKind::kInput;
      }
    }
    for (const Node& node : graph_.nodes()) {
      lower(node);
    }
    for (const ValueId id : graph_.outputs()) {
      result_.outputs().push_back(map_[index(id)]);
    }
    for (const StateUpdate& update : graph_.updates()) {
      result_.updates().push_back({map_[index(update.target)], map_[index(update.new_value)]});
    }
    return std::move(result_);
  }

 private:
  static size_t index(ValueId id) { return static_cast<size_t>(id); }

  // The type in which `node` is computed: float32 with a constant that 16 bits cannot hold, by
  // which exporters hide scores and others scale.
  DType type_of(const Node& node, PrecisionRule rule) {
    if (rule != PrecisionRule::kLow && rule != PrecisionRule::kFollow) {
      return DType::kFloat32;
    }
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      if (node.inputs[i] != kNoValue && !stays_full(node, i) && is_beyond_low(node.inputs[i])) {
        return DType::kFloat32;
      }
    }
    if (rule == PrecisionRule::kLow) {
      return low_;
    }
    bool any_low = false;
    for (const ValueId input : node.inputs) {
      if (input == kNoValue || !is_activation_[index(input)]) {
        continue;
      }
      const DType dtype = result_.value(map_[index(input)]).type.dtype;
      if (dtype == DType::kFloat32) {
        return DType::kFloat32;
      }
      any_low = any_low || dtype == low_;
    }
    return any_low ? low_ : DType::kFloat32;
  }

  bool is_beyond_low(ValueId id) {
    const Value& value = graph_.value(id);
    if (!value.constant.defined() || value.type.dtype != DType::kFloat32) {
      return false;
    }
    const auto [known, is_new] = beyond_low_.try_emplace(id, false);
    if (is_new) {
      known->second = has_overflowed(value.constant, value.constant.cast(low_));
    }
    return known->second;
  }

  // `id` of the new graph in `to`.
  ValueId cast(ValueId id, DType to) {
    const DType from = result_.value(id).type.dtype;
    if (from == to || (from != DType::kFloat32 && from != low_)) {
      return id;
    }
    const auto known = casts_.find({id, to});
    if (known != casts_.end()) {
      return known->second;
    }
    const std::string name = concat(result_.value(id).name, ".", dtype_name(to));
    const Tensor constant = result_.value(id).constant;  // known now: no node of every step
    const ValueId result =
        constant.defined()
            ? result_.add_constant(result_.unique_value_name(name), constant.cast(to))
            : builder_.op("Cast",
                          {id},
                          {{"to", std::string(dtype_name(to))}},
                          result_.unique_node_name(name),
                          result_.unique_value_name(name));
    casts_[{id, to}] = result;
    return result;
  }

  void lower(const Node& node) {
    builder_.set_region(node.region);
    builder_.set_source_index(node.source_index);
    const PrecisionRule rule = get_op(node.op_type).precision;
    const DType type = type_of(node, rule);
    std::vector<ValueId> inputs;
    bool activation = false;
    for (const ValueId input : node.inputs) {
      const bool stays = stays_full(node, inputs.size());
      inputs.push_back(
          input == kNoValue ? kNoValue : cast(map_[index(input)], stays ? DType::kFloat32 : type));
      activation = activation || (input != kNoValue && is_activation_[index(input)]);
    }
    std::vector<std::string> names;
    for (const ValueId output : node.outputs) {
      names.push_back(output == kNoValue ? "" : graph_.value(output).name);
    }
    const std::vector<ValueId> outputs =
        builder_.node(node.op_type, inputs, node.attributes, node.name, names);
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (node.outputs[i] == kNoValue) {
        continue;
      }
      const size_t at = index(node.outputs[i]);
      map_[at] = outputs[i];
      is_activation_[at] = activation;
      if (rule == PrecisionRule::kLowResult && activation && !wanted_full_[at]) {
        map_[at] = cast(outputs[i], low_);
      }
      if (wanted_full_[at] && result_.value(outputs[i]).type.dtype == low_) {
        give_out(node.outputs[i], outputs[i]);
      }
    }
  }

  // The low value makes room for its float32 form under the name that users know.
  void give_out(ValueId original, ValueId low) {
    const std::string name = graph_.value(original).name;
    result_.rename_value(low, result_.unique_value_name(concat(name, ".", dtype_name(low_))));
    const ValueId full = cast(low, DType::kFloat32);
    result_.rename_value(full, name);
    casts_[{full, low_}] = low;  // inner readers take the low one
    map_[index(original)] = full;
  }

  const Graph& graph_;
  const DType low_;
  Graph result_;
  GraphBuilder builder_;
  std::vector<ValueId> map_;  // old value -> new value
  std::vector<bool> is_activation_;
  std::vector<bool> wanted_full_;
  std::map<std::pair<ValueId, DType>, ValueId> casts_;
  std::map<ValueId, bool> beyond_low_;  // constants
};

}  // namespace

Graph lower_precision(const Graph& graph, DType low) {
  TRAINRT_CHECK(low == DType::kFloat16 || low == DType::kBFloat16);
  return Lowering(graph, low).run();
}

namespace {

// The classification losses' nodes that read scores, and what of them.
class ScoreReaders {
 public:
  explicit ScoreReaders(Graph& graph)
      : graph_(graph), live_(static_cast<size_t>(graph.num_nodes()), false) {
    for (const NodeId id : live_nodes(graph)) {
      live_[static_cast<size_t>(id)] = true;
    }
    consumers_ = graph.consumers();
  }

  void run() {
    for (NodeId id = 0; id < graph_.num_nodes(); ++id) {
      if (live_[static_cast<size_t>(id)] && graph_.node(id).op_type == "SoftmaxCrossEntropyLoss") {
        look_through_cast(graph_.node(id).inputs[0]);
      }
    }
  }

 private:
  const std::string& type(NodeId id) const { return graph_.node(id).op_type; }

  std::vector<NodeId> readers(ValueId id) const {
    std::vector<NodeId> live = consumers_[static_cast<size_t>(id)];
    std::erase_if(live, [this](NodeId reader) { return !live_[static_cast<size_t>(reader)]; });
    return live;
  }

  // With statistics in float32 beside 16-bit scores.
  bool takes_low(NodeId id) const {
    return type(id) == "SumExp" || type(id) == "SoftmaxCrossEntropyLoss" ||
           type(id) == "FirstMaxIndex";
  }

  bool is_of_loss(NodeId id) const {
    const auto is_maximum = [this](NodeId maximum) {
      const std::vector<NodeId> all = readers(graph_.node(maximum).outputs[0]);
      return type(maximum) == "ReduceMax" &&
             std::all_of(
                 all.begin(), all.end(), [this](NodeId reader) { return takes_low(reader); });
    };
    return takes_low(id) || is_maximum(id);
  }

  void look_through_cast(ValueId scores) {
    const NodeId cast = graph_.value(scores).producer;
    if (cast == kNoNode || type(cast) != "Cast" ||
        graph_.value(scores).type.dtype != DType::kFloat32) {
      return;
    }
    const ValueId low = graph_.node(cast).inputs[0];
    const DType dtype = graph_.value(low).type.dtype;
    const std::vector<NodeId> all = readers(scores);
    const bool is_kept = std::count(graph_.outputs().begin(), graph_.outputs().end(), scores) != 0;
    if ((dtype != DType::kFloat16 && dtype != DType::kBFloat16) || is_kept ||
        !std::all_of(all.begin(), all.end(), [this](NodeId id) { return is_of_loss(id); })) {
      return;
    }
    for (const NodeId id : all) {
      Node& node = graph_.node(id);
      node.inputs[0] = low;
      if (node.op_type == "ReduceMax") {
        graph_.value(node.outputs[0]).type.dtype = dtype;
      }
    }
  }

  Graph& graph_;
  std::vector<bool> live_;
  std::vector<std::vector<NodeId>> consumers_;
};

}  // namespace

void read_low_scores(Graph& graph) {
  ScoreReaders(graph).run();
}

Graph apply_precision(const Graph& graph, const std::string& precision) {
  if (precision == "fp64") {
    return convert_floats(graph, DType::kFloat64);
  }
  if (precision == "fp32") {
    return convert_floats(graph, DType::kFloat32);
  }
  for (const DType low : {DType::kBFloat16, DType::kFloat16}) {
    if (precision == precision_name(low)) {
      return lower_precision(convert_floats(graph, DType::kFloat32), low);
    }
  }
  TRAINRT_REQUIRE(precision != "tf32",
                  kUnsupported,
                  "--precision tf32 needs a CUDA device; the CPU runs fp64, fp32, bf16 and fp16");
  TRAINRT_FAIL(kInvalidArgument,
               "--precision '",
               precision,
               "' is none",
               did_you_mean(precision, {"auto", "fp64", "fp32", "tf32", "bf16", "fp16"}),
               " (auto, fp64, fp32, tf32, bf16, fp16)");
}

}  // namespace trainrt
