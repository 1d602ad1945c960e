// Random small models for stress programs: a chain of operators over [batch, sequence, hidden] with
// projections, attention, residuals, normalization, cuts and joins, all sizes odd or even by
// chance.
#pragma once

#include <random>

#include "tests/support/run_plan.h"

namespace trainrt::testing {

struct RandomModel {
  std::string description;
  TrainingGraphFactory factory;  // float64
  int num_nodes = 0;
  BatchFeeds feeds;
  std::vector<std::pair<std::string, Shape>> parameters;
};

RandomModel random_model(std::mt19937_64& random, int64_t batch);

// Command line of a stress program: --seed N --count N --seconds T. Runs `one_case` with a
// generator per case, seed by seed, until count or time is up or a case fails; prints what it did
// and how to repeat a failure. `one_case` returns its description and reports with EXPECT. Returns
// main's result.
int run_stress(int argc,
               char** argv,
               const std::string& program,
               const std::function<void(std::mt19937_64&, std::string& what)>& one_case);

}  // namespace trainrt::testing
