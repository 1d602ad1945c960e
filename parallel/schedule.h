// The order in which pipeline ranks work on (phase, micro-batch) cells. Data, printable as a table;
// nothing here costs or communicates.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "graph/base/error.h"

namespace trainrt {

// kCount: item counts of all micro-batches, before the first forward. kWeightGrad: the W of
// zero-bubble schedules. kGather/kReduce: ZeRO and gradient collectives. kUpdate: the optimizer.
enum class PhaseKind : uint8_t {
  kCount,
  kGather,
  kForward,
  kBackward,
  kWeightGrad,
  kReduce,
  kUpdate,
};

const char* phase_letter(PhaseKind kind);  // "C" "G" "F" "B" "W" "R" "U"

struct Cell {
  PhaseKind phase = PhaseKind::kForward;
  int virtual_stage = 0;  // 0 .. p*v-1; owned by rank virtual_stage % p
  int micro_batch = -1;   // -1 for kGather, kReduce, kUpdate, kCount
  bool ahead = false;     // of the next step's batch

  bool operator==(const Cell&) const = default;
};

enum class ScheduleKind : uint8_t { kGPipe, k1F1B, kInterleaved, kZeroBubbleH1, k2BW };

const char* schedule_name(ScheduleKind kind);  // "gpipe" "1f1b" "interleaved" "zb-h1" "2bw"
std::optional<ScheduleKind> schedule_from_name(std::string_view name);

struct Schedule {
  ScheduleKind kind = ScheduleKind::k1F1B;
  int num_stages = 1;                    // p, pipeline ranks
  int virtual_stages = 1;                // v, per rank
  int num_micro_batches = 1;             // m
  bool split_backward = false;           // W cells exist
  std::vector<std::vector<Cell>> ranks;  // F, B, W cells of each pipeline rank in order
};

// Throws kInfeasiblePlan for combinations that do not exist (2BW with m < p, v > 1 with a schedule
// that is not interleaved).
Schedule make_schedule(ScheduleKind kind,
                       int num_stages,
                       int num_micro_batches,
                       int virtual_stages);

// What is in flight where a step begins and ends, under a schedule that goes on from step to step
// (2BW): its first forwards may have run among the last backwards of the step before, and the next
// step's among its own.
enum class StepWindow : uint8_t {
  kWhole,   // nothing before, nothing after: a step by itself
  kFill,    // nothing before
  kSteady,  // as many forwards, and backwards, as the step has micro-batches
  kDrain,   // nothing after
};
inline constexpr int kNumWindows = 4;
const char* window_name(StepWindow window);  // "whole" "fill" "steady" "drain"

// Whether steps under this schedule may go over into each other.
bool goes_on(ScheduleKind kind);
// Forwards of the next step that pipeline rank `rank` runs before it ends a step: the warm-up.
int num_ahead(ScheduleKind kind, int num_stages, int rank);
// The rows of a step. `whole`: of make_schedule, of a kind that goes on. All steps that go over
// into each other have equally many micro-batches.
Schedule make_window(const Schedule& whole, StepWindow window);

// Checks the invariants of reference/training-semantics.md 2.3: each (stage, micro-batch) has one
// F, one B (and one W if split); dependencies can be met without deadlock. Throws kInternal.
void verify_schedule(const Schedule& schedule);

// Most micro-batches of `virtual_stage` whose forward has begun and whose last backward phase (W if
// split) has not ended: the number of stash slots.
int max_in_flight(const Schedule& schedule, int virtual_stage);
int max_in_flight(const std::vector<Cell>& row, int virtual_stage);  // of one rank's row

std::string cell_name(const Cell& cell);
// One row per rank, cells like 2F0 (virtual stage 2, forward, micro-batch 0), comma-separated;
// those of the next step's batch like 2F0'.
std::string schedule_table(const Schedule& schedule);

}  // namespace trainrt
