// A time that no step of a layout can beat, however its stages are cut and its batch is shared:
// what the search orders by, and what it reports as its lower bound.
#pragma once

#include <array>
#include <map>
#include <tuple>
#include <vector>

#include "planner/step_cost.h"

namespace trainrt {

// Sums over a model's blocks on one type of device, with one kind of recompute.
struct ModelSeconds {
  double forward = 0, backward = 0;              // of all blocks together
  double weight_grad = 0;                        // part of backward
  double forward_share = 1;                      // least share of the forward in a block
  double largest = 0;                            // of a block, both together
  double least_forward = 0, least_backward = 0;  // of a block
  std::vector<double> of_class;                  // both together
  std::vector<int> count;                        // blocks of a class
  double total() const { return forward + backward; }
};

class StepBounds {
 public:
  // For `total` micro-batches of request.layout's size in a step, or where data ranks have sizes
  // of their own, samples. `counts`: micro-batches of each data rank, where they are fixed.
  // request.layout's cuts and counts are not looked at. `fraction`: of a micro-batch, a short one
  // beside those.
  double least_seconds(const StepRequest& request,
                       int total,
                       double fraction,
                       const std::vector<int>& counts);
  // Of a data rank for one micro-batch where nothing runs again, were all of its stages equally
  // long.
  double micro_batch_seconds(const StepRequest& request, int data_rank);

 private:
  // Profile, device type, recompute, and where devices differ (d, t, p, order).
  using Key = std::tuple<const ModelProfile*, int, RecomputeMode, std::array<int, 4>>;
  static Key key_of(const StepRequest& request,
                    const ModelProfile& profile,
                    int device_type,
                    RecomputeMode mode);
  const ModelSeconds& seconds(const StepRequest& request,
                              const ModelProfile& profile,
                              int device_type,
                              RecomputeMode mode);
  double seconds_again(const StepRequest& request, int total, int device_type);
  double stage_bound(const StepRequest& request, const ModelProfile& profile, int device_type);
  double parameters(const ModelProfile& profile, bool once);
  double seconds_after(const StepRequest& request, double window);

  std::map<Key, ModelSeconds> seconds_;
  std::map<std::pair<Key, int>, double> largest_stage_;
  std::map<std::pair<const ModelProfile*, bool>, double> parameters_;
  // By profile, place and ZeRO stage, and what a reduction may hide behind.
  std::map<std::tuple<const ModelProfile*, std::array<int, 5>, double>, double> after_;
};

// Seconds of `micro_batches` through the pipeline at least, whatever the cuts, when all stages are
// of one type. `largest_stage`: what the busiest rank at least takes for one. `transfer`: seconds
// from any stage to the next at least.
double least_pipeline_seconds(const ModelSeconds& model,
                              ScheduleKind schedule,
                              int num_stages,
                              int micro_batches,
                              double largest_stage,
                              double transfer);

}  // namespace trainrt
