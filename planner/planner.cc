#include "planner/planner.h"

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "parallel/micro_batches.h"
#include "planner/candidates.h"
#include "planner/parallel_for.h"
#include "planner/plan_search.h"
#include "planner/remedies.h"
#include "planner/what_if.h"

namespace trainrt {

namespace {

// Of a stage with blocks [begin, end): what most of its blocks have, and runs of the others.
void write_recompute(const Layout& layout,
                     const std::vector<int>& last_source,
                     int begin,
                     int end,
                     PlanStage* stage) {
  std::array<int, 3> blocks = {0, 0, 0};
  for (int b = begin; b < end; ++b) {
    ++blocks[static_cast<size_t>(layout.recompute_of(b))];
  }
  stage->recompute =
      static_cast<RecomputeMode>(std::max_element(blocks.begin(), blocks.end()) - blocks.begin());
  for (int b = begin, next = 0; b < end; b = next) {
    next = layout.end_of_recompute(b, end);
    if (layout.recompute_of(b) != stage->recompute) {
      stage->recompute_runs.push_back(
          {b == begin ? stage->first_node : last_source[static_cast<size_t>(b) - 1] + 1,
           next == end ? stage->last_node : last_source[static_cast<size_t>(next) - 1],
           layout.recompute_of(b)});
    }
  }
}

}  // namespace

int64_t Candidate::peak_bytes() const {
  int64_t peak = rank_memory.empty() ? prediction.peak_bytes() : 0;
  for (const RankMemory& rank : rank_memory) {
    peak = std::max(peak, rank.peak_bytes);
  }
  return peak;
}

Plan plan_of(const PlanRequest& request, const Candidate& c, const GraphProfile& profile) {
  const Layout& layout = c.layout;
  Plan plan;
  plan.model_hash = request.model_hash;
  plan.bind = request.bind;
  plan.precision = request.precision;
  plan.global_batch = request.global_batch;
  plan.micro_batch_size = layout.micro_batch;
  plan.data_parallel = layout.data;
  plan.tensor_parallel = layout.tensor;
  plan.pipeline_parallel = layout.pipeline;
  plan.virtual_stages = layout.virtual_stages;
  plan.schedule = layout.schedule;
  plan.zero_stage = layout.zero_stage;
  plan.sequence_parallel = layout.sequence_parallel;
  plan.offload_optimizer = layout.offload_optimizer;
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    const int device = layout.device(rank);
    plan.devices.push_back(
        {rank, request.topology.host_of(device).name, request.topology.device(device).name});
  }
  plan.shares = c.shares;
  if (!plan.shares.empty()) {
    plan.micro_batch_size = 0;
    for (const DataShare& share : plan.shares) {
      plan.micro_batch_size = std::max(plan.micro_batch_size, share.micro_batch_size);
    }
  }
  const PlanPins& pins = request.pins;
  plan.exact_reduction = pins.exact_reduction;
  plan.logical_shards = pins.logical_shards;
  plan.sync_batch_norm = pins.sync_batch_norm;
  const int stages = static_cast<int>(layout.first_block.size());
  int first = 0, begin = 0;  // node, block
  for (int s = 0; s < stages; ++s) {
    const int end = s + 1 < stages ? layout.first_block[static_cast<size_t>(s) + 1]
                                   : profile.profile.num_blocks();
    PlanStage stage;
    stage.virtual_stage = s;
    stage.rank_stage = s % layout.pipeline;
    stage.first_node = first;
    stage.last_node = profile.last_source[static_cast<size_t>(end) - 1];
    if (!pins.stages.empty()) {
      const PlanStage& pinned = pins.stages[static_cast<size_t>(s)];
      stage.first_node = pinned.first_node;
      stage.last_node = pinned.last_node;
      stage.recompute_nodes = pinned.recompute_nodes;
    }
    write_recompute(layout, profile.last_source, begin, end, &stage);
    begin = end;
    first = stage.last_node + 1;
    plan.stages.push_back(stage);
  }
  for (const auto& [name, placement] : profile.placements) {
    plan.placements[name] = {Placement::replicate(), placement};
  }
  for (const auto& [name, placement] : pins.placements) {
    plan.placements[name] = placement;
  }
  const bool runs_again = layout.block_recompute.empty()
                              ? layout.recompute == RecomputeMode::kFull
                              : std::find(layout.block_recompute.begin(),
                                          layout.block_recompute.end(),
                                          RecomputeMode::kFull) != layout.block_recompute.end();
  for (const auto& [name, padded] : profile.padding) {
    plan.padding[name] = padded.multiple;
    if (runs_again) {
      plan.padding[name + "/recompute"] = padded.multiple;  // forward nodes run again
    }
  }
  for (const auto& [name, multiple] : pins.padding) {
    plan.padding[name] = multiple;
  }
  return plan;
}

Engine own_engine(const std::string& precision, double optimizer_bytes_fp32) {
  Engine engine = find_engine("trainrt");
  const double width = precision == "fp64" ? 8 : 4;
  engine.overlays_memory = true;
  // In 16 bits too: parameters are cast where they are read (graph/passes/precision).
  engine.weight_bytes = width;
  engine.gather_bytes = width;
  engine.update_bytes = 2 * width;
  engine.gradient_bytes = width;
  engine.reduce_bytes = width;
  engine.optimizer_bytes = optimizer_bytes_fp32;
  engine.scatters_each = true;
  return engine;
}

namespace {

PlanResult search_once(const PlanRequest& request,
                       SearchModel* model,
                       const PlanSearch::Beside& beside = nullptr) {
  const auto search = std::make_shared<PlanSearch>(request, model);
  PlanResult result = search->run(beside);
  result.remains = search;
  return result;
}

// Shares are proportions of the batch's samples. Where the micro-batch size is free they are
// rounded to samples first, and each size is tried on what that gives: cut into micro-batches of
// one size first, a batch of few would keep little of the proportions.
// `beside`: see PlanSearch::run(); not called where there are several searches.
PlanResult search(const PlanRequest& request,
                  SearchModel* model,
                  const PlanSearch::Beside& beside = nullptr) {
  const PlanPins& pins = request.pins;
  if (pins.shares.empty() || pins.micro_batch.has_value() || pins.exact_reduction) {
    return search_once(request, model, beside);
  }
  check_pins(request);
  const int num_blocks = static_cast<int>(model->models.at(1, false).blocks.blocks.size());
  if (candidate_degrees(request, num_blocks).empty()) {
    return search_once(request, model);  // says why
  }
  const auto cut = [&](int64_t micro_batch) {
    return make_sized_shares(
        request.global_batch, std::vector<int64_t>(pins.shares.size(), micro_batch), pins.shares);
  };
  const auto largest = [](const std::vector<DataShare>& shares) {
    int64_t size = 0;
    for (const DataShare& share : shares) {
      size = std::max(size, share.micro_batch_size);
    }
    return size;
  };
  std::optional<PlanResult> best;
  int64_t candidates = 0, pruned = 0;
  double lower_bound = 1e300;
  for (const int64_t b : candidate_micro_batches(request, largest(cut(request.global_batch)))) {
    PlanRequest changed = request;
    changed.pins.data = static_cast<int>(pins.shares.size());
    changed.pins.shares.clear();
    changed.pins.data_shares = cut(b);
    changed.pins.micro_batch = largest(changed.pins.data_shares);
    PlanResult found = search_once(changed, model);
    candidates += found.candidates;
    pruned += found.pruned;
    lower_bound = std::min(lower_bound, found.lower_bound);
    const bool better =
        !best || (found.feasible && !best->feasible) ||
        (found.feasible == best->feasible &&
         (found.feasible ? found.value < best->value : found.missing_bytes < best->missing_bytes));
    if (better) {
      best = std::move(found);
    }
  }
  best->candidates = candidates;
  best->pruned = pruned;
  best->lower_bound = lower_bound;
  return std::move(*best);
}

// Tells of plans for fewer devices which are faster, whatever the search's size.
void add_fewer_devices(
    const PlanRequest& request,
    const std::function<PlanResult(PlanRequest, bool only_feasible, bool split_for_memory)>& search,
    PlanResult* result) {
  for (const Change& change : fewer_devices_to_try(request, *result)) {
    try {
      const ChangedAnswer answer = {search(change.request, true, result->split_for_memory), {}};
      WhatIf found = what_came_of(change, answer, request, *result);
      if (found.feasible && found.rate_change > 0) {
        result->what_if.insert(result->what_if.begin(), std::move(found));
      }
    } catch (const Error&) {  // ruled out by what is pinned
    }
  }
}

}  // namespace

PlanResult make_plan(const PlanRequest& request) {
  ModelSource source = request.model;
  if (!request.pins.from.empty()) {
    source.forward = nullptr;  // the pins name tensors of the whole
    source.training = [&](int64_t micro_batch) {
      TrainingGraph built = request.model.training(micro_batch);
      check_model_pins(request.pins, built.graph, request.num_nodes);
      return built;
    };
  }
  const auto model = std::make_shared<SearchModel>(std::move(source), request.pins.block_pins());
  const auto search_again = [&](PlanRequest changed, bool only_feasible, bool split_for_memory) {
    changed.memory_where_tight = true;
    changed.only_feasible = only_feasible;
    changed.split_for_memory = split_for_memory;
    return search(changed, model.get());
  };
  const std::vector<Change> changes =
      request.what_if_candidates > 0 ? changes_to_try(request) : std::vector<Change>{};
  std::vector<ChangedAnswer> answers;
  const auto answer = [&](size_t i, bool split_for_memory) {
    try {
      answers[i].result = search_again(changes[i].request, false, split_for_memory);
    } catch (const Error& error) {
      answers[i].error = error;
    }
  };
  PlanResult result = search(request, model.get(), [&](int64_t candidates, const auto& rest) {
    if (candidates > request.what_if_candidates) {
      rest();
      return;
    }
    answers.resize(changes.size());
    parallel_for(1 + changes.size(), [&](size_t i, size_t) {
      if (i == 0) {
        rest();
      } else {
        answer(i - 1, request.split_for_memory);
      }
    });
  });
  if (!result.feasible) {
    result.remedies = find_remedies(request, [&](const PlanRequest& changed) {
      return search_again(changed, true, result.split_for_memory);
    });
  } else if (result.candidates <= request.what_if_candidates) {
    if (answers.empty() || result.split_for_memory != request.split_for_memory) {
      answers.assign(changes.size(), {});
      parallel_for(changes.size(), [&](size_t i, size_t) { answer(i, result.split_for_memory); });
    }
    for (size_t i = 0; i < changes.size(); ++i) {
      result.what_if.push_back(what_came_of(changes[i], answers[i], request, result));
    }
  }
  if (request.what_if_candidates > 0) {
    add_fewer_devices(request, search_again, &result);
  }
  result.remains = std::make_shared<std::pair<std::shared_ptr<const void>, std::shared_ptr<void>>>(
      std::move(result.remains), model);
  return result;
}

}  // namespace trainrt
