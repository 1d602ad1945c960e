// How the run is split: the plan that the flags ask for.
#pragma once

#include <string>
#include <vector>

#include "parallel/plan.h"
#include "planner/planner.h"
#include "runtime/device.h"
#include "runtime/options.h"
#include "runtime/training_job.h"

namespace trainrt {

// --plan, else what the planner finds within --dp, --tp, --pp and the other pins; one device
// without a memory limit needs no search, which keeps ranks in their places (rank_devices.h).
// Throws kInvalidArgument for pins that contradict each other or the number of devices,
// kInfeasiblePlan when nothing fits.
Plan choose_plan(const Options& options,
                 const TrainingJob& job,
                 const std::vector<DeviceOptions>& devices,
                 const std::vector<std::string>& places = {});

// The flags that fix a part of the plan.
PlanPins plan_pins(const Options& options);

// The same plan for a step of another size: shares in the same proportion.
Plan resize_plan(const Plan& plan, int64_t num_samples);

// What part of a step each data rank is to have, in proportion, where it is not cut into shares:
// --shares, else those of a --plan, else the speed of its slowest device (`devices`: by rank).
std::vector<double> data_rank_weights(const Options& options,
                                      const Plan& plan,
                                      const std::vector<DeviceOptions>& devices);

// What a plan's shares consist of: logical shards, micro-batches, or samples where each rank runs
// its share at once. By data rank.
std::vector<int64_t> share_units(const Plan& plan);
// The same plan with so many of these units for each data rank, as many as before in all.
Plan reshare_plan(const Plan& plan, const std::vector<int64_t>& units);

}  // namespace trainrt
