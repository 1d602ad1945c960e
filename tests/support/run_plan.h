// Trains a small model under a plan with every rank a thread of the test, for comparing plans.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "parallel/partition.h"

namespace trainrt::testing {

// The inputs of step `step`, for the whole global batch, samples along axis 0.
using BatchFeeds = std::function<std::map<std::string, Tensor>(int step)>;

struct PlanRun {
  std::vector<double> losses;  // per step
  std::vector<double> grad_norms;
  std::map<std::string, Tensor> persistent;  // whole parameters and states after the last step
  std::vector<int64_t> arena_bytes;          // per rank
  std::vector<Program> programs;
};

struct RunOptions {
  int steps = 3;
  double learning_rate = 0.05;
  bool reference_kernels = true;
  // Whether the pipeline is empty after a step of programs that run on; null: after the last only.
  std::function<bool(int step)> drains_after = nullptr;
  std::function<double(int step)> loss_scale = nullptr;  // of a plan in fp16; null: 1
};

PlanRun run_plan(const TrainingGraphFactory& factory,
                 const Plan& plan,
                 const BatchFeeds& feeds,
                 const RunOptions& options = {});

// Losses, norms and whole persistent tensors are the same to the last bit.
void expect_equal_bits(const PlanRun& a, const PlanRun& b, const std::string& what);
// Losses within `tolerance`, norms and tensors within ten times that, relative. Tensors by norm,
// with a floor of the parameters' mean norm.
void expect_close(const PlanRun& a, const PlanRun& b, double tolerance, const std::string& what);

}  // namespace trainrt::testing
