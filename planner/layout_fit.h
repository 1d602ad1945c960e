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

class LayoutFit {
 public:
  // Cuts that depend on neither memory nor devices, of a search.
  using CutCache =
      std::map<std::tuple<const ModelProfile*, RecomputeMode, size_t>, std::vector<int>>;

  // `total` micro-batches over the data ranks of *layout; `counts`: of each, where they are fixed.
  // request.layout must be `layout`, which is changed.
  LayoutFit(const StepRequest& request,
            int total,
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
  int64_t shortage() const;
  double seconds();
  double rank_seconds(int data_rank, int micro_batches);
  double perfect_pace(const std::vector<int>& types);
  std::vector<std::vector<int>> other_shares();
  double least_seconds(const std::vector<int>& counts);
  void climb(int budget);
  bool improve_shares();
  bool improve_cuts(int budget);
  // Whether there are at most `most` ways to cut; calls fn with each if so, until it returns true.
  bool for_all_cuts(int64_t most, const std::function<bool()>& fn);
  bool descend(int budget, double* best);
  bool slide_borders(int budget, double* best);
  bool move_borders(int more, int budget, std::vector<std::pair<int, int>>* moves, double* best);
  // (border, blocks to the right) each.
  bool try_cuts(const std::vector<std::pair<int, int>>& moves, double* best);
  int slowest_type(int stage, int data_rank) const;
  const std::vector<double>& block_seconds(int device_type);

  const StepRequest& request_;
  int total_;
  bool fixed_;  // the counts are
  CutCache* balanced_;
  std::vector<int> pinned_cuts_;
  Layout* layout_;
  std::vector<std::vector<int>> kinds_;                       // by data rank: types of its stages
  std::map<int, std::vector<double>> block_seconds_;          // by device type
  std::map<std::pair<std::vector<int>, int>, double> known_;  // rank_seconds() of the present cuts
  int num_replays_ = 0;
};

}  // namespace trainrt
