#include "runtime/bound_program.h"

#include <algorithm>

#include "graph/base/log.h"
#include "graph/kernel_pair.h"
#include "graph/op_def.h"

namespace trainrt {

namespace {

bool is_runtime_input(const std::string& name) {
  return name == runtime_input::kLearningRate || name == runtime_input::kStep ||
         name == runtime_input::kLossSeed || name == runtime_input::kGradScale ||
         name == kMicroBatchInput;
}

class Binder {
 public:
  Binder(BoundProgram& bound,
         size_t variant,
         std::byte* arena,
         std::byte* host_arena,
         const std::vector<std::string>& input_names,
         bool ahead = false)
      : bound_(bound),
        variant_(bound.program->variants[variant]),
        memory_(bound.memory.variants[variant]),
        arena_(arena),
        host_arena_(host_arena),
        input_names_(input_names),
        ahead_(ahead) {}

  BoundTensor tensor(ValueId id) const {
    if (id == kNoValue) {
      return {};
    }
    const Value& value = variant_.graph.value(id);
    if (ahead_ && value.kind == ValueKind::kParameter) {
      const auto newer = bound_.program->newer_versions.find(value.name);
      if (newer != bound_.program->newer_versions.end()) {
        return bound_.persistent.at(newer->second);
      }
    }
    const TensorAddress& at = memory_.values.at(static_cast<size_t>(id));
    TRAINRT_CHECK(at.region != ArenaRegion::kNone || value.type.bytes() == 0,
                  "value '",
                  value.name,
                  "' has no address");
    return {&value, &at, -1};
  }

  BoundPhase phase(const Phase& source) const {
    BoundPhase result;
    result.kind = source.kind;
    result.virtual_stage = source.virtual_stage;
    result.nodes.reserve(source.nodes.size());
    for (const NodeId id : source.nodes) {
      if (!join_producer(result.nodes, id)) {
        result.nodes.push_back(node(id));
      }
      const std::vector<ValueId>& outputs = variant_.graph.node(id).outputs;
      const auto take = [&](ValueId value, BoundTensor& to) {
        const bool made =
            value != kNoValue && std::find(outputs.begin(), outputs.end(), value) != outputs.end();
        if (made) {
          to = tensor(value);
        }
        return made;
      };
      take(variant_.loss_sum, result.loss_sum);
      take(variant_.item_count, result.item_count);
      take(variant_.correct, result.correct);
      if (take(variant_.grad_norm, result.grad_norm)) {
        result.grad_norm_node = result.nodes.size() - 1;
      }
    }
    for (const ValueId id : source.feeds) {
      result.feeds.push_back(feed(id));
    }
    add_updates(source, result);
    cut(result);
    return result;
  }

 private:
  std::byte* address(const TensorAddress& at) const {
    return (at.region == ArenaRegion::kHost ? host_arena_ : arena_) +
           bound_.memory.absolute_offset(at, 0);
  }

  // Lets a node before `id` that makes one of its inputs do its work too, where the device has a
  // kernel for the pair. Between the two there may be nodes that share no memory with what moves.
  bool join_producer(std::vector<BoundNode>& nodes, NodeId id) const {
    const Node& node = variant_.graph.node(id);
    for (size_t i = nodes.size(); i-- > 0 && nodes.size() - i <= kPairReach;) {
      if (!nodes[i].kernel) {
        return false;  // communication
      }
      if (nodes[i].joined != nullptr || nodes[i].node->outputs.size() != 1 ||
          std::find(node.inputs.begin(), node.inputs.end(), nodes[i].node->outputs[0]) ==
              node.inputs.end()) {
        continue;
      }
      return join(nodes[i], node, std::span(nodes).subspan(i + 1));
    }
    return false;
  }

  bool join(BoundNode& first, const Node& node, std::span<const BoundNode> between) const {
    if (!has_kernel_pair(first.node->op_type, node.op_type, bound_.program->device) ||
        node.outputs.size() != 1) {
      return false;
    }
    const auto at = std::find(node.inputs.begin(), node.inputs.end(), first.node->outputs[0]);
    BoundNode pair;
    pair.node = first.node;
    pair.joined = &node;
    pair.workspace = first.workspace;
    std::vector<ValueId> inputs = first.node->inputs;
    inputs.insert(inputs.end(), node.inputs.begin(), node.inputs.end());
    bind_all(inputs, pair.inputs, pair.patches);
    bind_all({first.node->outputs[0], node.outputs[0]}, pair.outputs, pair.patches);
    const bool keeps = pair.outputs[0].data != pair.outputs[1].data;
    const size_t num_first = first.node->inputs.size();
    const size_t joined = num_first + static_cast<size_t>(at - node.inputs.begin());
    const bool has_room = apart(pair, joined, keeps) &&
                          std::all_of(between.begin(), between.end(), [&](const BoundNode& other) {
                            return passes_by(pair, num_first, other);
                          });
    if (!has_room) {
      note_apart(pair, "their memory meets what else is read or written meanwhile");
      return false;
    }
    pair.kernel = make_kernel_pair({OpContext(variant_.graph, *first.node),
                                    OpContext(variant_.graph, node),
                                    static_cast<int>(at - node.inputs.begin()),
                                    keeps},
                                   bound_.program->device);
    if (!pair.kernel) {
      note_apart(pair, "no kernel takes both with these shapes and types");
      return false;
    }
    for (const StashPatch& patch : first.patches) {
      if (patch.ref == nullptr) {
        pair.patches.push_back(patch);
      }
    }
    first = std::move(pair);
    return true;
  }

  static void note_apart(const BoundNode& pair, const char* why) {
    log_debug("node '",
              pair.joined->name,
              "' (",
              pair.joined->op_type,
              ") runs by itself, not with '",
              pair.node->name,
              "' (",
              pair.node->op_type,
              ") before it: ",
              why);
  }

  static std::span<const std::byte> bytes(const TensorRef& ref) {
    return {static_cast<const std::byte*>(ref.data),
            ref.type == nullptr ? 0 : static_cast<size_t>(ref.type->bytes())};
  }
  static bool meet(std::span<const std::byte> a, std::span<const std::byte> b) {
    return a.data() < b.data() + b.size() && b.data() < a.data() + a.size();
  }

  // Whether the pair's second output, which is written while the rest is read, lies apart from it:
  // the memory plan saw one node after the other.
  static bool apart(const BoundNode& pair, size_t joined, bool keeps) {
    const std::span<const std::byte> y = bytes(pair.outputs[1]);
    bool apart = !meet(y, pair.workspace) && (!keeps || !meet(y, bytes(pair.outputs[0])));
    for (size_t i = 0; i < pair.inputs.size(); ++i) {
      apart = apart && (i == joined || !meet(y, bytes(pair.inputs[i])));
    }
    return apart;
  }

  // Whether the pair's second node may run before `other`: it writes nothing that the other one
  // has or writes, and reads nothing that the other one writes.
  static bool passes_by(const BoundNode& pair, size_t num_first, const BoundNode& other) {
    const std::span<const std::byte> y = bytes(pair.outputs[1]);
    bool free = !meet(y, other.workspace);
    for (const TensorRef& input : other.inputs) {
      free = free && !meet(y, bytes(input));
    }
    std::vector<std::span<const std::byte>> written = {other.workspace};
    for (const TensorRef& output : other.outputs) {
      free = free && !meet(y, bytes(output));
      written.push_back(bytes(output));
    }
    for (size_t i = num_first; i < pair.inputs.size(); ++i) {
      for (const std::span<const std::byte> part : written) {
        free = free && !meet(bytes(pair.inputs[i]), part);
      }
    }
    return free;
  }

  // A kernel that draws is told the step by the host. Attention without dropout has no stream.
  static bool draws(const Node& node) {
    return get_op(node.op_type).random && node.attributes.has("rng_stream");
  }

  // The host reads the gradient's norm, which ends a segment. Few kernels are launched in less time
  // than a graph of them takes memory to be worth.
  static void cut(BoundPhase& phase) {
    constexpr size_t kLeastRecorded = 4;
    for (size_t i = 0; i < phase.nodes.size(); ++i) {
      const BoundNode& node = phase.nodes[i];
      const bool recordable =
          node.kernel && !draws(*node.node) && (node.joined == nullptr || !draws(*node.joined));
      const bool read = i > 0 && phase.grad_norm_node == i - 1;
      if (phase.segments.empty() || read || phase.segments.back().recordable != recordable) {
        phase.segments.push_back({i, i, recordable, false, {}});
      }
      Segment& segment = phase.segments.back();
      segment.end = i + 1;
      segment.accumulates = segment.accumulates || node.node->op_type == "Accumulate";
    }
    for (Segment& segment : phase.segments) {
      segment.recordable = segment.recordable && segment.end - segment.begin >= kLeastRecorded;
    }
  }

  BoundNode node(NodeId id) const {
    BoundNode result;
    result.node = &variant_.graph.node(id);
    if (!is_communication(result.node->op_type)) {
      result.kernel = make_kernel(OpContext(variant_.graph, *result.node), bound_.program->device);
    }
    bind_all(result.node->inputs, result.inputs, result.patches);
    bind_all(result.node->outputs, result.outputs, result.patches);
    const TensorAddress& at = memory_.workspaces.at(static_cast<size_t>(id));
    if (at.bytes > 0) {
      result.workspace = {address(at), static_cast<size_t>(at.bytes)};
      if (at.region == ArenaRegion::kStash) {
        result.patches.push_back({nullptr, &at});
      }
    }
    return result;
  }

  void bind_all(const std::vector<ValueId>& ids,
                std::vector<TensorRef>& refs,
                std::vector<StashPatch>& patches) const {
    refs.resize(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) {
      const BoundTensor bound = tensor(ids[i]);
      if (bound.value == nullptr) {
        continue;
      }
      refs[i] = {address(*bound.at), &bound.value->type};
      if (bound.at->region == ArenaRegion::kStash) {
        patches.push_back({&refs[i], bound.at});
      }
    }
  }

  BoundTensor feed(ValueId id) const {
    BoundTensor result = tensor(id);
    const std::string& name = result.value->name;
    if (!is_runtime_input(name)) {
      const auto at = std::find(input_names_.begin(), input_names_.end(), name);
      TRAINRT_CHECK(at != input_names_.end(), "nobody feeds input '", name, "'");
      result.feed = static_cast<int>(at - input_names_.begin());
    }
    return result;
  }

  void add_updates(const Phase& source, BoundPhase& result) const {
    for (const StateUpdate& update : variant_.graph.updates()) {
      const NodeId producer = variant_.graph.value(update.new_value).producer;
      if (std::find(source.nodes.begin(), source.nodes.end(), producer) == source.nodes.end()) {
        continue;
      }
      const BoundUpdate bound{tensor(update.target), tensor(update.new_value)};
      const bool in_place = bound.source.at->region == bound.target.at->region &&
                            bound.source.at->offset == bound.target.at->offset;
      if (!in_place) {
        result.updates.push_back(bound);
      }
    }
  }

  BoundProgram& bound_;
  const ProgramVariant& variant_;
  const VariantMemory& memory_;
  std::byte* arena_;
  std::byte* host_arena_;
  const std::vector<std::string>& input_names_;
  bool ahead_;  // of the step's update
};

}  // namespace

std::vector<BoundPhase*> BoundProgram::phases_of(const Cell& cell, const StepWork* work) {
  const std::vector<MicroBatch>& micro_batches =
      work != nullptr ? work->micro_batches : program->micro_batches;
  int variant = work != nullptr ? work->once_variant : 0;
  if (cell.micro_batch >= 0) {
    variant = micro_batches.at(static_cast<size_t>(cell.micro_batch)).variant;
  }
  std::vector<BoundPhase*> phases;
  BoundVariant& bound = variants[static_cast<size_t>(variant)];
  for (BoundPhase& phase : cell.ahead ? bound.ahead : bound.phases) {
    if (phase.kind == cell.phase && phase.virtual_stage == cell.virtual_stage) {
      phases.push_back(&phase);
    }
  }
  return phases;
}

void BoundProgram::for_each_phase(const std::function<void(BoundPhase&)>& fn) {
  for (BoundVariant& variant : variants) {
    for (std::vector<BoundPhase>* phases : {&variant.phases, &variant.ahead}) {
      std::for_each(phases->begin(), phases->end(), fn);
    }
  }
}

void bind_program(BoundProgram& bound,
                  std::byte* arena,
                  std::byte* host_arena,
                  const std::vector<std::string>& input_names) {
  bound.variants.resize(bound.program->variants.size());
  for (size_t v = 0; v < bound.variants.size(); ++v) {
    const Binder binder(bound, v, arena, host_arena, input_names);
    for (const Phase& phase : bound.program->variants[v].phases) {
      bound.variants[v].phases.push_back(binder.phase(phase));
    }
    if (bound.program->num_ahead == 0) {
      continue;
    }
    const Binder newer(bound, v, arena, host_arena, input_names, /*ahead=*/true);
    for (const Phase& phase : bound.program->variants[v].phases) {
      if (phase.kind == PhaseKind::kForward) {
        bound.variants[v].ahead.push_back(newer.phase(phase));
      }
    }
  }
}

void bind_persistent(BoundProgram& bound) {
  for (size_t v = 0; v < bound.program->variants.size(); ++v) {
    const Graph& graph = bound.program->variants[v].graph;
    for (ValueId id = 0; id < graph.num_values(); ++id) {
      const Value& value = graph.value(id);
      if (!is_persistent(value.kind)) {
        continue;
      }
      const TensorAddress& at = bound.memory.variants[v].values.at(static_cast<size_t>(id));
      const auto [known, added] =
          bound.persistent.emplace(persistent_key(value), BoundTensor{&value, &at, -1});
      TRAINRT_CHECK(added || (known->second.at->offset == at.offset &&
                              known->second.value->type == value.type),
                    "persistent tensor '",
                    value.name,
                    "' differs between micro-batch sizes");
    }
  }
}

}  // namespace trainrt
