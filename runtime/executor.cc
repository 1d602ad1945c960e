// Walks cells in schedule order. What lies in a stash slot moves with the micro-batch in flight, so
// those few addresses are patched when a phase starts; nothing is allocated in a step.
//
// The step's normalisation: item counts of all micro-batches (C cells) are summed over the data
// ranks before the first backward, and 1/N is fed as the backward's seed. The loss of all ranks is
// known, and checked, before the first phase that changes a parameter starts.
#include "runtime/executor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <set>

#include "graph/evaluator.h"
#include "runtime/bad_values.h"
#include "runtime/bound_program.h"
#include "runtime/communication_node.h"
#include "runtime/node_runner.h"

namespace trainrt {

struct Executor::Impl {
  Device& device;
  RankCommunicators communicators;
  std::vector<std::string> input_names;
  std::vector<BoundProgram> programs;
  size_t loaded = 0;  // the program in whose layout persistent tensors lie
  std::unique_ptr<DeviceBuffer> arena;
  std::unique_ptr<DeviceBuffer> host_arena;
  NodeRunner nodes;
  CommunicatedMemory& communicated;
  struct Noted {
    double* to;
    DType dtype;
  };
  static constexpr int64_t kResultBytes = 8;
  std::unique_ptr<DeviceBuffer> results;  // of a GPU: numbers set aside, in the order of `noted`
  std::vector<Noted> noted;
  StepResult totals;  // of the running step
  StepSums sums;      // what they are added up from
  double loss_seed = 0;

  bool overflowed = false;  // the running step's loss, for which the step is skipped
  double compute_seconds = 0;
  const std::vector<MicroBatch>* micro_batches = nullptr;  // of the running step
  bool carried = false;                                    // forwards of the step to come have run
  int first_slot = 0;  // of stash slots, which the running step's first micro-batch has
  int slot_shift = 0;  // the same of the batch whose phase runs

  Impl(Device& d, RankCommunicators c, std::vector<std::string> names)
      : device(d),
        communicators(c),
        input_names(std::move(names)),
        nodes(d, c),
        communicated(nodes.communicated()) {}

  std::byte* address(const BoundProgram& bound, const TensorAddress& at, int micro_batch) const {
    const bool on_host = at.region == ArenaRegion::kHost;
    return (on_host ? host_arena->data() : arena->data()) +
           bound.memory.absolute_offset(at, micro_batch + slot_shift);
  }

  // ---- persistent tensors --------------------------------------------------------------------

  const BoundTensor& persistent(const std::string& name) const {
    const auto& all = programs[loaded].persistent;
    const auto at = all.find(name);
    TRAINRT_CHECK(at != all.end(), "no persistent tensor '", name, "' on this rank");
    return at->second;
  }

  void write_constants(const BoundProgram& bound) {
    for (const auto& [name, tensor] : bound.persistent) {
      if (tensor.value->kind == ValueKind::kConstant) {
        const Tensor data = initial_value(*tensor.value);
        device.copy_to_device(address(bound, *tensor.at, 0), data.raw(), data.bytes());
      }
    }
  }

  bool same_layout(const BoundProgram& a, const BoundProgram& b) const {
    return std::equal(a.persistent.begin(),
                      a.persistent.end(),
                      b.persistent.begin(),
                      b.persistent.end(),
                      [](const auto& x, const auto& y) {
                        return x.first == y.first && x.second.at->offset == y.second.at->offset &&
                               x.second.value->type == y.second.value->type;
                      });
  }

  // Moves persistent tensors to where program `to` expects them. Happens when the step's size
  // changes, and only if the programs differ in accumulators or in constants made for a size.
  // Accumulators mean nothing between steps, and a smaller batch may have fewer shards of them.
  void switch_layout(size_t to) {
    const BoundProgram& from_program = programs[loaded];
    const BoundProgram& to_program = programs[to];
    if (to == loaded || same_layout(from_program, to_program)) {
      loaded = to;
      return;
    }
    std::vector<std::pair<const BoundTensor*, Tensor>> saved;
    for (const auto& [name, tensor] : from_program.persistent) {
      const auto target = to_program.persistent.find(name);
      const ValueKind kind = tensor.value->kind;
      if (kind != ValueKind::kConstant && kind != ValueKind::kGradient &&
          target != to_program.persistent.end()) {
        TRAINRT_CHECK(target->second.value->type == tensor.value->type,
                      "'",
                      name,
                      "' has another type in the program of another batch size");
        saved.emplace_back(&target->second, read(name));
      }
    }
    for (const auto& [tensor, data] : saved) {
      device.copy_to_device(address(to_program, *tensor->at, 0), data.raw(), data.bytes());
    }
    write_constants(to_program);
    loaded = to;
  }

  Tensor read(const std::string& name) const {
    const BoundTensor& tensor = persistent(name);
    Tensor copy(tensor.value->type.dtype, tensor.value->type.shape);
    device.copy_to_host(copy.raw(), address(programs[loaded], *tensor.at, 0), copy.bytes());
    return copy;
  }

  // ---- running -------------------------------------------------------------------------------

  double read_scalar(const BoundProgram& bound, const BoundTensor& tensor, int micro_batch) {
    communicated.await(address(bound, *tensor.at, micro_batch), tensor.value->type.bytes(), false);
    alignas(8) std::byte bytes[8];
    const DType dtype = tensor.value->type.dtype;
    copy_to_host(bytes, address(bound, *tensor.at, micro_batch), dtype_bytes(dtype));
    return scalar_of(dtype, bytes);
  }

  static double scalar_of(DType dtype, const std::byte* bytes) {
    return dispatch_numeric(dtype, [&](auto tag) {
      decltype(tag) value;
      std::memcpy(&value, bytes, sizeof(value));
      return static_cast<double>(value);
    });
  }

  void write_runtime_input(const BoundTensor& tensor,
                           void* to,
                           int micro_batch,
                           const StepFeed& feed) const {
    const std::string& name = tensor.value->name;
    // Not finite: nothing is updated.
    double value = overflowed ? std::nan("") : 1 / feed.loss_scale;
    if (name == runtime_input::kLearningRate) {
      value = feed.learning_rate;
    } else if (name == runtime_input::kStep) {
      value = static_cast<double>(feed.update + 1);
    } else if (name == runtime_input::kLossSeed) {
      value = loss_seed;
    } else if (name == kMicroBatchInput) {
      value = micro_batch;
    }
    dispatch_numeric(tensor.value->type.dtype, [&](auto tag) {
      const auto typed = static_cast<decltype(tag)>(value);
      device.copy_to_device(to, &typed, sizeof(typed));
    });
  }

  void write_feeds(const BoundProgram& bound,
                   const BoundPhase& phase,
                   int micro_batch,
                   const StepFeed& feed) {
    for (const BoundTensor& tensor : phase.feeds) {
      void* to = address(bound, *tensor.at, micro_batch);
      communicated.await(to, tensor.value->type.bytes(), true);
      if (tensor.feed < 0) {
        write_runtime_input(tensor, to, micro_batch, feed);
        continue;
      }
      TRAINRT_CHECK(micro_batch >= 0,
                    "a phase that runs once per step reads input '",
                    tensor.value->name,
                    "'");
      const Tensor& data =
          feed.inputs->at(static_cast<size_t>(micro_batch)).at(static_cast<size_t>(tensor.feed));
      TRAINRT_CHECK(data.bytes() == tensor.value->type.bytes(),
                    "input '",
                    tensor.value->name,
                    "' is fed with ",
                    shape_string(data.shape()),
                    ", wanted ",
                    shape_string(tensor.value->type.shape));
      feed.fetches_inputs ? device.copy(to, data.raw(), data.bytes())
                          : device.copy_to_device(to, data.raw(), data.bytes());
    }
  }

  // What a GPU was to receive is undefined when communication has failed.
  void synchronize() {
    device.synchronize();
    communicators.require_alive();
  }

  void copy_to_host(void* host, const void* from, int64_t bytes) const {
    device.copy_to_host(host, from, bytes);
    communicators.require_alive();
  }

  // ---- the step's sums --------------------------------------------------------------------------
  //
  // Reading from a GPU waits for it. So what phases add to the totals is set aside there, since its
  // place in the arena is soon another tensor's, and read when a total is needed.

  void note_result(const BoundProgram& bound,
                   const BoundTensor& tensor,
                   int micro_batch,
                   double& to) {
    if (results == nullptr) {
      to += read_scalar(bound, tensor, micro_batch);
      return;
    }
    const void* from = address(bound, *tensor.at, micro_batch);
    const int64_t bytes = tensor.value->type.bytes();
    communicated.await(from, bytes, false);
    TRAINRT_CHECK(static_cast<int64_t>(noted.size() + 1) * kResultBytes <= results->bytes());
    device.copy(results->data() + static_cast<int64_t>(noted.size()) * kResultBytes, from, bytes);
    noted.push_back({&to, tensor.value->type.dtype});
  }

  void collect_results() {
    if (noted.empty()) {
      return;
    }
    std::vector<std::byte> host(noted.size() * kResultBytes);
    copy_to_host(host.data(), results->data(), static_cast<int64_t>(host.size()));
    for (size_t i = 0; i < noted.size(); ++i) {
      *noted[i].to += scalar_of(noted[i].dtype, host.data() + i * kResultBytes);
    }
    noted.clear();
  }

  // What lies in stash slots is patched in.
  void set_addresses(const BoundProgram& bound, BoundPhase& phase, int micro_batch) const {
    for (BoundNode& node : phase.nodes) {
      for (const StashPatch& patch : node.patches) {
        std::byte* data = address(bound, *patch.at, micro_batch);
        if (patch.ref != nullptr) {
          patch.ref->data = data;
        } else {
          node.workspace = {data, node.workspace.size()};
        }
      }
    }
  }

  // CUDA loads a kernel's code when it is launched first, and waits then for all that the GPU has
  // to do: for ever, when that is a message to a peer which does the same. So all kernels run once,
  // on zeros, and are recorded, before ranks communicate; nor do peers wait while algorithms are
  // measured or kernels compiled.
  void make_kernels_ready() {
    for (BoundProgram& bound : programs) {
      write_constants(bound);
      bound.for_each_phase([&](BoundPhase& phase) {
        set_addresses(bound, phase, 0);
        for (const BoundTensor& feed : phase.feeds) {
          device.fill_zero(address(bound, *feed.at, 0), feed.value->type.bytes());
        }
        nodes.run_kernels_once(phase);
      });
      const std::vector<int>& slots = bound.memory.num_slots;
      const int most =
          slots.empty() ? 1 : std::max(1, *std::max_element(slots.begin(), slots.end()));
      bound.for_each_phase([&](BoundPhase& phase) {
        for (int slot = 0; slot < most; ++slot) {
          set_addresses(bound, phase, slot);
          nodes.record_kernels(phase, slot == 0 || bound.program->runs_on());
        }
      });
    }
    device.synchronize();
    device.fill_zero(arena->data(), arena->bytes());
    std::memset(host_arena->data(), 0, static_cast<size_t>(host_arena->bytes()));
  }

  // `micro_batch` is -1 for phases that run once per step.
  void run_phase(const BoundProgram& bound,
                 BoundPhase& phase,
                 int micro_batch,
                 const StepFeed& feed) {
    nodes.note_feeds(phase, [&] { write_feeds(bound, phase, micro_batch, feed); });
    StepContext step;
    step.seed = feed.seed;
    step.step = static_cast<uint64_t>(feed.step);
    step.first_micro_batch = micro_batch <= 0;
    if (micro_batch >= 0) {
      step.first_sample =
          static_cast<uint64_t>(micro_batches->at(static_cast<size_t>(micro_batch)).first_sample);
    }
    set_addresses(bound, phase, micro_batch);
    for (Segment& segment : phase.segments) {
      nodes.run(phase, segment, step);
      if (segment.end == phase.grad_norm_node + 1) {
        totals.grad_norm = read_scalar(bound, phase.grad_norm, micro_batch);
        totals.has_grad_norm = true;
        totals.skipped = feed.skip_overflow && !std::isfinite(totals.grad_norm);
        if (!totals.skipped) {
          require_finite(totals.grad_norm, "the norm of the gradient", feed.step, feed.trains);
        }
      }
    }
    for (const BoundUpdate& update : phase.updates) {
      void* to = address(bound, *update.target.at, 0);
      const void* from = address(bound, *update.source.at, micro_batch);
      const int64_t bytes = update.target.value->type.bytes();
      communicated.await(to, bytes, true);
      communicated.await(from, bytes, false);
      device.copy(to, from, bytes);
    }
    const auto add = [&](const BoundTensor& tensor, std::vector<double>& to) {
      if (tensor.value != nullptr) {
        const MicroBatch& at = micro_batches->at(static_cast<size_t>(micro_batch));
        note_result(bound, tensor, micro_batch, to.at(static_cast<size_t>(at.shard)));
      }
    };
    add(phase.loss_sum, sums.loss);
    add(phase.item_count, sums.items);
    add(phase.correct, sums.correct);
  }

  StepResult run_step(int program, const StepFeed& feed);

  // The loss of all ranks, before anything is changed because of it. Where float16 may overflow,
  // one that is not finite is for the loss scale to answer, as a gradient is; every rank knows it.
  void combine(const BoundProgram& bound, const StepFeed& feed) {
    collect_results();
    const Program& program = *bound.program;
    nodes.time_communication([&] {
      if (program.runs_on()) {
        gather_step(totals, sums, program.coordinates, communicators);
      } else {
        combine_step(totals, sums, program.coordinates, communicators);
      }
    });
    overflowed = feed.skip_overflow && !std::isfinite(totals.loss());
    if (!feed.skip_overflow && (!program.runs_on() || program.rank == 0)) {
      require_finite(totals.loss(), "the loss", feed.step, feed.trains);
    }
  }

  // Which of the program's rows the step goes by, and what it leaves in flight.
  StepWindow begin_window(const Program& program, const StepFeed& feed) {
    TRAINRT_CHECK(program.runs_on() || feed.next == nullptr);
    TRAINRT_CHECK(!program.runs_on() || !feed.skip_overflow);
    const StepWindow window = carried     ? feed.next ? StepWindow::kSteady : StepWindow::kDrain
                              : feed.next ? StepWindow::kFill
                                          : StepWindow::kWhole;
    first_slot = carried ? first_slot : 0;
    carried = feed.next != nullptr;
    return window;
  }

  // Micro-batches have stash slots in turn, over all steps that go over into each other.
  void end_window(const BoundProgram& bound) {
    const int count = static_cast<int>(micro_batches->size());
    if (!bound.memory.num_slots.empty() && bound.memory.num_slots[0] > 0) {
      first_slot = (first_slot + count) % bound.memory.num_slots[0];
    }
  }

  void run_cell(BoundProgram& bound, const Cell& cell, const StepFeed& feed) {
    const int count = static_cast<int>(micro_batches->size());
    slot_shift = first_slot + (cell.ahead ? count : 0);
    for (BoundPhase* phase : bound.phases_of(cell, feed.work)) {
      nodes.begin_cell(cell);
      TRAINRT_CHECK(!cell.ahead ||
                    (phase->loss_sum.value == nullptr && phase->item_count.value == nullptr &&
                     phase->correct.value == nullptr));
      run_phase(bound, *phase, cell.micro_batch, cell.ahead ? *feed.next : feed);
      nodes.end_cell();
    }
    slot_shift = 0;
  }

  void count_items(const StepFeed& feed) {
    collect_results();
    // A device cannot throw in the middle of a count: it answers NaN to a label that is no class.
    TRAINRT_REQUIRE(
        std::none_of(
            sums.items.begin(), sums.items.end(), [](double items) { return std::isnan(items); }),
        kInvalidArgument,
        "step ",
        feed.step + 1,
        ": a class label lies outside of the classes that the model's output has");
    nodes.time_communication(
        [&] { totals.item_count = trainrt::count_items(sums, communicators); });
    loss_seed = totals.item_count > 0 ? feed.loss_scale / totals.item_count : 0;
  }
};

Executor::Executor(Device& device,
                   RankCommunicators communicators,
                   std::vector<std::string> input_names)
    : impl_(std::make_unique<Impl>(device, communicators, std::move(input_names))) {}

Executor::~Executor() = default;

int Executor::add_program(std::shared_ptr<const Program> program, MemoryPlan memory) {
  TRAINRT_CHECK(impl_->arena == nullptr, "programs are added before load()");
  impl_->programs.push_back({std::move(program), std::move(memory), {}, {}});
  return static_cast<int>(impl_->programs.size()) - 1;
}

void Executor::load() {
  impl_->device.attach_thread();
  impl_->arena = impl_->device.allocate(arena_bytes());
  impl_->device.fill_zero(impl_->arena->data(), impl_->arena->bytes());
  impl_->host_arena = impl_->device.allocate_host(host_bytes());
  if (impl_->device.context().spec().backend == Backend::kCuda) {
    size_t most_cells = 1;
    for (const BoundProgram& bound : impl_->programs) {
      most_cells = std::max(most_cells, bound.program->cells.size());
    }
    constexpr int64_t kTotals = 3;  // that a phase may add to
    impl_->results =
        impl_->device.allocate(kTotals * Impl::kResultBytes * static_cast<int64_t>(most_cells));
  }
  for (BoundProgram& bound : impl_->programs) {
    bind_persistent(bound);
    bind_program(bound, impl_->arena->data(), impl_->host_arena->data(), impl_->input_names);
  }
  if (!impl_->communicators.on_device.empty()) {
    impl_->make_kernels_ready();
    impl_->communicators.world->barrier();  // nobody waits on a GPU before all are ready
  }
  for (const auto& [group, communicator] : impl_->communicators.on_device) {
    std::vector<Message> messages;
    for (BoundProgram& bound : impl_->programs) {
      const std::vector<Message> more = messages_of(bound, group);
      messages.insert(messages.end(), more.begin(), more.end());
    }
    communicator->expect_messages(messages);
  }
  impl_->write_constants(impl_->programs.at(0));
  impl_->device.synchronize();
}

// A rank that fails gives up at once what its GPU waits for: peers that never come would keep it
// from freeing its memory.
StepResult Executor::run_step(int program, const StepFeed& feed) {
  try {
    return impl_->run_step(program, feed);
  } catch (const std::exception& error) {
    impl_->communicators.abort(error.what());
    throw;
  }
}

StepResult Executor::Impl::run_step(int program, const StepFeed& feed) {
  const StepTrace::Clock::time_point begin = StepTrace::Clock::now();
  nodes.reset_communicating();
  TRAINRT_CHECK(!carried || loaded == static_cast<size_t>(program));
  switch_layout(static_cast<size_t>(program));
  BoundProgram& bound = programs[static_cast<size_t>(program)];
  const StepWindow window = begin_window(*bound.program, feed);
  const std::vector<Cell>& cells = feed.work ? feed.work->cells : bound.program->row(window);
  micro_batches = feed.work ? &feed.work->micro_batches : &bound.program->micro_batches;
  const std::optional<PhaseKind> changes = updating_phase(*bound.program);
  totals = StepResult{};
  sums = StepSums(bound.program->num_shards);
  noted.clear();
  overflowed = false;
  for (const ProgramVariant& variant : bound.program->variants) {
    totals.has_correct = totals.has_correct || variant.correct != kNoValue;
  }
  bool counted = false;   // N is known
  bool combined = false;  // and the loss of all ranks
  for (const Cell& cell : cells) {
    if (!counted && cell.phase != PhaseKind::kCount) {
      count_items(feed);
      counted = true;
    }
    if (!combined && cell.phase == changes) {
      combine(bound, feed);
      combined = true;
    }
    run_cell(bound, cell, feed);
  }
  end_window(bound);
  if (!counted) {
    count_items(feed);  // a rank without a share of the samples still takes part
  }
  if (!combined) {
    combine(bound, feed);
  }
  collect_results();
  communicated.await_all();
  synchronize();
  compute_seconds =
      std::chrono::duration<double>(StepTrace::Clock::now() - begin - nodes.communicating())
          .count();
  return totals;
}

void Executor::replace_programs(const std::vector<std::shared_ptr<const Program>>& programs,
                                const std::vector<MemoryPlan>& memories) {
  std::vector<std::pair<std::string, Tensor>> contents;
  for (const Value* value : persistent_values()) {
    contents.emplace_back(value->name, read(value->name));
  }
  // The old arena goes before the new one comes: together they might not fit.
  impl_->arena.reset();
  impl_->host_arena.reset();
  impl_->programs.clear();
  impl_->loaded = 0;
  for (size_t i = 0; i < programs.size(); ++i) {
    add_program(programs[i], memories[i]);
  }
  load();
  for (const auto& [name, tensor] : contents) {
    write(name, tensor);
  }
}

double Executor::compute_seconds() const {
  return impl_->compute_seconds;
}

void Executor::set_trace(StepTrace* trace) {
  impl_->nodes.set_trace(trace);
}

Tensor Executor::read(const std::string& name) const {
  Tensor copy = impl_->read(name);
  impl_->communicators.require_alive();
  return copy;
}

Tensor Executor::read_after_failure(const std::string& name) const {
  return impl_->read(name);
}

void Executor::write(const std::string& name, const Tensor& tensor) {
  const BoundTensor& target = impl_->persistent(name);
  const TensorType& type = target.value->type;
  TRAINRT_REQUIRE(tensor.dtype() == type.dtype && tensor.shape() == type.shape,
                  kInvalidArgument,
                  "tensor '",
                  name,
                  "' is ",
                  dtype_name(tensor.dtype()),
                  shape_string(tensor.shape()),
                  ", wanted ",
                  dtype_name(type.dtype),
                  shape_string(type.shape));
  impl_->device.copy_to_device(
      impl_->address(impl_->programs[impl_->loaded], *target.at, 0), tensor.raw(), tensor.bytes());
}

std::vector<const Value*> Executor::persistent_values() const {
  std::vector<const Value*> values;
  std::set<std::string> known;
  for (const ProgramVariant& variant : impl_->programs.at(0).program->variants) {
    for (const Value& value : variant.graph.values()) {
      if (is_persistent(value.kind) && value.kind != ValueKind::kConstant &&
          value.kind != ValueKind::kGradient && known.insert(value.name).second) {
        values.push_back(&value);
      }
    }
  }
  return values;
}

int64_t Executor::arena_bytes() const {
  int64_t bytes = 0;
  for (const BoundProgram& bound : impl_->programs) {
    bytes = std::max(bytes, bound.memory.arena_bytes);
  }
  return bytes;
}

int64_t Executor::host_bytes() const {
  int64_t bytes = 0;
  for (const BoundProgram& bound : impl_->programs) {
    bytes = std::max(bytes, bound.memory.host_bytes);
  }
  return bytes;
}

}  // namespace trainrt
