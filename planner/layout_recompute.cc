// Which blocks run again, where that is open: as few as the memory of each pipeline rank demands,
// those first that free most for their time. Of equal blocks the first of a stage do: when these
// run again, the backward has left those after them, and what they need meanwhile lies where the
// others' activations were.
#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include "planner/layout_fit.h"

namespace trainrt {

namespace {

// Sorts of blocks of a rank beyond which the greedy choice is left as it is.
constexpr size_t kFewGroups = 8;

}  // namespace

const std::vector<RecomputeStep>& LayoutFit::steps_of(int stage, int block_class) {
  const ModelProfile& profile = *request_.profile;
  const int type = kinds_[0].types[static_cast<size_t>(stage)];
  std::vector<std::vector<RecomputeStep>>& steps = steps_[type];
  if (steps.empty()) {
    std::array<std::vector<StageTimes>, 3> times;
    for (size_t mode = 0; mode < times.size(); ++mode) {
      times[mode] = class_seconds(request_, profile, type, static_cast<RecomputeMode>(mode));
    }
    for (size_t c = 0; c < profile.classes.size(); ++c) {
      steps.push_back(recompute_steps(
          profile.classes[c], {times[0][c].backward, times[1][c].backward, times[2][c].backward}));
    }
  }
  return steps[static_cast<size_t>(block_class)];
}

// Chooses for the present cuts and shares.
void LayoutFit::settle_recompute() {
  Layout& layout = *layout_;
  if (!layout.recompute_as_needed) {
    return;
  }
  layout.block_recompute.clear();
  std::vector<int> lacking;
  for (int stage = 0; stage < layout.pipeline; ++stage) {
    if (!memories_.of(stage).fits()) {
      lacking.push_back(stage);
    }
  }
  if (!lacking.empty()) {
    layout.block_recompute.assign(static_cast<size_t>(request_.profile->num_blocks()),
                                  RecomputeMode::kNone);
  }
  for (const int stage : lacking) {
    settle_stage(stage);
  }
}

void LayoutFit::settle_stage(int stage) {
  Layout& layout = *layout_;
  const ModelProfile& profile = *request_.profile;
  struct Group {
    RecomputeStep step;
    double price = 0;         // seconds by byte
    std::vector<int> blocks;  // in order
    size_t taken = 0;
  };
  std::map<std::tuple<size_t, int, size_t>, Group> by_kind;
  const size_t num_stages = layout.first_block.size();
  const int most =
      *std::max_element(layout.num_micro_batches.begin(), layout.num_micro_batches.end());
  for (auto s = static_cast<size_t>(stage); s < num_stages;
       s += static_cast<size_t>(layout.pipeline)) {
    const int end = s + 1 < num_stages ? layout.first_block[s + 1] : profile.num_blocks();
    const int slots = std::max(1, num_slots(layout, static_cast<int>(s), most));
    for (int b = layout.first_block[s]; b < end; ++b) {
      const int block_class = profile.blocks[static_cast<size_t>(b)];
      const std::vector<RecomputeStep>& steps = steps_of(stage, block_class);
      for (size_t i = 0; i < steps.size(); ++i) {
        Group& group = by_kind[{s, block_class, i}];
        group.step = steps[i];
        group.price = steps[i].seconds / (steps[i].bytes * slots);
        group.blocks.push_back(b);
      }
    }
  }
  std::vector<Group> groups;
  size_t total = 0;
  for (auto& [kind, group] : by_kind) {
    total += group.blocks.size();
    groups.push_back(std::move(group));
  }
  std::stable_sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) {
    return a.price < b.price;
  });
  const auto fits = [&] {
    for (const Group& group : groups) {
      for (const int b : group.blocks) {
        layout.block_recompute[static_cast<size_t>(b)] = RecomputeMode::kNone;
      }
    }
    for (const Group& group : groups) {
      for (size_t i = 0; i < group.taken; ++i) {
        RecomputeMode& mode = layout.block_recompute[static_cast<size_t>(group.blocks[i])];
        mode = std::max(mode, group.step.mode);
      }
    }
    ++num_looks_;
    return memories_.of(stage).fits();
  };
  const auto take = [&](size_t count) {
    for (Group& group : groups) {
      group.taken = std::min(count, group.blocks.size());
      count -= group.taken;
    }
    return fits();
  };
  size_t low = 0, high = total;  // `high` fits, if any do; `low` does not
  while (high - low > 1) {
    const size_t middle = (low + high) / 2;
    (take(middle) ? high : low) = middle;
  }
  if (!take(high) || groups.size() > kFewGroups) {
    return;
  }
  // What the last one has made superfluous; then a cheaper one in its stead.
  size_t last = groups.size();
  while (last-- > 0 && groups[last].taken == 0) {
  }
  for (size_t g = last; g-- > 0;) {
    while (groups[g].taken > 0) {
      --groups[g].taken;
      if (!fits()) {
        ++groups[g].taken;
        break;
      }
    }
  }
  --groups[last].taken;
  size_t best = last;
  for (size_t g = 0; g < groups.size(); ++g) {
    if (g == last || groups[g].taken == groups[g].blocks.size() ||
        groups[g].step.seconds >= groups[best].step.seconds) {
      continue;
    }
    ++groups[g].taken;
    best = fits() ? g : best;
    --groups[g].taken;
  }
  ++groups[best].taken;
  fits();
}

// From cuts that balance, and lack memory: such that all stages fit with all running again that
// may; then as little as that allows does.
bool LayoutFit::cut_with_recompute(const std::vector<std::vector<double>>& seconds) {
  Layout& layout = *layout_;
  layout.block_recompute.clear();
  for (const int block_class : request_.profile->blocks) {
    const std::vector<RecomputeStep>& steps = steps_of(0, block_class);
    layout.block_recompute.push_back(steps.empty() ? RecomputeMode::kNone : steps.back().mode);
  }
  layout.recompute_as_needed = false;
  const std::vector<int> balanced = layout.first_block;
  const bool fits = cut_within_memory(seconds, balanced);
  layout.recompute_as_needed = true;
  return fits && shortage() <= 0;
}

}  // namespace trainrt
