// The report as a web page: figures, a bar of where the time goes, memory bars against the limit,
// the pipeline as a picture, alternatives. Plain HTML, CSS and SVG in one file.
#include <algorithm>
#include <cstdio>

#include "graph/base/error.h"
#include "planner/plan_report.h"

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

std::string number(double value, const char* format) {
  char text[64];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

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
                number(x, "%.2f"),
                "' y='",
                number(y, "%.2f"),
                "' width='",
                number(std::max(width, 0.3), "%.2f"),
                "' height='",
                number(height, "%.2f"),
                "' fill='",
                color,
                "'><title>",
                escape(title),
                "</title></rect>");
}

std::string label(double x, double y, const std::string& text) {
  return concat(
      "<text x='", number(x, "%.2f"), "' y='", number(y, "%.2f"), "'>", escape(text), "</text>");
}

std::string key(const char* color, const std::string& name) {
  return concat("<span class=key style='background:", color, "'></span>", escape(name));
}

struct Part {
  const char* name;
  const char* color;
  double value;
};

std::vector<Part> time_parts(const StepBreakdown& b) {
  return {{"compute", "#2da44e", b.compute},
          {"tensor-parallel communication", "#8250df", b.tensor_communication},
          {"stage transfers", "#0969da", b.transfer},
          {"pipeline bubble (idle)", "#d0d7de", b.bubble},
          {"exposed gradient reduction", "#bf8700", b.gradients},
          {"weight gathers", "#bc4c00", b.gather},
          {"optimizer", "#57606a", b.optimizer}};
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
  std::string svg = "<svg viewBox='0 0 900 34'>", table, keys;
  double x = 0;
  for (const Part& part : time_parts(p.breakdown)) {
    if (part.value <= 0) {
      continue;
    }
    const double width = 900 * part.value / p.seconds;
    const std::string text = concat(part.name,
                                    ": ",
                                    number(part.value, "%.4g"),
                                    " s, ",
                                    number(100 * part.value / p.seconds, "%.1f"),
                                    " %");
    svg += rectangle(x, 2, width, 30, part.color, text);
    keys += key(part.color, text);
    x += width;
  }
  return "<h2>Where the time of one step goes</h2>" + svg + "</svg><p class=note>" + keys + "</p>";
}

std::string memory_section(const StepPrediction& p) {
  const double capacity = static_cast<double>(
      std::max_element(p.stages.begin(), p.stages.end(), [](const auto& a, const auto& b) {
        return a.capacity_bytes < b.capacity_bytes;
      })->capacity_bytes);
  const double scale = 780 / capacity;
  const size_t shown = std::min<size_t>(p.stages.size(), 64);
  std::string svg = concat("<svg viewBox='0 0 900 ", 22 * shown + 6, "'>"), keys;
  for (size_t i = 0; i < shown; ++i) {
    const StageMemory& stage = p.stages[i];
    const double y = 4 + 22 * static_cast<double>(i);
    double x = 70;
    svg += label(0, y + 13, concat("stage ", stage.stage));
    for (const Part& part : memory_parts(stage.breakdown)) {
      svg += rectangle(x,
                       y,
                       part.value * scale,
                       17,
                       part.color,
                       concat(part.name, ": ", number(part.value / 1073741824.0, "%.2f"), " GiB"));
      x += part.value * scale;
    }
    svg += rectangle(x,
                     y,
                     static_cast<double>(stage.reserved_bytes) * scale,
                     17,
                     "#cf222e",
                     "reserved by driver and libraries");
    const double limit = 70 + static_cast<double>(stage.capacity_bytes) * scale;
    svg += concat("<line x1='",
                  limit,
                  "' x2='",
                  limit,
                  "' y1='",
                  y - 2,
                  "' y2='",
                  y + 19,
                  "' stroke='#1b1f24'/>");
  }
  for (const Part& part : memory_parts({})) {
    keys += key(part.color, part.name);
  }
  return "<h2>Memory of one device, by pipeline stage</h2><p class=note>The black line is the "
         "device's memory" +
         concat(" (",
                number(capacity / 1073741824.0, "%.0f"),
                " GiB).",
                key("#cf222e", "reserved"),
                keys,
                "</p>",
                svg,
                "</svg>");
}

std::string pipeline_section(const StepPrediction& p) {
  if (p.timeline == nullptr || p.timeline->schedule.num_stages == 1) {
    return "";
  }
  const Timeline& t = *p.timeline;
  // A long step shows its beginning: filling, and the steady state after it.
  const int rows = std::min(t.schedule.num_stages, 32);
  double end = t.replay.seconds;
  const size_t cells = t.schedule.ranks[0].size();
  if (cells > 96) {
    end *= 96.0 / static_cast<double>(cells);
  }
  std::string svg = concat("<svg viewBox='0 0 900 ", 18 * rows + 4, "'>");
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
                              ", virtual stage ",
                              cell.virtual_stage));
    }
  }
  return concat("<h2>The pipeline over time</h2><p class=note>",
                cells > 96 ? "The first " : "All ",
                number(end, "%.3g"),
                " s of the step; white is idle.",
                key("#54aeff", "forward"),
                key("#2da44e", "backward"),
                key("#bf8700", "weight gradient"),
                "</p>",
                svg,
                "</svg>");
}

std::string plan_words(const Candidate& c) {
  const Layout& l = c.layout;
  std::string text = concat(l.data,
                            "-way data, ",
                            l.tensor,
                            "-way tensor, ",
                            l.pipeline,
                            "-stage pipeline (",
                            schedule_name(l.schedule));
  if (l.virtual_stages > 1) {
    text += concat(", ", l.virtual_stages, " virtual stages");
  }
  text += concat("), micro-batch ",
                 l.micro_batch,
                 ", ZeRO ",
                 l.zero_stage,
                 ", recompute ",
                 recompute_name(l.recompute));
  return text + (l.sequence_parallel ? ", sequence parallel" : "");
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
                   number(other.prediction.seconds, "%.4g"),
                   "</td><td>",
                   escape(other.rejected_because),
                   "</td></tr>");
  }
  return "<h2>Why not otherwise</h2><table><tr><th>plan</th><th class=n>step (s)</th>"
         "<th>rejected because</th></tr>" +
         rows + "</table>";
}

std::string placements_section(const PlanResult& result) {
  if (result.plan.placements.empty()) {
    return "";
  }
  std::string rows;
  int shown = 0;
  for (const auto& [name, placement] : result.plan.placements) {
    if (++shown > 40) {
      rows += concat("<tr><td colspan=2>and ",
                     result.plan.placements.size() - 40,
                     " more, alike by layer</td></tr>");
      break;
    }
    rows += concat(
        "<tr><td>", escape(name), "</td><td>", placement_string(placement.tensor), "</td></tr>");
  }
  return "<h2>Tensors that are split over the tensor group</h2><table>" + rows + "</table>";
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
                            request.topology.num_devices(),
                            " × ",
                            escape(request.topology.types[0].name),
                            "</h1><p class=note>Batch of ",
                            request.global_batch,
                            " samples, ",
                            escape(request.precision),
                            ". A prediction: nothing was run.</p>");
  if (!result.feasible) {
    body += concat("<div class=bad><b>Does not fit.</b> The nearest plan is ",
                   number(static_cast<double>(result.missing_bytes) / 1073741824.0, "%.2f"),
                   " GiB (",
                   result.missing_bytes,
                   " bytes) short on rank ",
                   result.missing_rank,
                   ".");
    for (const std::string& remedy : result.remedies) {
      body += "<br>Would fit: " + escape(remedy);
    }
    body += "</div>";
  }
  body += "<p><b>Plan:</b> " + plan_words(c) + ".</p><div class=figures>";
  body += figure(number(p.seconds, "%.4g") + " s",
                 concat("one step (measured ones were ",
                        number(100 * band.low, "%+.0f"),
                        " to ",
                        number(100 * band.high, "%+.0f"),
                        " % off)"));
  body += figure(number(f.samples_per_second, "%.4g"), "samples per second");
  if (f.tokens_per_second > 0) {
    body += figure(number(f.tokens_per_second, "%.4g"), "tokens per second");
  }
  body += figure(number(100 * f.mfu, "%.1f") + " %", "of the devices' peak used by the model");
  body += figure(number(static_cast<double>(p.peak_bytes()) / 1073741824.0, "%.1f") + " GiB",
                 "most memory of a device");
  body += figure(number(100 * result.gap(), "%.2f") + " %", "gap to the search's lower bound");
  body += "</div>" + time_section(p) + memory_section(p) + pipeline_section(p) +
          alternatives_section(result) + placements_section(result);
  body += concat("<p class=note>Error band from: ",
                 escape(band.from),
                 ". ",
                 result.candidates,
                 " candidates in ",
                 number(context.seconds, "%.2g"),
                 " s.</p>");
  return "<!doctype html><html lang=en><head><meta charset=utf-8><title>" +
         escape(context.model_name) + " plan</title><style>" + kStyle + "</style></head><body>" +
         body + "</body></html>\n";
}

}  // namespace trainrt
