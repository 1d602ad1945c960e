// Let S_i be what stage i takes for one micro-batch, F_i and B_i its parts, C the transfer, and
// w = p - 1 - r. Every schedule obeys, for each rank r,
//   T >= sum_{i<r} (F_i + B_i + 2C) + m S_r                                                     (1)
// (with split backward the F_i alone, since weight gradients need not wait), and 1F1B with m > p
//   T >= sum_{i<r} (S_i + 2C) + (m - w) S_r + 2 sum_{i>r} (S_i + 2C)                            (2)
// which is planner/simulator's bound with both its maxima bounded from below by their sum. Each is
// linear in S; weights l_r >= 0 with sum 1 that give every S_i the same coefficient c turn them
// into T >= c sum S, free of the cuts. For (2) the weights exist and c = (m + p - 1) / p: no cut
// beats equal stages. For (1) with sum_{i<r} s S_i they give c = s / (1 - (1 - s / m)^p). GPipe
// obeys c = (m + p - 1) / p too, as two flow shops. Beside these stands m times the busiest rank:
// blocks are whole, and one rank of p gets at least ceil(n / p) of n equal ones.
#include "planner/step_bound.h"

#include <algorithm>
#include <cmath>

#include "planner/shares.h"
#include "planner/stage_partition.h"
#include "planner/step_memory.h"

namespace trainrt {

namespace {

// Of the slowest device of each of a data rank's stages.
std::vector<int> stage_types(const StepRequest& request, int data_rank) {
  const Layout& layout = *request.layout;
  const Topology& topology = *request.topology;
  std::vector<int> types;
  types.reserve(static_cast<size_t>(layout.pipeline));
  for (int stage = 0; stage < layout.pipeline; ++stage) {
    const int rank = (stage * layout.data + data_rank) * layout.tensor;
    int slowest = topology.device(layout.device(rank)).type;
    for (int i = 1; i < layout.tensor && !request.uniform; ++i) {
      const int type = topology.device(layout.device(rank + i)).type;
      const auto rate = [&](int t) {
        return topology.types[static_cast<size_t>(t)].peak_flops(request.precision);
      };
      slowest = rate(type) < rate(slowest) ? type : slowest;
    }
    types.push_back(slowest);
  }
  return types;
}

}  // namespace

double least_pipeline_seconds(const ModelSeconds& model,
                              ScheduleKind schedule,
                              int num_stages,
                              int micro_batches,
                              double largest_stage,
                              double transfer) {
  const double m = micro_batches, p = num_stages, total = model.total();
  if (num_stages == 1 || schedule == ScheduleKind::k2BW) {
    return m * largest_stage;
  }
  // The micro-batch that starts last, or the one that ends first, goes through all stages.
  const double chain = total - (schedule == ScheduleKind::kZeroBubbleH1 ? model.weight_grad : 0) +
                       (m - 1) * (schedule == ScheduleKind::kZeroBubbleH1
                                      ? model.least_forward
                                      : std::max(model.least_forward, model.least_backward)) +
                       2 * (p - 1) * transfer;
  const double busiest = std::max(chain, m * largest_stage);
  if (schedule == ScheduleKind::kInterleaved) {
    // Rank r waits for one block of each rank before it, and is waited for by them: on average over
    // the ranks.
    const double wait = model.least_forward + model.least_backward + 2 * transfer;
    return std::max(busiest, m * total / p + (p - 1) / 2 * wait);
  }
  const double share = schedule == ScheduleKind::kZeroBubbleH1 ? model.forward_share : 1;
  double bound = share * total / (1 - std::pow(1 - share / m, p));
  if (schedule == ScheduleKind::kGPipe || (schedule == ScheduleKind::k1F1B && m > p)) {
    bound = (m + p - 1) / p * total + 2 * (p - 1) * transfer;
    if (schedule == ScheduleKind::kGPipe) {
      bound = std::max(bound, total + (m - 1) * largest_stage + 2 * (p - 1) * transfer);
    }
  }
  return std::max(bound, busiest);
}

StepBounds::Key StepBounds::key_of(const StepRequest& request,
                                   const ModelProfile& profile,
                                   int device_type,
                                   RecomputeMode mode) {
  const Layout& layout = *request.layout;
  std::array<int, 4> place = {0, 0, 0, 0};
  if (!request.uniform) {
    place = {layout.data, layout.tensor, layout.pipeline, layout.device_order};
  }
  return {&profile, device_type, mode, place};
}

const ModelSeconds& StepBounds::seconds(const StepRequest& request,
                                        const ModelProfile& profile,
                                        int device_type,
                                        RecomputeMode mode) {
  const Key key = key_of(request, profile, device_type, mode);
  const auto found = seconds_.find(key);
  if (found != seconds_.end()) {
    return found->second;
  }
  const std::vector<StageTimes> classes = class_seconds(request, profile, device_type, mode);
  ModelSeconds model;
  model.count.assign(classes.size(), 0);
  model.least_forward = model.least_backward = 1e300;
  for (const int block : profile.blocks) {
    const StageTimes& own = classes[static_cast<size_t>(block)];
    const double both = own.forward + own.backward;
    model.forward += own.forward;
    model.backward += own.backward;
    model.weight_grad += own.weight_grad;
    model.forward_share = std::min(model.forward_share, both > 0 ? own.forward / both : 1);
    model.largest = std::max(model.largest, both);
    model.least_forward = std::min(model.least_forward, own.forward);
    model.least_backward = std::min(model.least_backward, own.backward);
    ++model.count[static_cast<size_t>(block)];
  }
  for (const StageTimes& own : classes) {
    model.of_class.push_back(own.forward + own.backward);
  }
  return seconds_.emplace(key, std::move(model)).first->second;
}

// Of the busiest rank for one micro-batch, at least: exact where a rank has one stage.
double StepBounds::stage_bound(const StepRequest& request,
                               const ModelProfile& profile,
                               int device_type) {
  const Layout& layout = *request.layout;
  const ModelSeconds& model = seconds(request, profile, device_type, layout.recompute);
  double bound = std::max(model.largest, model.total() / layout.pipeline);
  for (size_t c = 0; c < model.count.size(); ++c) {
    bound = std::max(
        bound,
        model.of_class[c] * std::ceil(static_cast<double>(model.count[c]) / layout.pipeline));
  }
  if (layout.virtual_stages > 1 || layout.pipeline == 1) {
    return layout.pipeline == 1 ? model.total() : bound;
  }
  const auto key =
      std::make_pair(key_of(request, profile, device_type, layout.recompute), layout.pipeline);
  const auto found = largest_stage_.find(key);
  if (found != largest_stage_.end()) {
    return found->second;
  }
  std::vector<double> of_block;
  for (const int block : profile.blocks) {
    of_block.push_back(model.of_class[static_cast<size_t>(block)]);
  }
  const std::vector<int> cuts = balanced_cuts({static_cast<size_t>(layout.pipeline), of_block});
  double largest = 0;
  for (size_t s = 0; s < cuts.size(); ++s) {
    const size_t end = s + 1 < cuts.size() ? static_cast<size_t>(cuts[s + 1]) : of_block.size();
    double sum = 0;
    for (auto b = static_cast<size_t>(cuts[s]); b < end; ++b) {
      sum += of_block[b];
    }
    largest = std::max(largest, sum);
  }
  // Bisection ends a hair above the least.
  return largest_stage_.emplace(key, std::max(bound, largest * (1 - 1e-9))).first->second;
}

// That the memory demands where the recompute is open, on all ranks together.
double StepBounds::seconds_again(const StepRequest& request, int total, int device_type) {
  const Layout& layout = *request.layout;
  if (!layout.recompute_as_needed || !layout.micro_batch_sizes.empty()) {
    return 0;
  }
  std::array<std::vector<double>, 3> of_class;
  for (size_t mode = 0; mode < of_class.size(); ++mode) {
    of_class[mode] =
        seconds(request, *request.profile, device_type, static_cast<RecomputeMode>(mode)).of_class;
  }
  return StageMemories(request).least_seconds_again((total + layout.data - 1) / layout.data,
                                                    of_class);
}

double StepBounds::micro_batch_seconds(const StepRequest& request, int data_rank) {
  double speed = 0;  // models per second, all stages together
  for (const int type : stage_types(request, data_rank)) {
    speed +=
        1 / seconds(request, request.profile_of(data_rank), type, RecomputeMode::kNone).total();
  }
  return 1 / speed;
}

// Of all blocks; `once`: without the copies of those that an earlier block has.
double StepBounds::parameters(const ModelProfile& profile, bool once) {
  const auto [found, is_new] = parameters_.try_emplace({&profile, once}, 0);
  for (const int block : is_new ? profile.blocks : std::vector<int>{}) {
    const BlockClass& own = profile.classes[static_cast<size_t>(block)];
    found->second += own.parameters - (once ? own.shared_parameters : 0);
  }
  return found->second;
}

// What follows the pipeline, which schedules have in common.
double StepBounds::seconds_after(const StepRequest& request, double window) {
  const Layout& layout = *request.layout;
  const auto key = std::make_tuple(
      request.profile,
      std::array<int, 5>{
          layout.data, layout.tensor, layout.pipeline, layout.device_order, layout.zero_stage},
      window);
  const auto known = after_.find(key);
  if (known != after_.end()) {
    return known->second;
  }
  const double of_stage = parameters(*request.profile, layout.pipeline == 1) / layout.pipeline;
  return after_.emplace(key, least_seconds_after(request, of_stage, window)).first->second;
}

double StepBounds::least_seconds(const StepRequest& request,
                                 int total,
                                 double fraction,
                                 const std::vector<int>& counts) {
  const Layout& layout = *request.layout;
  // Data ranks by the size of their micro-batches and the types of their stages: each group needs
  // one bound.
  std::map<std::pair<int64_t, std::vector<int>>, std::vector<int>> alike;
  const int num_ranks = request.uniform && counts.empty() ? 1 : layout.data;
  for (int data_rank = 0; data_rank < num_ranks; ++data_rank) {
    alike[{layout.micro_batch_size(data_rank), stage_types(request, data_rank)}].push_back(
        data_rank);
  }
  // Per micro-batch, and a whole pipeline's bound where its stages are of one type.
  std::vector<double> pace(static_cast<size_t>(num_ranks), 0);
  double window = 0, pipeline = 0;
  double again = 0;  // of what runs again, for a micro-batch
  std::vector<int> spread = counts;
  for (const auto& [kind, ranks] : alike) {
    const std::vector<int>& types = kind.second;
    const ModelProfile& profile = request.profile_of(ranks[0]);
    double speed = 0;  // models per second, all stages together
    double longest = 0;
    // What a reduction may hide behind: no backward is longer.
    const RecomputeMode most = layout.recompute_as_needed || !layout.block_recompute.empty()
                                   ? RecomputeMode::kFull
                                   : layout.recompute;
    double of_stage = 0;  // models per second
    for (size_t s = 0; s < types.size(); ++s) {
      if (s == 0 || types[s] != types[s - 1]) {  // not looked up for each of a hundred stages
        of_stage = 1 / seconds(request, profile, types[s], layout.recompute).total();
        longest = std::max(longest, seconds(request, profile, types[s], most).backward);
      }
      speed += of_stage;
    }
    const bool same = std::all_of(types.begin(), types.end(), [&](int t) { return t == types[0]; });
    double own = same ? stage_bound(request, profile, types[0]) : 1 / speed;
    if (same && alike.size() == 1) {
      again = seconds_again(request, total, types[0]);
      own = std::max(own,
                     (seconds(request, profile, types[0], layout.recompute).total() + again) /
                         layout.pipeline);
    }
    for (const int data_rank : ranks) {
      pace[static_cast<size_t>(data_rank)] = own;
    }
    window = std::max(window, longest / (same ? layout.pipeline : 1));
  }
  const bool by_sample = spread.empty() && !layout.micro_batch_sizes.empty();
  if (by_sample) {  // the last micro-batch may be short, on whichever data rank
    for (size_t r = 0; r < pace.size(); ++r) {
      pace[r] /= static_cast<double>(layout.micro_batch_sizes[r]);
    }
    spread = spread_micro_batches(total, pace, {});
  } else if (spread.empty()) {
    spread = num_ranks == 1 ? std::vector<int>{(total + layout.data - 1) / layout.data}
                            : spread_micro_batches(total, pace, {});
  }
  for (size_t r = 0; r < pace.size(); ++r) {
    pipeline = std::max(pipeline, spread[r] * pace[r]);
  }
  if (counts.empty() && !by_sample) {  // the busiest data rank has the mean at least
    double speed = 0;
    for (const double own : pace) {
      speed += (num_ranks == 1 ? layout.data : 1) / own;
    }
    pipeline = std::max(pipeline, (total + fraction) / speed);
  }
  if (alike.size() == 1 && !by_sample) {
    const std::vector<int>& types = alike.begin()->first.second;
    const ModelSeconds* model = &seconds(request, *request.profile, types[0], layout.recompute);
    ModelSeconds longer;
    if (again > 0) {
      longer = *model;
      longer.backward += again;
      model = &longer;
    }
    const int most = *std::max_element(spread.begin(), spread.end());
    if (std::all_of(types.begin(), types.end(), [&](int t) { return t == types[0]; })) {
      pipeline = std::max(
          pipeline,
          least_pipeline_seconds(*model, layout.schedule, layout.pipeline, most, pace[0], 0));
    }
  }
  return layout.last_micro_batch * pipeline + seconds_after(request, window);
}

}  // namespace trainrt
