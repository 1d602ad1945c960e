// The search: every combination of degrees, schedule, micro-batch size and memory saving gets a
// lower bound that no cut and no share can beat; in order of it, cuts and shares are fitted and the
// step is replayed, until the bound passes the best replay. The programs of what has won then say
// what memory they take; where that does not fit, the estimate is corrected and another wins.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "parallel/made_once.h"
#include "planner/candidates.h"
#include "planner/layout_fit.h"
#include "planner/model_sizes.h"
#include "planner/planner.h"
#include "planner/program_time.h"
#include "planner/step_bound.h"

namespace trainrt {

// What tensors are cut over the tensor group for: time, or where that was asked for or nothing fits
// otherwise, at any price, or as much as there is.
enum class Splitting : uint8_t { kForTime, kAtAnyPrice, kForMemory };

// Prices that are kept.
struct SearchCaches {
  PriceCache prices;
  LayoutFit::CutCache cuts;
};

// Micro-batch size, tensor degree, sequence parallelism, and what tensors are cut for.
using ProfileKey = std::tuple<int64_t, int, bool, Splitting>;

// Larger micro-batches than this are tried only while each lowers the time of a sample.
constexpr int64_t kAlwaysTried = 16;

// What searches have in common whose requests differ in batch, memory, pins of the layout or the
// number of hosts only, and not in what a device or a tensor group is. For any thread, once one
// search has begun.
struct SearchModel {
  SearchModel(ModelSource source, BlockPins pins) : models(std::move(source), std::move(pins)) {}

  ModelSizes models;
  MadeOnce<ProfileKey, std::shared_ptr<const GraphProfile>> profiles;
  // reason_to_drain() on one data rank, and on several, where the schedule goes on.
  std::optional<std::array<std::string, 2>> drains_because;
};

class PlanSearch {
 public:
  // `model`: of request.model; outlives the search.
  PlanSearch(const PlanRequest& request, SearchModel* model);
  // What can be done while programs are compiled, once the estimates say that a plan fits: `rest`
  // settles the plan, and must have been called when it ends.
  using Beside = std::function<void(int64_t candidates, const std::function<void()>& rest)>;
  PlanResult run(const Beside& beside = nullptr);

 private:
  // A point of the search space, all but cuts and shares.
  struct Shape {
    int degrees = 0;  // indices
    int order = 0;
    int profile = 0;
    int mix = -1;  // of micro-batch sizes; -1: all data ranks have the profile's
    int virtual_stages = 1;
    ScheduleKind schedule = ScheduleKind::k1F1B;
    RecomputeMode recompute = RecomputeMode::kNone;
    bool as_needed = false;  // blocks run again where the memory demands it
    int zero_stage = 0;
    double bound_seconds = 0;
    double bound = 0;  // of the objective's value
  };
  using Group = std::pair<int, int>;  // tensor and pipeline degree: what alternatives differ in
  using MemoryKind = std::tuple<int, std::vector<int>, int>;  // profiles and ZeRO stage

  void find_reasons_to_drain();
  const std::string& drains_because(const Layout& layout) const;

  // The model and its profiles.
  const SizedModel& model_at(int64_t micro_batch) const;
  int profile_of(int64_t micro_batch, const Degrees& d, bool sequence_parallel);
  void make_first_profiles();
  void make_profiles(const std::set<ProfileKey>& wanted);
  std::shared_ptr<const GraphProfile> profile_at(const ProfileKey& key);
  std::shared_ptr<const GraphProfile> make_profile(const ProfileKey& key) const;
  bool profiles_sequence_parallel(const Degrees& d, bool sp) const;
  Splitting splitting() const {
    return splits_for_memory_ ? Splitting::kForMemory : Splitting::kForTime;
  }
  const ModelProfile& profile(int index) const;

  // The space.
  void add_all_degrees();
  void add_degrees(int degrees, bool sequence_parallel);
  void take_part(PlanSearch* part);
  void note_too_few_for_2bw(const std::optional<std::pair<int, int>>& found);
  [[noreturn]] void refuse_pins(int num_blocks) const;
  void add_shapes(int degrees, int order, int profile_index, int mix);
  void add_mixes(int degrees, bool sequence_parallel);
  void add_mix(int degrees,
               int order,
               bool sequence_parallel,
               const std::vector<int64_t>& sizes,
               const std::vector<int>& kinds);
  bool mixes_sizes(const Degrees& d) const;
  std::vector<std::map<int64_t, double>> known_seconds(int degrees,
                                                       int order,
                                                       bool sequence_parallel,
                                                       const std::vector<int>& kinds);
  bool add_paced_mixes();
  void add_paced_mixes(int degrees, int order, bool sequence_parallel);
  std::optional<int> mixed_profile(int64_t micro_batch,
                                   const Degrees& d,
                                   bool sequence_parallel,
                                   int like);
  std::vector<int> mix_of(const std::vector<DataShare>& shares,
                          const Degrees& d,
                          bool sequence_parallel,
                          int like);
  int pinned_mix(const Degrees& d, bool sequence_parallel, int like);
  // Data ranks by what they run on: of one number, alike.
  std::vector<int> kinds_of_data_ranks(int degrees, int order) const;
  std::vector<std::pair<int, ScheduleKind>> schedules(const Degrees& d, int blocks) const;
  // Each with whether blocks run again as needed.
  std::vector<std::pair<RecomputeMode, bool>> recomputes(const Degrees& d) const;
  std::vector<int> zero_stages(const Degrees& d) const;
  // `place`: with the devices.
  Layout layout_of(const Shape& shape, bool place = true) const;
  Candidate candidate_of(const Shape& shape, bool place = true) const;

  // One point.
  using Caches = SearchCaches;
  StepRequest step_request(const Candidate& candidate, Caches* caches) const;
  StepRequest step_request(const Candidate& candidate) {
    return step_request(candidate, &caches_[0]);
  }
  int num_logical_shards() const;
  int micro_batches_together(int64_t micro_batch) const;
  int num_micro_batches(int64_t micro_batch) const;
  int least_micro_batches(int64_t micro_batch) const;
  std::vector<DataShare> shares_by(const std::vector<double>& weights, const Layout& layout) const;
  std::vector<int> fixed_counts(const Layout& layout) const;
  std::vector<int> least_counts(const Layout& layout) const;
  LayoutFit layout_fit(const StepRequest& request, Candidate* candidate, Caches* caches) const;
  // Takes the candidate's memory from its programs. False when it does not fit, or cannot be
  // compiled: the next explore() knows better.
  std::optional<std::vector<RankMemory>> programs_memory(Candidate* candidate);
  bool settle_memory(Candidate* candidate);
  const CostModel* cpu_cost(int device);
  std::optional<ProgramTime> replay_programs_of(const Candidate& candidate, const Plan& plan) const;
  void take_program_time(Candidate* candidate);
  // Among the best by the search's sums: what is best by its programs.
  void rank_by_programs();
  std::array<double, 3> memory_error(const Candidate& candidate) const;
  bool fit(const Shape& shape, Candidate* candidate, Caches* caches) const;
  std::vector<DataShare> shares_of(const Candidate& candidate) const;
  void write_shares(Candidate* candidate) const;
  // Micro-batches as they are cut, the short ones among them, for the candidate's time; and back:
  // shares are fitted in full ones.
  void cut_shares(Candidate* candidate) const;
  void uncut_shares(Candidate* candidate) const;
  void take_written_shares(Candidate* candidate);
  bool proven_too_large(const Shape& shape, Caches* caches) const;
  void keep_nearest(const Candidate& candidate);
  double value_of(const Candidate& candidate, double seconds) const;
  double hourly_price(const Layout& layout) const;

  // The decision.
  void choose();
  struct Visit;
  void sort_shapes();
  void explore();
  void explore_all();
  void settle();
  static double shortage_of(const Candidate& candidate);
  using DoubtKind = std::pair<MemoryKind, RecomputeMode>;
  static DoubtKind doubt_kind(const Candidate& candidate);
  std::optional<Candidate> doubtful_stage(double least_error, const std::set<DoubtKind>& doubted);
  std::optional<double> program_error(Candidate* candidate);
  void doubt_single_stages();
  void doubt_estimates();
  bool settle_by_programs(Candidate* candidate);
  void settle_nearest();
  void split_for_memory();
  bool is_known(size_t shape) const;
  Visit visit(size_t shape, Caches* caches) const;
  void visit_from(size_t shape);
  bool may_win(const Candidate& candidate) const;
  void replay_from(size_t shape);
  void take(Visit* visited);
  struct Improved {
    Candidate candidate;
    int64_t cells = 0;  // that replays looked at
  };
  Improved improved(const Candidate& candidate, Caches* caches) const;
  void improve();
  void decide();
  void explain_too_large();
  void list_alternatives(const StepPrediction& searched);

  const PlanRequest& request_;
  SearchModel* model_;
  BlockPins block_pins_;
  bool uniform_;
  const bool splits_first_;  // tensors as often as they can be, not where nothing else fits only
  bool splits_for_memory_ = false;
  Engine engine_;
  std::map<int, CostModel> cpu_costs_;  // by device type
  StepBounds bounds_;
  std::vector<Caches> caches_;  // by worker
  std::map<std::tuple<int64_t, int, bool>, int> profile_index_;
  std::vector<std::shared_ptr<const GraphProfile>> profiles_;
  std::vector<Degrees> degrees_;
  std::vector<std::vector<std::vector<int>>> orders_;  // by degrees
  std::vector<std::vector<int>> mixes_;                // profiles by data rank
  std::vector<Shape> shapes_;                          // by bound
  std::vector<size_t> too_large_shapes_;
  // Of a shape that 2BW was asked for and has too few micro-batches for: stages, and those.
  std::optional<std::pair<int, int>> too_few_for_2bw_;

  double best_ = 1e300;  // value of the best replay
  double best_seconds_ = 1e300;
  Candidate chosen_;
  std::vector<Candidate> replayed_;
  std::map<Group, Candidate> best_of_group_;  // that fit
  std::map<Group, Candidate> too_large_;      // least short of memory
  std::map<Group, int64_t> shortage_;
  Candidate nearest_;
  // What is known of a shape; refitted when the estimate of its memory is corrected.
  struct Visit {
    bool too_large = false;  // whatever the cuts
    bool redundant = false;  // nothing runs again: another shape's
    bool fits = false;
    bool replayed = false;
    std::optional<StepPrediction> replay;  // made ahead
    std::optional<Improved> improved;
    std::array<double, 3> memory_error = {};  // that it is fitted with
    Candidate candidate;
  };
  std::map<size_t, Visit> visits_;
  std::set<size_t> banned_;  // shapes that cannot be carried out
  // How many times the estimate programs need, by profiles and ZeRO stage and by recompute, where
  // that is known to be more.
  static MemoryKind memory_kind(const Candidate& candidate);
  std::map<MemoryKind, std::array<double, 3>> memory_errors_;
  double estimate_error_ = 1;  // where it is not known
  int64_t num_replayed_ = 0;
  std::map<size_t, double> program_seconds_;  // by shape, where programs were timed
  PlanResult result_;
};

// What separates a plan from the chosen one, for `rejected_because`.
std::string why_slower(const StepPrediction& other, const StepPrediction& chosen);

}  // namespace trainrt
