#include "parallel/reduction_tree.h"

#include <algorithm>

#include "graph/base/error.h"

namespace trainrt {

namespace {

struct TreeNode {
  int64_t level = 0;
  int64_t index = 0;
};

// Nodes that wait for their right neighbour, leftmost first: a binary counter's digits.
class OpenNodes {
 public:
  explicit OpenNodes(int64_t num_shards) : num_shards_(num_shards) {}

  // Puts `node` on top and merges what is complete. Returns the number of sums.
  int64_t push(TreeNode node) {
    nodes_.push_back(node);
    int64_t sums = 0;
    for (;;) {
      TreeNode& top = nodes_.back();
      const bool is_left = top.index % 2 == 0;
      const bool is_alone = is_left && ((top.index + 1) << top.level) >= num_shards_;
      if (is_alone && top.index == 0) {
        return sums;  // the root
      }
      if (is_alone) {
        top = {top.level + 1, top.index / 2};
        continue;
      }
      const bool has_left = !is_left && nodes_.size() > 1 &&
                            nodes_[nodes_.size() - 2].level == top.level &&
                            nodes_[nodes_.size() - 2].index == top.index - 1;
      if (!has_left) {
        return sums;
      }
      nodes_.pop_back();
      nodes_.back() = {nodes_.back().level + 1, nodes_.back().index / 2};
      ++sums;
    }
  }
  const std::vector<TreeNode>& nodes() const { return nodes_; }

 private:
  int64_t num_shards_;
  std::vector<TreeNode> nodes_;
};

// The complete nodes that a rank ends with.
std::vector<TreeNode> subtrees_of(const std::vector<MicroBatchCut>& cuts, int64_t num_shards) {
  OpenNodes open(num_shards);
  for (size_t i = 0; i < cuts.size(); ++i) {
    if (i + 1 == cuts.size() || cuts[i + 1].shard != cuts[i].shard) {
      open.push({0, cuts[i].shard});
    }
  }
  return open.nodes();
}

}  // namespace

TreeAccumulation accumulate_tree(const std::vector<MicroBatchCut>& cuts, int64_t num_shards) {
  TreeAccumulation result;
  OpenNodes open(num_shards);
  for (size_t i = 0; i < cuts.size(); ++i) {
    const bool begins = i == 0 || cuts[i - 1].shard != cuts[i].shard;
    const bool ends = i + 1 == cuts.size() || cuts[i + 1].shard != cuts[i].shard;
    const int64_t slot = static_cast<int64_t>(open.nodes().size());
    result.slot.push_back(slot);
    result.first.push_back(begins ? 1 : 0);
    result.num_slots = std::max(result.num_slots, slot + 1);
    result.merges.push_back(ends ? open.push({0, cuts[i].shard}) : 0);
  }
  result.num_subtrees = static_cast<int64_t>(open.nodes().size());
  return result;
}

std::vector<int64_t> tree_sum_merges(const std::vector<std::vector<MicroBatchCut>>& ranks,
                                     int64_t num_shards) {
  OpenNodes open(num_shards);
  std::vector<int64_t> merges;
  for (const std::vector<MicroBatchCut>& cuts : ranks) {
    for (const TreeNode& node : subtrees_of(cuts, num_shards)) {
      merges.push_back(open.push(node));
    }
  }
  TRAINRT_CHECK(open.nodes().size() == 1, "the shards of all ranks do not make one tree");
  return merges;
}

}  // namespace trainrt
