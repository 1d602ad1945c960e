// The report as a web page: figures, a bar of where the time goes, memory bars against the limit,
// the pipeline as a picture, alternatives. Plain HTML, CSS and SVG in one file.
#include <algorithm>
#include <cstdio>

#include "graph/base/error.h"
#include "planner/plan_report.h"
#include "planner/report_parts.h"
#include "planner/step_memory.h"

namespace trainrt {

namespace {

constexpr const char* kStyle = R"(
body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:62em;padding:0 1em;color:#1b1f24}
h1{font-size:1.5em;margin:0 0 .2em}h2{font-size:1.1em;margin:2em 0 .5em}
p.note{color:#57606a;margin:.2em 0 1em}table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.3em .8em .3em 0;border-bottom:1px solid #d8dee4;vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.figures{display:flex;flex-wrap:wrap;gap:1em;margin:1em 0}
.figures div{border:1px solid #d8dee4;border-radius:6px;padding:.6em 1em}
.figures b{display:block;font-size:1.3em}.key{display:inline-block;width:.9em;height:.9em;
border-radius:2px;margin:0 .3em 0 .9em;vertical-align:-1px}
.bad{background:#fff1f0;border:1px solid #cf222e;border-radius:6px;padding:.8em 1em}
svg{width:100%;height:auto;display:block}svg text{font:11px system-ui,sans-serif;fill:#1b1f24}
)";

std::string escape(const std::string& text) {
  std::string out;
  for (const char c : text) {
    out += c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '&' ? "&amp;" : std::string(1, c);
  }
  return out;
}

std::string rectangle(
    double x, double y, double width, double height, const char* color, const std::string& title) {
  return concat("<rect x='",
                number_text(x, "%.2f"),
                "' y='",
                number_text(y, "%.2f"),
                "' width='",
                number_text(std::max(width, 0.3), "%.2f"),
                "' height='",
                number_text(height, "%.2f"),
                "' fill='",
                color,
                "'><title>",
                escape(title),
                "</title></rect>");
}

std::string label(double x, double y, const std::string& text) {
  return concat("<text x='",
                number_text(x, "%.2f"),
                "' y='",
                number_text(y, "%.2f"),
                "'>",
                escape(text),
                "</text>");
}

std::string key(const char* color, const std::string& name) {
  return concat("<span class=key style='background:", color, "'></span>", escape(name));
}

struct Part {
  const char* name;
  const char* color;
  double value;
};

const char* color_of_time(const std::string& part) {
  return part == "compute"                         ? "#2da44e"
         : part == "tensor-parallel communication" ? "#8250df"
         : part == "stage transfers"               ? "#0969da"
         : part == "pipeline bubble"               ? "#d0d7de"
         : part == "waiting for slower devices"    ? "#eaeef2"
         : part == "exposed gradient reduction"    ? "#bf8700"
         : part == "weight gathers"                ? "#bc4c00"
                                                   : "#57606a";
}

// What each part of the step is, for who has not met the words.
const char* meaning_of_time(const std::string& part) {
  return part == "compute" ? "operators of the model, forward and backward"
         : part == "tensor-parallel communication"
             ? "devices that share a layer exchange parts of its tensors"
         : part == "stage transfers" ? "pipeline stages hand activations and gradients on"
         : part == "pipeline bubble" ? "devices idle while the pipeline fills and drains"
         : part == "exposed gradient reduction"
             ? "summing gradients over the data ranks, where nothing hides it"
         : part == "waiting for slower devices" ? "the others end their part of the batch earlier"
         : part == "weight gathers" ? "collecting weights that data ranks hold in pieces"
                                    : "updating the weights";
}

std::vector<Part> memory_parts(const MemoryBreakdown& m) {
  const auto d = [](int64_t bytes) { return static_cast<double>(bytes); };
  return {{"parameters", "#0969da", d(m.parameters)},
          {"gradients", "#8250df", d(m.gradients)},
          {"optimizer", "#57606a", d(m.optimizer)},
          {"activations", "#2da44e", d(m.activations)},
          {"workspace, state and buffers", "#bf8700", d(m.workspace + m.state + m.communication)}};
}

std::string time_section(const StepPrediction& p) {
  std::string svg = "<svg id=time-bar viewBox='0 0 900 34'>", rows;
  double x = 0;
  for (const auto& [key, name, seconds] : time_parts(p)) {
    const double width = 900 * seconds / p.seconds;
    const std::string share = number_text(100 * seconds / p.seconds, "%.1f") + " %";
    svg += rectangle(x, 2, width, 30, color_of_time(name), concat(name, ": ", share));
    rows += concat("<tr><td><span class=key style='background:",
                   color_of_time(name),
                   "'></span>",
                   name,
                   "</td><td class=n>",
                   number_text(seconds, "%.4g"),
                   " s</td><td class=n>",
                   share,
                   "</td><td>",
                   meaning_of_time(name),
                   "</td></tr>");
    x += width;
  }
  return "<h2>Where the time of one step goes</h2>" + svg + "</svg><table id=time>" + rows +
         "</table>";
}

// One bar per stage, of its fullest device; of mixed clusters one per rank.
struct MemoryBar {
  std::string name;
  MemoryBreakdown breakdown;
  int64_t peak = 0, reserved = 0, capacity = 0;
};

std::vector<MemoryBar> memory_bars(const PlanRequest& request, const Candidate& c) {
  std::vector<MemoryBar> bars;
  constexpr int kMostRanks = 32;
  if (!c.rank_memory.empty() && c.layout.world_size() <= kMostRanks) {
    for (int rank = 0; rank < c.layout.world_size(); ++rank) {
      const int device = c.layout.device(rank);
      const RankMemory& own = c.rank_memory[static_cast<size_t>(rank)];
      bars.push_back({concat("rank ", rank, ", ", request.topology.type_of(device).name),
                      own.breakdown,
                      own.peak_bytes,
                      reserved_bytes(request.topology, c.layout, device),
                      request.topology.capacity_bytes(device)});
    }
    return bars;
  }
  for (const StageMemory& stage : c.prediction.stages) {
    bars.push_back({concat("stage ", stage.stage, ", rank ", stage.rank),
                    stage.breakdown,
                    stage.peak_bytes,
                    stage.reserved_bytes,
                    stage.capacity_bytes});
  }
  return bars;
}

std::string memory_section(const PlanRequest& request, const Candidate& c) {
  const std::vector<MemoryBar> bars = memory_bars(request, c);
  int64_t largest = 1;
  for (const MemoryBar& bar : bars) {
    largest = std::max({largest, bar.capacity, bar.peak + bar.reserved});
  }
  constexpr double kLeft = 190, kWidth = 560;
  const double scale = kWidth / static_cast<double>(largest);
  const size_t shown = std::min<size_t>(bars.size(), 64);
  std::string svg = concat("<svg id=memory viewBox='0 0 900 ", 22 * shown + 6, "'>"), keys;
  for (size_t i = 0; i < shown; ++i) {
    const MemoryBar& bar = bars[i];
    const double y = 4 + 22 * static_cast<double>(i);
    double x = kLeft;
    svg += label(0, y + 13, bar.name);
    for (const Part& part : memory_parts(bar.breakdown)) {
      if (part.value > 0) {
        svg += rectangle(x,
                         y,
                         part.value * scale,
                         17,
                         part.color,
                         concat(part.name, ": ", gibibytes(part.value)));
        x += part.value * scale;
      }
    }
    if (bar.reserved > 0) {
      svg += rectangle(x,
                       y,
                       static_cast<double>(bar.reserved) * scale,
                       17,
                       "#f1aeb5",
                       "reserved by driver and libraries");
    }
    const int64_t used = bar.peak + bar.reserved;
    const double limit = kLeft + static_cast<double>(bar.capacity) * scale;
    svg += concat("<line x1='",
                  limit,
                  "' x2='",
                  limit,
                  "' y1='",
                  y - 2,
                  "' y2='",
                  y + 19,
                  "' stroke='#1b1f24' stroke-width='2'/>");
    svg += label(kLeft + kWidth + 10,
                 y + 13,
                 used > bar.capacity
                     ? gibibytes(static_cast<double>(used - bar.capacity)) + " too much"
                     : concat(gibibytes(static_cast<double>(used)),
                              ", ",
                              number_text(100 * static_cast<double>(used) /
                                              static_cast<double>(bar.capacity),
                                          "%.0f"),
                              " %"));
  }
  for (const Part& part : memory_parts({})) {
    keys += key(part.color, part.name);
  }
  return concat("<h2>Memory of the devices</h2><p class=note>",
                bars.size() == static_cast<size_t>(c.layout.world_size())
                    ? "Each device. "
                    : "The fullest device of each pipeline stage. ",
                "The black line is the device's memory: what lies left of it fits. ",
                c.memory_is_exact()
                    ? "The figures are those of the compiled programs: what a run allocates."
                    : "The figures are an estimate.",
                "</p><p class=note>",
                keys,
                key("#f1aeb5", "reserved by driver and libraries"),
                "</p>",
                svg,
                "</svg>");
}

std::string pipeline_section(const StepPrediction& p) {
  if (p.timeline == nullptr || p.timeline->schedule.num_stages == 1) {
    return "";
  }
  const Timeline& t = *p.timeline;
  const int rows = std::min(t.schedule.num_stages, 32);
  const double end = shown_seconds(t, 96);
  std::string svg = concat("<svg id=pipeline viewBox='0 0 900 ", 18 * rows + 4, "'>");
  for (int rank = 0; rank < rows; ++rank) {
    const auto row = static_cast<size_t>(rank);
    svg += label(0, 18 * rank + 13.0, concat("stage ", rank));
    for (size_t i = 0; i < t.schedule.ranks[row].size(); ++i) {
      const Cell& cell = t.schedule.ranks[row][i];
      const CellTime& time = t.replay.cells[row][i];
      if (time.start > end) {
        continue;
      }
      const char* color = cell.phase == PhaseKind::kForward    ? "#54aeff"
                          : cell.phase == PhaseKind::kBackward ? "#2da44e"
                                                               : "#bf8700";
      svg += rectangle(60 + 840 * time.start / end,
                       18 * rank + 2,
                       840 * (std::min(time.end, end) - time.start) / end - 0.4,
                       15,
                       color,
                       concat(phase_letter(cell.phase),
                              " of micro-batch ",
                              cell.micro_batch,
                              cell.ahead ? " of the next step" : "",
                              ", virtual stage ",
                              cell.virtual_stage));
    }
  }
  return concat("<h2>The pipeline over time</h2><p class=note>",
                end < t.replay.seconds
                    ? concat("The first ", number_text(end, "%.3g"), " s of the step")
                    : "The whole step",
                ", a row per stage; white is idle. Hover over a box to see what it is.",
                key("#54aeff", "forward"),
                key("#2da44e", "backward"),
                key("#bf8700", "weight gradient"),
                "</p>",
                svg,
                "</svg>");
}

std::string plan_words(const Candidate& c) {
  const Layout& l = c.layout;
  std::string text;
  const auto say = [&](const std::string& words) { text += (text.empty() ? "" : ", ") + words; };
  if (l.data > 1) {
    say(concat(l.data, "-way data"));
  }
  if (l.tensor > 1) {
    say(concat(l.tensor, "-way tensor", l.sequence_parallel ? " and sequence" : ""));
  }
  if (l.pipeline > 1) {
    const std::string virtual_stages =
        l.virtual_stages > 1 ? concat(", ", l.virtual_stages, " virtual stages") : "";
    say(concat(l.pipeline, "-stage pipeline (", schedule_name(l.schedule), virtual_stages, ")"));
  }
  if (text.empty()) {
    say("one device");
  }
  say(concat("micro-batches of ", micro_batch_text(l)));
  if (l.zero_stage > 0) {
    say(concat("ZeRO ", l.zero_stage));
  }
  if (recompute_text(l) != "none") {
    say(concat("recompute ", recompute_text(l)));
  }
  return text;
}

std::string alternatives_section(const PlanResult& result) {
  if (result.alternatives.empty()) {
    return "";
  }
  std::string rows;
  for (const Candidate& other : result.alternatives) {
    rows += concat("<tr><td>",
                   plan_words(other),
                   "</td><td class=n>",
                   number_text(other.prediction.seconds, "%.4g"),
                   "</td><td>",
                   escape(other.rejected_because),
                   "</td></tr>");
  }
  return "<h2>Why not otherwise</h2><table id=alternatives><tr><th>plan</th><th class=n>step "
         "(s)</th>"
         "<th>rejected because</th></tr>" +
         rows + "</table>";
}

std::string group_rows(const std::vector<NameGroup>& groups, bool with_gain) {
  constexpr size_t kMost = 40;
  std::string rows;
  for (size_t i = 0; i < groups.size() && i < kMost; ++i) {
    const NameGroup& group = groups[i];
    rows += concat("<tr><td>",
                   escape(group.pattern),
                   "</td><td class=n>",
                   group.count,
                   "</td><td>",
                   group.what,
                   "</td>");
    if (with_gain) {
      rows += concat("<td class=n>", number_text(1e3 * group.seconds), " ms</td>");
    }
    rows += "</tr>";
  }
  if (groups.size() > kMost) {
    rows += concat("<tr><td>and ", groups.size() - kMost, " kinds more</td></tr>");
  }
  return rows;
}

std::string placements_section(const PlanResult& result) {
  const std::vector<NameGroup> groups = placement_groups(result.plan);
  if (groups.empty()) {
    return "";
  }
  return "<h2>Which tensor is placed how</h2><p class=note>Over the devices of a tensor group; "
         "shard(d) cuts dimension d into parts as equal as can be. * stands for a number, such as "
         "the layer's. All other tensors are whole on every device.</p>"
         "<table id=placements><tr><th>tensor</th>"
         "<th class=n>how many</th><th>placement</th></tr>" +
         group_rows(groups, false) + "</table>";
}

std::string padding_section(const PlanResult& result) {
  const std::vector<NameGroup> groups = padding_groups(result);
  if (groups.empty()) {
    return "";
  }
  return "<h2>Padding</h2><p class=note>Matrix products whose rows are filled up with zeros to a "
         "length that the device multiplies faster. The gain is that of one micro-batch, with the "
         "copying subtracted.</p><table id=padding><tr><th>operator</th><th class=n>how many</th>"
         "<th>padded</th><th class=n>gain</th></tr>" +
         group_rows(groups, true) + "</table>";
}

std::string what_if_section(const PlanResult& result) {
  if (result.what_if.empty()) {
    return "";
  }
  std::string rows;
  for (const WhatIf& one : result.what_if) {
    rows += concat("<tr><td>With ",
                   escape(one.change),
                   "</td><td>",
                   escape(one.effect),
                   "</td><td class=n>",
                   one.feasible ? number_text(one.seconds, "%.4g") : std::string("does not fit"),
                   "</td></tr>");
  }
  return "<h2>What would change the answer</h2><table id=what-if><tr><th>if</th>"
         "<th>the best plan has</th><th class=n>step (s)</th></tr>" +
         rows + "</table>";
}

std::string figure(const std::string& value, const std::string& name) {
  return "<div><b>" + value + "</b>" + name + "</div>";
}

}  // namespace

std::string report_html(const PlanRequest& request,
                        const PlanResult& result,
                        const ReportContext& context) {
  const Candidate& c = result.chosen;
  const StepPrediction& p = c.prediction;
  const PlanFigures f = plan_figures(request, result, c);
  const ErrorBand band = error_band_of(request, result);
  std::string body = concat("<h1>",
                            escape(context.model_name),
                            " on ",
                            escape(cluster_text(request.topology)),
                            "</h1><p class=note>Batch of ",
                            request.global_batch,
                            " samples, ",
                            escape(request.precision),
                            ". A prediction: nothing was run.</p>");
  if (!result.feasible) {
    body += concat("<div id=infeasible class=bad><b>Does not fit.</b> The nearest plan is ",
                   gibibytes(static_cast<double>(result.missing_bytes)),
                   " (",
                   result.missing_bytes,
                   " bytes) short on ",
                   escape(rank_text(request, c, result.missing_rank)),
                   ".");
    for (const std::string& remedy : result.remedies) {
      body += "<br>Would fit: " + escape(remedy);
    }
    body += result.remedies.empty() ? "<br>No single change that was tried makes it fit.</div>"
                                    : "</div>";
  }
  body += concat("<p id=plan><b>",
                 result.feasible ? "Plan:" : "Nearest plan:",
                 "</b> ",
                 plan_words(c),
                 ". Batch: ",
                 escape(shares_text(request, result)),
                 ".</p><div class=figures>");
  body += figure(number_text(p.seconds, "%.4g") + " s",
                 concat("one step (measured ones were ",
                        number_text(100 * band.low, "%+.0f"),
                        " to ",
                        number_text(100 * band.high, "%+.0f"),
                        " % off)"));
  body += figure(number_text(f.samples_per_second, "%.4g"), "samples per second");
  if (f.tokens_per_second > 0) {
    body += figure(number_text(f.tokens_per_second, "%.4g"), "tokens per second");
  }
  body += figure(number_text(100 * f.mfu, "%.1f") + " %", "of the devices' peak used by the model");
  body +=
      figure(gibibytes(static_cast<double>(result.chosen.peak_bytes())), "most memory of a device");
  if (result.feasible) {
    body +=
        figure(number_text(100 * result.gap(), "%.2f") + " %", "gap to the search's lower bound");
  }
  body += "</div>" + time_section(p) + memory_section(request, c) + pipeline_section(p) +
          what_if_section(result) + alternatives_section(result) + placements_section(result) +
          padding_section(result);
  body += concat("<p class=note>Error band from: ",
                 escape(band.from),
                 ". ",
                 result.candidates,
                 " candidates in ",
                 number_text(context.seconds, "%.2g"),
                 " s.</p>");
  // The policy has the browser itself refuse whatever would be fetched or run.
  return "<!doctype html><html lang=en><head><meta charset=utf-8><meta "
         "http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src "
         "'unsafe-inline'\"><title>" +
         escape(context.model_name) + " plan</title><style>" + kStyle + "</style></head><body>" +
         body + "</body></html>\n";
}

}  // namespace trainrt
