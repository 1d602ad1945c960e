#include "graph/graph.h"

namespace trainrt {

const char* value_kind_name(ValueKind kind) {
  switch (kind) {
    case ValueKind::kIntermediate:
      return "intermediate";
    case ValueKind::kInput:
      return "input";
    case ValueKind::kParameter:
      return "parameter";
    case ValueKind::kState:
      return "state";
    case ValueKind::kOptimizerState:
      return "optimizer state";
    case ValueKind::kGradient:
      return "gradient";
    case ValueKind::kConstant:
      return "constant";
  }
  return "unknown";
}

const char* region_name(Region region) {
  switch (region) {
    case Region::kCount:
      return "count";
    case Region::kForward:
      return "forward";
    case Region::kBackward:
      return "backward";
    case Region::kUpdate:
      return "update";
  }
  return "unknown";
}

ValueId Graph::add_value(Value value) {
  TRAINRT_CHECK(!value.name.empty(), "a value needs a name");
  const ValueId id = num_values();
  const bool inserted = value_by_name_.emplace(value.name, id).second;
  TRAINRT_REQUIRE(inserted,
                  kInvalidModel,
                  "two values are named '",
                  value.name,
                  "'; every tensor of a graph needs a name of its own");
  values_.push_back(std::move(value));
  return id;
}

ValueId Graph::add_input(std::string name, TensorType type, int batch_axis) {
  num_elements(type.shape);  // refuses what is no shape
  Value value;
  value.name = std::move(name);
  value.type = std::move(type);
  value.kind = ValueKind::kInput;
  value.batch_axis = batch_axis;
  return add_value(std::move(value));
}

ValueId Graph::add_constant(std::string name, Tensor data) {
  Value value;
  value.name = std::move(name);
  value.type = {data.dtype(), data.shape()};
  value.kind = ValueKind::kConstant;
  value.constant = std::move(data);
  return add_value(std::move(value));
}

NodeId Graph::add_node(Node node, const TensorTypes& output_types, std::vector<std::string> names) {
  const NodeId id = num_nodes();
  const bool inserted = node_by_name_.emplace(node.name, id).second;
  TRAINRT_REQUIRE(
      inserted && !node.name.empty(), kInvalidModel, "two nodes are named '", node.name, "'");
  node.outputs.clear();
  for (size_t i = 0; i < output_types.size(); ++i) {
    Value value;
    value.name = i < names.size() && !names[i].empty()
                     ? names[i]
                     : unique_value_name(i == 0 && output_types.size() == 1
                                             ? node.name + ".out"
                                             : node.name + "." + std::to_string(i));
    value.type = output_types[i];
    value.producer = id;
    value.output_index = static_cast<int>(i);
    node.outputs.push_back(add_value(std::move(value)));
  }
  nodes_.push_back(std::move(node));
  return id;
}

std::optional<ValueId> Graph::find_value(const std::string& name) const {
  const auto it = value_by_name_.find(name);
  return it == value_by_name_.end() ? std::nullopt : std::optional<ValueId>(it->second);
}

void Graph::rename_value(ValueId id, std::string name) {
  Value& renamed = value(id);
  if (renamed.name == name) {
    return;
  }
  TRAINRT_CHECK(value_by_name_.count(name) == 0, "'", name, "' is taken");
  value_by_name_.erase(renamed.name);
  value_by_name_[name] = id;
  renamed.name = std::move(name);
}

std::vector<ValueId> Graph::values_of_kind(ValueKind kind) const {
  std::vector<ValueId> ids;
  for (ValueId id = 0; id < num_values(); ++id) {
    if (values_[static_cast<size_t>(id)].kind == kind) {
      ids.push_back(id);
    }
  }
  return ids;
}

std::vector<std::vector<NodeId>> Graph::consumers() const {
  std::vector<std::vector<NodeId>> consumers(values_.size());
  for (NodeId id = 0; id < num_nodes(); ++id) {
    for (const ValueId input : node(id).inputs) {
      if (input != kNoValue) {
        consumers[static_cast<size_t>(input)].push_back(id);
      }
    }
  }
  return consumers;
}

namespace {

// Numbers that were given out are remembered per stem, or naming n nodes would take n^2 look-ups.
template <typename Map>
std::string unique_name(const Map& taken,
                        std::unordered_map<std::string, int>& next_number,
                        const std::string& stem) {
  if (taken.count(stem) == 0) {
    return stem;
  }
  for (int& number = next_number[stem];;) {
    std::string name = stem + "_" + std::to_string(++number);
    if (taken.count(name) == 0) {
      return name;
    }
  }
}

}  // namespace

std::string Graph::unique_value_name(const std::string& stem) {
  return unique_name(value_by_name_, next_value_number_, stem);
}

std::string Graph::unique_node_name(const std::string& stem) {
  return unique_name(node_by_name_, next_node_number_, stem);
}

Graph Graph::subgraph(const std::vector<NodeId>& keep,
                      std::vector<ValueId>* value_map,
                      bool drop_unused) const {
  std::vector<bool> wanted(values_.size(), false);
  const auto want = [&](ValueId id) {
    if (id != kNoValue) {
      wanted[static_cast<size_t>(id)] = true;
    }
  };
  for (const NodeId id : keep) {
    for (const ValueId input : node(id).inputs) {
      want(input);
    }
  }
  for (ValueId id = 0; id < num_values(); ++id) {
    const ValueKind kind = value(id).kind;
    if (!drop_unused &&
        (kind == ValueKind::kInput || (is_persistent(kind) && kind != ValueKind::kConstant))) {
      want(id);
    }
  }
  for (const ValueId id : outputs_) {
    want(id);
  }
  Graph result;
  result.values_.reserve(values_.size());
  result.nodes_.reserve(keep.size());
  result.value_by_name_.reserve(values_.size());
  result.node_by_name_.reserve(keep.size());
  std::vector<ValueId> map(values_.size(), kNoValue);
  for (ValueId id = 0; id < num_values(); ++id) {
    if (value(id).producer == kNoNode && wanted[static_cast<size_t>(id)]) {
      map[static_cast<size_t>(id)] = result.add_value(value(id));
    }
  }
  std::vector<NodeId> node_map(nodes_.size(), kNoNode);
  for (const NodeId id : keep) {
    Node copy = node(id);
    for (ValueId& input : copy.inputs) {
      if (input != kNoValue) {
        input = map[static_cast<size_t>(input)];
        TRAINRT_CHECK(input != kNoValue, "node '", copy.name, "' reads a value that was dropped");
      }
    }
    const NodeId new_id = result.num_nodes();
    for (ValueId& output : copy.outputs) {
      if (output != kNoValue) {
        Value moved = value(output);
        moved.producer = new_id;
        const ValueId old = output;
        output = result.add_value(std::move(moved));
        map[static_cast<size_t>(old)] = output;
      }
    }
    if (copy.forward_node != kNoNode) {
      copy.forward_node = node_map[static_cast<size_t>(copy.forward_node)];
    }
    node_map[static_cast<size_t>(id)] = new_id;
    result.node_by_name_[copy.name] = new_id;
    result.nodes_.push_back(std::move(copy));
  }
  for (const ValueId id : outputs_) {
    if (map[static_cast<size_t>(id)] != kNoValue) {
      result.outputs_.push_back(map[static_cast<size_t>(id)]);
    }
  }
  for (const StateUpdate& update : updates_) {
    const ValueId target = map[static_cast<size_t>(update.target)];
    const ValueId new_value = map[static_cast<size_t>(update.new_value)];
    if (target != kNoValue && new_value != kNoValue) {
      result.updates_.push_back({target, new_value});
    }
  }
  if (value_map != nullptr) {
    *value_map = std::move(map);
  }
  return result;
}

}  // namespace trainrt
