// --rebalance: what the data ranks' parts of a step should be, from how long each has worked.
//
// A rank's time is taken for fixed + units x per_unit: an update, or what a kernel costs however
// small it is, does not become less with the share. The fixed part is 0 until a rank has been seen
// with two numbers of units, so a first move may go too far and the second corrects it. Where moves
// go on to bring less than they promise, times are not of that form, and all stay as they are until
// some rank's time changes.
//
// A pure function of the times it is told. All ranks tell it the same times (gathered from each
// other), so all come to the same decision, and none depends on a clock here.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

namespace trainrt {

struct RebalanceRule {
  // Steps measured before the first decision; the median counts. After each move twice as many, for
  // a machine that is busy with other things never looks the same twice.
  size_t window = 5;
  size_t longest_window = 80;
  double least_gain = 0.1;  // a change must promise to shorten the slowest rank's work by this part
  double change = 0.25;     // a rank whose time differs so much with equal units is another device
  int most_misses = 2;      // moves on end that bring less than half of what they promise
};

class Rebalancer {
 public:
  // `units`: parts of a step that are dealt out whole (micro-batches, logical shards, samples), by
  // data rank. `least`: what a rank that has any must keep, so that it goes on being measured. A
  // rank without units stays without.
  Rebalancer(std::vector<int64_t> units, int64_t least, RebalanceRule rule = {});

  // The seconds that each data rank has computed in a step. Returns the units to go on with where
  // others are worth it; then either adopt() or reject() is to be called.
  std::optional<std::vector<int64_t>> observe(const std::vector<double>& seconds);
  void adopt(const std::vector<int64_t>& units);
  // `over`: ranks whose memory does not hold what was proposed. Proposes again without giving them
  // more than they have, if that is worth it.
  std::optional<std::vector<int64_t>> reject(const std::vector<bool>& over);

  const std::vector<int64_t>& units() const { return units_; }
  // Of the last proposal: the slowest rank's work after it over that before.
  double promised() const { return promised_; }

 private:
  struct RankCost {
    double fixed = 0, per_unit = 0;  // seconds
    int64_t units = 0;               // of the last window before this one, 0: none,
    double seconds = 0;              // and how long they took
  };

  void learn(const std::vector<double>& seconds);
  bool rests(const std::vector<double>& seconds);
  std::optional<std::vector<int64_t>> propose();
  std::vector<int64_t> spread() const;
  double slowest(const std::vector<int64_t>& units) const;

  std::vector<int64_t> units_;
  int64_t least_;
  RebalanceRule rule_;
  std::vector<int64_t> caps_;    // most units that a rank's memory is known to hold
  size_t steps_ = rule_.window;  // to be measured before the next decision
  std::deque<std::vector<double>> window_;
  std::vector<RankCost> costs_;
  bool fresh_ = true;  // the next step is the first with these units, and slower than those to come
  double promised_ = 1;
  double enough_ = 0;  // after a move: what the slowest rank has to take at most; 0: no move since
  int misses_ = 0;
  std::vector<double> resting_at_;  // seconds by rank, while nothing is to be moved
};

}  // namespace trainrt
