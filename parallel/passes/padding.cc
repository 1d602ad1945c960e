#include "parallel/passes/padding.h"

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>

#include "graph/graph_builder.h"
#include "graph/passes/pass.h"

namespace trainrt {

namespace {

int64_t round_up(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

bool is_linear_in_all_inputs(const OpContext& op, const ShardingRule& rule) {
  for (int i = 0; i < op.num_inputs(); ++i) {
    const bool in_some_set =
        std::any_of(rule.linear.begin(), rule.linear.end(), [&](const std::vector<int>& set) {
          return std::find(set.begin(), set.end(), i) != set.end();
        });
    if (op.has_input(i) && !in_some_set) {
      return false;
    }
  }
  return op.num_outputs() == 1;
}

bool can_be_cut(const Factor& factor) {
  return factor.kind == FactorKind::kParallel || factor.kind == FactorKind::kReduction;
}

// The factor of the innermost dim that can be cut: where a row's alignment is decided.
std::optional<int> innermost_factor(const ShardingRule& rule, const TensorFactors& dims) {
  for (size_t d = dims.size(); d-- > 0;) {
    if (dims[d].size() == 1 && can_be_cut(rule.factors[static_cast<size_t>(dims[d][0])])) {
      return dims[d][0];
    }
  }
  return std::nullopt;
}

// A factor that is one of several in a dim cannot grow by itself.
bool stands_alone(const ShardingRule& rule, int factor) {
  const auto alone = [&](const TensorFactors& tensor) {
    return std::all_of(tensor.begin(), tensor.end(), [&](const DimFactors& dim) {
      return dim.size() <= 1 || std::find(dim.begin(), dim.end(), factor) == dim.end();
    });
  };
  return std::all_of(rule.inputs.begin(), rule.inputs.end(), alone) &&
         std::all_of(rule.outputs.begin(), rule.outputs.end(), alone);
}

Shape padded_shape(const Shape& shape,
                   const TensorFactors& dims,
                   const std::set<int>& factors,
                   int64_t multiple) {
  Shape padded = shape;
  for (size_t d = 0; d < dims.size(); ++d) {
    if (dims[d].size() == 1 && factors.count(dims[d][0]) != 0) {
      padded[d] = round_up(shape[d], multiple);
    }
  }
  return padded;
}

int64_t copy_bytes(const TensorType& type, const Shape& padded) {
  return type.shape == padded ? 0 : type.bytes() + num_elements(padded) * dtype_bytes(type.dtype);
}

}  // namespace

NodePadding node_padding(const OpContext& op, int64_t multiple) {
  const OpDef& def = get_op(op.node().op_type);
  return multiple <= 1 || def.cost(op).matmuls.empty()
             ? NodePadding{}
             : node_padding(op, def.sharding(op), multiple);
}

NodePadding node_padding(const OpContext& op, const ShardingRule& rule, int64_t multiple) {
  NodePadding padding;
  const OpDef& def = get_op(op.node().op_type);
  if (!is_linear_in_all_inputs(op, rule)) {
    return padding;
  }
  std::set<int> factors;
  for (const std::vector<TensorFactors>& tensors : {rule.inputs, rule.outputs}) {
    for (const TensorFactors& dims : tensors) {
      const std::optional<int> factor = innermost_factor(rule, dims);
      if (factor && stands_alone(rule, *factor)) {
        factors.insert(*factor);
      }
    }
  }
  TensorTypes inputs;
  std::vector<bool> present;
  for (int i = 0; i < op.num_inputs(); ++i) {
    present.push_back(op.has_input(i));
    inputs.push_back(op.has_input(i) ? op.input_type(i) : TensorType{});
    if (op.has_input(i)) {
      inputs.back().shape =
          padded_shape(op.input_shape(i), rule.inputs[static_cast<size_t>(i)], factors, multiple);
      padding.copied_bytes += copy_bytes(op.input_type(i), inputs.back().shape);
    }
    padding.inputs.push_back(inputs.back().shape);
  }
  padding.output = padded_shape(op.output_shape(0), rule.outputs[0], factors, multiple);
  padding.copied_bytes += copy_bytes(op.output_type(0), padding.output);
  padding.any = padding.copied_bytes > 0;
  if (padding.any) {
    TensorType output = op.output_type(0);
    output.shape = padding.output;
    padding.products =
        def.cost(OpContext(op.node(), std::move(inputs), std::move(present), {output})).matmuls;
  }
  return padding;
}

namespace {

class Padder {
 public:
  explicit Padder(TrainingGraph source)
      : result_(std::move(source)), builder_(result_.graph), num_nodes_(result_.graph.num_nodes()) {
    for (NodeId id = 0; id < num_nodes_; ++id) {
      positions_.push_back(id);
    }
  }

  void pad(NodeId id, int64_t multiple) {
    Graph& graph = result_.graph;
    const NodePadding padding = node_padding(OpContext(graph, graph.node(id)), multiple);
    if (!padding.any) {
      return;
    }
    changed_ = true;
    builder_.set_region(graph.node(id).region);
    builder_.set_source_index(graph.node(id).source_index);
    builder_.set_forward_node(graph.node(id).forward_node);
    for (size_t i = 0; i < padding.inputs.size(); ++i) {
      const ValueId input = graph.node(id).inputs[i];
      if (input != kNoValue && builder_.shape(input) != padding.inputs[i]) {
        const ValueId padded = padded_value(input, padding.inputs[i], id);
        graph.node(id).inputs[i] = padded;
      }
    }
    const ValueId output = graph.node(id).outputs[0];
    if (builder_.shape(output) != padding.output) {
      cut(id, output, padding.output);
    }
  }

  TrainingGraph finish() {
    if (!changed_) {
      return std::move(result_);
    }
    std::vector<ValueId> map;
    const Graph& graph = result_.graph;
    Graph ordered = graph.subgraph(topological_order(graph, positions_), &map);
    const auto moved = [&](ValueId id) {
      return id == kNoValue ? kNoValue : map[static_cast<size_t>(id)];
    };
    result_.loss_sum = moved(result_.loss_sum);
    result_.item_count = moved(result_.item_count);
    result_.correct = moved(result_.correct);
    result_.grad_norm = moved(result_.grad_norm);
    result_.graph = eliminate_dead_code(ordered);
    result_.loss_sum = found_again(ordered, result_.loss_sum);
    result_.item_count = found_again(ordered, result_.item_count);
    result_.correct = found_again(ordered, result_.correct);
    result_.grad_norm = found_again(ordered, result_.grad_norm);
    return std::move(result_);
  }

 private:
  ValueId found_again(const Graph& before, ValueId id) const {
    return id == kNoValue ? kNoValue
                          : result_.graph.find_value(before.value(id).name).value_or(kNoValue);
  }

  // `value` with zeros up to `shape`: what a padded product made before it was cut, where that is
  // the same, else a copy, made once for all readers of a layer and region.
  ValueId padded_value(ValueId value, const Shape& shape, NodeId reader) {
    const auto uncut = uncut_.find(value);
    if (uncut != uncut_.end() && builder_.shape(uncut->second) == shape) {
      return uncut->second;
    }
    const Node& node = result_.graph.node(reader);
    const auto key = std::make_tuple(value, shape, node.region, node.source_index);
    const auto known = copies_.find(key);
    if (known != copies_.end()) {
      return known->second;
    }
    const Shape from = builder_.shape(value);
    std::vector<int64_t> pads(2 * from.size(), 0);
    for (size_t d = 0; d < from.size(); ++d) {
      pads[from.size() + d] = shape[d] - from[d];
    }
    const std::string name = result_.graph.value(value).name + ".padded";
    const ValueId copy =
        builder_.op("Pad",
                    {value},
                    {{"pads", pads}, {"mode", std::string("constant")}, {"value", 0.0}},
                    result_.graph.unique_node_name(name),
                    result_.graph.unique_value_name(name));
    positions_.push_back(positions_[static_cast<size_t>(reader)]);
    copies_[key] = copy;
    return copy;
  }

  // Lets `node` make `shape` and everybody else read the part that was there before.
  void cut(NodeId node, ValueId output, const Shape& shape) {
    Graph& graph = result_.graph;
    const std::string name = graph.value(output).name;
    const Shape before = builder_.shape(output);
    std::vector<int64_t> axes, starts, ends, steps;
    for (size_t d = 0; d < before.size(); ++d) {
      if (before[d] != shape[d]) {
        axes.push_back(static_cast<int64_t>(d));
        starts.push_back(0);
        ends.push_back(before[d]);
        steps.push_back(1);
      }
    }
    graph.rename_value(output, graph.unique_value_name(name + ".padded"));
    graph.value(output).type.shape = shape;
    // Readers are turned before the cut exists, which must go on reading the whole.
    const ValueId part =
        builder_.op("Slice",
                    {output},
                    {{"axes", axes}, {"starts", starts}, {"ends", ends}, {"steps", steps}},
                    graph.unique_node_name(name + ".cut"),
                    name);
    const NodeId cutter = graph.value(part).producer;
    replace_uses(graph, output, part);
    graph.node(cutter).inputs[0] = output;
    for (ValueId* id :
         {&result_.loss_sum, &result_.item_count, &result_.correct, &result_.grad_norm}) {
      *id = *id == output ? part : *id;
    }
    positions_.push_back(positions_[static_cast<size_t>(node)]);
    uncut_[part] = output;
  }

  TrainingGraph result_;
  GraphBuilder builder_;
  int num_nodes_;
  bool changed_ = false;
  std::vector<int> positions_;  // of each node, for the order afterwards
  std::map<ValueId, ValueId> uncut_;
  std::map<std::tuple<ValueId, Shape, Region, int>, ValueId> copies_;
};

}  // namespace

TrainingGraph pad_products(TrainingGraph graph, const std::map<std::string, int64_t>& multiples) {
  if (multiples.empty()) {
    return graph;
  }
  std::vector<std::pair<NodeId, int64_t>> padded;
  for (NodeId id = 0; id < graph.graph.num_nodes(); ++id) {
    const auto found = multiples.find(graph.graph.node(id).name);
    if (found != multiples.end()) {
      padded.emplace_back(id, found->second);
    }
  }
  if (padded.empty()) {
    return graph;
  }
  Padder padder(std::move(graph));
  for (const auto& [id, multiple] : padded) {
    padder.pad(id, multiple);
  }
  return padder.finish();
}

}  // namespace trainrt
