// The way from ONNX's classification losses to ours.
#pragma once

#include "graph/upgrade.h"

namespace trainrt {

// ONNX's SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss, any opset and reduction.
void upgrade_softmax_cross_entropy(UpgradeContext& u);
void upgrade_negative_log_likelihood(UpgradeContext& u);

}  // namespace trainrt
