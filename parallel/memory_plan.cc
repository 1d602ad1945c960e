// Lifetimes from a program's phases, then offsets (parallel/assign_offsets).
//
// 1. Time lines. Phases that share a micro-batch follow each other on one time line (C, F, B, W of
// a
//    virtual stage); phases of the step (G, R, U) form another. With one micro-batch per step all
//    phases form one.
// 2. Buffers. Values that share storage form one buffer: an update in place, an input overwritten
// by
//    the output when nobody reads it afterwards, a view and what it looks at. A buffer lives from
//    the first of its values to the last.
// 3. Offsets. A buffer that is alive across phases goes to the stash when other phases may run in
//    between; the rest is transient.
#include "parallel/memory_plan.h"

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "graph/op_def.h"
#include "parallel/assign_offsets.h"

namespace trainrt {

namespace {

enum class Category : uint8_t { kActivation, kGradient, kWorkspace, kCommunication };

struct Buffer {
  int64_t bytes = 0;
  int first = -1, last = -1;              // instants of its time line
  int first_phase = -1, last_phase = -1;  // positions of phases on the time line
  int timeline = -1;
  bool fixed = false;      // persistent: has an address already
  bool step_wide = false;  // read on several time lines: lives as long as persistent ones
  int64_t fixed_offset = 0;
  Category category = Category::kActivation;
};

// Phases of one variant that are planned together, in order of execution.
struct TimeLine {
  std::vector<const Phase*> phases;
  int local_stage = -1;  // -1: once per step
  bool stash = false;    // other phases run between its phases
  int num_instants = 0;
};

int phase_rank(PhaseKind kind) {
  return static_cast<int>(kind);
}

bool is_step_phase(PhaseKind kind) {
  return kind == PhaseKind::kGather || kind == PhaseKind::kReduce || kind == PhaseKind::kUpdate;
}

std::vector<TimeLine> make_timelines(const Program& program, const ProgramVariant& variant) {
  const std::vector<int> stages = program.local_stages();
  const size_t num_micro_batches = program.micro_batches.size();
  std::vector<const Phase*> phases;
  for (const Phase& phase : variant.phases) {
    phases.push_back(&phase);
  }
  if (num_micro_batches <= 1) {
    // In the order of the cells; a phase without a cell never runs, but is planned.
    const auto position = [&](const Phase* phase) {
      for (size_t i = 0; i < program.cells.size(); ++i) {
        if (program.cells[i].phase == phase->kind &&
            (is_step_phase(phase->kind) ||
             program.cells[i].virtual_stage == phase->virtual_stage)) {
          return i;
        }
      }
      return program.cells.size();
    };
    std::stable_sort(phases.begin(), phases.end(), [&](const Phase* a, const Phase* b) {
      return position(a) < position(b);
    });
    return {{phases, 0, false, 0}};
  }
  std::stable_sort(phases.begin(), phases.end(), [](const Phase* a, const Phase* b) {
    return phase_rank(a->kind) < phase_rank(b->kind);
  });
  std::vector<TimeLine> lines;
  for (size_t i = 0; i < stages.size(); ++i) {
    TimeLine line{{}, static_cast<int>(i), false, 0};
    line.stash = stages.size() > 1 || program.num_stash_slots(stages[i]) > 1;
    for (const Phase* phase : phases) {
      if (!is_step_phase(phase->kind) && phase->virtual_stage == stages[i]) {
        line.phases.push_back(phase);
      }
    }
    lines.push_back(std::move(line));
  }
  TimeLine step;
  for (const Phase* phase : phases) {
    if (is_step_phase(phase->kind)) {
      step.phases.push_back(phase);
    }
  }
  lines.push_back(std::move(step));
  return lines;
}

// Storage of one variant: value -> buffer, and the buffers' lives.
class BufferPlan {
 public:
  BufferPlan(const ProgramVariant& variant,
             const DeviceSpec& device,
             std::vector<TimeLine>* lines,
             const std::unordered_map<std::string, int64_t>& persistent)
      : graph_(variant.graph), buffer_of_(static_cast<size_t>(graph_.num_values()), -1) {
    for (ValueId id = 0; id < graph_.num_values(); ++id) {
      const Value& value = graph_.value(id);
      if (is_persistent(value.kind)) {
        Buffer buffer;
        buffer.bytes = value.type.bytes();
        buffer.fixed = true;
        buffer.fixed_offset = persistent.at(persistent_key(value));
        add(id, buffer);
      }
    }
    // Updates happen in place. A phase may read what an earlier step or no node at all wrote.
    for (const StateUpdate& update : graph_.updates()) {
      alias_of_[update.new_value] = update.target;
      buffer_of_[static_cast<size_t>(update.new_value)] =
          buffer_of_[static_cast<size_t>(update.target)];
    }
    for (size_t l = 0; l < lines->size(); ++l) {
      walk(device, (*lines)[l], static_cast<int>(l));
    }
  }

  int find(int buffer) const {
    while (parent_[static_cast<size_t>(buffer)] != buffer) {
      buffer = parent_[static_cast<size_t>(buffer)];
    }
    return buffer;
  }
  int buffer_of(ValueId id) const {
    const int buffer = buffer_of_[static_cast<size_t>(id)];
    return buffer < 0 ? -1 : find(buffer);
  }
  Buffer& buffer(int i) { return buffers_[static_cast<size_t>(i)]; }
  int num_buffers() const { return static_cast<int>(buffers_.size()); }
  bool is_root(int i) const { return parent_[static_cast<size_t>(i)] == i; }
  const std::vector<std::pair<NodeId, int>>& workspaces() const { return workspaces_; }

 private:
  void add(ValueId id, const Buffer& buffer) {
    buffer_of_[static_cast<size_t>(id)] = add_buffer(buffer);
  }
  int add_buffer(const Buffer& buffer) {
    parent_.push_back(static_cast<int>(buffers_.size()));
    buffers_.push_back(buffer);
    return parent_.back();
  }

  // `from` becomes part of `into`.
  void merge(int into, int from) {
    Buffer &a = buffer(into), &b = buffer(from);
    parent_[static_cast<size_t>(from)] = into;
    a.bytes = std::max(a.bytes, b.bytes);
    if (b.first >= 0 && !a.fixed) {
      if (a.first < 0 || b.first < a.first) {
        a.first = b.first;
        a.first_phase = b.first_phase;
      }
      if (b.last > a.last) {
        a.last = b.last;
        a.last_phase = b.last_phase;
      }
    }
    a.category = std::max(a.category, b.category);
  }

  void touch(ValueId id, int instant, int phase, int line) {
    Buffer& touched = buffer(find(buffer_of_[static_cast<size_t>(id)]));
    if (touched.fixed) {
      return;
    }
    if (touched.first < 0) {
      touched.first = instant;
      touched.first_phase = phase;
      touched.timeline = line;
    }
    touched.step_wide = touched.step_wide || touched.timeline != line;
    touched.last = std::max(touched.last, instant);
    touched.last_phase = std::max(touched.last_phase, phase);
  }

  void walk(const DeviceSpec& device, TimeLine& line, int index);
  void share_storage(const TimeLine& line);
  bool try_inplace(const Node& node, const Inplace& alias, int instant);

  const Graph& graph_;
  std::vector<int> buffer_of_;
  std::vector<Buffer> buffers_;
  std::vector<int> parent_;
  std::unordered_map<ValueId, ValueId> alias_of_;   // new value of a state -> its target
  std::vector<std::pair<NodeId, int>> workspaces_;  // node, buffer
};

// Lives of the values touched on one time line, each in a buffer of its own; then sharing.
void BufferPlan::walk(const DeviceSpec& device, TimeLine& line, int index) {
  int instant = 0;
  // An input fed for the count phase is fed again for the forward phase: no life in between is
  // needed, but one address must do for both, so it is kept free from the first to the last use.
  for (size_t p = 0; p < line.phases.size(); ++p) {
    const Phase& phase = *line.phases[p];
    const int phase_index = static_cast<int>(p);
    const int begin = instant;
    for (const NodeId id : phase.nodes) {
      const Node& node = graph_.node(id);
      for (const ValueId input : node.inputs) {
        if (input == kNoValue) {
          continue;
        }
        const bool is_new = buffer_of_[static_cast<size_t>(input)] < 0;
        if (is_new) {
          TRAINRT_CHECK(graph_.value(input).kind == ValueKind::kInput,
                        "value '",
                        graph_.value(input).name,
                        "' is read in phase ",
                        phase_letter(phase.kind),
                        " by '",
                        node.name,
                        "' but was not computed in a phase before it");
          add(input, {.bytes = graph_.value(input).type.bytes()});
          touch(input, begin, phase_index, index);
        } else if (graph_.value(input).kind == ValueKind::kIntermediate) {
          TRAINRT_CHECK(buffer(buffer_of_[static_cast<size_t>(input)]).fixed ||
                            buffer(buffer_of_[static_cast<size_t>(input)]).timeline == index ||
                            alias_of_.count(input) != 0,
                        "value '",
                        graph_.value(input).name,
                        "' of a micro-batch is read by '",
                        node.name,
                        "' once per step");
        }
        if (!(graph_.value(input).kind == ValueKind::kIntermediate &&
              alias_of_.count(input) != 0)) {
          touch(input, instant, phase_index, index);
        }
      }
      const bool communication = is_communication(node.op_type);
      for (const ValueId output : node.outputs) {
        if (output == kNoValue) {
          continue;
        }
        if (alias_of_.count(output) != 0) {
          continue;
        }
        add(output,
            {.bytes = graph_.value(output).type.bytes(),
             .category = communication ? Category::kCommunication : Category::kActivation});
        touch(output, instant, phase_index, index);
      }
      // The executor itself packs for collectives, whatever kernels run.
      const OpContext op(graph_, node);
      const OpDef& def = get_op(node.op_type);
      const int64_t workspace = !communication  ? workspace_bytes(op, device)
                                : def.workspace ? def.workspace(op, device)
                                                : 0;
      if (workspace > 0) {
        workspaces_.emplace_back(id,
                                 add_buffer({.bytes = workspace,
                                             .first = instant,
                                             .last = instant,
                                             .first_phase = phase_index,
                                             .last_phase = phase_index,
                                             .timeline = index,
                                             .category = communication ? Category::kCommunication
                                                                       : Category::kWorkspace}));
      }
      ++instant;
    }
    for (const ValueId fetch : phase.fetches) {
      touch(fetch, instant, phase_index, index);
    }
    ++instant;  // the end of the phase, when the host reads
  }
  line.num_instants = std::max(1, instant);
  share_storage(line);
}

// The output of `node` takes the storage of an input that is not read later.
bool BufferPlan::try_inplace(const Node& node, const Inplace& alias, int instant) {
  if (alias.output >= static_cast<int>(node.outputs.size()) ||
      alias.input >= static_cast<int>(node.inputs.size())) {
    return false;
  }
  const ValueId output = node.outputs[static_cast<size_t>(alias.output)];
  const ValueId input = node.inputs[static_cast<size_t>(alias.input)];
  if (output == kNoValue || input == kNoValue) {
    return false;
  }
  const int from = buffer_of(output), into = buffer_of(input);
  if (from == into) {
    return true;
  }
  const Buffer &source = buffer(into), &target = buffer(from);
  if (alias.always && source.fixed) {
    merge(into, from);
    return true;
  }
  // `target.first`: an output that shares an input's storage already does not take a second's.
  if (source.fixed || source.step_wide || target.fixed || source.last != instant ||
      target.first != instant || source.timeline != target.timeline ||
      source.bytes != target.bytes) {
    return false;
  }
  // Another input in the same storage would be overwritten while it is read.
  int uses = 0;
  for (const ValueId other : node.inputs) {
    uses += other != kNoValue && buffer_of(other) == into ? 1 : 0;
  }
  if (uses != 1) {
    return false;
  }
  merge(into, from);
  return true;
}

void BufferPlan::share_storage(const TimeLine& line) {
  int instant = 0;
  // Views first: they lengthen the life of what they look at.
  for (const Phase* phase : line.phases) {
    for (const NodeId id : phase->nodes) {
      const Node& node = graph_.node(id);
      if (!get_op(node.op_type).view || node.inputs[0] == kNoValue) {
        continue;
      }
      const int into = buffer_of(node.inputs[0]), from = buffer_of(node.outputs[0]);
      if (into != from && !buffer(into).fixed && !buffer(from).fixed &&
          buffer(into).timeline == buffer(from).timeline) {
        merge(into, from);
      }
    }
  }
  for (const Phase* phase : line.phases) {
    for (const NodeId id : phase->nodes) {
      const Node& node = graph_.node(id);
      // An output takes the storage of one input: with a second, two inputs would become one.
      std::vector<int> placed;
      for (const Inplace& alias : get_op(node.op_type).inplace) {
        if (std::find(placed.begin(), placed.end(), alias.output) != placed.end()) {
          continue;
        }
        const bool shared = try_inplace(node, alias, instant);
        if (shared) {
          placed.push_back(alias.output);
        }
        TRAINRT_CHECK(shared || !alias.always,
                      "node '",
                      node.name,
                      "' (",
                      node.op_type,
                      ") works in place on '",
                      graph_.value(node.inputs[static_cast<size_t>(alias.input)]).name,
                      "', which is read later");
      }
      ++instant;
    }
    ++instant;
  }
}

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

// Persistent values of all variants, by name, one after the other in order of first appearance.
int64_t place_persistent(const Program& program,
                         std::unordered_map<std::string, int64_t>* offsets,
                         MemoryBreakdown* breakdown) {
  int64_t end = 0;
  for (const ProgramVariant& variant : program.variants) {
    for (const Value& value : variant.graph.values()) {
      if (is_persistent(value.kind) && offsets->emplace(persistent_key(value), end).second) {
        const int64_t bytes = OffsetAssigner::align(value.type.bytes());
        *breakdown_of(*breakdown, value.kind) += bytes;
        end += bytes;
      }
    }
  }
  return end;
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

// Addresses of all values and workspaces of one variant.
VariantMemory addresses(const ProgramVariant& variant,
                        VariantPlan& plan,
                        int64_t slots_extent,
                        const std::vector<int64_t>& step_wide) {
  std::vector<TensorAddress> of_buffer(static_cast<size_t>(plan.buffers->num_buffers()));
  for (int i = 0; i < plan.buffers->num_buffers(); ++i) {
    const Buffer& buffer = plan.buffers->buffer(i);
    if (buffer.fixed) {
      of_buffer[static_cast<size_t>(i)] = {ArenaRegion::kPersistent, buffer.fixed_offset, 0, 0};
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
                         : offset + (line.local_stage >= 0 ? slots_extent : 0),
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
  return memory;
}

}  // namespace

int64_t MemoryPlan::absolute_offset(const TensorAddress& address, int micro_batch) const {
  switch (address.region) {
    case ArenaRegion::kNone:
      return 0;
    case ArenaRegion::kPersistent:
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

MemoryPlan plan_memory(const Program& program) {
  MemoryPlan memory;
  std::unordered_map<std::string, int64_t> persistent;
  memory.persistent_bytes = place_persistent(program, &persistent, &memory.breakdown);
  const std::vector<int> stages = program.local_stages();
  memory.slot_bytes.assign(stages.size(), 0);
  memory.num_slots.assign(stages.size(), 0);
  memory.slot_base.assign(stages.size(), 0);

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
  PeakFinder peak;
  for (size_t v = 0; v < plans.size(); ++v) {
    VariantPlan& plan = plans[v];
    for (size_t l = 0; l < plan.lines.size(); ++l) {
      const TimeLine& line = plan.lines[l];
      const LineLayout& layout = plan.layouts[l];
      const int64_t above = line.stash ? layout.extent - layout.stash : layout.extent;
      memory.transient_bytes =
          std::max(memory.transient_bytes, above + (line.local_stage >= 0 ? slots_extent : 0));
      peak.begin_line(line.num_instants);
      for (const int i : layout.buffers) {
        const Buffer& buffer = plan.buffers->buffer(i);
        if (!line.stash || buffer.first_phase == buffer.last_phase) {
          peak.add(buffer);
        }
      }
      peak.end_line(line.local_stage >= 0 ? live_slots : 0);
    }
    memory.variants.push_back(addresses(program.variants[v], plan, slots_extent, step_wide[v]));
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
