#include "parallel/trace_events.h"

#include <cstdio>
#include <nlohmann/json.hpp>

namespace trainrt {

namespace {

using Json = nlohmann::ordered_json;

const char* lane_name(TraceLane lane) {
  switch (lane) {
    case TraceLane::kCompute:
      return "compute";
    case TraceLane::kCommunication:
      return "communication";
    case TraceLane::kBubble:
      return "bubble";
    case TraceLane::kOperator:
      return "operator";
  }
  return "?";
}

constexpr double kMicroseconds = 1e6;

}  // namespace

void TraceTotals::add(const TraceEvent& event) {
  switch (event.lane) {
    case TraceLane::kCompute:
      compute += event.seconds;
      break;
    case TraceLane::kCommunication:
      communication += event.seconds;
      break;
    case TraceLane::kBubble:
      bubble += event.seconds;
      break;
    case TraceLane::kOperator:
      break;  // part of a cell's
  }
}

std::string TraceTotals::line(const std::string& label, double whole) const {
  const double all = whole > 0 ? whole : 1;
  char line[160];
  std::snprintf(line,
                sizeof(line),
                ": compute %.1f %%, communication %.1f %%, bubble %.1f %%\n",
                100 * compute / all,
                100 * communication / all,
                100 * (all - compute - communication) / all);
  return label + line;
}

std::string trace_rank_lines(int rank, const std::string& label) {
  const Json process = {
      {"name", "process_name"}, {"ph", "M"}, {"pid", rank}, {"args", {{"name", label}}}};
  std::string lines = process.dump() + ",\n";
  for (const TraceLane lane :
       {TraceLane::kCompute, TraceLane::kCommunication, TraceLane::kBubble, TraceLane::kOperator}) {
    const Json thread = {{"name", "thread_name"},
                         {"ph", "M"},
                         {"pid", rank},
                         {"tid", static_cast<int>(lane)},
                         {"args", {{"name", lane_name(lane)}}}};
    lines += thread.dump() + ",\n";
  }
  return lines;
}

std::string trace_line(int rank, const TraceEvent& event) {
  Json json = {{"name", event.name},
               {"cat", lane_name(event.lane)},
               {"ph", "X"},
               {"ts", event.start_seconds * kMicroseconds},
               {"dur", event.seconds * kMicroseconds},
               {"pid", rank},
               {"tid", static_cast<int>(event.lane)},
               {"args", {{"step", event.step}}}};
  if (!event.op_type.empty()) {
    json["args"]["op"] = event.op_type;
  }
  if (event.bytes >= 0) {
    json["args"]["bytes"] = event.bytes;
  }
  return json.dump() + ",\n";
}

}  // namespace trainrt
