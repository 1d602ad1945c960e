// Trains or evaluates a model: the data's way from file to result, one call per step of it.
#pragma once

#include "runtime/options.h"
#include "runtime/ranks.h"

namespace trainrt {

// Exit codes: 0, or 128 + n when signal n asked to stop (after a checkpoint was written).
int train(const Options& options);
int train_ranks(const Options& options, Ranks& ranks);  // those of this process

// Prints `loss: X` and, for class labels, `accuracy: 0.xxxx` on stdout.
int evaluate(const Options& options);

}  // namespace trainrt
