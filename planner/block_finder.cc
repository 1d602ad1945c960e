// Live values are counted along the forward nodes: a value is alive from its producer to its last
// forward reader. Values that depend on no parameter (masks, positions) do not count: every stage
// can have them. Two blocks are equal when their nodes read alike: same operators, attributes and
// types, inputs that are the same earlier node of the block, the block's input, or a parameter or
// constant of the same type. O(nodes + inputs).
#include "planner/block_finder.h"

#include <algorithm>
#include <map>
#include <sstream>

#include "graph/autodiff.h"
#include "graph/base/error.h"

namespace trainrt {

namespace {

// Attributes that name an instance and do not change what is computed.
bool is_instance_attribute(const std::string& name) {
  return name == "rng_stream";
}

std::string type_text(const TensorType& type) {
  std::string text = dtype_name(type.dtype);
  for (const int64_t size : type.shape) {
    text += "," + std::to_string(size);
  }
  return text;
}

class Signature {
 public:
  Signature(const Graph& graph, const Block& block, const BlockPins& pins)
      : graph_(graph), block_(block), pins_(pins) {}

  std::string text() {
    std::ostringstream out;
    for (const NodeId id : block_.forward) {
      const Node& node = graph_.node(id);
      out << node.op_type << padding(node) << '{';
      for (const auto& [name, value] : node.attributes) {
        if (!is_instance_attribute(name)) {
          out << name << '=' << attribute_string(value) << ';';
        }
      }
      out << "}(";
      for (const ValueId input : node.inputs) {
        out << reference(input) << ' ';
      }
      out << ")->";
      for (const ValueId output : node.outputs) {
        if (output != kNoValue) {
          number_.emplace(output, number_.size());
          out << type_text(graph_.value(output).type) << placement(output) << ' ';
        }
      }
    }
    for (const NodeId id : block_.backward) {
      out << padding(graph_.node(id));
    }
    return out.str();
  }

 private:
  std::string placement(ValueId id) const {
    const auto found = pins_.placements.find(graph_.value(id).name);
    return found == pins_.placements.end() ? "" : "@" + placement_string(found->second);
  }

  std::string padding(const Node& node) const {
    const auto found = pins_.padding.find(node.name);
    return found == pins_.padding.end() ? "" : "/" + std::to_string(found->second);
  }

  std::string reference(ValueId input) {
    if (input == kNoValue) {
      return "-";
    }
    const auto found = number_.find(input);
    if (found != number_.end()) {
      return "%" + std::to_string(found->second);
    }
    const Value& value = graph_.value(input);
    const std::string own = "#" + std::to_string(number_.size());
    number_.emplace(input, number_.size());
    return own + (input == block_.input ? "in" : value_kind_name(value.kind)) +
           type_text(value.type) + placement(input);
  }

  const Graph& graph_;
  const Block& block_;
  const BlockPins& pins_;
  std::map<ValueId, size_t> number_;
};

// Cuts forward nodes into blocks.
std::vector<Block> cut_forward(const Graph& graph,
                               const std::vector<bool>& trained,
                               const std::vector<int>& wanted_cuts) {
  std::vector<NodeId> forward;
  std::vector<int> last_reader(static_cast<size_t>(graph.num_values()), -1);
  for (NodeId id = 0; id < graph.num_nodes(); ++id) {
    const Node& node = graph.node(id);
    if (node.region != Region::kForward) {
      continue;
    }
    for (const ValueId input : node.inputs) {
      if (input != kNoValue) {
        last_reader[static_cast<size_t>(input)] = static_cast<int>(forward.size());
      }
    }
    forward.push_back(id);
  }
  std::vector<Block> blocks(1);
  std::map<ValueId, int> alive;  // value -> last reader
  int passed = -1;               // largest source index so far
  for (int i = 0; i < static_cast<int>(forward.size()); ++i) {
    const NodeId id = forward[static_cast<size_t>(i)];
    blocks.back().forward.push_back(id);
    for (const ValueId output : graph.node(id).outputs) {
      if (output != kNoValue && trained[static_cast<size_t>(output)] &&
          last_reader[static_cast<size_t>(output)] > i) {
        alive[output] = last_reader[static_cast<size_t>(output)];
      }
    }
    std::erase_if(alive, [i](const auto& entry) { return entry.second <= i; });
    passed = std::max(passed, graph.node(id).source_index);
    if (i + 1 == static_cast<int>(forward.size())) {
      break;
    }
    const int next = graph.node(forward[static_cast<size_t>(i) + 1]).source_index;
    const bool wanted = std::any_of(wanted_cuts.begin(), wanted_cuts.end(), [&](int cut) {
      return passed < cut && cut <= next;
    });
    // What an imported node or the loss became cannot be told apart in a plan.
    if ((alive.size() == 1 && next > passed) || wanted) {
      Block& before = blocks.back();
      for (const auto& [value, reader] : alive) {
        before.also_crossing.push_back(value);
      }
      // The largest stands for the rest.
      const auto largest = std::max_element(
          before.also_crossing.begin(), before.also_crossing.end(), [&](ValueId a, ValueId b) {
            return graph.value(a).type.bytes() < graph.value(b).type.bytes();
          });
      if (largest != before.also_crossing.end()) {
        before.output = *largest;
        before.also_crossing.erase(largest);
      }
      const ValueId output = before.output;
      blocks.emplace_back();
      blocks.back().input = output;
    }
  }
  return blocks;
}

// Backward nodes go where their forward node is; sums of gradients and accumulations, which have
// none, where their first gradient input was made.
void assign_backward(const Graph& graph, std::vector<Block>* blocks) {
  std::vector<int> block_of(static_cast<size_t>(graph.num_nodes()), -1);
  for (size_t b = 0; b < blocks->size(); ++b) {
    for (const NodeId id : (*blocks)[b].forward) {
      block_of[static_cast<size_t>(id)] = static_cast<int>(b);
    }
  }
  for (NodeId id = 0; id < graph.num_nodes(); ++id) {
    const Node& node = graph.node(id);
    if (node.region != Region::kBackward) {
      continue;
    }
    int block =
        node.forward_node == kNoNode ? -1 : block_of[static_cast<size_t>(node.forward_node)];
    for (size_t i = 0; block < 0 && i < node.inputs.size(); ++i) {
      const ValueId input = node.inputs[i];
      const NodeId producer = input == kNoValue ? kNoNode : graph.value(input).producer;
      if (producer != kNoNode) {
        block = block_of[static_cast<size_t>(producer)];
      }
    }
    block = block < 0 ? static_cast<int>(blocks->size()) - 1 : block;
    block_of[static_cast<size_t>(id)] = block;
    (*blocks)[static_cast<size_t>(block)].backward.push_back(id);
  }
}

// For blocks whose nodes are known: the activations that cross from each to the next.
void find_crossing(const Graph& graph, const std::vector<bool>& trained, BlockList* list) {
  std::vector<int> block_of(static_cast<size_t>(graph.num_nodes()), -1);
  for (size_t b = 0; b < list->blocks.size(); ++b) {
    for (const NodeId id : list->blocks[b].forward) {
      block_of[static_cast<size_t>(id)] = static_cast<int>(b);
    }
  }
  std::vector<int> last_reader(static_cast<size_t>(graph.num_values()), -1);
  for (const Block& block : list->blocks) {
    for (const NodeId id : block.forward) {
      for (const ValueId input : graph.node(id).inputs) {
        if (input != kNoValue) {
          int& last = last_reader[static_cast<size_t>(input)];
          last = std::max(last, block_of[static_cast<size_t>(id)]);
        }
      }
    }
  }
  for (ValueId id = 0; id < graph.num_values(); ++id) {
    const NodeId producer = graph.value(id).producer;
    if (producer == kNoNode || !trained[static_cast<size_t>(id)]) {
      continue;
    }
    const int made = block_of[static_cast<size_t>(producer)];
    for (int b = made; b >= 0 && b < last_reader[static_cast<size_t>(id)]; ++b) {
      Block& before = list->blocks[static_cast<size_t>(b)];
      if (before.output == kNoValue ||
          graph.value(before.output).type.bytes() < graph.value(id).type.bytes()) {
        before.output = id;
        list->blocks[static_cast<size_t>(b) + 1].input = id;
      }
    }
  }
}

}  // namespace

BlockList blocks_at(const Graph& graph,
                    const std::vector<int>& last_source,
                    const std::vector<int>& classes) {
  BlockList list;
  list.trained = depends_on(graph, graph.values_of_kind(ValueKind::kParameter));
  list.blocks.resize(last_source.size());
  for (NodeId id = 0; id < graph.num_nodes(); ++id) {
    const Node& node = graph.node(id);
    if (node.region == Region::kForward) {
      const auto at = std::lower_bound(last_source.begin(), last_source.end(), node.source_index);
      const bool ours = node.source_index < 0 || at == last_source.end();
      const size_t block =
          ours ? last_source.size() - 1 : static_cast<size_t>(at - last_source.begin());
      list.blocks[block].forward.push_back(id);
    }
  }
  find_crossing(graph, list.trained, &list);
  assign_backward(graph, &list.blocks);
  for (size_t b = 0; b < classes.size(); ++b) {
    list.blocks[b].block_class = classes[b];
    if (classes[b] == list.num_classes) {
      list.representative.push_back(static_cast<int>(b));
      ++list.num_classes;
    }
  }
  return list;
}

BlockList find_blocks(const Graph& graph, const BlockPins& pins) {
  BlockList list;
  list.trained = depends_on(graph, graph.values_of_kind(ValueKind::kParameter));
  list.blocks = cut_forward(graph, list.trained, pins.cuts);
  assign_backward(graph, &list.blocks);
  std::map<std::string, int> classes;
  for (size_t b = 0; b < list.blocks.size(); ++b) {
    const std::string text = Signature(graph, list.blocks[b], pins).text();
    const auto [entry, is_new] = classes.emplace(text, list.num_classes);
    if (is_new) {
      list.representative.push_back(static_cast<int>(b));
      ++list.num_classes;
    }
    list.blocks[b].block_class = entry->second;
  }
  return list;
}

}  // namespace trainrt
