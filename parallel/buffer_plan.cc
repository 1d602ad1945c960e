#include "parallel/buffer_plan.h"

#include <algorithm>

#include "graph/kernel_pair.h"

namespace trainrt {

namespace {

int phase_rank(PhaseKind kind) {
  return static_cast<int>(kind);
}

}  // namespace

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

BufferPlan::BufferPlan(const ProgramVariant& variant,
                       const DeviceSpec& device,
                       std::vector<TimeLine>* lines,
                       const std::unordered_map<std::string, PersistentAddress>& persistent)
    : graph_(variant.graph),
      buffer_of_(static_cast<size_t>(graph_.num_values()), -1),
      num_readers_(static_cast<size_t>(graph_.num_values()), 0) {
  for (ValueId id = 0; id < graph_.num_values(); ++id) {
    const Value& value = graph_.value(id);
    if (is_persistent(value.kind)) {
      Buffer buffer;
      buffer.bytes = value.type.bytes();
      buffer.fixed = true;
      const PersistentAddress& at = persistent.at(persistent_key(value));
      buffer.on_host = at.on_host;
      buffer.fixed_offset = at.offset;
      buffer.accumulator = value.kind == ValueKind::kGradient;
      add(id, buffer);
    }
  }
  for (const Node& node : graph_.nodes()) {
    for (const ValueId input : node.inputs) {
      if (input != kNoValue) {
        ++num_readers_[static_cast<size_t>(input)];
      }
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

// Lives of the values touched on one time line, each in a buffer of its own; then sharing.
void BufferPlan::walk(const DeviceSpec& device, TimeLine& line, int index) {
  int instant = 0;
  // An input fed for the count phase is fed again for the forward phase: no life in between is
  // needed, but one address must do for both, so it is kept free from the first to the last use.
  for (size_t p = 0; p < line.phases.size(); ++p) {
    const Phase& phase = *line.phases[p];
    const int phase_index = static_cast<int>(p);
    const int begin = instant;
    for (size_t i = 0; i < phase.nodes.size(); ++i) {
      const NodeId id = phase.nodes[i];
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
          const Buffer& of_input = buffer(buffer_of(input));
          TRAINRT_CHECK(of_input.fixed || of_input.timeline == index || alias_of_.count(input) != 0,
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
      if (device.backend == Backend::kCuda) {
        leave_room_for_pair(phase.nodes, i);
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

// Where nodes[at] may run within a product before it, its result lies apart from all that is there
// from the product on; or in the place of the product's own result, if nobody else reads that.
void BufferPlan::leave_room_for_pair(const std::vector<NodeId>& nodes, size_t at) {
  const NodeId id = nodes[at];
  const Node& node = graph_.node(id);
  const int joined = epilogue_input(graph_, node);
  if (joined < 0) {
    return;
  }
  const ValueId between = node.inputs[static_cast<size_t>(joined)];
  for (size_t back = 1; back <= std::min(at, kPairReach); ++back) {
    const NodeId earlier = nodes[at - back];
    if (is_communication(graph_.node(earlier).op_type)) {
      return;
    }
    if (earlier == graph_.value(between).producer) {
      Buffer& result = buffer(buffer_of(node.outputs[0]));
      if (num_readers_[static_cast<size_t>(between)] == 1) {
        joined_input_[id] = joined;
      } else if (node.op_type == "Gelu" && !result.fixed) {  // no other epilogue keeps both
        result.first -= static_cast<int>(back);
      }
      return;
    }
  }
}

// Accumulated gradients are summed over their uses and over ranks where they are: nobody reads a
// rank's own sum any more (the next step's first micro-batch overwrites it).
bool BufferPlan::ends_accumulator(const Node& node, ValueId input) const {
  return node.region == Region::kUpdate &&
         buffers_[static_cast<size_t>(buffer_of(input))].accumulator &&
         num_readers_[static_cast<size_t>(input)] == 1;
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
  if (source.fixed && (alias.always || (target.bytes <= source.bytes && !target.fixed &&
                                        ends_accumulator(node, input)))) {
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
      const auto joined = joined_input_.find(id);
      for (const Inplace& alias : inplace_of(node)) {
        if (std::find(placed.begin(), placed.end(), alias.output) != placed.end() ||
            (joined != joined_input_.end() && alias.input != joined->second)) {
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

}  // namespace trainrt
