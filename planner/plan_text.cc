// The report as one screen of text.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>

#include "graph/base/error.h"
#include "planner/plan_report.h"
#include "planner/report_parts.h"

namespace trainrt {

namespace {

constexpr size_t kMostStages = 8;
constexpr size_t kMostGroups = 6;

template <typename... Args>
std::string line(const char* format, Args... args) {
  char text[256];
  std::snprintf(text, sizeof(text), format, args...);
  return std::string(text) + "\n";
}

std::string infeasible_text(const PlanRequest& request, const PlanResult& result) {
  std::string text = concat("Does not fit: the nearest plan is ",
                            result.missing_bytes,
                            " bytes (",
                            gibibytes(static_cast<double>(result.missing_bytes)),
                            ") short on ",
                            rank_text(request, result.chosen, result.missing_rank),
                            ".\n  nearest      ",
                            layout_text(result.chosen.layout),
                            "\n");
  for (const std::string& remedy : result.remedies) {
    text += "  would fit    " + remedy + "\n";
  }
  if (result.remedies.empty()) {
    text += "  would fit    no single change that was tried\n";
  }
  return text;
}

std::string headline(const PlanRequest& request, const PlanResult& result) {
  const Candidate& c = result.chosen;
  const PlanFigures figures = plan_figures(request, result, c);
  const ErrorBand band = error_band_of(request, result);
  std::string text = concat("  plan         ", layout_text(c.layout), "\n");
  if (!result.drains_because.empty()) {
    text += concat("               drains at the end of each step: ", result.drains_because, "\n");
  }
  text += "  shares       " + shares_text(request, result) + "\n";
  if (const std::string blocks = recomputed_blocks_text(c.layout); !blocks.empty()) {
    text += "  run again    " + blocks + "\n";
  }
  text += concat("  step         ",
                 number_text(c.prediction.seconds, "%.4g"),
                 " s  (",
                 number_text(100 * band.low, "%+.0f"),
                 " to ",
                 number_text(100 * band.high, "%+.0f"),
                 " %, from ",
                 band.from,
                 ")\n");
  text += concat("  rate         ", number_text(figures.samples_per_second, "%.4g"), " samples/s");
  if (figures.tokens_per_second > 0) {
    text += concat(", ", number_text(figures.tokens_per_second, "%.4g"), " tokens/s");
  }
  return text + concat(", ",
                       number_text(figures.flops_per_second_per_device / 1e12, "%.4g"),
                       " TFLOP/s a device, mfu ",
                       number_text(100 * figures.mfu, "%.1f"),
                       " %\n");
}

std::string time_text(const StepPrediction& p) {
  std::string text = "\n  where the time goes\n";
  for (const TimePart& part : time_parts(p)) {
    text += line(
        "    %-30s %10.4g s  %5.1f %%", part.name, part.seconds, 100 * part.seconds / p.seconds);
  }
  return text;
}

// The stages' fullest devices as bars of what is used, against the limit at the right.
std::string memory_text(const Candidate& c) {
  constexpr int kBar = 20;
  const std::vector<StageMemory>& stages = c.prediction.stages;
  int64_t most = 0;
  for (const StageMemory& stage : stages) {
    most = std::max(most, stage.peak_bytes);
  }
  const bool small = most < int64_t{1} << 28;
  const double unit = small ? 1048576.0 : 1073741824.0;
  std::string text = concat("\n  memory (",
                            small ? "MiB" : "GiB",
                            c.memory_is_exact() ? ", of the compiled programs" : ", estimated",
                            ")\n    stage  params   grads   optim  activ.   other    peak + "
                            "reserved of capacity\n");
  for (const StageMemory& stage : stages) {
    if (stage.stage >= static_cast<int>(kMostStages) &&
        stage.stage + 1 < static_cast<int>(stages.size())) {
      continue;  // one screen
    }
    const MemoryBreakdown& m = stage.breakdown;
    const auto in_units = [&](int64_t bytes) { return static_cast<double>(bytes) / unit; };
    const double used = static_cast<double>(stage.peak_bytes + stage.reserved_bytes) /
                        static_cast<double>(std::max<int64_t>(1, stage.capacity_bytes));
    const int filled = std::clamp(static_cast<int>(kBar * used + 0.5), 0, kBar);
    text += line("    %-4d%8.2f%8.2f%8.2f%8.2f%8.2f%8.2f + %.2f of %.2f  [%s%s] %.0f %%",
                 stage.stage,
                 in_units(m.parameters),
                 in_units(m.gradients),
                 in_units(m.optimizer),
                 in_units(m.activations),
                 in_units(m.workspace + m.communication + m.state),
                 in_units(stage.peak_bytes),
                 in_units(stage.reserved_bytes),
                 in_units(stage.capacity_bytes),
                 std::string(static_cast<size_t>(filled), '#').c_str(),
                 std::string(static_cast<size_t>(kBar - filled), '.').c_str(),
                 100 * used);
  }
  return text;
}

// The beginning of the pipeline, a row per stage: F forward, B backward, W weight gradient.
std::string pipeline_text(const StepPrediction& p) {
  if (p.timeline == nullptr || p.timeline->schedule.num_stages == 1) {
    return "";
  }
  constexpr int kColumns = 64;
  const Timeline& t = *p.timeline;
  const double end = shown_seconds(t, 16);
  std::string text = concat("\n  pipeline, ",
                            end < t.replay.seconds ? "the first " : "all ",
                            number_text(end, "%.3g"),
                            " s (F forward, B backward, W weight gradient, . idle)\n");
  const size_t rows = std::min<size_t>(t.schedule.ranks.size(), kMostStages);
  for (size_t rank = 0; rank < rows; ++rank) {
    std::string row(kColumns, '.');
    for (size_t i = 0; i < t.schedule.ranks[rank].size(); ++i) {
      const CellTime& time = t.replay.cells[rank][i];
      const int from = static_cast<int>(kColumns * time.start / end);
      const int to = static_cast<int>(kColumns * time.end / end);
      for (int x = from; x < std::min(to, kColumns); ++x) {
        row[static_cast<size_t>(x)] = phase_letter(t.schedule.ranks[rank][i].phase)[0];
      }
    }
    text += line("    %-4d|%s|", static_cast<int>(rank), row.c_str());
  }
  return text;
}

std::string groups_text(const std::string& title,
                        const std::vector<NameGroup>& groups,
                        const std::function<std::string(const NameGroup&)>& what) {
  if (groups.empty()) {
    return "";
  }
  std::string text = "\n  " + title + "\n";
  for (size_t i = 0; i < groups.size() && i < kMostGroups; ++i) {
    const NameGroup& group = groups[i];
    const std::string count = group.count > 1 ? concat(" (", group.count, ")") : "";
    text += concat("    ", group.pattern, count, ": ", what(group), "\n");
  }
  return text +
         (groups.size() > kMostGroups
              ? concat("    and ", groups.size() - kMostGroups, " kinds more (--format json)\n")
              : "");
}

}  // namespace

std::string report_text(const PlanRequest& request,
                        const PlanResult& result,
                        const ReportContext& context) {
  std::string text = concat(context.model_name,
                            " on ",
                            cluster_text(request.topology),
                            ", batch ",
                            request.global_batch,
                            ", ",
                            request.precision,
                            "\n");
  if (!result.feasible) {
    return text + infeasible_text(request, result) + memory_text(result.chosen);
  }
  text += headline(request, result) + time_text(result.chosen.prediction) +
          memory_text(result.chosen) + pipeline_text(result.chosen.prediction);
  text += groups_text("tensors cut over the tensor group",
                      placement_groups(result.plan),
                      [](const NameGroup& group) { return group.what; });
  text += groups_text("padding", padding_groups(result), [](const NameGroup& group) {
    return concat(group.what,
                  group.seconds >= 0 ? ", gains " : ", costs ",
                  number_text(1e3 * std::abs(group.seconds)),
                  " ms a micro-batch");
  });
  if (!result.alternatives.empty()) {
    text += "\n  why not\n";
    for (size_t i = 0; i < result.alternatives.size() && i < 6; ++i) {
      text += "    " + layout_text(result.alternatives[i].layout) + "\n      " +
              result.alternatives[i].rejected_because + "\n";
    }
  }
  if (!result.what_if.empty()) {
    text += "\n  what would change the answer\n";
    for (const WhatIf& one : result.what_if) {
      text += concat("    ", one.change, ": ", one.effect, "\n");
    }
  } else if (result.feasible) {
    text += "\n  what would change the answer: --what-if on searches for it\n";
  }
  text += concat("\n  search       ",
                 number_text(context.seconds),
                 " s, ",
                 result.candidates,
                 " candidates, ",
                 result.pruned,
                 " pruned");
  if (result.feasible) {
    text += concat("; no plan of this space beats ",
                   number_text(result.lower_bound, "%.4g"),
                   " s (gap ",
                   number_text(100 * result.gap(), "%.2f"),
                   " %)");
  }
  return text + "\n";
}

}  // namespace trainrt
