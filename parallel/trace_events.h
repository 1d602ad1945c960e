// Time lines as Perfetto and Chrome read them: the one form of measured (`run --trace`) and
// predicted
// (`plan --trace`) steps. A file is a JSON array with one event per line; a viewer also takes one
// whose end is missing, so it can be written as it comes.
#pragma once

#include <cstdint>
#include <string>

#include "parallel/schedule.h"

namespace trainrt {

// Lanes of a rank's process in the viewer.
// Computation is drawn twice: as cells, and as the operators that a cell consists of.
enum class TraceLane : uint8_t { kCompute, kCommunication, kBubble, kOperator };

struct TraceEvent {
  std::string name;  // a cell ("2F0": virtual stage 2, forward, micro-batch 0), or an operator
  TraceLane lane = TraceLane::kCompute;
  double start_seconds = 0;
  double seconds = 0;
  int64_t step = 0;
  int64_t bytes = -1;        // communicated; -1: does not apply
  std::string op_type = {};  // of an operator ("MatMul+Relu": two in one kernel); else empty
};

// The host's writing of what a phase is fed with, among operators.
inline constexpr const char* kFeedKernel = "(feed)";

// What a rank did with its time.
struct TraceTotals {
  double compute = 0, communication = 0, bubble = 0;  // seconds

  void add(const TraceEvent& event);
  // "rank 0: compute 60.0 %, communication 10.0 %, bubble 30.0 %" of `whole` seconds: what is
  // neither of the former is a bubble. Measured and predicted lines are alike.
  std::string line(const std::string& label, double whole) const;
};

inline constexpr const char* kTraceBegin = "[\n";
inline constexpr const char* kTraceEnd = "{}]\n";

// Lines that name a rank and its lanes, and the line of one event; all end with a comma.
std::string trace_rank_lines(int rank, const std::string& label);
std::string trace_line(int rank, const TraceEvent& event);

}  // namespace trainrt
