// Cuts of the stages, shares of the batch and, where that is open, the blocks that run again, for a
// layout whose degrees, schedule and ZeRO stage are given: a first choice by closed form, then
// improved under the replay.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/step_cost.h"
#include "planner/step_memory.h"

namespace trainrt {

// Micro-batches of a step.
struct StepMicroBatches {
  int total = 1;     // where data ranks have sizes of their own, samples
  int together = 1;  // data ranks take so many at a time; divides `total`
};

class LayoutFit {
 public:
  // Cuts that depend on neither memory nor devices, of a search.
  using CutCache =
      std::map<std::tuple<const ModelProfile*, RecomputeMode, size_t>, std::vector<int>>;

  // Over the data ranks of *layout; `counts`: of each, where they are fixed. request.layout must be
  // `layout`, which is changed.
  LayoutFit(const StepRequest& request,
            const StepMicroBatches& micro_batches,
            const std::vector<int>& counts,
            CutCache* balanced,
            Layout* layout);

  // The cuts are these; only the shares are fitted. Before start().
  void pin_cuts(std::vector<int> first_block);
  // Cuts by balance within each stage's memory, shares by speed. False when no cut was found that
  // fits; the layout then has the cuts that balance.
  bool start();
  // Moves borders of stages, and micro-batches between data ranks, while the step gets shorter;
  // from the present layout, and from other shares. Some `budget` replays at most; returns how
  // many.
  int improve(int budget);

 private:
  bool cut();
  std::vector<int> cuts_that_balance(const std::vector<std::vector<double>>& seconds);
  std::vector<int> cuts_that_fit(const std::vector<std::vector<double>>& seconds);
  bool cut_within_memory(const std::vector<std::vector<double>>& seconds,
                         const std::vector<int>& balanced);
  bool repair();
  void share();
  std::vector<int> spread(const std::vector<double>& pace, const std::vector<int>& caps) const;
  // Of `total`, what a micro-batch of a data rank holds.
  int64_t unit(size_t data_rank) const;
  int64_t shortage();
  bool spent(int budget) const;
  double seconds(double give_up = 1e300);
  double cut_seconds(double give_up);
  double rank_seconds(int data_rank, int micro_batches);
  struct Kind;
  double perfect_pace(const Kind& kind);
  std::vector<std::vector<int>> all_shares() const;
  std::vector<std::vector<int>> other_shares();
  double least_seconds(const std::vector<int>& counts);
  void climb(int budget);
  bool improve_shares();
  bool improve_cuts(int budget);
  bool descend(int budget, double* best);
  bool slide_borders(int budget, double* best);
  bool move_borders(int more, int budget, std::vector<std::pair<int, int>>* moves, double* best);
  // (border, blocks to the right) each.
  bool try_cuts(const std::vector<std::pair<int, int>>& moves, double* best);
  int slowest_type(int stage, int data_rank) const;
  const std::vector<double>& block_seconds(const Kind& kind, int stage) {
    return block_seconds(kind, stage, layout_->recompute);
  }
  const std::vector<double>& block_seconds(const Kind& kind, int stage, RecomputeMode mode);

  const std::vector<RecomputeStep>& steps_of(int stage, int block_class);
  void settle_recompute();
  void settle_stage(int stage);
  bool cut_with_recompute(const std::vector<std::vector<double>>& seconds);

  const StepRequest& request_;
  StepRequest timed_;  // the same, for the time alone
  int64_t units_;      // that data ranks take, unit() at a time,
  int together_;       // for so many micro-batches
  bool fixed_;         // the counts are
  CutCache* balanced_;
  std::vector<int> pinned_cuts_;
  Layout* layout_;
  StageMemories memories_;  // of `layout_`, as it is when they are asked
  // What data ranks take equally long for.
  struct Kind {
    int64_t micro_batch = 1;
    std::vector<int> types;  // of its stages
    auto operator<=>(const Kind&) const = default;
  };
  std::vector<Kind> kinds_;                          // by data rank
  std::map<int64_t, const ModelProfile*> profiles_;  // by micro-batch
  // By micro-batch, device type and recompute.
  std::map<std::tuple<int64_t, int, RecomputeMode>, std::vector<double>> block_seconds_;
  std::map<int, std::vector<std::vector<RecomputeStep>>> steps_;  // by device type, class of block
  std::map<std::pair<Kind, int>, double> known_;  // rank_seconds() of the present cuts
  struct Tried {
    double seconds = 0;
    bool bound = false;  // that sufficed then
  };
  std::map<std::vector<int>, Tried> tried_;  // by cuts, then shares
  std::vector<int> tried_key_;               // of the last look
  int num_replays_ = 0, num_looks_ = 0;
};

}  // namespace trainrt
