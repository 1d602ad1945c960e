#include "planner/report_parts.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <map>

#include "graph/base/error.h"

namespace trainrt {

std::string number_text(double value, const char* format) {
  char text[64];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

std::string gibibytes(double bytes) {
  const double mebibyte = 1048576;
  return bytes < 1024 * mebibyte / 10 ? number_text(bytes / mebibyte, "%.2f") + " MiB"
                                      : number_text(bytes / (1024 * mebibyte), "%.2f") + " GiB";
}

std::string cluster_text(const Topology& topology) {
  std::string text;
  for (size_t type = 0; type < topology.types.size(); ++type) {
    const auto count =
        std::count_if(topology.devices.begin(), topology.devices.end(), [&](const auto& device) {
          return device.type == static_cast<int>(type);
        });
    if (count > 0) {
      text += concat(text.empty() ? "" : ", ", count, " x ", topology.types[type].name);
    }
  }
  return text;
}

std::string micro_batch_text(const Layout& l) {
  std::string text;
  std::vector<int64_t> sizes = l.micro_batch_sizes;
  constexpr size_t kMostListed = 8;
  if (sizes.size() > kMostListed) {  // their range
    const auto [least, most] = std::minmax_element(sizes.begin(), sizes.end());
    return concat(*least, " to ", *most);
  }
  for (const int64_t size : sizes) {
    text += (text.empty() ? "" : ",") + std::to_string(size);
  }
  return text.empty() ? std::to_string(l.micro_batch) : text;
}

std::string recompute_text(const Layout& l) {
  std::array<size_t, 3> blocks = {0, 0, 0};
  for (const RecomputeMode mode : l.block_recompute) {
    ++blocks[static_cast<size_t>(mode)];
  }
  std::string text;
  for (const RecomputeMode mode : {RecomputeMode::kSelective, RecomputeMode::kFull}) {
    const size_t own = blocks[static_cast<size_t>(mode)];
    if (own > 0) {
      text += concat(text.empty() ? "" : " and ", recompute_name(mode), " of ", own);
    }
  }
  return text.empty() ? recompute_name(l.recompute)
                      : concat(text, " of ", l.block_recompute.size(), " blocks");
}

std::string recomputed_blocks_text(const Layout& l) {
  const auto end = static_cast<int>(l.block_recompute.size());
  constexpr int kMostRuns = 6;
  std::string text;
  for (const RecomputeMode mode : {RecomputeMode::kSelective, RecomputeMode::kFull}) {
    int runs = 0;
    for (int b = 0, next = 0; b < end; b = next) {
      next = l.end_of_recompute(b, end);
      if (l.recompute_of(b) != mode || ++runs > kMostRuns + 1) {
        continue;
      }
      text += runs > 1 ? ", " : concat(text.empty() ? "" : "; ", recompute_name(mode), " ");
      text += runs > kMostRuns ? "..." : next - b == 1 ? concat(b) : concat(b, "-", next - 1);
    }
  }
  return text.empty() ? "" : concat(text, ", of blocks 0-", end - 1);
}

std::string layout_text(const Layout& l) {
  std::string text = concat("dp ", l.data, "  tp ", l.tensor, "  pp ", l.pipeline);
  if (l.virtual_stages > 1) {
    text += concat(" x ", l.virtual_stages, " virtual");
  }
  text += concat("  ",
                 schedule_name(l.schedule),
                 "  micro-batch ",
                 micro_batch_text(l),
                 "  zero ",
                 l.zero_stage,
                 "  recompute ",
                 recompute_text(l));
  text += l.sequence_parallel ? "  sequence-parallel" : "";
  text += l.exact.exchanged > 0 ? "  exact reduction" : "";
  text += l.sync_batch_norm ? "  batch norm sync" : "";
  return text + (l.offload_optimizer ? "  optimizer offloaded" : "");
}

std::string shares_text(const PlanRequest& request, const PlanResult& result) {
  const std::vector<DataShare>& shares = result.plan.shares;
  const bool alike = std::all_of(shares.begin(), shares.end(), [&](const DataShare& share) {
    return share.num_samples == shares[0].num_samples;
  });
  if (alike) {
    return concat(
        shares[0].num_samples, " samples each, ", shares[0].num_micro_batches, " micro-batches");
  }
  const bool sizes = !result.chosen.layout.micro_batch_sizes.empty();
  std::string text;
  for (size_t i = 0; i < shares.size() && i < 16; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shares[i].num_samples);
    if (sizes && shares[i].num_samples > 0) {
      text += concat(" (", shares[i].num_micro_batches, " x ", shares[i].micro_batch_size, ")");
    }
  }
  text += shares.size() > 16 ? ", ..." : "";
  const bool rounded =
      request.pins.micro_batch && !request.pins.shares.empty() && !request.pins.exact_reduction;
  const char* why = rounded ? "as asked for, in whole micro-batches"
                    : !request.pins.data_shares.empty() || !request.pins.shares.empty()
                        ? "as asked for"
                    : request.topology.is_uniform() ? "the batch does not divide evenly"
                                                    : "by speed and memory of the devices";
  return concat(text, " samples: ", why);
}

std::string rank_text(const PlanRequest& request, const Candidate& candidate, int rank) {
  const int device = candidate.layout.device(rank);
  return concat("stage ",
                rank / (candidate.layout.data * candidate.layout.tensor),
                ", rank ",
                rank,
                " (",
                request.topology.host_of(device).name,
                "/",
                request.topology.device(device).name,
                ")");
}

std::vector<TimePart> all_time_parts(const StepPrediction& prediction) {
  const StepBreakdown& b = prediction.breakdown;
  std::vector<TimePart> parts = {
      {"compute", "compute", b.compute},
      {"tensor_communication", "tensor-parallel communication", b.tensor_communication},
      {"transfer", "stage transfers", b.transfer},
      {"bubble", "pipeline bubble", b.bubble},
      {"gradient_reduction", "exposed gradient reduction", b.gradients},
      {"weight_gather", "weight gathers", b.gather},
      {"optimizer", "optimizer", b.optimizer}};
  // The parts are those of the first data rank, which may not be the slowest.
  double sum = 0;
  for (const TimePart& part : parts) {
    sum += part.seconds;
  }
  const bool waits = sum < 0.999 * prediction.seconds;
  parts.push_back({"waiting", "waiting for slower devices", waits ? prediction.seconds - sum : 0});
  return parts;
}

std::vector<TimePart> time_parts(const StepPrediction& prediction) {
  std::vector<TimePart> parts = all_time_parts(prediction);
  std::erase_if(parts, [](const TimePart& part) { return part.seconds <= 0; });
  return parts;
}

namespace {

std::string without_numbers(const std::string& name) {
  std::string pattern;
  bool in_number = false;
  for (const char c : name) {
    const bool digit = std::isdigit(static_cast<unsigned char>(c)) != 0;
    if (!digit) {
      pattern += c;
    } else if (!in_number) {
      pattern += '*';
    }
    in_number = digit;
  }
  return pattern;
}

// Groups in order of their first member; a group of one keeps its name.
class Grouper {
 public:
  void add(const std::string& name, const std::string& what, double seconds) {
    const auto key = std::make_pair(without_numbers(name), what);
    const auto [at, is_new] = index_.emplace(key, groups_.size());
    if (is_new) {
      groups_.push_back({name, what, 0, 0});
    } else {
      groups_[at->second].pattern = key.first;
    }
    ++groups_[at->second].count;
    groups_[at->second].seconds += seconds;
  }
  std::vector<NameGroup> take() { return std::move(groups_); }

 private:
  std::map<std::pair<std::string, std::string>, size_t> index_;
  std::vector<NameGroup> groups_;
};

}  // namespace

std::vector<NameGroup> placement_groups(const Plan& plan) {
  Grouper grouper;
  for (const auto& [name, placement] : plan.placements) {
    grouper.add(name, placement_string(placement.tensor), 0);
  }
  return grouper.take();
}

std::vector<NameGroup> padding_groups(const PlanResult& result) {
  Grouper grouper;
  const GraphProfile& profile = *result.profiles[static_cast<size_t>(result.chosen.profile)];
  for (const auto& [name, padded] : profile.padding) {
    grouper.add(
        name, concat("to multiples of ", padded.multiple), padded.plain_seconds - padded.seconds);
  }
  return grouper.take();
}

}  // namespace trainrt
