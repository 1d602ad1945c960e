// What the classification losses share beside their layout: sums over items in fixed blocks, and
// the way from ONNX's loss operators to ours.
#pragma once

#include "graph/op_def.h"
#include "graph/upgrade.h"

namespace trainrt {

// Items are summed in blocks of this many, and the blocks in order: the sum depends on the number
// of items alone, not on threads.
inline constexpr int64_t kItemGrain = 4096;

inline double sum_blocks(const double* blocks, int64_t num_items) {
  double sum = 0;
  for (int64_t block = 0; block * kItemGrain < num_items; ++block) {
    sum += blocks[block];
  }
  return sum;
}

// Workspace for one double per block of the items of input `items_input`.
inline int64_t item_workspace(const OpContext& op, int items_input) {
  const int64_t items = op.num_elements(items_input);
  return std::max<int64_t>(1, (items + kItemGrain - 1) / kItemGrain) *
         static_cast<int64_t>(sizeof(double));
}

// ONNX's SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss, any opset and reduction.
void upgrade_softmax_cross_entropy(UpgradeContext& u);
void upgrade_negative_log_likelihood(UpgradeContext& u);

}  // namespace trainrt
