// Each figure is the best of several repetitions: noise only ever adds time. With several devices
// every repetition starts together on all of them, and the figure is the mean of their best.
#include "runtime/profiler.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "graph/graph_builder.h"
#include "graph/op_def.h"
#include "runtime/call_times.h"
#include "runtime/machine.h"

namespace trainrt {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRepetitions = 4;
constexpr int kFigures = 25;  // that take so much time each, about

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// One operator with tensors of its own, ready to run again and again.
class SingleNode {
 public:
  SingleNode(Device& device,
             const std::string& op_type,
             const TensorTypes& inputs,
             const Attributes& attributes)
      : device_(device) {
    GraphBuilder builder(graph_);
    std::vector<ValueId> ids;
    for (size_t i = 0; i < inputs.size(); ++i) {
      ids.push_back(graph_.add_input(concat("x", i), inputs[i]));
    }
    node_ = graph_.value(builder.op(op_type, ids, attributes)).producer;
    const Node& node = graph_.node(node_);
    const OpContext context(graph_, node);
    const DeviceSpec& spec = device.context().spec();
    kernel_ = make_kernel(context, spec);
    workspace_ = device.allocate(std::max<int64_t>(64, workspace_bytes(context, spec)));
    for (const ValueId id : ids) {
      inputs_.push_back(reference(id));
    }
    for (const ValueId id : node.outputs) {
      outputs_.push_back(id == kNoValue ? TensorRef{} : reference(id));
    }
    cost_ = get_op(op_type).cost(context);
  }

  const Cost& cost() const { return cost_; }

  void run() {
    KernelContext context(graph_.node(node_),
                          inputs_,
                          outputs_,
                          {workspace_->data(), static_cast<size_t>(workspace_->bytes())},
                          device_.context(),
                          StepContext{});
    kernel_(context);
  }

 private:
  TensorRef reference(ValueId id) {
    const TensorType& type = graph_.value(id).type;
    buffers_.push_back(device_.allocate(std::max<int64_t>(64, type.bytes())));
    device_.fill_zero(buffers_.back()->data(), buffers_.back()->bytes());
    return {buffers_.back()->data(), &type};
  }

  Device& device_;
  Graph graph_;
  NodeId node_ = kNoNode;
  Kernel kernel_;
  Cost cost_;
  std::unique_ptr<DeviceBuffer> workspace_;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
  std::vector<TensorRef> inputs_, outputs_;
};

// What one device measures. `world` is null for a single device.
class DeviceProfiler {
 public:
  DeviceProfiler(Device& device, Communicator* world, double seconds)
      : device_(device), world_(world), least_seconds_(seconds / kFigures / kRepetitions) {}

  void measure(MachineProfile& profile) {
    device_.attach_thread();
    profile.flops["fp32"] = fastest_product(DType::kFloat32);
    profile.flops["fp64"] = fastest_product(DType::kFloat64);
    profile.flops["bf16"] = fastest_product(DType::kBFloat16);
    const double ordinary = layer_products();
    profile.flops["fp32"] = std::max(profile.flops["fp32"], ordinary);
    profile.matmul_efficiency = ordinary / profile.flops["fp32"];
    profile.memory_bandwidth = stream("Add", 2, {}, 1 << 22);
    profile.memory_efficiency =
        std::min(1.0,
                 (stream("Relu", 1, {}, 1 << 20) + stream("Add", 2, {}, 1 << 20)) /
                     (2 * profile.memory_bandwidth));
    profile.vector_flops = element_wise_arithmetic();
    profile.launch_seconds = smallest_call();
    for (const int64_t kib : {32, 128, 512, 2048, 8192, 32768, 131072}) {
      const int64_t elements = kib * 1024 / 12;  // of three tensors
      profile.streams.push_back({static_cast<double>(kib) * 1024, stream("Add", 2, {}, elements)});
    }
  }

 private:
  // Best seconds of one call of `fn`.
  template <typename Fn>
  double best_seconds(Fn&& fn) {
    fn();  // caches, page faults, primitives
    Clock::time_point start = Clock::now();
    fn();
    int64_t calls =
        std::max<int64_t>(1, static_cast<int64_t>(least_seconds_ / (seconds_since(start) + 1e-9)));
    if (world_ != nullptr) {  // the same number everywhere: fn may be a collective
      world_->broadcast(&calls, sizeof(calls), 0);
    }
    double best = 1e30;
    for (int i = 0; i < kRepetitions; ++i) {
      if (world_ != nullptr) {
        world_->barrier();
      }
      start = Clock::now();
      for (int64_t call = 0; call < calls; ++call) {
        fn();
      }
      best = std::min(best, seconds_since(start) / static_cast<double>(calls));
    }
    return best;
  }

  double product(DType dtype, int64_t m, int64_t n, int64_t k) {
    SingleNode node(device_, "MatMul", {{dtype, {m, k}}, {dtype, {k, n}}}, {});
    return node.cost().matmul_flops() / best_seconds([&] { node.run(); });
  }

  double fastest_product(DType dtype) {
    double fastest = 0;
    for (const int64_t n : {512, 1024}) {
      fastest = std::max(fastest, product(dtype, n, n, n));
    }
    return fastest;
  }

  // Harmonic mean over products as layers have them: few rows, narrow and wide.
  double layer_products() {
    const std::vector<std::vector<int64_t>> shapes = {
        {128, 128, 512}, {128, 512, 128}, {512, 384, 384}, {1024, 256, 64}, {64, 1024, 1024}};
    double inverse = 0;
    for (const std::vector<int64_t>& s : shapes) {
      inverse += 1 / product(DType::kFloat32, s[0], s[1], s[2]);
    }
    return static_cast<double>(shapes.size()) / inverse;
  }

  // Bytes per second of an element-wise operator over `elements` floats an operand.
  double stream(const char* op_type,
                int num_inputs,
                const Attributes& attributes,
                int64_t elements) {
    const TensorType type{DType::kFloat32, {elements}};
    SingleNode node(
        device_, op_type, TensorTypes(static_cast<size_t>(num_inputs), type), attributes);
    return node.cost().bytes / best_seconds([&] { node.run(); });
  }

  // FLOP/s of a function of many operations per element, within the cache.
  double element_wise_arithmetic() {
    SingleNode node(device_, "Gelu", {{DType::kFloat32, {1 << 14}}}, {});
    return std::max(1.0, node.cost().flops) / best_seconds([&] { node.run(); });
  }

  double smallest_call() {
    SingleNode node(device_, "Add", {{DType::kFloat32, {1}}, {DType::kFloat32, {1}}}, {});
    return best_seconds([&] { node.run(); });
  }

  Device& device_;
  Communicator* world_;
  double least_seconds_;  // of one repetition
};

// The mean over the ranks.
void average(MachineProfile& profile, Communicator& world) {
  std::vector<double*> fields = {&profile.matmul_efficiency,
                                 &profile.memory_bandwidth,
                                 &profile.memory_efficiency,
                                 &profile.vector_flops,
                                 &profile.launch_seconds};
  for (auto& [precision, rate] : profile.flops) {
    fields.push_back(&rate);
  }
  for (StreamSample& sample : profile.streams) {
    fields.push_back(&sample.bytes_per_second);
  }
  for (double* field : fields) {
    world.all_reduce(field, 1, DType::kFloat64, ReductionKind::kSum);
    *field /= world.world_size();
  }
}

}  // namespace

MachineProfile profile_machine(const DeviceOptions& options, Communicator* world, double seconds) {
  MachineProfile profile;
  {
    const std::unique_ptr<Device> device = make_cpu_device(world ? world->rank() : 0, options);
    DeviceProfiler(*device, world, 0.3 * seconds).measure(profile);
  }
  if (world != nullptr) {
    average(profile, *world);
    profile.link = time_calls(*world);
    profile.num_devices = world->world_size();
  }
  profile.kernels = time_kernels(options, world, 0.7 * seconds);
  profile.threads = options.threads;
  profile.memory_bytes = describe_machine().memory_bytes;
  return profile;
}

namespace {

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.4g", value);
  return text;
}

std::string link_yaml(const LinkType& link) {
  std::string yaml = concat("{type: shared-memory, bandwidth: ",
                            number(link.bandwidth),
                            ", measured_ranks: ",
                            link.measured_ranks,
                            ", wake_seconds: ",
                            number(link.wake_seconds),
                            ", calls: {  # [bytes, seconds]\n");
  for (const auto& [call, samples] : link.calls) {
    yaml += concat("      ", call, ": [");
    for (size_t i = 0; i < samples.size(); ++i) {
      yaml += concat(i == 0 ? "[" : ", [",
                     static_cast<int64_t>(samples[i].bytes),
                     ", ",
                     number(samples[i].seconds),
                     "]");
    }
    yaml += "],\n";
  }
  return yaml + "    }}";
}

}  // namespace

std::string profile_yaml(const MachineProfile& profile, const std::string& name) {
  std::string yaml = concat("# Measured by `trainrt profile` on ",
                            profile.num_devices,
                            profile.num_devices == 1 ? " device" : " devices",
                            " of ",
                            profile.threads,
                            " threads.\n");
  yaml += concat("hosts:\n  - {count: 1, devices: [{count: ",
                 profile.num_devices,
                 ", type: ",
                 name,
                 "}], intra: ",
                 profile.num_devices > 1 ? link_yaml(profile.link) : std::string("shared-memory"),
                 "}\n");
  yaml += concat("devices:\n  ", name, ":\n    base: cpu\n");
  yaml += concat("    memory: ", profile.memory_bytes / profile.num_devices, "\n");
  yaml += concat("    sms: ", profile.threads, "\n");
  yaml += concat("    memory_bandwidth: ", number(profile.memory_bandwidth), "\n    flops: {");
  bool first = true;
  for (const auto& [precision, rate] : profile.flops) {
    yaml += concat(first ? "" : ", ", precision, ": ", number(rate));
    first = false;
  }
  yaml += concat("}\n    efficiency: {matmul: ",
                 number(profile.matmul_efficiency),
                 ", memory: ",
                 number(profile.memory_efficiency),
                 ", vector: ",
                 number(profile.vector_flops / profile.flops.at("fp32")),
                 ", launch_seconds: ",
                 number(profile.launch_seconds),
                 ", gap_seconds: ",
                 number(profile.kernels.gap_seconds),
                 "}\n");
  yaml += "    streams:  # [working set, bytes/s]\n";
  for (const StreamSample& s : profile.streams) {
    yaml += concat("      - [", number(s.working_set), ", ", number(s.bytes_per_second), "]\n");
  }
  yaml += "    kernels:  # [batch, m, n, k, bytes, seconds]\n";
  for (const auto& [kernel, samples] : profile.kernels.samples) {
    yaml += concat("      ", kernel, ":\n");
    for (const KernelSample& s : samples) {
      yaml += "        - [";
      for (const double value : {s.batch, s.m, s.n, s.k, s.bytes}) {
        yaml += concat(static_cast<int64_t>(value), ", ");
      }
      yaml += concat(number(s.seconds), "]\n");
    }
  }
  return yaml;
}

}  // namespace trainrt
