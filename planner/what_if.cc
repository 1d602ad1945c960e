#include "planner/what_if.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <set>
#include <utility>

#include "planner/candidates.h"
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

// The same cluster of fewer devices.
Topology only(const Topology& topology, const std::vector<bool>& kept) {
  Topology result;
  result.types = topology.types;
  for (const Host& host : topology.hosts) {
    Host own = host;
    own.devices.clear();
    for (const int device : host.devices) {
      if (kept[static_cast<size_t>(device)]) {
        own.devices.push_back(result.num_devices());
        result.devices.push_back(topology.device(device));
        result.devices.back().host = static_cast<int>(result.hosts.size());
      }
    }
    if (!own.devices.empty()) {
      result.hosts.push_back(std::move(own));
    }
  }
  return result;
}

}  // namespace

std::vector<Change> fewer_devices_to_try(const PlanRequest& request, const PlanResult& result) {
  const PlanPins& pins = request.pins;
  const Topology& topology = request.topology;
  if (request.objective != Objective::kThroughput || !result.feasible || !pins.shares.empty() ||
      !pins.data_shares.empty() || !pins.device_order.empty() ||
      (pins.data && pins.tensor && pins.pipeline)) {
    return {};
  }
  const auto rate = [&](int device) { return pace_of(topology.type_of(device)); };
  const auto rates = [&](const std::vector<int>& devices) {
    return std::accumulate(devices.begin(), devices.end(), 0.0, [&](double sum, int device) {
      return sum + rate(device);
    });
  };
  std::vector<int> all(topology.devices.size());
  std::iota(all.begin(), all.end(), 0);
  std::vector<std::pair<std::string, std::vector<int>>> choices;
  std::vector<int> fast = all;
  std::stable_sort(fast.begin(), fast.end(), [&](int a, int b) { return rate(a) > rate(b); });
  for (size_t n = fast.size(); n-- > 1;) {
    if (rate(fast[n - 1]) > rate(fast[n])) {
      choices.emplace_back(
          "the fastest ",
          std::vector<int>(fast.begin(), fast.begin() + static_cast<std::ptrdiff_t>(n)));
    }
  }
  if (topology.hosts.size() > 1) {
    const auto host = std::max_element(
        topology.hosts.begin(), topology.hosts.end(), [&](const Host& a, const Host& b) {
          return rates(a.devices) < rates(b.devices);
        });
    choices.emplace_back("those of " + host->name + ": ", host->devices);
  }
  constexpr size_t kMostTried = 3;
  constexpr double kBetterUsed = 0.9;  // of the same work: larger parts of it on each
  const double compute = result.chosen.prediction.breakdown.compute;
  std::vector<Change> changes;
  std::set<std::vector<int>> seen;
  for (const auto& [which, devices] : choices) {
    const double least = kBetterUsed * compute * rates(all) / rates(devices);
    if (changes.size() < kMostTried && least < result.chosen.prediction.seconds &&
        seen.insert(devices).second) {
      std::vector<bool> kept(all.size(), false);
      for (const int device : devices) {
        kept[static_cast<size_t>(device)] = true;
      }
      PlanRequest changed = request;
      changed.topology = only(topology, kept);
      changes.push_back(
          {concat(which, devices.size(), " of the ", all.size(), " devices"), std::move(changed)});
    }
  }
  return changes;
}

std::vector<Change> changes_to_try(const PlanRequest& request) {
  std::vector<Change> changes;
  PlanRequest changed = request;
  changed.topology = with_memory(request.topology, 1.1);
  changes.push_back({"10 % more memory", changed, /*allows_the_plan=*/true});
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
  if (change.allows_the_plan &&
      found.rate_change < 0) {  // of another search, which ended elsewhere
    found.layout = result.chosen.layout;
    found.seconds = result.chosen.prediction.seconds;
    found.samples_per_second = rate;
    found.rate_change = 0;
  }
  const std::string different = difference(result.chosen.layout, found.layout);
  const bool same_speed = std::abs(found.rate_change) < 5e-4;
  found.effect = different.empty() ? "the same plan" : different;
  found.effect += same_speed ? ", as fast" : ", " + percent(found.rate_change) + " samples/s";
  return found;
}

}  // namespace trainrt
