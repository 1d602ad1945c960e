// Lifetimes from a program's phases (parallel/buffer_plan), then offsets (parallel/assign_offsets).
// A buffer that is alive across phases goes to the stash when other phases may run in between; the
// rest is transient.
#include "parallel/memory_plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "graph/op_def.h"
#include "parallel/assign_offsets.h"
#include "parallel/buffer_plan.h"
#include "parallel/message_lanes.h"

namespace trainrt {

namespace {

int64_t* breakdown_of(MemoryBreakdown& breakdown, ValueKind kind) {
  switch (kind) {
    case ValueKind::kParameter:
      return &breakdown.parameters;
    case ValueKind::kGradient:
      return &breakdown.gradients;
    case ValueKind::kOptimizerState:
      return &breakdown.optimizer;
    default:
      return &breakdown.state;
  }
}

// One after the other; offloaded ones in an arena of their own.
std::unordered_map<std::string, PersistentAddress> place_persistent(const Program& program,
                                                                    MemoryPlan* memory) {
  std::unordered_map<std::string, PersistentAddress> addresses;
  for (const PersistentTensor& tensor : persistent_tensors(program)) {
    const bool on_host = program.offload_optimizer && tensor.kind == ValueKind::kOptimizerState;
    int64_t& end = on_host ? memory->host_bytes : memory->persistent_bytes;
    addresses.emplace(tensor.key, PersistentAddress{end, on_host});
    end += tensor.bytes;
    *breakdown_of(memory->breakdown, tensor.kind) += on_host ? 0 : tensor.bytes;
  }
  return addresses;
}

// Where copies of messages wait to be received: one room for a tag, at whichever micro-batch size
// it is sent.
using MessageKey = std::pair<std::string, int64_t>;  // group, tag
struct MessageRoom {
  int64_t bytes = 0;  // of all copies
  int64_t offset = 0;
};

MessageKey message_key(const Node& node) {
  return {node.attributes.get_string("group"), node.attributes.get_int("tag", 0)};
}

bool to_itself(const Program& program, const Node& node) {
  return node.attributes.get_string("group") == "pipeline" &&
         node.attributes.get_int("peer") == program.coordinates.stage;
}

// What a rank sends to itself stays until it comes to receive it: the most that do at once.
std::map<MessageKey, int64_t> copies_to_itself(const Program& program) {
  std::map<MessageKey, int64_t> waiting, most;
  for (const Cell& cell : program.cells) {
    const size_t variant =
        cell.micro_batch < 0
            ? 0
            : static_cast<size_t>(
                  program.micro_batches.at(static_cast<size_t>(cell.micro_batch)).variant);
    const ProgramVariant& source = program.variants.at(variant);
    const Phase* phase = source.find_phase(cell.phase, cell.virtual_stage);
    for (size_t i = 0; phase != nullptr && i < phase->nodes.size(); ++i) {
      const Node& node = source.graph.node(phase->nodes[i]);
      const bool sends = node.op_type == comm_op::kSend;
      if ((sends || node.op_type == comm_op::kRecv) && to_itself(program, node)) {
        int64_t& now = waiting[message_key(node)];
        now += sends ? 1 : -1;
        most[message_key(node)] = std::max(most[message_key(node)], now);
      }
    }
  }
  return most;
}

// On GPUs: elsewhere communicators hold what is on its way in memory of their own.
std::map<MessageKey, MessageRoom> place_messages(const Program& program, MemoryPlan* memory) {
  std::map<MessageKey, MessageRoom> rooms;
  if (program.device.backend != Backend::kCuda) {
    return rooms;
  }
  std::map<MessageKey, int64_t> copies = copies_to_itself(program);
  const int64_t of_micro_batches =
      std::min<int64_t>(kCopiesOnWay, static_cast<int64_t>(program.micro_batches.size()));
  const int64_t of_steps = program.runs_on() ? kCopiesOnWay : 1;
  for (const ProgramVariant& variant : program.variants) {
    for (const Phase& phase : variant.phases) {
      for (const NodeId id : phase.nodes) {
        const Node& node = variant.graph.node(id);
        if (node.op_type == comm_op::kSend) {
          MessageRoom& room = rooms[message_key(node)];
          copies.try_emplace(message_key(node),
                             is_step_phase(phase.kind) ? of_steps : of_micro_batches);
          const int64_t bytes = variant.graph.value(node.inputs[0]).type.bytes();
          room.bytes = std::max(room.bytes, OffsetAssigner::align(bytes));
          if (node.attributes.has(comm_op::kNumbers)) {
            memory->numbers[static_cast<int>(node.attributes.get_int("peer"))] =
                node.attributes.get_int(comm_op::kNumbers);
          }
        }
      }
    }
  }
  for (auto& [key, room] : rooms) {
    room.bytes *= copies.at(key);
    room.offset = memory->persistent_bytes;
    memory->persistent_bytes += room.bytes;
    memory->message_bytes += room.bytes;
  }
  memory->breakdown.communication += memory->message_bytes;
  return rooms;
}

// Live bytes by category at each instant of a time line; the peak is where the sum is largest.
class PeakFinder {
 public:
  void begin_line(int num_instants) {
    deltas_.assign(static_cast<size_t>(num_instants) + 1, MemoryBreakdown{});
  }
  void add(const Buffer& buffer) {
    const int64_t bytes = OffsetAssigner::align(buffer.bytes);
    *field(deltas_[static_cast<size_t>(buffer.first)], buffer.category) += bytes;
    *field(deltas_[static_cast<size_t>(buffer.last) + 1], buffer.category) -= bytes;
  }
  // `constant`: activations of other micro-batches in flight meanwhile.
  void end_line(int64_t constant) {
    MemoryBreakdown now;
    for (const MemoryBreakdown& delta : deltas_) {
      now.activations += delta.activations;
      now.gradients += delta.gradients;
      now.workspace += delta.workspace;
      now.communication += delta.communication;
      if (now.total() + constant > peak_.total()) {
        peak_ = now;
        peak_.activations += constant;
      }
    }
  }
  const MemoryBreakdown& peak() const { return peak_; }

 private:
  static int64_t* field(MemoryBreakdown& breakdown, Category category) {
    switch (category) {
      case Category::kGradient:
        return &breakdown.gradients;
      case Category::kWorkspace:
        return &breakdown.workspace;
      case Category::kCommunication:
        return &breakdown.communication;
      case Category::kActivation:
        return &breakdown.activations;
    }
    return nullptr;
  }
  std::vector<MemoryBreakdown> deltas_;
  MemoryBreakdown peak_;
};

// Buffers that hold what an update node reads and a backward node made.
void mark_gradients(const Graph& graph, BufferPlan& plan) {
  for (const Node& node : graph.nodes()) {
    if (node.region != Region::kUpdate) {
      continue;
    }
    for (const ValueId input : node.inputs) {
      if (input == kNoValue || graph.value(input).producer == kNoNode ||
          graph.node(graph.value(input).producer).region != Region::kBackward) {
        continue;
      }
      const int buffer = plan.buffer_of(input);
      if (buffer >= 0 && plan.buffer(buffer).category == Category::kActivation) {
        plan.buffer(buffer).category = Category::kGradient;
      }
    }
  }
}

// Where the buffers of one time line lie: offsets below `stash` are in the slot.
struct LineLayout {
  std::vector<int> buffers;
  std::vector<int64_t> offsets;
  int64_t stash = 0;  // extent of what crosses phases
  int64_t extent = 0;
  int64_t live_stash = 0;  // bytes of the stash itself, without gaps
};

LineLayout lay_out(BufferPlan& plan, const TimeLine& line, int index) {
  LineLayout layout;
  std::vector<Lifetime> lives;
  for (int i = 0; i < plan.num_buffers(); ++i) {
    const Buffer& buffer = plan.buffer(i);
    if (plan.is_root(i) && !buffer.fixed && !buffer.step_wide && buffer.timeline == index &&
        buffer.first >= 0) {
      layout.buffers.push_back(i);
      lives.push_back({buffer.bytes, buffer.first, buffer.last});
    }
  }
  layout.offsets.assign(lives.size(), 0);
  const auto crosses = [&](size_t i) {
    const Buffer& buffer = plan.buffer(layout.buffers[i]);
    return line.stash && buffer.first_phase != buffer.last_phase;
  };
  const std::vector<size_t> order = largest_first(lives);
  OffsetAssigner assigner(line.num_instants);
  for (const size_t i : order) {
    if (crosses(i) && lives[i].bytes > 0) {
      layout.offsets[i] = assigner.place(lives[i]);
      layout.live_stash += OffsetAssigner::align(lives[i].bytes);
    }
  }
  layout.stash = assigner.extent();
  for (const size_t i : order) {
    if (!crosses(i) && lives[i].bytes > 0) {
      layout.offsets[i] =
          line.stash ? assigner.place(lives[i], layout.stash) : assigner.place(lives[i]);
    }
  }
  layout.extent = assigner.extent();
  return layout;
}

struct VariantPlan {
  std::vector<TimeLine> lines;
  std::vector<LineLayout> layouts;
  std::unique_ptr<BufferPlan> buffers;
};

// What runs once per step may lie over the slots where they are empty then.
bool beside_slots(const TimeLine& line, bool overlays_slots) {
  return line.local_stage >= 0 || !overlays_slots;
}

// Addresses of all values and workspaces of one variant.
VariantMemory addresses(const ProgramVariant& variant,
                        VariantPlan& plan,
                        bool overlays_slots,
                        int64_t slots_extent,
                        const std::vector<int64_t>& step_wide,
                        const std::map<MessageKey, MessageRoom>& messages) {
  std::vector<TensorAddress> of_buffer(static_cast<size_t>(plan.buffers->num_buffers()));
  for (int i = 0; i < plan.buffers->num_buffers(); ++i) {
    const Buffer& buffer = plan.buffers->buffer(i);
    if (buffer.fixed) {
      of_buffer[static_cast<size_t>(i)] = {
          buffer.on_host ? ArenaRegion::kHost : ArenaRegion::kPersistent,
          buffer.fixed_offset,
          0,
          0};
    } else if (step_wide[static_cast<size_t>(i)] >= 0) {
      of_buffer[static_cast<size_t>(i)] = {
          ArenaRegion::kPersistent, step_wide[static_cast<size_t>(i)], 0, 0};
    }
  }
  for (size_t l = 0; l < plan.lines.size(); ++l) {
    const TimeLine& line = plan.lines[l];
    const LineLayout& layout = plan.layouts[l];
    for (size_t i = 0; i < layout.buffers.size(); ++i) {
      TensorAddress& at = of_buffer[static_cast<size_t>(layout.buffers[i])];
      const int64_t offset = layout.offsets[i];
      if (line.stash && offset < layout.stash) {
        at = {ArenaRegion::kStash, offset, 0, line.local_stage};
      } else {
        at = {ArenaRegion::kTransient,
              line.stash ? slots_extent + offset - layout.stash
                         : offset + (beside_slots(line, overlays_slots) ? slots_extent : 0),
              0,
              std::max(0, line.local_stage)};
      }
    }
  }
  VariantMemory memory;
  const Graph& graph = variant.graph;
  memory.values.resize(static_cast<size_t>(graph.num_values()));
  memory.workspaces.resize(static_cast<size_t>(graph.num_nodes()));
  for (ValueId id = 0; id < graph.num_values(); ++id) {
    const int buffer = plan.buffers->buffer_of(id);
    if (buffer >= 0) {
      TensorAddress& at = memory.values[static_cast<size_t>(id)];
      at = of_buffer[static_cast<size_t>(buffer)];
      at.bytes = graph.value(id).type.bytes();
    }
  }
  for (const auto& [node, buffer] : plan.buffers->workspaces()) {
    TensorAddress& at = memory.workspaces[static_cast<size_t>(node)];
    at = of_buffer[static_cast<size_t>(buffer)];
    at.bytes = plan.buffers->buffer(buffer).bytes;
  }
  for (NodeId id = 0; id < graph.num_nodes() && !messages.empty(); ++id) {
    const Node& node = graph.node(id);
    const auto at =
        node.op_type == comm_op::kSend ? messages.find(message_key(node)) : messages.end();
    if (at != messages.end()) {
      memory.workspaces[static_cast<size_t>(id)] = {
          ArenaRegion::kPersistent, at->second.offset, at->second.bytes, 0};
    }
  }
  return memory;
}

}  // namespace

int64_t MemoryPlan::absolute_offset(const TensorAddress& address, int micro_batch) const {
  switch (address.region) {
    case ArenaRegion::kNone:
      return 0;
    case ArenaRegion::kPersistent:
    case ArenaRegion::kHost:
      return address.offset;
    case ArenaRegion::kTransient:
      return transient_base + address.offset;
    case ArenaRegion::kStash: {
      const size_t stage = static_cast<size_t>(address.local_stage);
      const int slot = std::max(0, micro_batch) % std::max(1, num_slots.at(stage));
      return slot_base.at(stage) + slot * slot_bytes.at(stage) + address.offset;
    }
  }
  return 0;
}

std::vector<PersistentTensor> persistent_tensors(const Program& program) {
  std::vector<PersistentTensor> tensors;
  std::unordered_set<std::string> known;
  for (const ProgramVariant& variant : program.variants) {
    for (const Value& value : variant.graph.values()) {
      if (!is_persistent(value.kind)) {
        continue;
      }
      std::string key = persistent_key(value);
      if (known.insert(key).second) {
        tensors.push_back({std::move(key), value.kind, OffsetAssigner::align(value.type.bytes())});
      }
    }
  }
  return tensors;
}

MemoryPlan plan_memory(const Program& program) {
  MemoryPlan memory;
  const std::unordered_map<std::string, PersistentAddress> persistent =
      place_persistent(program, &memory);
  const std::map<MessageKey, MessageRoom> messages = place_messages(program, &memory);
  const std::vector<int> stages = program.local_stages();
  memory.slot_bytes.assign(stages.size(), 0);
  memory.num_slots.assign(stages.size(), 0);
  memory.slot_base.assign(stages.size(), 0);
  memory.stage_bytes.assign(std::max<size_t>(1, stages.size()), 0);

  std::vector<VariantPlan> plans;
  std::vector<std::vector<int64_t>> step_wide;
  for (const ProgramVariant& variant : program.variants) {
    VariantPlan plan;
    plan.lines = make_timelines(program, variant);
    plan.buffers = std::make_unique<BufferPlan>(variant, program.device, &plan.lines, persistent);
    mark_gradients(variant.graph, *plan.buffers);
    for (size_t l = 0; l < plan.lines.size(); ++l) {
      plan.layouts.push_back(lay_out(*plan.buffers, plan.lines[l], static_cast<int>(l)));
      const TimeLine& line = plan.lines[l];
      if (line.stash) {
        const size_t stage = static_cast<size_t>(line.local_stage);
        memory.slot_bytes[stage] = std::max(memory.slot_bytes[stage], plan.layouts[l].stash);
        memory.num_slots[stage] = program.num_stash_slots(stages[stage]);
      }
    }
    std::vector<int64_t>& wide =
        step_wide.emplace_back(static_cast<size_t>(plan.buffers->num_buffers()), int64_t{-1});
    for (int i = 0; i < plan.buffers->num_buffers(); ++i) {
      const Buffer& buffer = plan.buffers->buffer(i);
      if (plan.buffers->is_root(i) && buffer.step_wide) {
        wide[static_cast<size_t>(i)] = memory.persistent_bytes;
        memory.persistent_bytes += OffsetAssigner::align(buffer.bytes);
        memory.breakdown.state += OffsetAssigner::align(buffer.bytes);
      }
    }
    plans.push_back(std::move(plan));
  }

  int64_t slots_extent = 0, live_slots = 0;
  for (size_t s = 0; s < stages.size(); ++s) {
    memory.slot_base[s] = memory.persistent_bytes + slots_extent;
    slots_extent += memory.num_slots[s] * memory.slot_bytes[s];
  }
  memory.transient_base = memory.persistent_bytes;
  memory.transient_bytes = slots_extent;
  live_slots = slots_extent;
  const bool overlays_slots = program.num_ahead == 0;
  PeakFinder peak;
  for (size_t v = 0; v < plans.size(); ++v) {
    VariantPlan& plan = plans[v];
    for (size_t l = 0; l < plan.lines.size(); ++l) {
      const TimeLine& line = plan.lines[l];
      const LineLayout& layout = plan.layouts[l];
      const int64_t above = line.stash ? layout.extent - layout.stash : layout.extent;
      int64_t& most = line.local_stage >= 0
                          ? memory.stage_bytes[static_cast<size_t>(line.local_stage)]
                          : memory.step_bytes;
      most = std::max(most, above);
      memory.transient_bytes = std::max(
          memory.transient_bytes, above + (beside_slots(line, overlays_slots) ? slots_extent : 0));
      peak.begin_line(line.num_instants);
      for (const int i : layout.buffers) {
        const Buffer& buffer = plan.buffers->buffer(i);
        if (!line.stash || buffer.first_phase == buffer.last_phase) {
          peak.add(buffer);
        }
      }
      peak.end_line(beside_slots(line, overlays_slots) ? live_slots : 0);
    }
    memory.variants.push_back(
        addresses(program.variants[v], plan, overlays_slots, slots_extent, step_wide[v], messages));
  }
  memory.arena_bytes = memory.persistent_bytes + memory.transient_bytes;
  memory.breakdown.gradients += peak.peak().gradients;
  memory.breakdown.workspace += peak.peak().workspace;
  memory.breakdown.communication += peak.peak().communication;
  // Activations, and the gaps between tensors, which no category owns. Transients in gaps of the
  // stash can make the categories add up to more than the arena; they are activations as well.
  memory.breakdown.activations = memory.arena_bytes - memory.breakdown.total();
  return memory;
}

}  // namespace trainrt
