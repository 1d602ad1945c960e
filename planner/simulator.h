// Event-by-event replay of a schedule table: when each cell starts and ends, given the time of each
// phase and of the transfers between stages. What the search decides by.
#pragma once

#include <vector>

#include "parallel/schedule.h"

namespace trainrt {

// Seconds of one full micro-batch on one virtual stage. Without split backward, `weight_grad` is
// part of `backward` and ignored here.
struct StageTimes {
  double forward = 0;
  double backward = 0;
  double weight_grad = 0;
};

struct ReplayInput {
  std::vector<StageTimes> stages;  // by virtual stage, p * v
  std::vector<double> transfer;    // [i]: virtual stage i to i + 1, and back; p * v - 1 entries
  // Sender and receiver are busy while a transfer runs (engines that wait for their sends);
  // otherwise only the data is late.
  bool blocking_transfers = false;
  // Time of micro-batch j relative to a full one (a short last one is below 1); empty: all 1.
  std::vector<double> micro_batch_scale;
};

struct CellTime {
  double start = 0;
  double end = 0;
};

struct Replay {
  double seconds = 0;                        // until the last rank ends
  std::vector<double> rank_end;              // by pipeline rank
  std::vector<double> rank_compute;          // seconds in cells
  std::vector<double> rank_transfer;         // seconds blocked in transfers
  std::vector<std::vector<CellTime>> cells;  // as Schedule::ranks
};

// Without `keep_cells` the times of the cells are left out.
Replay replay_schedule(const Schedule& schedule, const ReplayInput& input, bool keep_cells = true);

// One step in the middle of many that go over into each other (make_window): `cells` of its kSteady
// rows, times from when the first rank ends the step before, `seconds` from step to step.
Replay replay_steady(const Schedule& whole, const ReplayInput& input);
// Never above that: the busiest rank's work.
double lower_bound_steady(const ReplayInput& input, int num_micro_batches);

// Never above replay_schedule() for 1F1B and GPipe-like orders with one virtual stage per rank:
// reference formula of the pipeline literature, improved by the round trip that each stage must
// wait for. O(p).
double lower_bound_1f1b(const ReplayInput& input, int num_micro_batches);

// Holds for every schedule: each rank does its work after the first micro-batch has reached it, and
// what it hands back last must still travel. The schedule's rows are not looked at.
double lower_bound_any(const Schedule& schedule, const ReplayInput& input);

}  // namespace trainrt
