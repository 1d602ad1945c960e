#include "parallel/rank_cells.h"

#include <algorithm>

#include "parallel/passes/delay_weights.h"

namespace trainrt {

std::vector<Cell> rank_cells(const Plan& plan,
                             int stage,
                             const std::vector<MicroBatch>& micro_batches,
                             const std::vector<Phase>& phases,
                             StepWindow window) {
  std::vector<Cell> cells;
  const auto has = [&](const Cell& cell) {
    return std::any_of(phases.begin(), phases.end(), [&](const Phase& phase) {
      return phase.kind == cell.phase && phase.virtual_stage == cell.virtual_stage;
    });
  };
  const auto add_all = [&](PhaseKind kind, int micro_batch) {
    for (const Phase& phase : phases) {
      if (phase.kind == kind) {
        cells.push_back({kind, phase.virtual_stage, micro_batch});
      }
    }
  };
  const int count = static_cast<int>(micro_batches.size());
  for (int i = 0; i < count; ++i) {
    if (micro_batches[static_cast<size_t>(i)].num_samples > 0) {
      add_all(PhaseKind::kCount, i);
    }
  }
  add_all(PhaseKind::kGather, -1);
  if (count > 0) {
    Schedule schedule =
        make_schedule(plan.schedule, plan.pipeline_parallel, count, plan.virtual_stages);
    if (window != StepWindow::kWhole) {
      schedule = make_window(schedule, window);
    }
    for (const Cell& cell : schedule.ranks[static_cast<size_t>(stage)]) {
      if (has(cell)) {
        cells.push_back(cell);
      }
    }
  }
  add_all(PhaseKind::kReduce, -1);
  add_all(PhaseKind::kUpdate, -1);
  return cells;
}

void add_windows(const Plan& plan, const std::vector<Phase>& phases, Program* program) {
  const int stage = program->coordinates.stage;
  for (const StepWindow window : {StepWindow::kFill, StepWindow::kSteady, StepWindow::kDrain}) {
    program->windows.push_back(rank_cells(plan, stage, program->micro_batches, phases, window));
  }
  program->num_ahead =
      program->micro_batches.empty() ? 0 : num_ahead(plan.schedule, plan.pipeline_parallel, stage);
  for (const ProgramVariant& variant : program->variants) {
    for (const Value& value : variant.graph.values()) {
      if (value.kind == ValueKind::kParameter &&
          variant.graph.find_value(previous_version(value.name))) {
        program->newer_versions[previous_version(value.name)] = value.name;
      }
    }
  }
}

}  // namespace trainrt
