#include "runtime/node_runner.h"

#include "runtime/communication_node.h"

namespace trainrt {

namespace {

std::span<std::byte> bytes_of(const TensorRef& ref) {
  return {static_cast<std::byte*>(ref.data), static_cast<size_t>(ref.type->bytes())};
}

// What a node reads and writes.
template <typename Fn>
void for_each_use(const BoundNode& node, Fn&& fn) {
  for (const std::vector<TensorRef>* refs : {&node.inputs, &node.outputs}) {
    for (const TensorRef& ref : *refs) {
      if (ref.type != nullptr) {
        fn(MemoryUse{bytes_of(ref), refs == &node.outputs});
      }
    }
  }
  fn(MemoryUse{node.workspace, true});
}

}  // namespace

void NodeRunner::run(BoundPhase& phase, Segment& segment, const StepContext& step) {
  if (segment.recordable && trace_ == nullptr && device_.records()) {
    throw_if_a_rank_failed();
    run_recorded(phase, segment, step);
    return;
  }
  for (size_t i = segment.begin; i < segment.end; ++i) {
    BoundNode& node = phase.nodes[i];
    throw_if_a_rank_failed();
    device_.begin_node(node.node->name);
    if (node.kernel) {
      await_memory_of(node);
      run_kernel(node, step);
    } else {
      run_communication(node);
    }
    device_.end_node();
  }
}

void NodeRunner::run_kernels_once(BoundPhase& phase) {
  for (BoundNode& node : phase.nodes) {
    if (node.kernel) {
      throw_if_a_rank_failed();
      run_kernel(node, {});
    }
  }
}

void NodeRunner::throw_if_a_rank_failed() const {
  if (communicators_.world != nullptr) {
    communicators_.world->throw_if_failed();
  }
}

void NodeRunner::record_kernels(BoundPhase& phase, bool may_be_first) {
  if (!device_.records()) {
    return;
  }
  for (Segment& segment : phase.segments) {
    for (const bool first : {false, true}) {
      StepContext step;
      step.first_micro_batch = first;
      if (!segment.recordable || (first && !may_be_first)) {
        continue;
      }
      std::unique_ptr<RecordedWork>& recording =
          segment.recordings[addresses(phase, segment, step)];
      if (recording == nullptr) {
        recording = device_.record([&] { run_kernels(phase, segment, step); });
      }
    }
  }
}

// What a recording of the segment depends on.
std::vector<const void*> NodeRunner::addresses(const BoundPhase& phase,
                                               const Segment& segment,
                                               const StepContext& step) const {
  std::vector<const void*> key;
  if (segment.accumulates) {
    key.push_back(step.first_micro_batch ? this : nullptr);
  }
  for (size_t i = segment.begin; i < segment.end; ++i) {
    const BoundNode& node = phase.nodes[i];
    for (const StashPatch& patch : node.patches) {
      key.push_back(patch.ref == nullptr ? node.workspace.data() : patch.ref->data);
    }
  }
  return key;
}

void NodeRunner::run_kernels(BoundPhase& phase, const Segment& segment, const StepContext& step) {
  for (size_t i = segment.begin; i < segment.end; ++i) {
    run_kernel(phase.nodes[i], step);
  }
}

// Nothing is recorded beside communication: making a graph ready takes memory of the GPU, which may
// wait for all that it has to do, and that for a peer which does the same.
void NodeRunner::run_recorded(BoundPhase& phase, Segment& segment, const StepContext& step) {
  for (size_t i = segment.begin; i < segment.end; ++i) {
    await_memory_of(phase.nodes[i]);
  }
  const bool communicates = !communicators_.on_device.empty();
  std::vector<const void*> key = addresses(phase, segment, step);
  const auto known = segment.recordings.find(key);
  if (known == segment.recordings.end()) {  // kernels make ready what they need at their first run
    run_kernels(phase, segment, step);
    if (!communicates) {
      segment.recordings.emplace(std::move(key), nullptr);
    }
    return;
  }
  if (known->second == nullptr) {
    known->second = device_.record([&] { run_kernels(phase, segment, step); });
  }
  device_.replay(*known->second);
}

void NodeRunner::await_memory_of(const BoundNode& node) {
  for_each_use(node, [this](const MemoryUse& use) { communicated_.await(use); });
}

void NodeRunner::run_kernel(BoundNode& node, const StepContext& step) {
  const bool traces = traces_operators();
  const auto start =
      slowdown_.active() || traces ? StepTrace::Clock::now() : StepTrace::Clock::time_point();
  KernelContext context(
      *node.node, node.inputs, node.outputs, node.workspace, device_.context(), step);
  try {
    node.kernel(context);
  } catch (Error& error) {
    error.add_context(concat("in node '", node.node->name, "' (", node.node->op_type, ")"));
    throw;
  }
  if (slowdown_.active()) {
    slowdown_.worked(StepTrace::Clock::now() - start);
  }
  if (traces) {
    trace_->add(node.node->name,
                TraceLane::kOperator,
                start,
                StepTrace::Clock::now(),
                -1,
                node.joined == nullptr ? node.node->op_type
                                       : concat(node.node->op_type, "+", node.joined->op_type));
  }
}

void NodeRunner::run_communication(BoundNode& node) {
  slowdown_.settle();
  std::vector<MemoryUse> uses;
  for_each_use(node, [&uses](const MemoryUse& use) { uses.push_back(use); });
  const Lane lane = communication_lane(node, communicators_);
  communicated_.begin(lane, uses);
  StepTrace::Clock::time_point begin;
  if (trace_ != nullptr) {
    begin = traced_now();
    trace_->add(running_cell_, TraceLane::kCompute, computing_since_, begin);
  }
  time_communication([&] {
    run_communication_node(
        *node.node, node.inputs, node.outputs, node.workspace, communicators_, device_);
  });
  if (trace_ != nullptr) {
    // What waits for a peer's message is a bubble; a collective is communication.
    computing_since_ =
        traced_now(node.node->op_type == comm_op::kRecv ? lane : Lane::kCommunication);
    const bool waits = node.node->op_type == comm_op::kRecv;
    int64_t bytes = 0;
    for (const TensorRef& moved : node.outputs.empty() ? node.inputs : node.outputs) {
      bytes += moved.type->bytes();
    }
    trace_->add(node.node->name,
                waits ? TraceLane::kBubble : TraceLane::kCommunication,
                begin,
                computing_since_,
                bytes);
  }
  communicated_.end(lane, uses);
}

// On a GPU the host runs ahead of what is timed: a trace waits for it, and for what `lane`
// receives. Not for what is being sent: the peer may come to receive it after something that this
// rank sends later.
StepTrace::Clock::time_point NodeRunner::traced_now(Lane lane) {
  device_.synchronize(Lane::kCompute);
  device_.synchronize(lane);
  return StepTrace::Clock::now();
}

// A cell computes but for the time that its communication takes.
void NodeRunner::begin_cell(const Cell& cell) {
  if (trace_ != nullptr) {
    running_cell_ = cell_name(cell);
    computing_since_ = traced_now();
  }
}

void NodeRunner::end_cell() {
  slowdown_.settle();
  if (trace_ != nullptr) {
    trace_->add(running_cell_, TraceLane::kCompute, computing_since_, traced_now());
  }
}

}  // namespace trainrt
