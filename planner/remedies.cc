#include "planner/remedies.h"

#include <algorithm>

#include "graph/base/error.h"

namespace trainrt {

namespace {

// The flags that have to go when the number of devices changes, as a remedy says it; empty: none.
std::string flags_to_leave_out(const PlanPins& pins) {
  std::string flags;
  const auto add = [&](bool pinned, const char* flag) {
    flags += pinned ? concat(flags.empty() ? "" : ", ", flag) : "";
  };
  add(pins.data.has_value(), "--dp");
  add(pins.tensor.has_value(), "--tp");
  add(pins.pipeline.has_value(), "--pp");
  add(pins.virtual_stages.has_value(), "--virtual-stages");
  return flags.empty() ? "" : concat(" (without ", flags, ")");
}

}  // namespace

std::vector<std::string> find_remedies(
    const PlanRequest& request, const std::function<PlanResult(const PlanRequest&)>& search) {
  std::vector<std::string> remedies;
  const auto fits = [&](const PlanRequest& changed) {
    try {
      return search(changed).feasible;
    } catch (const Error&) {
      return false;
    }
  };
  PlanRequest changed = request;
  if (request.global_batch > 1) {
    changed.global_batch = std::max<int64_t>(1, request.global_batch / 2);
    changed.pins.shares.clear();
    changed.pins.data_shares.clear();
    if (fits(changed)) {
      remedies.push_back(concat("--batch-size ", changed.global_batch));
    }
  }
  changed = request;
  if (request.pins.micro_batch.value_or(1) > 1) {
    changed.pins.micro_batch = 1;
    changed.pins.data_shares.clear();
    if (fits(changed)) {
      remedies.push_back("--micro-batch-size 1");
    }
  }
  changed = request;
  if (request.pins.recompute.has_value() && *request.pins.recompute != RecomputeMode::kFull) {
    changed.pins.recompute = RecomputeMode::kFull;
    changed.pins.stage_recompute = false;
    if (fits(changed)) {
      remedies.push_back("--recompute full");
    }
  }
  changed = request;
  if (request.pins.zero_stage.value_or(3) < 3) {
    changed.pins.zero_stage = 3;
    if (fits(changed)) {
      remedies.push_back("--zero 3");
    }
  }
  changed = request;
  if (!request.pins.offload_optimizer) {
    changed.pins.offload_optimizer = true;
    if (fits(changed)) {
      remedies.push_back("--offload optimizer");
    }
  }
  // More hosts of the last kind.
  changed = request;
  changed.pins.data.reset();
  changed.pins.tensor.reset();
  changed.pins.pipeline.reset();
  changed.pins.virtual_stages.reset();
  changed.pins.stages.clear();
  changed.pins.data_shares.clear();
  changed.pins.device_order.clear();
  for (int factor = 2; factor <= 16; factor *= 2) {
    Topology larger = request.topology;
    const size_t hosts = request.topology.hosts.size();
    for (size_t i = hosts; i < hosts * static_cast<size_t>(factor); ++i) {
      const Host& host = request.topology.hosts[i % hosts];
      std::vector<int> types;
      for (const int device : host.devices) {
        types.push_back(request.topology.device(device).type);
      }
      larger.add_host(types, host.intra, host.inter, host.num_nics);
    }
    changed.topology = larger;
    if (fits(changed)) {
      remedies.push_back(concat(larger.num_devices(),
                                " devices instead of ",
                                request.topology.num_devices(),
                                flags_to_leave_out(request.pins)));
      break;
    }
  }
  return remedies;
}

}  // namespace trainrt
