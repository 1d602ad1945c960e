// The order in which one rank runs the phases of a step.
#pragma once

#include <vector>

#include "parallel/program.h"

namespace trainrt {

// C cells of the micro-batches that have samples, the schedule's row as far as this rank has
// phases, R and U. `phases`: of a full micro-batch.
std::vector<Cell> rank_cells(const Plan& plan,
                             int stage,
                             const std::vector<MicroBatch>& micro_batches,
                             const std::vector<Phase>& phases,
                             StepWindow window = StepWindow::kWhole);

// The rows of a rank whose steps go over into each other, and what its forwards read ahead of the
// update: Program::windows and what belongs to them. `phases`: of a full micro-batch.
void add_windows(const Plan& plan, const std::vector<Phase>& phases, Program* program);

}  // namespace trainrt
