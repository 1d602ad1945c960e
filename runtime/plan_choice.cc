#include "runtime/plan_choice.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include "graph/base/log.h"
#include "parallel/cluster_file.h"
#include "parallel/micro_batches.h"
#include "planner/planner.h"
#include "runtime/given_plan.h"
#include "runtime/rank_devices.h"

namespace trainrt {

namespace {

std::vector<double> parse_shares(const std::string& text) {
  std::vector<double> shares;
  size_t at = 0;
  while (!text.empty() && at <= text.size()) {
    const size_t comma = std::min(text.find(',', at), text.size());
    double value = 0;
    const auto [end, status] = std::from_chars(text.data() + at, text.data() + comma, value);
    TRAINRT_REQUIRE(
        status == std::errc() && end == text.data() + comma && value > 0 && std::isfinite(value),
        kInvalidArgument,
        "--shares is '",
        text,
        "'; wanted numbers greater than 0, as in 2,3,3: a data rank without samples is "
        "one less of --dp");
    shares.push_back(value);
    at = comma + 1;
  }
  return shares;
}

PlanPins pins_from(const Options& options) {
  PlanPins pins;
  const auto take = [](const std::optional<int64_t>& value, std::optional<int>& pin) {
    if (value) {
      pin = static_cast<int>(*value);
    }
  };
  take(options.dp, pins.data);
  take(options.tp, pins.tensor);
  take(options.pp, pins.pipeline);
  take(options.virtual_stages, pins.virtual_stages);
  take(options.zero, pins.zero_stage);
  if (!options.schedule.empty()) {
    pins.schedule = schedule_from_name(options.schedule);
  }
  if (!options.recompute.empty()) {
    pins.recompute = options.recompute == "none"   ? RecomputeMode::kNone
                     : options.recompute == "full" ? RecomputeMode::kFull
                                                   : RecomputeMode::kSelective;
  }
  if (options.sequence_parallel) {
    pins.sequence_parallel = true;
  }
  if (options.micro_batch_size > 0) {
    pins.micro_batch = options.micro_batch_size;
  }
  pins.shares = parse_shares(options.shares);
  pins.offload_optimizer = options.offload == "optimizer";
  pins.exact_reduction = options.reduction == "exact";
  pins.logical_shards = options.logical_shards;
  pins.sync_batch_norm = options.batch_norm == "sync";
  return pins;
}

// Flags that change a plan's sums, and the shares that nobody has written down. For plans that were
// not searched for.
void apply_execution_flags(const Options& options, Plan& plan) {
  plan.sync_batch_norm = options.batch_norm == "sync";
  plan.exact_reduction = options.reduction == "exact";
  if (!plan.exact_reduction) {
    return;
  }
  plan.logical_shards = options.logical_shards;
  std::vector<double> weights;
  for (const DataShare& share : plan.shares) {
    weights.push_back(static_cast<double>(share.num_samples));
  }
  // Without a size given a micro-batch is a logical shard, whatever the data degree: only then are
  // the bits the same for all of them.
  plan.shares = make_exact_shares(plan.global_batch,
                                  plan.data_parallel,
                                  options.micro_batch_size,
                                  weights,
                                  plan.logical_shards);
  plan.micro_batch_size = 0;
  for (const DataShare& share : plan.shares) {
    plan.micro_batch_size = std::max(plan.micro_batch_size, share.micro_batch_size);
  }
}

// What the planner finds within the pins and the plan given, if any. Throws kInfeasiblePlan when
// nothing fits.
Plan searched_plan(const Options& options,
                   const TrainingJob& job,
                   const std::vector<std::string>& places,
                   const Topology& topology,
                   const std::optional<GivenPlan>& given) {
  PlanRequest request;
  request.places = places;
  // The model is looked at as `trainrt plan` does, without the casts of lower precisions, which
  // would hold the blocks together that share a weight.
  TrainingJob full = job;
  full.precision = job.precision == "fp64" ? "fp64" : "fp32";
  if (!job.from_training_info && job.precision != full.precision) {
    full.example = nullptr;  // it is in the other precision
  }
  request.model.training = [&full](int64_t micro_batch) {
    return full.build({micro_batch, 0}, true);
  };
  if (!job.from_training_info) {
    request.model.forward = [&full](int64_t micro_batch) {
      return std::make_shared<const Graph>(full.forward({micro_batch, 0}));
    };
    request.model.train = [&full](Graph forward, int64_t micro_batch) {
      return full.build_from(std::move(forward), {micro_batch, 0}, true);
    };
    if (job.precision != full.precision) {
      request.model.train_as_run = [&job](Graph forward, int64_t micro_batch) {
        return job.build_from_full(forward, {micro_batch, 0}, true);
      };
    }
    request.program_source.forward = request.model.forward;
    request.program_source.train = [&job](Graph forward, int64_t micro_batch, bool accumulate) {
      return job.build_from_full(forward, {micro_batch, 0}, accumulate);
    };
  }
  request.topology = topology;
  request.precision = job.precision;
  request.global_batch = options.batch_size;
  request.model_hash = job.model->hash();
  request.bind = job.bind.dims;
  request.num_nodes = job.num_forward_nodes;
  request.programs = [&job](int64_t micro_batch, bool accumulate) {
    return job.build({micro_batch, 0}, accumulate);
  };
  request.device_spec = [&](const Topology& cluster, int device) {
    return planned_device_spec(options, cluster, device);
  };
  request.pins = pins_from(options);
  if (job.token_batches) {
    request.pins.micro_batch = job.token_batches->largest_micro_batch();
  }
  if (given) {
    pin_given_plan(*given, request.model_hash, request.topology, &request.pins);
  }
  const PlanResult result = make_plan(request);
  if (!result.feasible) {
    std::string remedies;
    for (const std::string& remedy : result.remedies) {
      remedies += "\n  " + remedy;
    }
    TRAINRT_FAIL(kInfeasiblePlan,
                 "no plan fits into the memory of these devices: rank ",
                 result.missing_rank,
                 " lacks ",
                 result.missing_bytes,
                 " bytes",
                 remedies.empty() ? "" : ". What would help:",
                 remedies);
  }
  return result.plan;
}

// A plan that leaves nothing open, as it is written. The flags beside it may say the same only.
Plan whole_plan(const Options& options, const TrainingJob& job, const GivenPlan& given) {
  GivenPlan without_devices = given;  // devices_of_ranks() reads them
  TRAINRT_REQUIRE(
      given.plan.devices.empty() || std::ssize(given.plan.devices) == given.plan.world_size(),
      kInvalidArgument,
      given.where,
      " lists ",
      given.plan.devices.size(),
      " devices, and its degrees are for ",
      given.plan.world_size());
  without_devices.plan.devices.clear();
  PlanPins pins = pins_from(options);
  pin_given_plan(without_devices, job.model->hash(), {}, &pins);
  if (!job.evaluate) {  // the nodes and tensors that it names are of the training graph
    const TrainingGraph training = job.build({job.example_micro_batch, 0}, true);
    check_model_pins(pins, training.graph, job.num_forward_nodes);
  }
  return given.plan;
}

// What the file says; what it leaves open is planned.
Plan plan_from_file(const Options& options,
                    const TrainingJob& job,
                    const std::vector<std::string>& places,
                    int num_devices,
                    const Topology& topology,
                    const GivenPlan& given) {
  const Plan& plan = given.plan;
  const bool sized = given.stated.count("data_parallel") + given.stated.count("tensor_parallel") +
                         given.stated.count("pipeline_parallel") ==
                     3;
  TRAINRT_REQUIRE(sized || given.is_whole() ? plan.world_size() == num_devices
                                            : num_devices % plan.world_size() == 0,
                  kInvalidArgument,
                  given.where,
                  " is for ",
                  plan.world_size(),
                  " devices, there are ",
                  num_devices,
                  "; choose them with --devices cpu:",
                  plan.world_size(),
                  " or --nproc ",
                  plan.world_size());
  if (given.is_whole()) {
    return whole_plan(options, job, given);
  }
  TRAINRT_REQUIRE(!job.evaluate,
                  kInvalidArgument,
                  given.where,
                  " leaves parts of the plan open, which are planned for training only; "
                  "'trainrt plan --plan' completes it ('--format json' prints it)");
  return searched_plan(options, job, places, topology, given);
}

bool wants_search(const Options& options, const std::vector<DeviceOptions>& devices) {
  const bool limited = std::any_of(devices.begin(), devices.end(), [](const DeviceOptions& device) {
    return device.memory_limit.has_value();
  });
  return devices.size() > 1 || limited || !options.recompute.empty() || !options.schedule.empty() ||
         options.zero.value_or(0) > 0 || options.virtual_stages.value_or(1) > 1 ||
         options.sequence_parallel || options.offload == "optimizer";
}

}  // namespace

PlanPins plan_pins(const Options& options) {
  return pins_from(options);
}

Plan choose_plan(const Options& options,
                 const TrainingJob& job,
                 const std::vector<DeviceOptions>& devices,
                 const std::vector<std::string>& places) {
  const int num_devices = static_cast<int>(devices.size());
  const std::optional<Topology> gpus = options.cluster.empty() ? known_gpus(devices) : std::nullopt;
  const Topology topology = gpus                      ? *gpus
                            : options.cluster.empty() ? make_preset(concat("cpu:", num_devices))
                                                      : load_cluster(options.cluster);
  if (const std::optional<GivenPlan> given = plan_file(options)) {
    return plan_from_file(options, job, places, num_devices, topology, *given);
  }
  // A model may carry its plan (`trainrt plan --annotate`); it is followed where it fits.
  const std::optional<GivenPlan> carried = carried_plan(options, *job.model);
  if (carried && carried->is_whole() && !job.evaluate && num_devices > 1 &&
      carried->plan.world_size() == num_devices &&
      carried->plan.global_batch == options.batch_size) {
    log_info("the plan is the one that the model carries");
    return whole_plan(options, job, *carried);
  }
  if (!job.evaluate && (gpus || wants_search(options, devices))) {
    return searched_plan(options, job, places, topology, std::nullopt);
  }
  Plan plan =
      single_device_plan(options.batch_size, options.micro_batch_size, job.num_forward_nodes);
  if (num_devices > 1) {
    // Evaluation: the batch in equal parts.
    plan.data_parallel = num_devices;
    plan.shares = make_shares(
        options.batch_size, num_devices, options.micro_batch_size, parse_shares(options.shares));
  }
  TRAINRT_REQUIRE(options.shares.empty() || plan.data_parallel > 1,
                  kInvalidArgument,
                  "--shares ",
                  options.shares,
                  " has no effect with --devices ",
                  options.devices.empty() ? "cpu" : options.devices,
                  ": one data rank takes the whole batch; --devices cpu:N makes N of this "
                  "machine");
  if (!options.cluster.empty()) {
    plan.devices.clear();
    for (int d = 0; d < num_devices; ++d) {
      plan.devices.push_back({d, topology.host_of(d).name, topology.device(d).name});
    }
  }
  plan.model_hash = job.model->hash();
  plan.bind = job.bind.dims;
  plan.precision = job.precision;
  apply_execution_flags(options, plan);
  return plan;
}

namespace {

// Samples of a micro-batch where shares are cut into several; 0 where each is one.
int64_t micro_batch_unit(const Plan& plan) {
  int64_t micro_batch = 0;
  bool several = false;
  for (const DataShare& share : plan.shares) {
    micro_batch = std::max(micro_batch, share.micro_batch_size);
    several = several || share.num_micro_batches > 1;
  }
  return several || plan.exact_reduction ? micro_batch : 0;
}

// Of each data rank, where they differ and shares are cut into several: what its memory is for.
std::vector<int64_t> micro_batch_sizes(const Plan& plan) {
  const int64_t largest = micro_batch_unit(plan);
  std::vector<int64_t> sizes;
  bool differ = false;
  for (const DataShare& share : plan.shares) {
    sizes.push_back(share.num_samples == 0 ? largest : share.micro_batch_size);
    differ = differ || sizes.back() != largest;
  }
  return differ && largest > 0 && !plan.exact_reduction ? sizes : std::vector<int64_t>{};
}

Plan with_shares(const Plan& plan, int64_t num_samples, const std::vector<double>& weights) {
  Plan result = plan;
  result.global_batch = num_samples;
  const std::vector<int64_t> sizes = micro_batch_sizes(plan);
  result.shares =
      plan.exact_reduction ? make_exact_shares(num_samples,
                                               plan.data_parallel,
                                               micro_batch_unit(plan),
                                               weights,
                                               plan.logical_shards)
      : !sizes.empty()
          ? make_sized_shares(num_samples, sizes, weights)
          : make_shares(num_samples, plan.data_parallel, micro_batch_unit(plan), weights);
  result.micro_batch_size = 0;
  for (const DataShare& share : result.shares) {
    result.micro_batch_size = std::max(result.micro_batch_size, share.micro_batch_size);
  }
  return result;
}

}  // namespace

Plan resize_plan(const Plan& plan, int64_t num_samples) {
  if (num_samples == plan.global_batch) {
    return plan;
  }
  std::vector<double> weights;
  for (const DataShare& share : plan.shares) {
    weights.push_back(static_cast<double>(share.num_samples));
  }
  return with_shares(plan, num_samples, weights);
}

std::vector<double> data_rank_weights(const Options& options,
                                      const Plan& plan,
                                      const std::vector<DeviceOptions>& devices) {
  std::vector<double> weights = parse_shares(options.shares);
  if (weights.empty() && !options.plan.empty()) {
    for (const DataShare& share : plan.shares) {
      weights.push_back(static_cast<double>(share.num_samples));
    }
  }
  if (weights.empty()) {
    weights.assign(static_cast<size_t>(plan.data_parallel), 1.0);
    for (size_t rank = 0; rank < devices.size(); ++rank) {
      const int data_rank = rank_coordinates(plan, static_cast<int>(rank)).data_rank;
      double& weight = weights[static_cast<size_t>(data_rank)];
      weight = std::min(weight, devices[rank].speed);
    }
  }
  return weights;
}

std::vector<int64_t> share_units(const Plan& plan) {
  const bool whole = micro_batch_unit(plan) == 0 || !micro_batch_sizes(plan).empty();
  std::vector<int64_t> units;
  for (const DataShare& share : plan.shares) {
    std::set<int64_t> shards;
    for (const MicroBatchCut& cut : cut_micro_batches(plan, share.data_rank)) {
      shards.insert(cut.shard);
    }
    units.push_back(plan.exact_reduction ? static_cast<int64_t>(shards.size())
                    : whole              ? share.num_samples
                                         : share.num_micro_batches);
  }
  return units;
}

Plan reshare_plan(const Plan& plan, const std::vector<int64_t>& units) {
  return with_shares(plan, plan.global_batch, {units.begin(), units.end()});
}

}  // namespace trainrt
