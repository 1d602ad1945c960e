#include "planner/block_sums.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace trainrt {

LargestOf::LargestOf(std::vector<double> values) : values_(std::move(values)) {
  std::vector<size_t>& single = runs_.emplace_back(values_.size());
  std::iota(single.begin(), single.end(), size_t{0});
  for (size_t size = 2; size <= values_.size(); size *= 2) {
    const std::vector<size_t>& half = runs_.back();
    std::vector<size_t> run;
    for (size_t i = 0; i + size <= values_.size(); ++i) {
      run.push_back(larger(half[i], half[i + size / 2]));
    }
    runs_.push_back(std::move(run));
  }
}

size_t LargestOf::at(size_t first, size_t end) const {
  size_t level = 0;
  while (size_t{2} << level <= end - first) {
    ++level;
  }
  return larger(runs_[level][first], runs_[level][end - (size_t{1} << level)]);
}

namespace {

using OfBlock = std::function<double(const BlockClass&)>;

std::vector<double> by_block(const ModelProfile& profile, const OfBlock& fn) {
  std::vector<double> of_class, values;
  for (const BlockClass& block : profile.classes) {
    of_class.push_back(fn(block));
  }
  for (const int block : profile.blocks) {
    values.push_back(of_class[static_cast<size_t>(block)]);
  }
  return values;
}

std::vector<double> prefix(const ModelProfile& profile, const OfBlock& fn) {
  std::vector<double> sums(1, 0);
  for (const double value : by_block(profile, fn)) {
    sums.push_back(sums.back() + value);
  }
  return sums;
}

double kept_of(const BlockClass& block, RecomputeMode recompute) {
  return block.stash_bytes[static_cast<size_t>(recompute)];
}

double working_of(const BlockClass& block, RecomputeMode recompute) {
  const double again = recompute != RecomputeMode::kNone && block.recomputed
                           ? std::max(0.0, block.stash_bytes[0] - kept_of(block, recompute))
                           : 0;
  return block.transient_bytes + again;
}

std::vector<double> busy(const std::vector<double>& kept, const std::vector<double>& working) {
  std::vector<double> values;
  for (size_t b = 0; b < working.size(); ++b) {
    values.push_back(kept[b + 1] + working[b]);
  }
  return values;
}

}  // namespace

BlockSums::BlockSums(const ModelProfile& profile, RecomputeMode recompute)
    : parameters_(prefix(profile, [](const BlockClass& block) { return block.parameters; })),
      shared_(prefix(profile, [](const BlockClass& block) { return block.shared_parameters; })),
      kept_(prefix(profile, [&](const BlockClass& block) { return kept_of(block, recompute); })),
      put_off_(prefix(profile,
                      [&](const BlockClass& block) {
                        return block.split_bytes +
                               std::max(0.0, block.stash_bytes[0] - kept_of(block, recompute));
                      })),
      working_(
          by_block(profile, [&](const BlockClass& block) { return working_of(block, recompute); })),
      largest_parameters_(
          by_block(profile, [](const BlockClass& block) { return block.parameters; })),
      transient_(by_block(profile, [](const BlockClass& block) { return block.transient_bytes; })),
      again_(by_block(profile,
                      [&](const BlockClass& block) {
                        return recompute != RecomputeMode::kNone && block.recomputed
                                   ? block.stash_bytes[0]
                                   : 0;
                      })),
      busiest_(busy(kept_, working_)) {}

int BlockSums::busiest(int first, int end) const {
  return static_cast<int>(busiest_.at(static_cast<size_t>(first), static_cast<size_t>(end)));
}

}  // namespace trainrt
