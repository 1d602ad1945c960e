// Reduction copies the representatives' nodes in graph order, so that the small graph is sorted
// too. Values and nodes keep their names, by which two sizes of one model are matched: only the
// smaller may lack some (a sum over a batch of one is no node at all), and what it lacks is
// inferred.
#include "planner/model_blocks.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "graph/base/error.h"
#include "graph/op_def.h"

namespace trainrt {

namespace {

// Backward nodes that the gradient of an earlier block waits for.
std::vector<bool> find_awaited(const Graph& graph, const std::vector<Block>& blocks) {
  std::vector<bool> awaited(static_cast<size_t>(graph.num_nodes()), false);
  std::vector<int> block_of(static_cast<size_t>(graph.num_nodes()), -1);
  for (size_t b = 0; b < blocks.size(); ++b) {
    for (const NodeId id : blocks[b].backward) {
      block_of[static_cast<size_t>(id)] = static_cast<int>(b);
    }
  }
  for (NodeId id = graph.num_nodes() - 1; id >= 0; --id) {
    const Node& node = graph.node(id);
    if (node.region != Region::kBackward) {
      continue;
    }
    for (const ValueId input : node.inputs) {
      const NodeId producer = input == kNoValue ? kNoNode : graph.value(input).producer;
      if (producer == kNoNode || block_of[static_cast<size_t>(producer)] < 0) {
        continue;
      }
      if (awaited[static_cast<size_t>(id)] ||
          block_of[static_cast<size_t>(id)] < block_of[static_cast<size_t>(producer)]) {
        awaited[static_cast<size_t>(producer)] = true;
      }
    }
  }
  return awaited;
}

// Places in the block, forward then backward, of nodes that have matrix products.
std::vector<size_t> product_places(const Graph& graph, const Block& block) {
  std::vector<size_t> places;
  for (size_t i = 0; i < block.forward.size() + block.backward.size(); ++i) {
    const Node& node = graph.node(block.node(i));
    if (!get_op(node.op_type).cost(OpContext(graph, node)).matmuls.empty()) {
      places.push_back(i);
    }
  }
  return places;
}

class Reducer {
 public:
  Reducer(const TrainingGraph& training, int64_t micro_batch, BlockList blocks)
      : graph_(training.graph), list_(std::move(blocks)) {
    result_.micro_batch = micro_batch;
  }

  ModelBlocks run() {
    copy_representatives();
    read_chain();
    totals();
    result_.facts = std::make_shared<NodeFacts>(result_.graph.num_nodes());
    return std::move(result_);
  }

 private:
  void copy_representatives() {
    const std::vector<bool> awaited = find_awaited(graph_, list_.blocks);
    std::set<NodeId> nodes;
    for (const int index : list_.representative) {
      const Block& block = list_.blocks[static_cast<size_t>(index)];
      nodes.insert(block.forward.begin(), block.forward.end());
      nodes.insert(block.backward.begin(), block.backward.end());
    }
    std::unordered_map<NodeId, NodeId> new_node;
    for (const NodeId id : nodes) {
      Node copy = graph_.node(id);
      const std::vector<ValueId> outputs = copy.outputs;
      for (ValueId& input : copy.inputs) {
        input = input == kNoValue ? kNoValue : value(input);
      }
      copy.forward_node = kNoNode;
      const NodeId made = result_.graph.add_node(std::move(copy), {});
      for (size_t i = 0; i < outputs.size(); ++i) {
        ValueId output = outputs[i] == kNoValue ? kNoValue : value(outputs[i]);
        if (output != kNoValue) {
          result_.graph.value(output).producer = made;
          result_.graph.value(output).output_index = static_cast<int>(i);
        }
        result_.graph.node(made).outputs.push_back(output);
      }
      new_node[id] = made;
      result_.awaited.push_back(awaited[static_cast<size_t>(id)]);
    }
    for (const int index : list_.representative) {
      Block block = list_.blocks[static_cast<size_t>(index)];
      places_.push_back(product_places(graph_, block));
      for (std::vector<NodeId>* ids : {&block.forward, &block.backward}) {
        for (NodeId& id : *ids) {
          id = new_node.at(id);
        }
      }
      for (ValueId* id : {&block.input, &block.output}) {
        *id = *id == kNoValue ? kNoValue : value(*id);
      }
      for (ValueId& id : block.also_crossing) {
        id = value(id);
      }
      result_.parameters.push_back(read_parameters(result_.graph, block));
      std::vector<NodeId>& products = result_.products.emplace_back();
      for (const size_t place : places_.back()) {
        products.push_back(block.node(place));
      }
      result_.classes.push_back(std::move(block));
    }
  }

  ValueId value(ValueId id) {
    const auto [entry, is_new] = new_value_.emplace(id, result_.graph.num_values());
    if (is_new) {
      const Value& original = graph_.value(id);
      Value copy;
      copy.name = original.name;
      copy.type = original.type;
      copy.kind = original.kind;
      result_.graph.add_value(std::move(copy));
      result_.trained.push_back(list_.trained[static_cast<size_t>(id)]);
    }
    return entry->second;
  }

  void read_chain() {
    result_.shared_parameters.assign(list_.representative.size(), 0);
    std::map<ValueId, size_t> first_block;
    int last = 0;
    for (size_t b = 0; b < list_.blocks.size(); ++b) {
      const Block& block = list_.blocks[b];
      result_.blocks.push_back(block.block_class);
      for (const NodeId id : block.forward) {
        last = std::max(last, graph_.node(id).source_index);
      }
      result_.last_source.push_back(last);
      std::vector<std::string> names;
      double shared = 0;
      for (const ValueId id : read_parameters(graph_, block)) {
        names.push_back(graph_.value(id).name);
        if (first_block.emplace(id, b).first->second != b) {
          shared += static_cast<double>(num_elements(graph_.value(id).type.shape));
        }
      }
      result_.parameter_names.push_back(std::move(names));
      std::vector<std::string> products;
      for (const size_t place : places_[static_cast<size_t>(block.block_class)]) {
        const bool there = place < block.forward.size() + block.backward.size();
        products.push_back(there ? graph_.node(block.node(place)).name : std::string());
      }
      result_.product_names.push_back(std::move(products));
      double& most = result_.shared_parameters[static_cast<size_t>(block.block_class)];
      most = std::max(most, shared);
    }
  }

  void totals() {
    result_.num_nodes = graph_.num_nodes();
    double optimizer = 0;
    for (const Value& value : graph_.values()) {
      // Token ids [samples, positions].
      if (value.kind == ValueKind::kInput && is_integer(value.type.dtype) &&
          value.type.shape.size() == 2) {
        result_.tokens_per_sample = static_cast<double>(num_elements(value.type.shape)) /
                                    static_cast<double>(result_.micro_batch);
      }
      if (value.kind == ValueKind::kParameter) {
        result_.num_parameters += static_cast<double>(num_elements(value.type.shape));
      } else if (value.kind == ValueKind::kOptimizerState) {
        optimizer += static_cast<double>(value.type.bytes());
      }
    }
    result_.optimizer_bytes = result_.num_parameters > 0 ? optimizer / result_.num_parameters : 0;
  }

  const Graph& graph_;
  const BlockList list_;
  std::unordered_map<ValueId, ValueId> new_value_;
  std::vector<std::vector<size_t>> places_;  // by class: product_places()
  ModelBlocks result_;
};

// Numbers at a third size: on the line through those at two.
class Line {
 public:
  Line(int64_t smaller, int64_t larger, int64_t wanted)
      : smaller_(smaller), larger_(larger), wanted_(wanted) {}

  std::optional<int64_t> at(int64_t a, int64_t b) const {
    const int64_t rise = b - a, run = larger_ - smaller_;
    if (rise % run != 0) {
      return std::nullopt;
    }
    return a + rise / run * (wanted_ - smaller_);
  }

  // Of an attribute: it grows as the size does, or has nothing to do with it and is the larger's.
  int64_t grown(int64_t a, int64_t b) const {
    return a != b && a * larger_ == b * smaller_ ? b / larger_ * wanted_ : b;
  }

  // Nothing when the lists do not correspond.
  template <typename List>
  std::optional<List> at(const List& a, const List& b) const {
    if (a.size() != b.size()) {
      return std::nullopt;
    }
    List result;
    for (size_t i = 0; i < a.size(); ++i) {
      const std::optional<int64_t> value = at(a[i], b[i]);
      if (!value.has_value()) {
        return std::nullopt;
      }
      result.push_back(*value);
    }
    return result;
  }

 private:
  int64_t smaller_, larger_, wanted_;
};

class Resizer {
 public:
  Resizer(const ModelBlocks& smaller, const ModelBlocks& larger, int64_t micro_batch)
      : smaller_(smaller),
        line_(smaller.micro_batch, larger.micro_batch, micro_batch),
        result_(larger) {
    result_.micro_batch = micro_batch;
    for (const Node& node : smaller.graph.nodes()) {
      smaller_nodes_.emplace(node.name, &node);
    }
  }

  std::optional<ModelBlocks> run() {
    if (smaller_.blocks != result_.blocks) {
      return std::nullopt;
    }
    Graph& graph = result_.graph;
    std::vector<bool> known(static_cast<size_t>(graph.num_values()), false);
    for (ValueId id = 0; id < graph.num_values(); ++id) {
      Value& value = graph.value(id);
      const std::optional<ValueId> match = smaller_.graph.find_value(value.name);
      if (match.has_value()) {
        const std::optional<Shape> shape =
            line_.at(smaller_.graph.value(*match).type.shape, value.type.shape);
        if (shape.has_value()) {
          value.type.shape = *shape;
          known[static_cast<size_t>(id)] = true;
        }
      }
      if (!known[static_cast<size_t>(id)] && value.producer == kNoNode) {
        return std::nullopt;
      }
    }
    for (NodeId id = 0; id < graph.num_nodes(); ++id) {
      if (!resize(graph, graph.node(id), known)) {
        return std::nullopt;
      }
    }
    result_.facts = std::make_shared<NodeFacts>(graph.num_nodes());
    return std::move(result_);
  }

 private:
  bool resize(Graph& graph, Node& node, std::vector<bool>& known) const {
    const auto match = smaller_nodes_.find(node.name);
    if (match != smaller_nodes_.end() && match->second->op_type == node.op_type) {
      resize_attributes(match->second->attributes, node.attributes);
    }
    TensorTypes inputs;
    std::vector<bool> present;
    for (const ValueId input : node.inputs) {
      present.push_back(input != kNoValue);
      inputs.push_back(input == kNoValue ? TensorType{} : graph.value(input).type);
    }
    TensorTypes inferred;
    try {
      inferred = get_op(node.op_type)
                     .infer_types(OpContext(node, std::move(inputs), std::move(present), {}));
    } catch (const Error&) {
      return false;  // the attributes do not grow with the size as dims do
    }
    for (size_t o = 0; o < node.outputs.size(); ++o) {
      if (node.outputs[o] == kNoValue) {
        continue;
      }
      TensorType& type = graph.value(node.outputs[o]).type;
      if (o >= inferred.size() ||
          (known[static_cast<size_t>(node.outputs[o])] && !(type == inferred[o]))) {
        return false;
      }
      type = inferred[o];
    }
    return true;
  }

  void resize_attributes(const Attributes& smaller, Attributes& attributes) const {
    Attributes resized = attributes;
    for (const auto& [name, value] : attributes) {
      if (!smaller.has(name)) {
        continue;
      }
      if (const auto* number = std::get_if<int64_t>(&value)) {
        resized.set(name, line_.grown(smaller.get_int(name), *number));
      } else if (const auto* list = std::get_if<std::vector<int64_t>>(&value)) {
        const std::vector<int64_t>& other = smaller.get_ints(name);
        std::vector<int64_t> grown = *list;
        for (size_t i = 0; i < grown.size() && other.size() == grown.size(); ++i) {
          grown[i] = line_.grown(other[i], grown[i]);
        }
        resized.set(name, std::move(grown));
      }
    }
    attributes = std::move(resized);
  }

  const ModelBlocks& smaller_;
  Line line_;
  ModelBlocks result_;
  std::unordered_map<std::string, const Node*> smaller_nodes_;
};

}  // namespace

std::vector<ValueId> read_parameters(const Graph& graph, const Block& block) {
  std::vector<ValueId> found;
  for (const NodeId id : block.forward) {
    for (const ValueId input : graph.node(id).inputs) {
      if (input != kNoValue && graph.value(input).kind == ValueKind::kParameter &&
          std::find(found.begin(), found.end(), input) == found.end()) {
        found.push_back(input);
      }
    }
  }
  return found;
}

ModelBlocks model_blocks(const TrainingGraph& training,
                         int64_t micro_batch,
                         const BlockPins& pins) {
  return Reducer(training, micro_batch, find_blocks(training.graph, pins)).run();
}

ModelBlocks model_blocks(const TrainingGraph& training, int64_t micro_batch, BlockList blocks) {
  return Reducer(training, micro_batch, std::move(blocks)).run();
}

std::optional<ModelBlocks> at_micro_batch(const ModelBlocks& smaller,
                                          const ModelBlocks& larger,
                                          int64_t micro_batch) {
  return Resizer(smaller, larger, micro_batch).run();
}

}  // namespace trainrt
