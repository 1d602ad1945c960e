// Nodes join group by group: in the order of their phase, each joins the groups that make its
// operands as long as no path leads from one to the other through a node outside (the group could
// then run neither before nor after it). A result that others read, too, is one more output.
//
// A group takes its place by the last of its nodes, and what waits for an early one moves behind.
#include "parallel/passes/elementwise_fusion.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>
#include <queue>
#include <utility>

#include "graph/fused_elementwise.h"
#include "graph/kernel_pair.h"
#include "parallel/passes/node_inserter.h"
#include "parallel/phase_order.h"

namespace trainrt {

namespace {

// Nodes further apart stay so: what the later one reads would have to live from the earlier one on.
constexpr int kReach = 16;

using Group = std::vector<NodeId>;               // in the order of their phase
using Edges = std::vector<std::vector<NodeId>>;  // by node: who comes after it

class ElementwiseFusion {
 public:
  ElementwiseFusion(TrainingGraph& local, std::vector<Phase>& phases)
      : local_(local),
        phases_(phases),
        graph_(local.graph),
        consumers_(graph_.consumers()),
        phase_of_(num_nodes(), -1),
        position_(num_nodes(), -1),
        fits_(num_nodes(), false),
        reads_(num_nodes()),
        group_of_(num_nodes()),
        is_kept_(static_cast<size_t>(graph_.num_values()), false) {
    find_kept();
    for (NodeId id = 0; id < graph_.num_nodes(); ++id) {
      group_of_[static_cast<size_t>(id)] = id;
      groups_.push_back({id});
      for (const ValueId input : graph_.node(id).inputs) {
        if (input != kNoValue && graph_.value(input).producer != kNoNode) {
          reads_[static_cast<size_t>(graph_.value(input).producer)].push_back(id);
        }
      }
    }
    after_ = reads_;
    for (size_t i = 0; i < phases.size(); ++i) {
      add_phase(static_cast<int>(i), phases[i].nodes);
    }
    for (NodeId id = 0; id < graph_.num_nodes(); ++id) {
      fits_[static_cast<size_t>(id)] = fits(graph_.node(id), phase_of_[static_cast<size_t>(id)]);
    }
  }

  void run() {
    bool joined = false;
    for (const Phase& phase : phases_) {
      for (const NodeId id : phase.nodes) {
        for (const ValueId input : graph_.node(id).inputs) {
          const NodeId producer = input == kNoValue ? kNoNode : graph_.value(input).producer;
          if (producer != kNoNode && may_join(producer, id)) {
            join(group_of_[static_cast<size_t>(producer)], group_of_[static_cast<size_t>(id)]);
            joined = true;
          }
        }
      }
    }
    if (joined) {
      rewrite();
    }
  }

 private:
  size_t num_nodes() const { return static_cast<size_t>(graph_.num_nodes()); }
  int position(NodeId id) const { return position_[static_cast<size_t>(id)]; }
  int phase(NodeId id) const { return phase_of_[static_cast<size_t>(id)]; }
  const Group& group(NodeId id) const {
    return groups_[static_cast<size_t>(group_of_[static_cast<size_t>(id)])];
  }
  const TensorType& type(ValueId id) const { return graph_.value(id).type; }
  const Shape& shape(const Group& group) const {
    return type(graph_.node(group.front()).outputs[0]).shape;
  }

  // What is fetched, or updates something else in place.
  void find_kept() {
    for (const ValueId id : graph_.outputs()) {
      is_kept_[static_cast<size_t>(id)] = true;
    }
    for (const StateUpdate& update : graph_.updates()) {
      is_kept_[static_cast<size_t>(update.new_value)] = true;
    }
    for (const ValueId id :
         {local_.loss_sum, local_.item_count, local_.grad_norm, local_.correct}) {
      if (id != kNoValue) {
        is_kept_[static_cast<size_t>(id)] = true;
      }
    }
  }

  void add_phase(int phase, const std::vector<NodeId>& nodes) {
    NodeId last = kNoNode;  // that communicates
    for (size_t i = 0; i < nodes.size(); ++i) {
      const NodeId id = nodes[i];
      phase_of_[static_cast<size_t>(id)] = phase;
      position_[static_cast<size_t>(id)] = static_cast<int>(i);
      if (is_communication(graph_.node(id).op_type)) {
        if (last != kNoNode) {
          after_[static_cast<size_t>(last)].push_back(id);
        }
        last = id;
      }
    }
    for (const auto& [earlier, later] : order_without_data(graph_, nodes)) {
      after_[static_cast<size_t>(earlier)].push_back(later);
    }
  }

  // May the node become a step?
  bool fits(const Node& node, int phase) const {
    if (phase < 0 || !is_elementwise(node.op_type) || node.outputs.size() != 1) {
      return false;
    }
    const auto is_float = [this](ValueId value) {
      return value != kNoValue && is_floating(type(value).dtype);
    };
    return is_float(node.outputs[0]) &&
           std::all_of(node.inputs.begin(), node.inputs.end(), is_float) &&
           num_elements(type(node.outputs[0]).shape) > 0 &&
           !is_kept_[static_cast<size_t>(node.outputs[0])] && !follows_data_ranks(node) &&
           !goes_with_product(node, phase);
  }

  // What ranks without samples make of the others' sums, too (parallel/silent_variant).
  bool follows_data_ranks(const Node& node) const {
    return std::any_of(node.inputs.begin(), node.inputs.end(), [this](ValueId input) {
      const NodeId from = graph_.value(input).producer;
      return from != kNoNode && is_communication(graph_.node(from).op_type) &&
             graph_.node(from).attributes.get_string("group", "") == "data";
    });
  }

  bool goes_with_product(const Node& node, int phase) const {
    const int input = epilogue_input(graph_, node);
    return input >= 0 &&
           this->phase(graph_.value(node.inputs[static_cast<size_t>(input)]).producer) == phase;
  }

  // ---- joining ---------------------------------------------------------------------------------

  bool may_join(NodeId producer, NodeId reader) const {
    const Group &earlier = group(producer), &later = group(reader);
    return fits_[static_cast<size_t>(producer)] && fits_[static_cast<size_t>(reader)] &&
           &earlier != &later && phase(producer) == phase(reader) &&
           graph_.node(producer).region == graph_.node(reader).region &&
           shape(earlier) == shape(later) &&
           position(later.back()) - position(earlier.back()) <= kReach &&
           has_room(earlier, later) && !leads_around(earlier, later) &&
           !leads_around(later, earlier);
  }

  bool has_room(const Group& a, const Group& b) const {
    const Group both = united(a, b);
    const std::vector<ValueId> inputs = inputs_of(both);
    const auto is_broadcast = [&](ValueId id) {
      return type(id).shape != shape(a) && num_elements(type(id).shape) != 1;
    };
    return both.size() <= FusedExpression::kMaxSteps &&
           inputs.size() <= FusedExpression::kMaxInputs &&
           outputs_of(both).size() <= FusedExpression::kMaxOutputs &&
           std::count_if(inputs.begin(), inputs.end(), is_broadcast) <=
               static_cast<std::ptrdiff_t>(FusedExpression::kMaxBroadcast);
  }

  Group united(const Group& a, const Group& b) const {
    Group both;
    std::merge(a.begin(),
               a.end(),
               b.begin(),
               b.end(),
               std::back_inserter(both),
               [this](NodeId x, NodeId y) { return position(x) < position(y); });
    return both;
  }

  static bool contains(const Group& group, NodeId id) {
    return std::find(group.begin(), group.end(), id) != group.end();
  }

  std::vector<ValueId> inputs_of(const Group& group) const {
    std::vector<ValueId> inputs;
    for (const NodeId id : group) {
      for (const ValueId input : graph_.node(id).inputs) {
        if (!contains(group, graph_.value(input).producer) &&
            std::find(inputs.begin(), inputs.end(), input) == inputs.end()) {
          inputs.push_back(input);
        }
      }
    }
    return inputs;
  }

  // The nodes whose results somebody else reads.
  std::vector<NodeId> outputs_of(const Group& group) const {
    std::vector<NodeId> outputs;
    for (const NodeId id : group) {
      const ValueId value = graph_.node(id).outputs[0];
      const std::vector<NodeId>& readers = consumers_[static_cast<size_t>(value)];
      if (readers.empty() || std::any_of(readers.begin(), readers.end(), [&](NodeId reader) {
            return !contains(group, reader);
          })) {
        outputs.push_back(id);
      }
    }
    return outputs;
  }

  // Is there a way from `from` to `to`, groups of one phase, through another group? It is not
  // longer than to the last node of the two.
  bool leads_around(const Group& from, const Group& to) const {
    const int target = group_of_[static_cast<size_t>(to.front())];
    const int last = std::max(position(from.back()), position(to.back()));
    std::vector<int> open, seen = {group_of_[static_cast<size_t>(from.front())]};
    const auto spread = [&](const Group& nodes, bool starts) {
      for (const NodeId id : nodes) {
        for (const NodeId next : after_[static_cast<size_t>(id)]) {
          const int reached = group_of_[static_cast<size_t>(next)];
          const bool within = phase(next) == phase(id) && position(next) <= last;
          if (within && !(starts && reached == target) &&
              std::find(seen.begin(), seen.end(), reached) == seen.end()) {
            seen.push_back(reached);
            open.push_back(reached);
          }
        }
      }
    };
    spread(from, true);
    while (!open.empty()) {
      const int group = open.back();
      open.pop_back();
      if (group == target) {
        return true;
      }
      spread(groups_[static_cast<size_t>(group)], false);
    }
    return false;
  }

  void join(int into, int from) {
    Group& source = groups_[static_cast<size_t>(from)];
    for (const NodeId id : source) {
      group_of_[static_cast<size_t>(id)] = into;
    }
    groups_[static_cast<size_t>(into)] = united(groups_[static_cast<size_t>(into)], source);
    source.clear();
  }

  // ---- rewriting -------------------------------------------------------------------------------

  // The last nodes of the groups that have one among `nodes`, each after those that it has to
  // follow, and otherwise in the order of `nodes`.
  std::vector<NodeId> order(const std::vector<NodeId>& nodes, const Edges& edges) const {
    std::vector<int> place(num_nodes(), -1), missing(num_nodes(), 0);  // by node, by group
    for (size_t i = 0; i < nodes.size(); ++i) {
      place[static_cast<size_t>(nodes[i])] = static_cast<int>(i);
    }
    const auto for_each_after = [&](const Group& group, const auto& fn) {
      for (const NodeId id : group) {
        for (const NodeId next : edges[static_cast<size_t>(id)]) {
          if (place[static_cast<size_t>(next)] >= 0 && &this->group(next) != &group) {
            fn(next);
          }
        }
      }
    };
    using Entry = std::pair<int, NodeId>;  // by place
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> ready;
    const auto add_if_ready = [&](NodeId id) {
      if (missing[static_cast<size_t>(group_of_[static_cast<size_t>(id)])] == 0) {
        const NodeId last = group(id).back();
        ready.emplace(place[static_cast<size_t>(last)], last);
      }
    };
    const auto count = [&](NodeId next, int change) {
      missing[static_cast<size_t>(group_of_[static_cast<size_t>(next)])] += change;
    };
    for (const NodeId id : nodes) {
      if (group(id).back() == id) {
        for_each_after(group(id), [&](NodeId next) { count(next, 1); });
      }
    }
    for (const NodeId id : nodes) {
      if (group(id).back() == id) {
        add_if_ready(id);
      }
    }
    std::vector<NodeId> result;
    while (!ready.empty()) {
      const NodeId id = ready.top().second;
      ready.pop();
      result.push_back(id);
      for_each_after(group(id), [&](NodeId next) {
        count(next, -1);
        add_if_ready(next);
      });
    }
    TRAINRT_CHECK(std::all_of(missing.begin(), missing.end(), [](int n) { return n == 0; }),
                  "fused operators wait for each other");
    return result;
  }

  void rewrite() {
    std::vector<NodeId> all(num_nodes()), new_id(num_nodes(), kNoNode);
    std::iota(all.begin(), all.end(), 0);
    const std::vector<NodeId> keep = order(all, reads_);
    for (size_t i = 0; i < keep.size(); ++i) {
      new_id[static_cast<size_t>(keep[i])] = static_cast<NodeId>(i);
    }
    for (Phase& phase : phases_) {
      phase.nodes = order(phase.nodes, after_);
      for (NodeId& id : phase.nodes) {
        id = new_id[static_cast<size_t>(id)];
      }
    }
    for (const Group& group : groups_) {
      if (group.size() > 1) {
        fuse(group);
      }
    }
    keep_nodes(local_, keep);
  }

  // The last of the nodes becomes all of them.
  void fuse(const Group& group) {
    const std::vector<ValueId> inputs = inputs_of(group);
    FusedExpression expression;
    expression.num_inputs = static_cast<int>(inputs.size());
    const auto index_in = [](const auto& list, auto wanted) {
      return static_cast<int>(std::find(list.begin(), list.end(), wanted) - list.begin());
    };
    for (const NodeId id : group) {
      const Node& node = graph_.node(id);
      FusedStep step{node.op_type, node.attributes, {}};
      for (const ValueId input : node.inputs) {
        const NodeId from = graph_.value(input).producer;
        step.operands.push_back(contains(group, from)
                                    ? expression.num_inputs + index_in(group, from)
                                    : index_in(inputs, input));
      }
      expression.steps.push_back(std::move(step));
    }
    std::vector<ValueId> outputs;
    for (const NodeId id : outputs_of(group)) {
      expression.outputs.push_back(index_in(group, id));
      outputs.push_back(graph_.node(id).outputs[0]);
    }
    Node& fused = graph_.node(group.back());
    fused.op_type = kFusedElementwise;
    fused.attributes = expression.to_attributes();
    fused.attributes.set("inplace", overwritable(inputs, outputs));
    fused.inputs = inputs;
    fused.outputs = outputs;
    for (size_t i = 0; i < outputs.size(); ++i) {
      graph_.value(outputs[i]).producer = group.back();
      graph_.value(outputs[i]).output_index = static_cast<int>(i);
    }
  }

  // Pairs of an output and an input of its type, over which it may be written: a thread has read
  // its elements of all inputs before it writes.
  std::vector<int64_t> overwritable(const std::vector<ValueId>& inputs,
                                    const std::vector<ValueId>& outputs) const {
    std::vector<int64_t> pairs;
    for (size_t o = 0; o < outputs.size(); ++o) {
      for (size_t i = 0; i < inputs.size(); ++i) {
        if (type(outputs[o]) == type(inputs[i])) {
          pairs.insert(pairs.end(), {static_cast<int64_t>(o), static_cast<int64_t>(i)});
        }
      }
    }
    return pairs;
  }

  TrainingGraph& local_;
  std::vector<Phase>& phases_;
  Graph& graph_;
  const std::vector<std::vector<NodeId>> consumers_;
  std::vector<int> phase_of_, position_;  // position: in the phase
  std::vector<bool> fits_;
  Edges reads_, after_;        // after_: of nodes of a phase, what there is beside data as well
  std::vector<Group> groups_;  // empty: joined another
  std::vector<int> group_of_;
  std::vector<bool> is_kept_;  // by value
};

}  // namespace

void fuse_elementwise(TrainingGraph& local, std::vector<Phase>& phases, Backend backend) {
  if (backend == Backend::kCuda) {
    ElementwiseFusion(local, phases).run();
  }
}

}  // namespace trainrt
