#include "planner/candidates.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "graph/base/error.h"

namespace trainrt {

namespace {

// Micro-batches of one data rank in a step: beyond any accumulation, and few enough to replay.
constexpr int64_t kMostMicroBatches = int64_t{1} << 16;
// Among so few micro-batches a short last one weighs: sizes that divide the share are tried too.
constexpr int64_t kEvenParts = 4;
// Data ranks of several sizes try these: of many sizes there are too many pairs.
constexpr int64_t kLargestMixed = 16;

bool few_enough(int64_t samples, int64_t micro_batch) {
  return (samples + micro_batch - 1) / micro_batch <= kMostMicroBatches;
}

bool matches(const std::optional<int>& pin, int value) {
  return !pin.has_value() || *pin == value;
}

std::vector<int> divisors(int n) {
  std::vector<int> found;
  for (int i = 1; i <= n; ++i) {
    if (n % i == 0) {
      found.push_back(i);
    }
  }
  return found;
}

// Tensor groups stay within a host: the smallest host's size bounds them, unless pinned.
int largest_tensor_degree(const PlanRequest& request) {
  size_t least = request.topology.hosts[0].devices.size();
  for (const Host& host : request.topology.hosts) {
    least = std::min(least, host.devices.size());
  }
  return request.pins.tensor.value_or(static_cast<int>(least));
}

std::vector<Degrees> degrees_of(const PlanRequest& request, int devices, int num_blocks) {
  std::vector<Degrees> found;
  for (const int t : divisors(devices)) {
    if (t == 1 &&
        (request.pins.splits_tensors() || request.pins.sequence_parallel.value_or(false))) {
      continue;
    }
    if (t > largest_tensor_degree(request) || !matches(request.pins.tensor, t)) {
      continue;
    }
    for (const int p : divisors(devices / t)) {
      const int d = devices / t / p;
      // Data ranks without a sample only where they are asked for.
      const bool busy = d <= request.global_batch || request.pins.data.has_value() ||
                        !request.pins.data_shares.empty() || !request.pins.shares.empty();
      const bool shared =
          request.pins.shares.empty() || d == static_cast<int>(request.pins.shares.size());
      if (p <= num_blocks && busy && shared && matches(request.pins.pipeline, p) &&
          matches(request.pins.data, d)) {
        found.push_back({d, t, p});
      }
    }
  }
  return found;
}

bool keeps_places(const std::vector<std::string>& places, const std::vector<int>& order) {
  for (size_t rank = 0; rank < order.size() && !places.empty(); ++rank) {
    const auto device = static_cast<size_t>(order[rank]);
    if (std::max(rank, device) >= places.size() || places[rank] != places[device]) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::vector<Degrees> candidate_degrees(const PlanRequest& request, int num_blocks) {
  if (!request.pins.device_order.empty()) {
    return degrees_of(request, static_cast<int>(request.pins.device_order.size()), num_blocks);
  }
  const int all = request.topology.num_devices();
  std::vector<Degrees> found = degrees_of(request, all, num_blocks);
  const bool fewer = request.objective == Objective::kDevices ||
                     request.objective == Objective::kCost ||
                     request.objective == Objective::kMemory;
  for (int devices = all - 1; devices >= 1; --devices) {
    // Speed: only the largest number that has any plan. Else all, or of many the divisors, which
    // span the range.
    constexpr int kFew = 16;
    const bool wanted = fewer ? all <= kFew || all % devices == 0 : found.empty();
    if (!wanted) {
      continue;
    }
    const std::vector<Degrees> more = degrees_of(request, devices, num_blocks);
    found.insert(found.end(), more.begin(), more.end());
  }
  return found;
}

std::vector<int64_t> candidate_micro_batches(const PlanRequest& request, int64_t samples) {
  if (request.pins.micro_batch.has_value()) {
    return {std::min(*request.pins.micro_batch, request.global_batch)};
  }
  if (request.pins.exact_reduction) {  // equal bits at every data degree: whole logical shards
    const int64_t shards = std::min(request.pins.logical_shards, request.global_batch);
    return {(request.global_batch + shards - 1) / shards};
  }
  std::set<int64_t> sizes = {samples};
  for (int64_t b = 1; b < samples; b *= 2) {
    sizes.insert(b);
  }
  for (int64_t parts = 2; parts <= kEvenParts; ++parts) {
    if (samples % parts == 0) {
      sizes.insert(samples / parts);
    }
  }
  std::erase_if(sizes, [samples](int64_t b) { return !few_enough(samples, b); });
  return {sizes.begin(), sizes.end()};
}

std::vector<int64_t> mixed_micro_batches(const PlanRequest& request, int64_t samples) {
  std::set<int64_t> sizes = {std::min(samples, kLargestMixed)};
  for (int64_t b = 1; b <= std::min(request.global_batch, kLargestMixed); b *= 2) {
    sizes.insert(b);
  }
  std::erase_if(sizes, [samples](int64_t b) { return !few_enough(samples, b); });
  return {sizes.begin(), sizes.end()};
}

double pace_of(const DeviceType& type) {
  return type.memory_bandwidth * type.speed;
}

std::vector<std::vector<int>> candidate_device_orders(const PlanRequest& request,
                                                      const Degrees& degrees) {
  const Topology& topology = request.topology;
  const PlanPins& pins = request.pins;
  if (!pins.device_order.empty()) {
    const bool plain = std::is_sorted(pins.device_order.begin(), pins.device_order.end()) &&
                       pins.device_order.back() + 1 == static_cast<int>(pins.device_order.size());
    return {plain ? std::vector<int>{} : pins.device_order};
  }
  std::vector<std::vector<int>> orders = {{}};
  const int world = degrees.data * degrees.tensor * degrees.pipeline;
  std::vector<int> plain(static_cast<size_t>(topology.num_devices()));
  std::iota(plain.begin(), plain.end(), 0);
  std::set<std::vector<int>> seen = {{plain.begin(), plain.begin() + world}};
  std::vector<std::vector<int>> lines = {plain};
  if (topology.types.size() > 1) {
    for (const bool fast_first : {true, false}) {
      std::vector<int> sorted = plain;
      std::stable_sort(sorted.begin(), sorted.end(), [&](int a, int b) {
        const double rx = pace_of(topology.type_of(a)), ry = pace_of(topology.type_of(b));
        return fast_first ? rx > ry : rx < ry;
      });
      lines.push_back(std::move(sorted));
    }
  }
  const int d = degrees.data, t = degrees.tensor, p = degrees.pipeline;
  for (const std::vector<int>& line : lines) {
    for (const bool data_major : {false, true}) {
      if (data_major && (d == 1 || p == 1)) {
        continue;
      }
      std::vector<int> order;
      for (int stage = 0; stage < p; ++stage) {
        for (int data_rank = 0; data_rank < d; ++data_rank) {
          for (int i = 0; i < t; ++i) {
            const int at =
                data_major ? (data_rank * p + stage) * t + i : (stage * d + data_rank) * t + i;
            order.push_back(line[static_cast<size_t>(at)]);
          }
        }
      }
      if (seen.insert(order).second && keeps_places(request.places, order)) {
        orders.push_back(std::move(order));
      }
    }
  }
  return orders;
}

void check_pins(const PlanRequest& request) {
  const PlanPins& pins = request.pins;
  const int devices = request.topology.num_devices();
  TRAINRT_REQUIRE(devices > 0, kInvalidArgument, "the cluster has no devices");
  TRAINRT_REQUIRE(request.global_batch > 0, kInvalidArgument, "--batch-size must be above zero");
  const int64_t most_data = pins.data.value_or(devices);
  TRAINRT_REQUIRE(
      pins.micro_batch.value_or(0) < 1 ||
          few_enough((request.global_batch + most_data - 1) / most_data, *pins.micro_batch),
      kInvalidArgument,
      "--batch-size ",
      request.global_batch,
      " in micro-batches of ",
      *pins.micro_batch,
      " gives each of ",
      most_data,
      " data ranks more than ",
      kMostMicroBatches,
      " of them a step: lower --batch-size or raise --micro-batch-size");
  const std::pair<const char*, std::optional<int>> degrees[] = {
      {"--dp", pins.data},
      {"--tp", pins.tensor},
      {"--pp", pins.pipeline},
      {"--virtual-stages", pins.virtual_stages}};
  int64_t product = 1;
  for (const auto& [name, pin] : degrees) {
    TRAINRT_REQUIRE(!pin.has_value() || *pin >= 1,
                    kInvalidArgument,
                    name,
                    " must be at least 1, got ",
                    pin.value_or(0));
    if (std::string(name) != "--virtual-stages") {
      product *= pin.value_or(1);
    }
  }
  TRAINRT_REQUIRE(product <= devices,
                  kInvalidArgument,
                  "--dp * --tp * --pp = ",
                  product,
                  " ranks are pinned, and the cluster has ",
                  devices,
                  " devices: lower a degree or give a larger --cluster");
  TRAINRT_REQUIRE(!pins.zero_stage.has_value() || (*pins.zero_stage >= 0 && *pins.zero_stage <= 3),
                  kInvalidArgument,
                  "--zero must be 0, 1, 2 or 3");
  const int v = pins.virtual_stages.value_or(1);
  TRAINRT_REQUIRE(
      v == 1 || !pins.schedule.has_value() || *pins.schedule == ScheduleKind::kInterleaved,
      kInvalidArgument,
      "--virtual-stages ",
      v,
      " needs --schedule interleaved, not ",
      schedule_name(pins.schedule.value_or(ScheduleKind::k1F1B)));
  TRAINRT_REQUIRE(pins.shares.empty() || !pins.data.has_value() ||
                      static_cast<int>(pins.shares.size()) == *pins.data,
                  kInvalidArgument,
                  "--shares has ",
                  pins.shares.size(),
                  " entries for --dp ",
                  pins.data.value_or(0));
  int64_t samples = 0;
  for (const DataShare& share : pins.data_shares) {
    samples += share.num_samples;
  }
  TRAINRT_REQUIRE(pins.data_shares.empty() || samples == request.global_batch,
                  kInvalidArgument,
                  pins.from,
                  ": the shares add up to ",
                  samples,
                  " samples, ",
                  std::abs(samples - request.global_batch),
                  samples > request.global_batch ? " more" : " fewer",
                  " than the batch of ",
                  request.global_batch);
  TRAINRT_REQUIRE(!pins.sequence_parallel.value_or(false) || pins.tensor.value_or(2) > 1,
                  kInvalidArgument,
                  "--sequence-parallel needs --tp of 2 or more");
}

}  // namespace trainrt
