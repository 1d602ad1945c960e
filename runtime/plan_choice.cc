#include "runtime/plan_choice.h"

#include <algorithm>
#include <charconv>

#include "parallel/cluster_file.h"
#include "runtime/file_bytes.h"
#include "runtime/machine.h"

namespace trainrt {

namespace {

// Devices of "cpu" or "cpu:N".
int num_cpu_ranks(const std::string& devices) {
  if (devices.empty() || devices == "cpu") {
    return 1;
  }
  TRAINRT_REQUIRE(devices.rfind("cuda", 0) != 0,
                  kDevice,
                  "--devices ",
                  devices,
                  ": no CUDA driver is loaded on this machine; see 'trainrt doctor'");
  int count = 0;
  const char* end = devices.data() + devices.size();
  const bool is_cpu = devices.rfind("cpu:", 0) == 0;
  const auto [stop, status] =
      std::from_chars(devices.data() + std::min<size_t>(4, devices.size()), end, count);
  TRAINRT_REQUIRE(is_cpu && status == std::errc() && stop == end && count >= 1 && count <= 1024,
                  kInvalidArgument,
                  "--devices is '",
                  devices,
                  "'; wanted cpu, cpu:N, cuda or cuda:0,1");
  return count;
}

std::vector<double> parse_shares(const std::string& text) {
  std::vector<double> shares;
  size_t at = 0;
  while (!text.empty() && at <= text.size()) {
    const size_t comma = std::min(text.find(',', at), text.size());
    double value = 0;
    const auto [end, status] = std::from_chars(text.data() + at, text.data() + comma, value);
    TRAINRT_REQUIRE(status == std::errc() && end == text.data() + comma && value >= 0,
                    kInvalidArgument,
                    "--shares is '",
                    text,
                    "'; wanted numbers as in 2,3,3");
    shares.push_back(value);
    at = comma + 1;
  }
  return shares;
}

Plan pinned_plan(const Options& options, const TrainingJob& job, int num_devices) {
  const std::vector<double> shares = parse_shares(options.shares);
  const int64_t tp = options.tp.value_or(1);
  const int64_t pp = options.pp.value_or(1);
  const int64_t dp = options.dp.value_or(std::max<int64_t>(1, num_devices / (tp * pp)));
  TRAINRT_REQUIRE(dp * tp * pp == num_devices,
                  kInvalidArgument,
                  "dp ",
                  dp,
                  " x tp ",
                  tp,
                  " x pp ",
                  pp,
                  " needs ",
                  dp * tp * pp,
                  " devices, there are ",
                  num_devices,
                  num_devices == 1 ? "; --devices cpu:N makes N of this machine" : "");
  TRAINRT_REQUIRE(shares.empty() || static_cast<int64_t>(shares.size()) == dp,
                  kInvalidArgument,
                  "--shares names ",
                  shares.size(),
                  " data ranks, there are ",
                  dp);
  Plan plan =
      single_device_plan(options.batch_size, options.micro_batch_size, job.num_forward_nodes);
  plan.model_hash = job.model->hash();
  plan.bind = job.bind.dims;
  plan.precision = job.precision;
  plan.data_parallel = static_cast<int>(dp);
  plan.tensor_parallel = static_cast<int>(tp);
  plan.pipeline_parallel = static_cast<int>(pp);
  plan.virtual_stages = static_cast<int>(options.virtual_stages.value_or(1));
  plan.zero_stage = static_cast<int>(options.zero.value_or(0));
  plan.sequence_parallel = options.sequence_parallel;
  plan.offload_optimizer = options.offload == "optimizer";
  plan.exact_reduction = options.reduction == "exact";
  if (!options.schedule.empty()) {
    plan.schedule = *schedule_from_name(options.schedule);
  }
  plan.shares =
      make_shares(options.batch_size, plan.data_parallel, options.micro_batch_size, shares);
  plan.micro_batch_size = 0;
  for (const DataShare& share : plan.shares) {
    plan.micro_batch_size = std::max(plan.micro_batch_size, share.micro_batch_size);
  }
  plan.devices.clear();
  for (int rank = 0; rank < num_devices; ++rank) {
    plan.devices.push_back({rank, "localhost", concat("cpu:", rank)});
  }
  // Stages of equal length: the planner knows better.
  plan.stages.clear();
  const int num_stages = plan.pipeline_parallel * plan.virtual_stages;
  for (int s = 0; s < num_stages; ++s) {
    PlanStage stage;
    stage.virtual_stage = s;
    stage.rank_stage = s % plan.pipeline_parallel;
    stage.first_node = job.num_forward_nodes * s / num_stages;
    stage.last_node = job.num_forward_nodes * (s + 1) / num_stages - 1;
    plan.stages.push_back(stage);
  }
  return plan;
}

}  // namespace

std::vector<DeviceOptions> local_devices(const Options& options) {
  std::vector<DeviceOptions> devices;
  if (!options.cluster.empty()) {
    const Topology topology = load_cluster(options.cluster);
    for (int d = 0; d < topology.num_devices(); ++d) {
      const DeviceType& type = topology.type_of(d);
      TRAINRT_REQUIRE(type.is_cpu(),
                      kDevice,
                      "--cluster ",
                      options.cluster,
                      ": device ",
                      topology.device(d).name,
                      " is a ",
                      type.name,
                      ", which this machine does not have; 'trainrt plan' plans for it");
      DeviceOptions device;
      device.memory_limit = topology.capacity_bytes(d) - topology.reserved_bytes(d);
      device.speed = type.speed;
      devices.push_back(device);
    }
  } else {
    devices.resize(static_cast<size_t>(num_cpu_ranks(options.devices)));
  }
  const int ranks = static_cast<int>(devices.size());
  const int threads = options.threads > 0 ? static_cast<int>(options.threads)
                                          : std::max(1, num_usable_cores() / ranks);
  for (DeviceOptions& device : devices) {
    device.threads = threads;
  }
  return devices;
}

Plan choose_plan(const Options& options, const TrainingJob& job, int num_devices) {
  if (options.plan.empty()) {
    return pinned_plan(options, job, num_devices);
  }
  const std::vector<std::byte> bytes = read_file(options.plan);
  Plan plan;
  try {
    plan = plan_from_json(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  } catch (Error& error) {
    error.add_context("in --plan '" + options.plan + "'");
    throw;
  }
  TRAINRT_REQUIRE(plan.model_hash.empty() || plan.model_hash == job.model->hash(),
                  kInvalidArgument,
                  "--plan '",
                  options.plan,
                  "' is made for another model (hash ",
                  plan.model_hash,
                  ", this model has ",
                  job.model->hash(),
                  ")");
  TRAINRT_REQUIRE(plan.world_size() == num_devices,
                  kInvalidArgument,
                  "--plan '",
                  options.plan,
                  "' is for ",
                  plan.world_size(),
                  " devices, there are ",
                  num_devices,
                  "; choose them with --devices cpu:",
                  plan.world_size());
  return plan;
}

Plan resize_plan(const Plan& plan, int64_t num_samples) {
  if (num_samples == plan.global_batch) {
    return plan;
  }
  Plan resized = plan;
  std::vector<double> shares;
  int64_t micro_batch = 0;
  bool several = false;
  for (const DataShare& share : plan.shares) {
    shares.push_back(static_cast<double>(share.num_samples));
    micro_batch = std::max(micro_batch, share.micro_batch_size);
    several = several || share.num_micro_batches > 1;
  }
  resized.global_batch = num_samples;
  resized.shares = make_shares(num_samples, plan.data_parallel, several ? micro_batch : 0, shares);
  resized.micro_batch_size = 0;
  for (const DataShare& share : resized.shares) {
    resized.micro_batch_size = std::max(resized.micro_batch_size, share.micro_batch_size);
  }
  return resized;
}

}  // namespace trainrt
