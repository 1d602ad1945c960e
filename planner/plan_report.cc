// The report as JSON (CONTRACT section 2), and the figures that all forms of it show.
#include "planner/plan_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "graph/base/error.h"
#include "planner/report_parts.h"
#include "planner/step_memory.h"

namespace trainrt {

namespace {

using Json = nlohmann::ordered_json;

Json plan_object(const Plan& plan) {
  return Json::parse(plan_to_json(plan));
}

Json predicted_object(const PlanRequest& request, const PlanResult& result, const Candidate& c) {
  const PlanFigures figures = plan_figures(request, result, c);
  const ErrorBand band = error_band_of(request, result);
  return {{"step_seconds", c.prediction.seconds},
          {"samples_per_second", figures.samples_per_second},
          {"tokens_per_second", figures.tokens_per_second},
          {"model_flops", figures.model_flops},
          {"model_flops_per_second_per_device", figures.flops_per_second_per_device},
          {"mfu", figures.mfu},
          {"bubble_fraction", c.prediction.bubble_fraction},
          {"exposed_communication_seconds", figures.exposed_communication_seconds},
          {"peak_bytes_max", c.peak_bytes()},
          {"error_band", {{"low", band.low}, {"high", band.high}, {"from", band.from}}}};
}

Json breakdown_object(const StepPrediction& prediction) {
  Json object = Json::object();
  for (const TimePart& part : all_time_parts(prediction)) {
    object[part.key] = part.seconds;
  }
  return object;
}

Json memory_object(const MemoryBreakdown& m) {
  return {{"parameters", m.parameters},
          {"gradients", m.gradients},
          {"optimizer", m.optimizer},
          {"state", m.state},
          {"activations", m.activations},
          {"workspace", m.workspace},
          {"communication", m.communication}};
}

Json ranks_array(const PlanRequest& request, const PlanResult& result) {
  Json ranks = Json::array();
  const Candidate& c = result.chosen;
  const int per_stage = c.layout.data * c.layout.tensor;
  for (int rank = 0; rank < c.layout.world_size(); ++rank) {
    const int device = c.layout.device(rank);
    const StageMemory& stage = c.prediction.stages[static_cast<size_t>(rank / per_stage)];
    const bool exact = !c.rank_memory.empty();
    const RankMemory own = exact ? c.rank_memory[static_cast<size_t>(rank)]
                                 : RankMemory{stage.peak_bytes, stage.breakdown, nullptr};
    ranks.push_back({{"rank", rank},
                     {"host", request.topology.host_of(device).name},
                     {"device", request.topology.device(device).name},
                     {"stage", rank / per_stage},
                     {"peak_bytes", own.peak_bytes},
                     {"reserved_bytes", reserved_bytes(request.topology, c.layout, device)},
                     {"capacity_bytes", request.topology.capacity_bytes(device)},
                     {"breakdown", memory_object(own.breakdown)}});
  }
  return ranks;
}

// What tells a plan from the chosen one, as a plan file that leaves the rest open. Recomputation is
// said by stages there, so it stands beside it.
Json short_plan(const Layout& layout) {
  return {{"data_parallel", layout.data},
          {"tensor_parallel", layout.tensor},
          {"pipeline_parallel", layout.pipeline},
          {"virtual_stages", layout.virtual_stages},
          {"schedule", schedule_name(layout.schedule)},
          {"micro_batch_size", layout.micro_batch},
          {"zero_stage", layout.zero_stage},
          {"sequence_parallel", layout.sequence_parallel}};
}

Json alternative_object(const PlanRequest& request,
                        const PlanResult& result,
                        const Candidate& other) {
  Json plan = short_plan(other.layout);
  if (!other.layout.micro_batch_sizes.empty()) {
    Plan shares;
    shares.shares = other.shares;
    plan["shares"] = plan_object(shares)["shares"];
    const auto largest = std::max_element(
        other.shares.begin(), other.shares.end(), [](const DataShare& a, const DataShare& b) {
          return a.micro_batch_size < b.micro_batch_size;
        });
    plan["micro_batch_size"] = largest->micro_batch_size;  // which a short share may not reach
  }
  return {{"plan", std::move(plan)},
          {"recompute", recompute_text(other.layout)},
          {"predicted", predicted_object(request, result, other)},
          {"rejected_because", other.rejected_because}};
}

// As the search would find it after a change.
Json what_if_object(const WhatIf& one) {
  Json object = {{"change", one.change}, {"feasible", one.feasible}, {"effect", one.effect}};
  if (one.feasible) {
    object["plan"] = short_plan(one.layout);
    object["recompute"] = recompute_text(one.layout);
    object["predicted"] = {{"step_seconds", one.seconds},
                           {"samples_per_second", one.samples_per_second},
                           {"rate_change", one.rate_change}};
  }
  return object;
}

// The beginning of the step: by stage, cells of [phase, virtual stage, micro-batch, start, end];
// what belongs to the next step's batch has a phase like "F'".
Json timeline_object(const Timeline& timeline) {
  constexpr size_t kMostStages = 32, kMostCells = 64;
  Json stages = Json::array();
  for (size_t rank = 0; rank < timeline.schedule.ranks.size() && rank < kMostStages; ++rank) {
    Json cells = Json::array();
    for (size_t i = 0; i < timeline.schedule.ranks[rank].size() && i < kMostCells; ++i) {
      const Cell& cell = timeline.schedule.ranks[rank][i];
      const CellTime& time = timeline.replay.cells[rank][i];
      cells.push_back(Json::array({concat(phase_letter(cell.phase), cell.ahead ? "'" : ""),
                                   cell.virtual_stage,
                                   cell.micro_batch,
                                   time.start,
                                   time.end}));
    }
    stages.push_back(std::move(cells));
  }
  return {{"seconds", timeline.replay.seconds}, {"stages", std::move(stages)}};
}

Json padding_array(const PlanResult& result) {
  Json padding = Json::array();
  const GraphProfile& profile = *result.profiles[static_cast<size_t>(result.chosen.profile)];
  for (const auto& [name, padded] : profile.padding) {
    padding.push_back({{"node", name},
                       {"multiple", padded.multiple},
                       {"seconds", padded.seconds},
                       {"unpadded_seconds", padded.plain_seconds},
                       {"flops", padded.flops},
                       {"unpadded_flops", padded.plain_flops},
                       {"bytes", padded.bytes},
                       {"unpadded_bytes", padded.plain_bytes}});
  }
  return padding;
}

}  // namespace

PlanFigures plan_figures(const PlanRequest& request, const PlanResult& result, const Candidate& c) {
  PlanFigures figures;
  const double seconds = c.prediction.seconds;
  const double batch = static_cast<double>(request.global_batch);
  const ModelProfile& profile = result.profiles[static_cast<size_t>(c.profile)]->profile;
  figures.model_flops = profile.model_flops_per_sample * batch;
  if (seconds <= 0) {
    return figures;
  }
  figures.samples_per_second = batch / seconds;
  figures.tokens_per_second = batch * profile.tokens_per_sample / seconds;
  figures.flops_per_second_per_device = figures.model_flops / seconds / c.layout.world_size();
  double peak = 0;
  for (int rank = 0; rank < c.layout.world_size(); ++rank) {
    peak += request.topology.type_of(c.layout.device(rank)).peak_flops(request.precision);
  }
  figures.mfu = figures.model_flops / seconds / peak;
  const StepBreakdown& b = c.prediction.breakdown;
  figures.exposed_communication_seconds =
      b.tensor_communication + b.transfer + b.gradients + b.gather;
  return figures;
}

double shown_seconds(const Timeline& timeline, size_t most_cells) {
  const size_t cells = timeline.schedule.ranks[0].size();
  const double share = static_cast<double>(most_cells) / static_cast<double>(cells);
  return timeline.replay.seconds * std::min(1.0, share);
}

ErrorBand error_band_of(const PlanRequest& request, const PlanResult& result) {
  const GraphProfile& profile = *result.profiles[static_cast<size_t>(result.chosen.profile)];
  return error_band(request.topology, profile.profile.tokens_per_sample > 0);
}

std::string report_json(const PlanRequest& request,
                        const PlanResult& result,
                        const ReportContext& context) {
  Json json;
  json["feasible"] = result.feasible;
  if (!result.feasible) {
    json["missing_bytes"] = result.missing_bytes;
    json["missing_rank"] = result.missing_rank;
    json["missing_on"] = rank_text(request, result.chosen, result.missing_rank);
    json["remedies"] = result.remedies;
  }
  json["plan"] = plan_object(result.plan);
  json["predicted"] = predicted_object(request, result, result.chosen);
  json["predicted"]["breakdown_seconds"] = breakdown_object(result.chosen.prediction);
  if (!result.drains_because.empty()) {
    json["drains_because"] = result.drains_because;
  }
  json["memory_from"] = result.chosen.memory_is_exact() ? "programs" : "estimate";
  json["ranks"] = ranks_array(request, result);
  json["padding"] = padding_array(result);
  if (result.chosen.prediction.timeline != nullptr) {
    json["timeline"] = timeline_object(*result.chosen.prediction.timeline);
  }
  json["alternatives"] = Json::array();
  for (const Candidate& other : result.alternatives) {
    json["alternatives"].push_back(alternative_object(request, result, other));
  }
  json["what_if"] = Json::array();
  for (const WhatIf& one : result.what_if) {
    json["what_if"].push_back(what_if_object(one));
  }
  json["search"] = {{"seconds", context.seconds},
                    {"candidates", result.candidates},
                    {"pruned", result.pruned},
                    {"lower_bound_seconds", result.feasible ? Json(result.lower_bound) : Json()},
                    {"gap", result.feasible ? Json(result.gap()) : Json()}};
  return json.dump(1) + "\n";
}

}  // namespace trainrt
