// Which forward nodes run again, in which block; then every backward reader of such a node's output
// is turned to a clone. A block's clones stand together right before the first backward node that
// reads one of them, so at most one block's activations are alive twice.
//
// Blocks of `full` end where exactly one computed tensor is alive (a residual stream between
// layers), after Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174:
// such a tensor is kept, and everything between two of them runs again.
#include "parallel/passes/recompute.h"

#include <algorithm>
#include <map>
#include <set>

#include "graph/op_def.h"
#include "parallel/passes/node_inserter.h"

namespace trainrt {

namespace {

// The plan's stage of a node of the imported graph; null for nodes of ours.
const PlanStage* stage_of(const Plan& plan, const Node& node) {
  const PlanStage* found = nullptr;
  for (const PlanStage& stage : plan.stages) {
    if (node.source_index >= stage.first_node) {
      found = &stage;
    }
  }
  return found;
}

// Where the node's recomputation may end: a stage, or a run of nodes with a mode of their own.
std::pair<const PlanStage*, int> section_of(const Plan& plan, const Node& node) {
  const PlanStage* stage = stage_of(plan, node);
  int section = 0;
  for (size_t i = 0; stage != nullptr && i < stage->recompute_runs.size(); ++i) {
    const RecomputeRun& run = stage->recompute_runs[i];
    section += node.source_index >= run.first_node ? 1 : 0;
    section += node.source_index > run.last_node ? 1 : 0;
  }
  return {stage, section};
}

// The block of each node that runs again, -1 for the rest.
std::vector<int> blocks_of(const Graph& graph, const Plan& plan) {
  const std::vector<std::vector<NodeId>> consumers = graph.consumers();
  std::vector<int> block(static_cast<size_t>(graph.num_nodes()), -1);
  std::vector<NodeId> last_forward_use(static_cast<size_t>(graph.num_values()), kNoNode);
  for (ValueId id = 0; id < graph.num_values(); ++id) {
    for (const NodeId reader : consumers[static_cast<size_t>(id)]) {
      if (graph.node(reader).region == Region::kForward) {
        last_forward_use[static_cast<size_t>(id)] =
            std::max(last_forward_use[static_cast<size_t>(id)], reader);
      }
    }
  }
  int next_block = 0;
  std::set<ValueId> alive;  // computed, and read by a later forward node
  for (NodeId id = 0; id < graph.num_nodes(); ++id) {
    const Node& node = graph.node(id);
    if (node.region != Region::kForward) {
      continue;
    }
    const PlanStage* stage = stage_of(plan, node);
    const bool listed = stage != nullptr && !stage->recompute_nodes.empty();
    const bool named = listed && std::find(stage->recompute_nodes.begin(),
                                           stage->recompute_nodes.end(),
                                           node.name) != stage->recompute_nodes.end();
    const RecomputeMode mode =
        stage == nullptr ? RecomputeMode::kNone : stage->recompute_of(node.source_index);
    if (mode != RecomputeMode::kNone && (!listed || named)) {
      if (mode == RecomputeMode::kFull) {
        block[static_cast<size_t>(id)] = next_block;
      } else if (get_op(node.op_type).cheap) {
        block[static_cast<size_t>(id)] = graph.num_nodes() + id;  // a block of its own
      }
    }
    for (const ValueId output : node.outputs) {
      if (output != kNoValue && last_forward_use[static_cast<size_t>(output)] > id) {
        alive.insert(output);
      }
    }
    for (const ValueId input : node.inputs) {
      if (input != kNoValue && last_forward_use[static_cast<size_t>(input)] <= id) {
        alive.erase(input);
      }
    }
    next_block += alive.size() == 1 ? 1 : 0;
  }
  return block;
}

class Recomputer {
 public:
  Recomputer(const TrainingGraph& whole, const Plan& plan, std::vector<int> blocks)
      : source_(whole.graph), result_(whole), blocks_(std::move(blocks)) {
    for (NodeId id = 0; id < source_.num_nodes(); ++id) {
      positions_.emplace_back(id, 1, id);
    }
    for (NodeId id = 0; id < source_.num_nodes(); ++id) {
      const Node& node = source_.node(id);
      for (const ValueId input : node.inputs) {
        const NodeId from = input == kNoValue ? kNoNode : source_.value(input).producer;
        // What leaves a stage is kept where it arrives: running it again there would pull the
        // backward into the stage before. So is what leaves a run.
        if (node.region == Region::kForward && from != kNoNode &&
            section_of(plan, source_.node(from)) != section_of(plan, node)) {
          kept_.insert(input);
        }
        // What leaves a block in the forward is kept: it is the next block's input.
        if (node.region == Region::kForward && from != kNoNode &&
            blocks_[static_cast<size_t>(from)] >= 0 &&
            blocks_[static_cast<size_t>(from)] < source_.num_nodes() &&
            blocks_[static_cast<size_t>(from)] != blocks_[static_cast<size_t>(id)]) {
          kept_.insert(input);
        }
      }
    }
  }

  TrainingGraph run() {
    for (NodeId id = 0; id < source_.num_nodes(); ++id) {
      if (source_.node(id).region != Region::kBackward) {
        continue;
      }
      for (size_t i = 0; i < source_.node(id).inputs.size(); ++i) {
        const ValueId input = source_.node(id).inputs[i];
        if (const ValueId copy = clone_of(input, id); copy != input) {
          result_.graph.node(id).inputs[i] = copy;
        }
      }
    }
    std::vector<NodeId> keep(positions_.size());
    for (size_t i = 0; i < keep.size(); ++i) {
      keep[i] = static_cast<NodeId>(i);
    }
    std::stable_sort(keep.begin(), keep.end(), [&](NodeId a, NodeId b) {
      return positions_[static_cast<size_t>(a)] < positions_[static_cast<size_t>(b)];
    });
    keep_nodes(result_, keep);
    return std::move(result_);
  }

 private:
  // The value that backward node `reader` shall read instead of `id`.
  ValueId clone_of(ValueId id, NodeId reader) {
    const NodeId from = id == kNoValue ? kNoNode : source_.value(id).producer;
    if (from == kNoNode || blocks_[static_cast<size_t>(from)] < 0 || kept_.count(id) != 0) {
      return id;
    }
    const int output = source_.value(id).output_index;
    const auto known = clones_.find(from);
    if (known != clones_.end()) {
      return result_.graph.node(known->second).outputs[static_cast<size_t>(output)];
    }
    const int block = blocks_[static_cast<size_t>(from)];
    const NodeId place = block < source_.num_nodes()
                             ? first_reader_.try_emplace(block, reader).first->second
                             : reader;
    Node copy = source_.node(from);
    for (ValueId& input : copy.inputs) {
      input = clone_of(input, place);
    }
    copy.name += "/recompute";
    copy.region = Region::kBackward;
    copy.forward_node = from;
    const std::vector<ValueId> originals = copy.outputs;
    TensorTypes types;
    std::vector<std::string> names;
    for (const ValueId original : originals) {
      types.push_back(original == kNoValue ? TensorType{} : source_.value(original).type);
      names.push_back(original == kNoValue ? "" : source_.value(original).name + "/recompute");
    }
    const NodeId clone = result_.graph.add_node(std::move(copy), types, names);
    for (size_t i = 0; i < originals.size(); ++i) {
      if (originals[i] == kNoValue) {
        result_.graph.node(clone).outputs[i] = kNoValue;
      }
    }
    positions_.emplace_back(place, 0, from);
    clones_[from] = clone;
    return result_.graph.node(clone).outputs[static_cast<size_t>(output)];
  }

  const Graph& source_;
  TrainingGraph result_;
  std::vector<int> blocks_;
  std::set<ValueId> kept_;
  std::map<NodeId, NodeId> clones_;     // forward node -> its clone
  std::map<int, NodeId> first_reader_;  // block -> backward node before which its clones stand
  // Sort keys of the result's nodes: the node they stand at, clones before it, forward order.
  std::vector<std::tuple<NodeId, int, NodeId>> positions_;
};

}  // namespace

TrainingGraph apply_recompute(TrainingGraph whole, const Plan& plan) {
  const bool any = std::any_of(plan.stages.begin(), plan.stages.end(), [](const PlanStage& stage) {
    return stage.recomputes();
  });
  if (!any) {
    return whole;
  }
  return Recomputer(whole, plan, blocks_of(whole.graph, plan)).run();
}

}  // namespace trainrt
