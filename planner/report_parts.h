// What the three forms of the report have in common: figures in words, and lists that say a thing
// once for all layers it holds for.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "planner/planner.h"

namespace trainrt {

std::string number_text(double value, const char* format = "%.3g");
std::string gibibytes(double bytes);
std::string cluster_text(const Topology& topology);  // "4 x RTX 4090, 4 x RTX 3090"
// "4", or by data rank: "4, 4, 2".
std::string micro_batch_text(const Layout& layout);
// "none", or "full of 12 of 48 blocks".
std::string recompute_text(const Layout& layout);
// "full 0-11, 14; selective 20-23, of blocks 0-47"; empty where all blocks are
// alike.
std::string recomputed_blocks_text(const Layout& layout);
std::string layout_text(const Layout& layout);
// How the batch lies over the data ranks, and why unevenly.
std::string shares_text(const PlanRequest& request, const PlanResult& result);
// "stage 2, rank 17 (host1/cuda:3)".
std::string rank_text(const PlanRequest& request, const Candidate& candidate, int rank);

// Seconds of the step by what they are spent on.
struct TimePart {
  const char* key;   // in JSON
  const char* name;  // in text
  double seconds = 0;
};
std::vector<TimePart> all_time_parts(const StepPrediction& prediction);
// Without what takes no time.
std::vector<TimePart> time_parts(const StepPrediction& prediction);

// Things of one name but for the numbers in it ("h.0.mlp.w", "h.1.mlp.w" ...: "h.*.mlp.w").
struct NameGroup {
  std::string pattern;
  std::string what;  // the placement; the multiple of a padding
  int count = 0;
  double seconds = 0;  // paddings: gained by all of the group, of one micro-batch
};
std::vector<NameGroup> placement_groups(const Plan& plan);
std::vector<NameGroup> padding_groups(const PlanResult& result);

}  // namespace trainrt
