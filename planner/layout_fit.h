// Cuts of the stages and shares of the batch for a layout whose degrees, schedule and memory saving
// are given: a first choice by closed form, then improved under the replay.
#pragma once

#include <functional>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/step_cost.h"

namespace trainrt {

// Micro-batches of a step.
struct StepMicroBatches {
  int total = 1;
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
  bool repair();
  void share();
  std::vector<int> spread(const std::vector<double>& pace, const std::vector<int>& caps) const;
  int64_t shortage() const;
  bool spent(int budget) const;
  double seconds(double give_up = 1e300);
  double cut_seconds(double give_up);
  double rank_seconds(int data_rank, int micro_batches);
  double perfect_pace(const std::vector<int>& types);
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
  const std::vector<double>& block_seconds(int device_type);

  const StepRequest& request_;
  StepRequest timed_;  // the same, for the time alone
  int units_;          // that data ranks take one at a time,
  int together_;       // each of so many micro-batches
  bool fixed_;         // the counts are
  CutCache* balanced_;
  std::vector<int> pinned_cuts_;
  Layout* layout_;
  std::vector<std::vector<int>> kinds_;                       // by data rank: types of its stages
  std::map<int, std::vector<double>> block_seconds_;          // by device type
  std::map<std::pair<std::vector<int>, int>, double> known_;  // rank_seconds() of the present cuts
  struct Tried {
    double seconds = 0;
    bool bound = false;  // that sufficed then
  };
  std::map<std::pair<std::vector<int>, std::vector<int>>, Tried> tried_;  // by cuts and shares
  int num_replays_ = 0, num_looks_ = 0;
};

}  // namespace trainrt
