#include "planner/what_if.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "planner/report_parts.h"

namespace trainrt {

namespace {

// In which respects `other` is another plan than `base`.
std::string difference(const Layout& base, const Layout& other) {
  std::string text;
  const auto note = [&](const char* name, const auto& before, const auto& after) {
    if (before != after) {
      text += concat(text.empty() ? "" : ", ", name, " ", after, " instead of ", before);
    }
  };
  note("dp", base.data, other.data);
  note("tp", base.tensor, other.tensor);
  note("pp", base.pipeline, other.pipeline);
  note("virtual stages", base.virtual_stages, other.virtual_stages);
  const std::string before = schedule_name(base.schedule), after = schedule_name(other.schedule);
  if (other.pipeline > 1) {
    note("schedule", before, after);
  }
  note("micro-batch", micro_batch_text(base), micro_batch_text(other));
  note("zero", base.zero_stage, other.zero_stage);
  const std::string kept = recompute_text(base), again = recompute_text(other);
  note("recompute", kept, again);
  if (base.sequence_parallel != other.sequence_parallel) {
    text += concat(text.empty() ? "" : ", ",
                   other.sequence_parallel ? "with" : "without",
                   " sequence parallelism");
  }
  return text;
}

std::string percent(double ratio) {
  char text[64];
  std::snprintf(
      text, sizeof(text), "%.1f %% %s", 100 * std::abs(ratio), ratio >= 0 ? "more" : "fewer");
  return text;
}

// The same cluster without its last host, or without the last device of its only one.
Topology smaller(const Topology& topology) {
  Topology result = topology;
  if (result.hosts.size() > 1) {
    const size_t gone = result.hosts.back().devices.size();
    result.hosts.pop_back();
    result.devices.resize(result.devices.size() - gone);
  } else {
    result.hosts.back().devices.pop_back();
    result.devices.pop_back();
  }
  return result;
}

Topology with_memory(const Topology& topology, double factor) {
  Topology result = topology;
  for (DeviceType& type : result.types) {
    type.memory_bytes = static_cast<int64_t>(static_cast<double>(type.memory_bytes) * factor);
  }
  return result;
}

}  // namespace

std::vector<Change> changes_to_try(const PlanRequest& request) {
  std::vector<Change> changes;
  PlanRequest changed = request;
  changed.topology = with_memory(request.topology, 1.1);
  changes.push_back({"10 % more memory", changed});
  changed = request;
  changed.global_batch = 2 * request.global_batch;
  for (DataShare& share : changed.pins.data_shares) {
    share.num_samples *= 2;
    share.num_micro_batches = (share.num_samples + share.micro_batch_size - 1) /
                              std::max<int64_t>(1, share.micro_batch_size);
  }
  changes.push_back({concat("a batch of ", changed.global_batch, " samples"), changed});
  if (request.topology.num_devices() > 1) {
    changed = request;
    changed.topology = smaller(request.topology);
    changes.push_back(
        {request.topology.hosts.size() > 1 ? "one host fewer" : "one device fewer", changed});
  }
  return changes;
}

WhatIf what_came_of(const Change& change,
                    const ChangedAnswer& answer,
                    const PlanRequest& request,
                    const PlanResult& result) {
  WhatIf found;
  found.change = change.name;
  if (answer.error) {
    found.effect = concat("ruled out by what is pinned: ", answer.error->what());
    return found;
  }
  const PlanResult& other = answer.result;
  found.feasible = other.feasible;
  found.layout = other.chosen.layout;
  if (!other.feasible) {
    found.effect = concat("does not fit: ", other.missing_bytes, " bytes short");
    return found;
  }
  found.seconds = other.chosen.prediction.seconds / other.programs_factor * result.programs_factor;
  const double rate = static_cast<double>(request.global_batch) / result.chosen.prediction.seconds;
  found.samples_per_second = static_cast<double>(change.request.global_batch) / found.seconds;
  found.rate_change = found.samples_per_second / rate - 1;
  const std::string different = difference(result.chosen.layout, found.layout);
  const bool same_speed = std::abs(found.rate_change) < 5e-4;
  found.effect = different.empty() ? "the same plan" : different;
  found.effect += same_speed ? ", as fast" : ", " + percent(found.rate_change) + " samples/s";
  return found;
}

}  // namespace trainrt
