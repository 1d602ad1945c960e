// Trains or evaluates a model: the data's way from file to result, one call per step of it.
#pragma once

#include <cstdint>
#include <functional>

#include "runtime/options.h"
#include "runtime/ranks.h"

namespace trainrt {

// Where a test takes the place of the world.
struct TrainingSeams {
  // Instead of the seconds that a rank has computed in a step, in which it had `work` samples (with
  // --max-tokens: tokens).
  std::function<double(int rank, int64_t step, int64_t work)> compute_seconds = nullptr;
};

// Exit codes: 0, or 128 + n when signal n asked to stop (after a checkpoint was written).
int train(const Options& options, const TrainingSeams& seams = {});
// Those of this process.
int train_ranks(const Options& options, Ranks& ranks, const TrainingSeams& seams = {});

// Prints `loss: X` and, for class labels, `accuracy: 0.xxxx` on stdout.
int evaluate(const Options& options);

}  // namespace trainrt
