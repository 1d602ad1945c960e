#include "planner/plan_report.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "graph/base/error.h"

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
          {"peak_bytes_max", c.prediction.peak_bytes()},
          {"error_band", {{"low", band.low}, {"high", band.high}, {"from", band.from}}}};
}

Json breakdown_object(const StepBreakdown& b) {
  return {{"compute", b.compute},
          {"tensor_communication", b.tensor_communication},
          {"transfer", b.transfer},
          {"bubble", b.bubble},
          {"gradient_reduction", b.gradients},
          {"weight_gather", b.gather},
          {"optimizer", b.optimizer}};
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
    ranks.push_back({{"rank", rank},
                     {"host", request.topology.host_of(device).name},
                     {"device", request.topology.device(device).name},
                     {"stage", rank / per_stage},
                     {"peak_bytes", stage.peak_bytes},
                     {"reserved_bytes", request.topology.reserved_bytes(device)},
                     {"capacity_bytes", request.topology.capacity_bytes(device)},
                     {"breakdown", memory_object(stage.breakdown)}});
  }
  return ranks;
}

// An alternative's plan in short: what tells it from the chosen one.
Json short_plan(const Candidate& c) {
  return {{"data_parallel", c.layout.data},
          {"tensor_parallel", c.layout.tensor},
          {"pipeline_parallel", c.layout.pipeline},
          {"virtual_stages", c.layout.virtual_stages},
          {"schedule", schedule_name(c.layout.schedule)},
          {"micro_batch_size", c.layout.micro_batch},
          {"zero_stage", c.layout.zero_stage},
          {"sequence_parallel", c.layout.sequence_parallel},
          {"recompute", recompute_name(c.layout.recompute)}};
}

std::string number(double value, const char* format = "%.3g") {
  char text[64];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

std::string gibibytes(double bytes) {
  return number(bytes / 1073741824.0, "%.2f") + " GiB";
}

std::string layout_text(const Candidate& c) {
  const Layout& l = c.layout;
  std::string text = concat("dp ", l.data, "  tp ", l.tensor, "  pp ", l.pipeline);
  if (l.virtual_stages > 1) {
    text += concat(" x ", l.virtual_stages, " virtual");
  }
  text += concat("  ",
                 schedule_name(l.schedule),
                 "  micro-batch ",
                 l.micro_batch,
                 "  zero ",
                 l.zero_stage,
                 "  recompute ",
                 recompute_name(l.recompute));
  return text + (l.sequence_parallel ? "  sequence-parallel" : "");
}

std::string infeasible_text(const PlanResult& result) {
  std::string text = concat("Does not fit: the nearest plan is ",
                            result.missing_bytes,
                            " bytes (",
                            gibibytes(static_cast<double>(result.missing_bytes)),
                            ") short on rank ",
                            result.missing_rank,
                            ".\n  nearest      ",
                            layout_text(result.chosen),
                            "\n");
  for (const std::string& remedy : result.remedies) {
    text += "  would fit    " + remedy + "\n";
  }
  return text;
}

std::string shares_text(const PlanResult& result) {
  const std::vector<DataShare>& shares = result.plan.shares;
  bool alike = true;
  for (const DataShare& share : shares) {
    alike = alike && share.num_samples == shares[0].num_samples;
  }
  if (alike) {
    return concat(
        shares[0].num_samples, " samples each, ", shares[0].num_micro_batches, " micro-batches");
  }
  std::string text;
  for (size_t i = 0; i < shares.size() && i < 16; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shares[i].num_samples);
  }
  return text + (shares.size() > 16 ? ", ..." : "") +
         " samples: by speed and memory of the devices";
}

}  // namespace

PlanFigures plan_figures(const PlanRequest& request, const PlanResult& result, const Candidate& c) {
  PlanFigures figures;
  const double seconds = c.prediction.seconds;
  const double batch = static_cast<double>(request.global_batch);
  const ModelProfile& profile = result.profiles[static_cast<size_t>(c.profile)].profile;
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

ErrorBand error_band_of(const PlanRequest& request, const PlanResult& result) {
  const GraphProfile& profile = result.profiles[static_cast<size_t>(result.chosen.profile)];
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
    json["remedies"] = result.remedies;
  }
  json["plan"] = plan_object(result.plan);
  json["predicted"] = predicted_object(request, result, result.chosen);
  json["predicted"]["breakdown_seconds"] = breakdown_object(result.chosen.prediction.breakdown);
  json["ranks"] = ranks_array(request, result);
  json["alternatives"] = Json::array();
  for (const Candidate& other : result.alternatives) {
    json["alternatives"].push_back({{"plan", short_plan(other)},
                                    {"predicted", predicted_object(request, result, other)},
                                    {"rejected_because", other.rejected_because}});
  }
  json["search"] = {{"seconds", context.seconds},
                    {"candidates", result.candidates},
                    {"pruned", result.pruned},
                    {"lower_bound_seconds", result.lower_bound},
                    {"gap", result.gap()}};
  return json.dump(1) + "\n";
}

std::string report_text(const PlanRequest& request,
                        const PlanResult& result,
                        const ReportContext& context) {
  const Candidate& c = result.chosen;
  const StepPrediction& p = c.prediction;
  std::string text = concat(context.model_name,
                            " on ",
                            request.topology.num_devices(),
                            " x ",
                            request.topology.types[0].name,
                            request.topology.types.size() > 1 ? " and others" : "",
                            ", batch ",
                            request.global_batch,
                            ", ",
                            request.precision,
                            "\n");
  if (!result.feasible) {
    return text + infeasible_text(result);
  }
  const PlanFigures figures = plan_figures(request, result, c);
  const ErrorBand band = error_band_of(request, result);
  text += concat("  plan         ", layout_text(c), "\n");
  text += "  shares       " + shares_text(result) + "\n";
  text += concat("  step         ",
                 number(p.seconds, "%.4g"),
                 " s  (",
                 number(100 * band.low, "%+.0f"),
                 " to ",
                 number(100 * band.high, "%+.0f"),
                 " %, from ",
                 band.from,
                 ")\n");
  text += concat("  rate         ", number(figures.samples_per_second, "%.4g"), " samples/s");
  if (figures.tokens_per_second > 0) {
    text += concat(", ", number(figures.tokens_per_second, "%.4g"), " tokens/s");
  }
  text += concat(", ",
                 number(figures.flops_per_second_per_device / 1e12, "%.4g"),
                 " TFLOP/s a device, mfu ",
                 number(100 * figures.mfu, "%.1f"),
                 " %\n");
  text += "\n  where the time goes\n";
  const StepBreakdown& b = p.breakdown;
  const std::pair<const char*, double> parts[] = {
      {"compute", b.compute},
      {"tensor-parallel communication", b.tensor_communication},
      {"stage transfers", b.transfer},
      {"pipeline bubble", b.bubble},
      {"exposed gradient reduction", b.gradients},
      {"weight gathers", b.gather},
      {"optimizer", b.optimizer}};
  for (const auto& [name, seconds] : parts) {
    if (seconds > 0) {
      char line[128];
      std::snprintf(line,
                    sizeof(line),
                    "    %-30s %10.4g s  %5.1f %%\n",
                    name,
                    seconds,
                    100 * seconds / p.seconds);
      text += line;
    }
  }
  text +=
      "\n  memory by stage (GiB)    params   grads   optim  activ.   other    peak + reserved of "
      "capacity\n";
  for (const StageMemory& stage : p.stages) {
    if (stage.stage >= 8 && stage.stage + 1 < static_cast<int>(p.stages.size())) {
      continue;  // one screen
    }
    const MemoryBreakdown& m = stage.breakdown;
    const auto gib = [](int64_t bytes) { return static_cast<double>(bytes) / 1073741824.0; };
    char line[192];
    std::snprintf(line,
                  sizeof(line),
                  "    %-20d %8.2f%8.2f%8.2f%8.2f%8.2f%8.2f + %.2f of %.2f\n",
                  stage.stage,
                  gib(m.parameters),
                  gib(m.gradients),
                  gib(m.optimizer),
                  gib(m.activations),
                  gib(m.workspace + m.communication + m.state),
                  gib(stage.peak_bytes),
                  gib(stage.reserved_bytes),
                  gib(stage.capacity_bytes));
    text += line;
  }
  if (!result.alternatives.empty()) {
    text += "\n  why not\n";
    for (size_t i = 0; i < result.alternatives.size() && i < 6; ++i) {
      text += "    " + layout_text(result.alternatives[i]) + "\n      " +
              result.alternatives[i].rejected_because + "\n";
    }
  }
  return text + concat("\n  search       ",
                       number(context.seconds, "%.3g"),
                       " s, ",
                       result.candidates,
                       " candidates, ",
                       result.pruned,
                       " pruned; no plan of this space beats ",
                       number(result.lower_bound, "%.4g"),
                       " s (gap ",
                       number(100 * result.gap(), "%.2f"),
                       " %)\n");
}

}  // namespace trainrt
