// Time and memory of one training step of a profiled model under a layout: prices blocks, replays
// the schedule, adds reductions and the update. The one function that search, report and validation
// share.
#pragma once

#include <array>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "parallel/memory_plan.h"
#include "parallel/trace_events.h"
#include "planner/block_sums.h"
#include "planner/cost_model.h"
#include "planner/engine.h"
#include "planner/exact_sums.h"
#include "planner/model_profile.h"
#include "planner/priced_profile.h"
#include "planner/simulator.h"

namespace trainrt {

// How a step is laid out. rank = (stage * data + data_rank) * tensor + tensor_rank.
struct Layout {
  int data = 1;
  int tensor = 1;
  int pipeline = 1;
  int virtual_stages = 1;
  ScheduleKind schedule = ScheduleKind::k1F1B;
  int zero_stage = 0;
  RecomputeMode recompute = RecomputeMode::kNone;
  bool recompute_as_needed = false;  // open by block, where memory demands it
  bool sequence_parallel = false;
  bool offload_optimizer = false;
  bool sync_batch_norm = false;
  ExactSums exact;          // of gradients, where their reduction is
  int64_t micro_batch = 1;  // the largest
  // Sizes by data rank, where they differ; empty: all are `micro_batch`.
  std::vector<int64_t> micro_batch_sizes;
  // Micro-batches by data rank; one entry: the same for all. A data rank of 0 idles.
  std::vector<int> num_micro_batches = {1};
  // By block of the model, where they differ; empty: `recompute` everywhere.
  std::vector<RecomputeMode> block_recompute;
  // By data rank: the size of each micro-batch relative to the rank's full ones; empty: all full.
  std::vector<std::vector<double>> micro_batch_scales;
  double last_micro_batch = 1;   // size of the last one relative to a full one
  std::vector<int> first_block;  // by virtual stage, ascending; the first is 0
  std::vector<int> devices;      // by rank, indices into Topology::devices; empty: rank = device
  int device_order = -1;  // tells `devices` of equal degrees apart, for PriceCache; -1: not cached

  int world_size() const { return data * tensor * pipeline; }
  RecomputeMode recompute_of(int block) const {
    return block_recompute.empty() ? recompute : block_recompute[static_cast<size_t>(block)];
  }
  // The end of the run of blocks from `first` on, before `end`, that have one kind of recompute.
  int end_of_recompute(int first, int end) const {
    int next = block_recompute.empty() ? end : first + 1;
    while (next < end && recompute_of(next) == recompute_of(first)) {
      ++next;
    }
    return next;
  }
  int micro_batches(int data_rank) const {
    return num_micro_batches.size() == 1 ? num_micro_batches[0]
                                         : num_micro_batches[static_cast<size_t>(data_rank)];
  }
  int64_t micro_batch_size(int data_rank) const {
    return micro_batch_sizes.empty() ? micro_batch
                                     : micro_batch_sizes[static_cast<size_t>(data_rank)];
  }
  std::vector<double> scales_of(int data_rank) const {
    return micro_batch_scales.empty() ? std::vector<double>{}
                                      : micro_batch_scales[static_cast<size_t>(data_rank)];
  }
  int device(int rank) const { return devices.empty() ? rank : devices[static_cast<size_t>(rank)]; }
};

// Among the blocks of a pipeline rank.
RecomputeMode strongest_recompute(const Layout& layout, int stage);

// Of the groups that a layout's ranks form, as far as asked for (planner/step_devices).
struct LayoutLinks {
  std::vector<int> slowest_type;                              // by stage and data rank; -1: open
  std::vector<std::unique_ptr<GroupLinks>> tensor, transfer;  // likewise
  std::vector<std::unique_ptr<GroupLinks>> data;              // by stage
  std::unique_ptr<GroupLinks> tied;
};

// What many predictions of one search have in common. Keys hold the profile's address: keep the
// profiles alive and in place.
struct PriceCache {
  // By profile, device type and the tensor group's hosts, and bandwidths within and between them.
  std::map<std::tuple<const ModelProfile*, int, int, double, double>, PricedProfile> profiles;
  std::map<int, CostModel> cost_models;                  // by device type
  std::map<std::array<int, 4>, LayoutLinks> links;       // (d, t, p, order)
  std::map<std::array<int, 4>, Schedule> schedules;      // (kind, p, m, v)
  std::map<std::array<int, 4>, std::vector<int>> slots;  // (kind, p, m, v), by virtual stage
  std::map<std::pair<const ModelProfile*, RecomputeMode>, BlockSums> sums;
};

struct StepBreakdown {
  double compute = 0;  // of the busiest data rank's mean stage
  double tensor_communication = 0;
  double transfer = 0;
  double bubble = 0;
  double gradients = 0;  // exposed
  double gather = 0;     // exposed ZeRO gathers
  double optimizer = 0;
};

struct StageMemory {
  int stage = 0;  // pipeline rank
  int rank = 0;   // the one that is nearest to its device's limit
  MemoryBreakdown breakdown;
  int64_t peak_bytes = 0;
  int64_t reserved_bytes = 0;
  int64_t capacity_bytes = 0;
  int64_t missing_bytes() const { return peak_bytes + reserved_bytes - capacity_bytes; }
  bool fits() const { return missing_bytes() <= 0; }
};

// Who did what when, for pictures: of data rank 0.
struct Timeline {
  Schedule schedule;
  Replay replay;
  // Of every rank, node by node, where the programs were replayed (planner/program_time).
  std::vector<std::vector<TraceEvent>> events = {};
};

struct StepPrediction {
  double seconds = 0;
  double lower_bound = 0;   // of the pipeline part plus what follows it
  bool bound_only = false;  // not replayed: seconds is the lower bound
  double bubble_fraction = 0;
  StepBreakdown breakdown;
  std::vector<StageMemory> stages;
  std::shared_ptr<const Timeline> timeline;  // when asked for
  bool fits() const;
  int64_t peak_bytes() const;
};

struct StepRequest {
  const ModelProfile* profile = nullptr;  // at the layout's micro-batch
  // By data rank, where their micro-batches differ in size; empty: all are `profile`.
  std::vector<const ModelProfile*> rank_profiles = {};
  const Topology* topology = nullptr;
  const Engine* engine = nullptr;
  std::string precision = "bf16";
  const Layout* layout = nullptr;
  bool bound_only = false;      // skip the replay: seconds = lower_bound
  bool uniform = false;         // all devices and hosts are alike (Topology::is_uniform)
  PriceCache* cache = nullptr;  // optional
  bool keep_timeline = false;
  bool time_only = false;  // leave out the memory
  bool runs_on = false;    // steps go over into each other where the schedule lets them
  // A step that takes longer may be given by its lower bound.
  double give_up = std::numeric_limits<double>::infinity();
  // Programs are known to need so many times the memory that is estimated: by the strongest
  // recompute on a rank.
  std::array<double, 3> memory_error = {1, 1, 1};

  const ModelProfile& profile_of(int data_rank) const {
    return rank_profiles.empty() ? *profile : *rank_profiles[static_cast<size_t>(data_rank)];
  }
};

// Seconds of each class of block on a device type, with the micro-batch of `profile`. The stages of
// the layout need not be cut yet.
std::vector<StageTimes> class_seconds(const StepRequest& request,
                                      const ModelProfile& profile,
                                      int device_type,
                                      RecomputeMode mode);

// What follows the pipeline at least, when every stage holds `parameters` elements and the last
// backward of each takes `last_backward`. The stages need not be cut yet.
double least_seconds_after(const StepRequest& request, double parameters, double last_backward);

// The pipeline of one data rank alone.
double pipeline_seconds(const StepRequest& request, int data_rank);

StepPrediction predict_step(const StepRequest& request);

// Memory alone, for pruning; stages as in predict_step().
std::vector<StageMemory> predict_memory(const StepRequest& request);

}  // namespace trainrt
