// Walks cells in schedule order. Before the first step every node is bound: its kernel made, its
// inputs and outputs resolved to addresses. What lies in a stash slot moves with the micro-batch in
// flight, so those few addresses are patched when a phase starts; nothing is allocated in a step.
//
// The step's normalisation: item counts of all micro-batches (kCount cells) are summed over the
// data ranks before the first backward, and 1/N is fed as the backward's seed. Loss and gradient
// norm are checked before the update's first node that writes a parameter could run.
#include "runtime/executor.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <thread>
#include <unordered_map>

#include "graph/evaluator.h"
#include "graph/op_def.h"
#include "runtime/communication_node.h"

namespace trainrt {

Communicator& RankCommunicators::group(const std::string& name) const {
  Communicator* found = nullptr;
  if (name == "data") {
    found = data;
  } else if (name == "tensor") {
    found = tensor;
  } else if (name == "pipeline") {
    found = pipeline;
  } else if (name == "world") {
    found = world;
  }
  TRAINRT_CHECK(found != nullptr, "no communicator for group '", name, "' on this rank");
  return *found;
}

namespace {

// One reference of a bound node into a stash slot.
struct StashPatch {
  TensorRef* ref = nullptr;
  int64_t offset = 0;  // from the slot's start
};

struct BoundNode {
  NodeId id = kNoNode;
  const Node* node = nullptr;
  Kernel kernel;  // empty for communication
  std::vector<TensorRef> inputs;
  std::vector<TensorRef> outputs;
  std::span<std::byte> workspace;
  std::vector<StashPatch> patches;
};

// A tensor the executor itself writes or reads, before or after a phase.
struct BoundTensor {
  const Value* value = nullptr;
  TensorRef ref;
  bool in_stash = false;
  int64_t stash_offset = 0;
  int feed = -1;  // index into StepFeed::inputs; -1: a runtime input
};

struct BoundUpdate {
  BoundTensor target;
  BoundTensor source;
};

struct BoundPhase {
  PhaseKind kind = PhaseKind::kForward;
  int virtual_stage = 0;
  int local_stage = 0;  // index of the virtual stage on this rank
  std::vector<BoundTensor> feeds;
  std::vector<BoundNode> nodes;
  std::vector<BoundUpdate> updates;
  size_t check_after = SIZE_MAX;  // the node after which the gradient norm is known
  bool has_loss = false;          // computes the micro-batch's loss, count, correct items
  bool has_count = false;
  bool has_correct = false;
};

struct BoundVariant {
  const ProgramVariant* variant = nullptr;
  std::vector<BoundPhase> phases;
  BoundTensor loss_sum, item_count, grad_norm, correct;
};

struct BoundProgram {
  std::shared_ptr<const Program> program;
  MemoryPlan memory;
  std::vector<BoundVariant> variants;
};

bool is_runtime_input(const std::string& name) {
  return name == runtime_input::kLearningRate || name == runtime_input::kStep ||
         name == runtime_input::kLossSeed || name == runtime_input::kGradScale;
}

// Virtual stages of a rank in ascending order; their positions index MemoryPlan::slot_bytes.
std::vector<int> local_stages(const ProgramVariant& variant) {
  std::vector<int> stages;
  for (const Phase& phase : variant.phases) {
    stages.push_back(phase.virtual_stage);
  }
  std::sort(stages.begin(), stages.end());
  stages.erase(std::unique(stages.begin(), stages.end()), stages.end());
  return stages;
}

int phase_order(PhaseKind kind) {
  return static_cast<int>(kind);
}

}  // namespace

struct Executor::Impl {
  Device& device;
  RankCommunicators communicators;
  std::vector<std::string> input_names;
  std::vector<BoundProgram> programs;
  std::unique_ptr<DeviceBuffer> arena;
  std::map<std::string, TensorRef> persistent;  // by name, in the first program
  StepResult totals;                            // of the running step
  double loss_seed = 0;
  std::vector<std::byte> scratch;  // for updates that are not in place

  Impl(Device& d, RankCommunicators c, std::vector<std::string> names)
      : device(d), communicators(c), input_names(std::move(names)) {}

  int64_t arena_bytes() const {
    int64_t bytes = 0;
    for (const BoundProgram& program : programs) {
      bytes = std::max(bytes, program.memory.arena_bytes);
    }
    return bytes;
  }

  // ---- binding -------------------------------------------------------------------------------

  std::byte* address(const MemoryPlan& memory, const TensorAddress& at) const {
    switch (at.region) {
      case ArenaRegion::kPersistent:
        return arena->data() + at.offset;
      case ArenaRegion::kTransient:
        return arena->data() + memory.transient_base + at.offset;
      default:
        return nullptr;  // a stash slot is known when the phase starts
    }
  }

  BoundTensor bind_tensor(const BoundProgram& bound, size_t variant, ValueId id) const {
    BoundTensor tensor;
    if (id == kNoValue) {
      return tensor;
    }
    const Value& value = bound.program->variants[variant].graph.value(id);
    const TensorAddress& at = bound.memory.variants[variant].values[static_cast<size_t>(id)];
    TRAINRT_CHECK(at.region != ArenaRegion::kNone || value.type.bytes() == 0,
                  "value '",
                  value.name,
                  "' has no address");
    tensor.value = &value;
    tensor.ref = {address(bound.memory, at), &value.type};
    tensor.in_stash = at.region == ArenaRegion::kStash;
    tensor.stash_offset = at.offset;
    return tensor;
  }

  BoundNode bind_node(const BoundProgram& bound, size_t variant, NodeId id) const {
    const Graph& graph = bound.program->variants[variant].graph;
    BoundNode result;
    result.id = id;
    result.node = &graph.node(id);
    if (!is_communication(result.node->op_type)) {
      result.kernel = make_kernel(OpContext(graph, *result.node), bound.program->device);
    }
    const auto bind_all = [&](const std::vector<ValueId>& ids, std::vector<TensorRef>& refs) {
      refs.resize(ids.size());
      for (size_t i = 0; i < ids.size(); ++i) {
        const BoundTensor tensor = bind_tensor(bound, variant, ids[i]);
        refs[i] = tensor.ref;
        if (tensor.in_stash) {
          result.patches.push_back({&refs[i], tensor.stash_offset});
        }
      }
    };
    bind_all(result.node->inputs, result.inputs);
    bind_all(result.node->outputs, result.outputs);
    const TensorAddress& at = bound.memory.variants[variant].workspaces[static_cast<size_t>(id)];
    if (at.bytes > 0) {
      std::byte* data = address(bound.memory, at);
      TRAINRT_CHECK(data != nullptr, "workspace of '", result.node->name, "' has no address");
      result.workspace = {data, static_cast<size_t>(at.bytes)};
    }
    return result;
  }

  // Inputs are written when the phase that reads them first starts, and again for a later phase
  // unless they were kept in the stash.
  void bind_feeds(const BoundProgram& bound,
                  size_t variant,
                  const Phase& phase,
                  BoundPhase& result) const {
    const ProgramVariant& source = bound.program->variants[variant];
    const auto reads = [&](const Phase& p, ValueId id) {
      return std::any_of(p.nodes.begin(), p.nodes.end(), [&](NodeId n) {
        const std::vector<ValueId>& in = source.graph.node(n).inputs;
        return std::find(in.begin(), in.end(), id) != in.end();
      });
    };
    for (const ValueId id : source.graph.values_of_kind(ValueKind::kInput)) {
      if (!reads(phase, id)) {
        continue;
      }
      BoundTensor tensor = bind_tensor(bound, variant, id);
      const bool kept =
          tensor.in_stash &&
          std::any_of(source.phases.begin(), source.phases.end(), [&](const Phase& earlier) {
            return earlier.virtual_stage == phase.virtual_stage &&
                   earlier.kind != PhaseKind::kCount &&
                   phase_order(earlier.kind) < phase_order(phase.kind) && reads(earlier, id);
          });
      if (kept) {
        continue;
      }
      const std::string& name = tensor.value->name;
      if (!is_runtime_input(name)) {
        const auto at = std::find(input_names.begin(), input_names.end(), name);
        TRAINRT_CHECK(at != input_names.end(), "nobody feeds input '", name, "'");
        tensor.feed = static_cast<int>(at - input_names.begin());
      }
      result.feeds.push_back(tensor);
    }
  }

  void bind_updates(const BoundProgram& bound,
                    size_t variant,
                    const Phase& phase,
                    BoundPhase& result) const {
    const Graph& graph = bound.program->variants[variant].graph;
    for (const StateUpdate& update : graph.updates()) {
      const NodeId producer = graph.value(update.new_value).producer;
      if (std::find(phase.nodes.begin(), phase.nodes.end(), producer) == phase.nodes.end()) {
        continue;
      }
      BoundUpdate bound_update{bind_tensor(bound, variant, update.target),
                               bind_tensor(bound, variant, update.new_value)};
      if (bound_update.target.ref.data != bound_update.source.ref.data ||
          bound_update.source.in_stash) {
        result.updates.push_back(bound_update);
      }
    }
  }

  void bind_variant(BoundProgram& bound, size_t variant) const {
    const ProgramVariant& source = bound.program->variants[variant];
    BoundVariant& result = bound.variants[variant];
    const std::vector<int> stages = local_stages(source);
    result.variant = &source;
    result.phases.resize(source.phases.size());
    for (size_t i = 0; i < source.phases.size(); ++i) {
      const Phase& phase = source.phases[i];
      BoundPhase& to = result.phases[i];
      to.kind = phase.kind;
      to.virtual_stage = phase.virtual_stage;
      to.local_stage = static_cast<int>(
          std::find(stages.begin(), stages.end(), phase.virtual_stage) - stages.begin());
      to.nodes.reserve(phase.nodes.size());  // patches point into the elements
      for (const NodeId id : phase.nodes) {
        to.nodes.push_back(bind_node(bound, variant, id));
        const std::vector<ValueId>& outputs = source.graph.node(id).outputs;
        const auto makes = [&](ValueId value) {
          return value != kNoValue &&
                 std::find(outputs.begin(), outputs.end(), value) != outputs.end();
        };
        to.has_loss = to.has_loss || makes(source.loss_sum);
        to.has_count = to.has_count || makes(source.item_count);
        to.has_correct = to.has_correct || makes(source.correct);
        if (makes(source.grad_norm)) {
          to.check_after = to.nodes.size() - 1;
        }
      }
      bind_feeds(bound, variant, phase, to);
      bind_updates(bound, variant, phase, to);
    }
    result.loss_sum = bind_tensor(bound, variant, source.loss_sum);
    result.item_count = bind_tensor(bound, variant, source.item_count);
    result.grad_norm = bind_tensor(bound, variant, source.grad_norm);
    result.correct = bind_tensor(bound, variant, source.correct);
  }

  // Fills constants, and records where the persistent tensors are: at one place in all programs.
  void bind_persistent(const BoundProgram& bound, size_t variant) {
    const Graph& graph = bound.program->variants[variant].graph;
    for (ValueId id = 0; id < graph.num_values(); ++id) {
      const Value& value = graph.value(id);
      if (!is_persistent(value.kind)) {
        continue;
      }
      const BoundTensor tensor = bind_tensor(bound, variant, id);
      const auto [at, added] = persistent.emplace(value.name, tensor.ref);
      TRAINRT_CHECK(at->second.data == tensor.ref.data && *at->second.type == value.type,
                    "persistent tensor '",
                    value.name,
                    "' lies at two addresses");
      if (added && value.kind == ValueKind::kConstant) {
        const Tensor data = initial_value(value);
        device.copy_to_device(tensor.ref.data, data.raw(), data.bytes());
      }
    }
  }

  // ---- running -------------------------------------------------------------------------------

  double read_scalar(const BoundTensor& tensor, std::byte* slot) const {
    alignas(16) std::byte bytes[16];
    const DType dtype = tensor.value->type.dtype;
    const void* data = tensor.in_stash ? slot + tensor.stash_offset : tensor.ref.data;
    device.copy_to_host(bytes, data, dtype_bytes(dtype));
    switch (dtype) {
      case DType::kFloat64: {
        double value;
        std::memcpy(&value, bytes, sizeof(value));
        return value;
      }
      case DType::kFloat32: {
        float value;
        std::memcpy(&value, bytes, sizeof(value));
        return value;
      }
      case DType::kInt64: {
        int64_t value;
        std::memcpy(&value, bytes, sizeof(value));
        return static_cast<double>(value);
      }
      default:
        TRAINRT_FAIL(kInternal,
                     "'",
                     tensor.value->name,
                     "' is ",
                     dtype_name(dtype),
                     ", which no step result is");
    }
  }

  void write_runtime_input(const BoundTensor& tensor, void* to, const StepFeed& feed) const {
    const std::string& name = tensor.value->name;
    double value = 1 / feed.loss_scale;
    if (name == runtime_input::kLearningRate) {
      value = feed.learning_rate;
    } else if (name == runtime_input::kStep) {
      value = static_cast<double>(feed.step + 1);
    } else if (name == runtime_input::kLossSeed) {
      value = loss_seed;
    }
    dispatch_numeric(tensor.value->type.dtype, [&](auto tag) {
      const decltype(tag) typed = static_cast<decltype(tag)>(value);
      device.copy_to_device(to, &typed, sizeof(typed));
    });
  }

  void run_node(BoundNode& node, const StepContext& step) {
    if (!node.kernel) {
      device.synchronize();
      run_communication_node(*node.node, node.inputs, node.outputs, node.workspace, communicators);
      return;
    }
    const double speed = device.speed();
    const auto start =
        speed < 1 ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
    KernelContext context(
        *node.node, node.inputs, node.outputs, node.workspace, device.context(), step);
    try {
      node.kernel(context);
    } catch (Error& error) {
      error.add_context(concat("in node '", node.node->name, "' (", node.node->op_type, ")"));
      throw;
    }
    if (speed < 1) {
      const auto elapsed = std::chrono::steady_clock::now() - start;
      std::this_thread::sleep_for(elapsed * (1 / speed - 1));
    }
  }

  // `micro_batch` is -1 for phases that run once per step.
  void run_phase(const BoundProgram& bound,
                 BoundVariant& variant,
                 BoundPhase& phase,
                 int micro_batch,
                 const StepFeed& feed) {
    const MemoryPlan& memory = bound.memory;
    std::byte* slot = nullptr;
    const size_t stage = static_cast<size_t>(phase.local_stage);
    if (stage < memory.slot_bytes.size() && memory.num_slots[stage] > 0) {
      const int in_slot = std::max(0, micro_batch) % memory.num_slots[stage];
      slot = arena->data() + memory.slot_base[stage] + in_slot * memory.slot_bytes[stage];
    }
    for (const BoundTensor& tensor : phase.feeds) {
      void* to = tensor.in_stash ? slot + tensor.stash_offset : tensor.ref.data;
      if (tensor.feed < 0) {
        write_runtime_input(tensor, to, feed);
        continue;
      }
      TRAINRT_CHECK(micro_batch >= 0,
                    "a phase that runs once per step reads input '",
                    tensor.value->name,
                    "'");
      const Tensor& data =
          (*feed.inputs)[static_cast<size_t>(micro_batch)][static_cast<size_t>(tensor.feed)];
      TRAINRT_CHECK(data.bytes() == tensor.value->type.bytes(),
                    "input '",
                    tensor.value->name,
                    "' is fed with ",
                    shape_string(data.shape()),
                    ", wanted ",
                    shape_string(tensor.value->type.shape));
      device.copy_to_device(to, data.raw(), data.bytes());
    }
    StepContext step;
    step.seed = feed.seed;
    step.step = static_cast<uint64_t>(feed.step);
    step.first_micro_batch = micro_batch <= 0;
    if (micro_batch >= 0) {
      step.first_sample = static_cast<uint64_t>(
          bound.program->micro_batches[static_cast<size_t>(micro_batch)].first_sample);
    }
    for (size_t i = 0; i < phase.nodes.size(); ++i) {
      BoundNode& node = phase.nodes[i];
      for (const StashPatch& patch : node.patches) {
        patch.ref->data = slot + patch.offset;
      }
      run_node(node, step);
      if (i == phase.check_after) {
        check_grad_norm(variant, slot, feed);
      }
    }
    for (const BoundUpdate& update : phase.updates) {
      const void* from =
          update.source.in_stash ? slot + update.source.stash_offset : update.source.ref.data;
      copy_on_device(update.target.ref.data, from, update.target.value->type.bytes());
    }
    collect(variant, phase, slot);
  }

  void copy_on_device(void* to, const void* from, int64_t bytes) {
    scratch.resize(std::max(scratch.size(), static_cast<size_t>(bytes)));
    device.copy_to_host(scratch.data(), from, bytes);
    device.copy_to_device(to, scratch.data(), bytes);
  }

  void collect(const BoundVariant& variant, const BoundPhase& phase, std::byte* slot) {
    if (phase.has_count) {
      totals.item_count += read_scalar(variant.item_count, slot);
    }
    if (phase.has_loss) {
      totals.loss_sum += read_scalar(variant.loss_sum, slot);
    }
    if (phase.has_correct) {
      totals.correct += read_scalar(variant.correct, slot);
    }
  }

  void check_grad_norm(const BoundVariant& variant, std::byte* slot, const StepFeed& feed) {
    totals.grad_norm = read_scalar(variant.grad_norm, slot);
    totals.has_grad_norm = true;
    TRAINRT_REQUIRE(std::isfinite(totals.grad_norm),
                    kNonFinite,
                    "step ",
                    feed.step + 1,
                    ": the gradient is not finite (its norm is ",
                    totals.grad_norm,
                    "); no parameter was changed. Try a smaller --lr or --clip-norm");
  }
};

Executor::Executor(Device& device,
                   RankCommunicators communicators,
                   std::vector<std::string> input_names)
    : impl_(std::make_unique<Impl>(device, communicators, std::move(input_names))) {}

Executor::~Executor() = default;

int Executor::add_program(std::shared_ptr<const Program> program, MemoryPlan memory) {
  TRAINRT_CHECK(impl_->arena == nullptr, "programs are added before load()");
  impl_->programs.push_back({std::move(program), std::move(memory), {}});
  return static_cast<int>(impl_->programs.size()) - 1;
}

void Executor::load() {
  impl_->device.attach_thread();
  impl_->arena = impl_->device.allocate(impl_->arena_bytes());
  impl_->device.fill_zero(impl_->arena->data(), impl_->arena->bytes());
  for (BoundProgram& bound : impl_->programs) {
    bound.variants.resize(bound.program->variants.size());
    for (size_t v = 0; v < bound.variants.size(); ++v) {
      impl_->bind_persistent(bound, v);
      impl_->bind_variant(bound, v);
    }
  }
  impl_->device.synchronize();
}

StepResult Executor::run_step(int program, const StepFeed& feed) {
  Impl& impl = *impl_;
  BoundProgram& bound = impl.programs.at(static_cast<size_t>(program));
  const std::vector<MicroBatch>& micro_batches = bound.program->micro_batches;
  impl.totals = StepResult{};
  bool counted = false;   // N is known
  bool combined = false;  // the loss of all ranks is known
  for (const Cell& cell : bound.program->cells) {
    const bool starts_backward =
        cell.phase != PhaseKind::kCount && cell.phase != PhaseKind::kGather;
    if (!counted && starts_backward) {
      impl.totals.item_count = sum_over_data_ranks(impl.totals.item_count, impl.communicators);
      const double n = impl.totals.item_count;
      impl.loss_seed = n > 0 ? feed.loss_scale / n : 0;
      counted = true;
    }
    if (!combined && cell.phase == PhaseKind::kUpdate) {
      combine_step(impl.totals, bound.program->coordinates, impl.communicators);
      combined = true;
      TRAINRT_REQUIRE(std::isfinite(impl.totals.loss_sum),
                      kNonFinite,
                      "step ",
                      feed.step + 1,
                      ": the loss is ",
                      impl.totals.loss(),
                      "; no parameter was changed. Look for bad values in the data, or try a "
                      "smaller --lr or --clip-norm");
    }
    // A cell without a micro-batch runs once, except the count, which covers them all.
    const bool every = cell.phase == PhaseKind::kCount && cell.micro_batch < 0;
    const int first = every ? 0 : cell.micro_batch;
    const int last = every ? static_cast<int>(micro_batches.size()) - 1 : cell.micro_batch;
    for (int m = first; m <= last; ++m) {
      const size_t v =
          m < 0 ? 0 : static_cast<size_t>(micro_batches[static_cast<size_t>(m)].variant);
      for (BoundPhase& phase : bound.variants[v].phases) {
        if (phase.kind == cell.phase && phase.virtual_stage == cell.virtual_stage) {
          impl.run_phase(bound, bound.variants[v], phase, m, feed);
        }
      }
    }
  }
  if (!combined) {
    combine_step(impl.totals, bound.program->coordinates, impl.communicators);
  }
  impl.totals.has_correct = bound.program->variants[0].correct != kNoValue;
  impl.device.synchronize();
  return impl.totals;
}

Tensor Executor::read(const std::string& name) const {
  const auto at = impl_->persistent.find(name);
  TRAINRT_CHECK(at != impl_->persistent.end(), "no persistent tensor '", name, "' on this rank");
  Tensor tensor(at->second.type->dtype, at->second.type->shape);
  impl_->device.copy_to_host(tensor.raw(), at->second.data, tensor.bytes());
  return tensor;
}

void Executor::write(const std::string& name, const Tensor& tensor) {
  const auto at = impl_->persistent.find(name);
  TRAINRT_CHECK(at != impl_->persistent.end(), "no persistent tensor '", name, "' on this rank");
  TRAINRT_REQUIRE(
      tensor.dtype() == at->second.type->dtype && tensor.shape() == at->second.type->shape,
      kInvalidArgument,
      "tensor '",
      name,
      "' is ",
      dtype_name(tensor.dtype()),
      shape_string(tensor.shape()),
      ", wanted ",
      dtype_name(at->second.type->dtype),
      shape_string(at->second.type->shape));
  impl_->device.copy_to_device(at->second.data, tensor.raw(), tensor.bytes());
}

std::vector<const Value*> Executor::persistent_values() const {
  std::vector<const Value*> values;
  for (const Value& value : impl_->programs.at(0).program->variants.at(0).graph.values()) {
    if (is_persistent(value.kind) && value.kind != ValueKind::kConstant) {
      values.push_back(&value);
    }
  }
  return values;
}

int64_t Executor::arena_bytes() const {
  return impl_->arena_bytes();
}

}  // namespace trainrt
