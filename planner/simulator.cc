// Each rank works off its row in order; a cell waits for the cell it depends on and for the
// transfer. Rows are walked round-robin, each until it meets a cell whose dependency has no end
// yet, so every cell is visited once plus at most p * v stalls: O(cells).
#include "planner/simulator.h"

#include <algorithm>
#include <cmath>

#include "graph/base/error.h"

namespace trainrt {

namespace {

constexpr double kPending = -1;

class Replayer {
 public:
  Replayer(const Schedule& schedule, const ReplayInput& input, bool keep_cells)
      : schedule_(schedule),
        input_(input),
        keep_cells_(keep_cells),
        num_virtual_(schedule.num_stages * schedule.virtual_stages),
        end_(static_cast<size_t>(2 * num_virtual_ * schedule.num_micro_batches), kPending) {
    TRAINRT_CHECK(static_cast<int>(input.stages.size()) == num_virtual_ &&
                      static_cast<int>(input.transfer.size()) == num_virtual_ - 1,
                  "replay of ",
                  num_virtual_,
                  " stages got ",
                  input.stages.size());
    const auto p = static_cast<size_t>(schedule.num_stages);
    result_.rank_end.assign(p, 0);
    result_.rank_compute.assign(p, 0);
    result_.rank_transfer.assign(p, 0);
    if (keep_cells) {
      result_.cells.resize(p);
    }
    next_.assign(p, 0);
  }

  Replay run() {
    for (bool progress = true; progress;) {
      progress = false;
      for (size_t rank = 0; rank < next_.size(); ++rank) {
        const std::vector<Cell>& row = schedule_.ranks[rank];
        while (next_[rank] < row.size() && step(rank, row[next_[rank]])) {
          ++next_[rank];
          progress = true;
        }
      }
    }
    for (size_t rank = 0; rank < next_.size(); ++rank) {
      TRAINRT_CHECK(next_[rank] == schedule_.ranks[rank].size(), "schedule deadlocks, rank ", rank);
      result_.seconds = std::max(result_.seconds, result_.rank_end[rank]);
    }
    return std::move(result_);
  }

 private:
  double& end_of(bool backward, int stage, int micro_batch) {
    return end_[static_cast<size_t>(
        ((backward ? num_virtual_ : 0) + stage) * schedule_.num_micro_batches + micro_batch)];
  }

  // When the cell's input is there; kPending when its producer has not run. `transfer` receives the
  // time the data travelled.
  double ready(const Cell& cell, double* transfer) {
    *transfer = 0;
    const int s = cell.virtual_stage, j = cell.micro_batch;
    if (cell.phase == PhaseKind::kForward) {
      if (s == 0) {
        return 0;
      }
      *transfer = input_.transfer[static_cast<size_t>(s - 1)] * scale(j);
      return end_of(false, s - 1, j);
    }
    if (cell.phase == PhaseKind::kWeightGrad) {
      return end_of(true, s, j);
    }
    const double own = end_of(false, s, j);
    if (s == num_virtual_ - 1 || own == kPending) {
      return own;
    }
    *transfer = input_.transfer[static_cast<size_t>(s)] * scale(j);
    return end_of(true, s + 1, j);
  }

  double scale(int micro_batch) const {
    return input_.micro_batch_scale.empty()
               ? 1
               : input_.micro_batch_scale[static_cast<size_t>(micro_batch)];
  }

  double duration(const Cell& cell) const {
    const StageTimes& times = input_.stages[static_cast<size_t>(cell.virtual_stage)];
    switch (cell.phase) {
      case PhaseKind::kForward:
        return times.forward;
      case PhaseKind::kBackward:
        return schedule_.split_backward ? times.backward - times.weight_grad : times.backward;
      case PhaseKind::kWeightGrad:
        return times.weight_grad;
      default:
        TRAINRT_FAIL(kInternal, "a schedule holds F, B and W cells only");
    }
  }

  bool step(size_t rank, const Cell& cell) {
    double transfer = 0;
    const double input_ready = ready(cell, &transfer);
    if (input_ready == kPending) {
      return false;
    }
    double& clock = result_.rank_end[rank];
    double start = 0;
    if (input_.blocking_transfers && transfer > 0) {
      start = std::max(clock, input_ready) + transfer;
      result_.rank_transfer[rank] += transfer;
    } else {
      start = std::max(clock, input_ready + transfer);
    }
    const double work = duration(cell) * scale(cell.micro_batch);
    clock = start + work;
    result_.rank_compute[rank] += work;
    if (keep_cells_) {
      result_.cells[rank].push_back({start, clock});
    }
    if (cell.phase != PhaseKind::kWeightGrad) {
      end_of(cell.phase == PhaseKind::kBackward, cell.virtual_stage, cell.micro_batch) = clock;
    }
    return true;
  }

  const Schedule& schedule_;
  const ReplayInput& input_;
  bool keep_cells_;
  int num_virtual_;
  std::vector<double> end_;
  std::vector<size_t> next_;
  Replay result_;
};

double total(const StageTimes& times) {
  return times.forward + times.backward;
}

// The smallest factor of any micro-batch, and their sum.
void micro_batch_range(const ReplayInput& input, int m, double* least, double* sum) {
  *least = 1;
  *sum = m;
  if (!input.micro_batch_scale.empty()) {
    *sum = 0;
    for (const double scale : input.micro_batch_scale) {
      *least = std::min(*least, scale);
      *sum += scale;
    }
  }
}

}  // namespace

Replay replay_schedule(const Schedule& schedule, const ReplayInput& input, bool keep_cells) {
  return Replayer(schedule, input, keep_cells).run();
}

// Without an end between them, such steps are one long step.
Replay replay_steady(const Schedule& whole, const ReplayInput& input) {
  constexpr int kSteps = 4, kStep = 2;  // the one that is looked at
  const int m = whole.num_micro_batches;
  const Schedule steps =
      make_schedule(whole.kind, whole.num_stages, kSteps * m, whole.virtual_stages);
  ReplayInput repeated = input;
  for (int i = 1; i < kSteps && !input.micro_batch_scale.empty(); ++i) {
    repeated.micro_batch_scale.insert(repeated.micro_batch_scale.end(),
                                      input.micro_batch_scale.begin(),
                                      input.micro_batch_scale.end());
  }
  const Replay all = Replayer(steps, repeated, true).run();
  const Schedule window = make_window(whole, StepWindow::kSteady);
  const auto time_of = [&](size_t rank, const Cell& cell, int step) {
    Cell wanted = cell;
    wanted.micro_batch += (step + (cell.ahead ? 1 : 0)) * m;
    wanted.ahead = false;
    const std::vector<Cell>& row = steps.ranks[rank];
    return all
        .cells[rank][static_cast<size_t>(std::find(row.begin(), row.end(), wanted) - row.begin())];
  };
  Replay result;
  double begin = 1e300;
  for (size_t rank = 0; rank < window.ranks.size(); ++rank) {
    begin = std::min(begin, time_of(rank, window.ranks[rank].back(), kStep - 1).end);
  }
  for (size_t rank = 0; rank < window.ranks.size(); ++rank) {
    const std::vector<Cell>& row = window.ranks[rank];
    std::vector<CellTime>& cells = result.cells.emplace_back();
    for (const Cell& cell : row) {
      const CellTime time = time_of(rank, cell, kStep);
      cells.push_back({time.start - begin, time.end - begin});
    }
    result.rank_end.push_back(cells.back().end);
    result.rank_compute.push_back(all.rank_compute[rank] / kSteps);
    result.rank_transfer.push_back(all.rank_transfer[rank] / kSteps);
    result.seconds = std::max(
        result.seconds, cells.back().end - (time_of(rank, row.back(), kStep - 1).end - begin));
  }
  return result;
}

double lower_bound_steady(const ReplayInput& input, int num_micro_batches) {
  double least = 1, sum = num_micro_batches, bound = 0;
  micro_batch_range(input, num_micro_batches, &least, &sum);
  for (const StageTimes& stage : input.stages) {
    bound = std::max(bound, sum * total(stage));
  }
  return bound;
}

double lower_bound_1f1b(const ReplayInput& input, int num_micro_batches) {
  const int p = static_cast<int>(input.stages.size());
  const double m = num_micro_batches;
  double least = 1, sum = m;
  micro_batch_range(input, num_micro_batches, &least, &sum);
  double prefix = 0, bound = 0;
  for (int b = 0; b < p; ++b) {
    const StageTimes& stage = input.stages[static_cast<size_t>(b)];
    const double w = p - 1 - b;
    double after = 0;  // R: one round trip downstream
    for (int i = b + 1; i < p; ++i) {
      after += total(input.stages[static_cast<size_t>(i)]);
    }
    for (int i = b; i < p - 1; ++i) {
      after += 2 * input.transfer[static_cast<size_t>(i)];
    }
    const double s = total(stage);
    if (least < 1) {  // a short micro-batch may be the one that fills or drains the pipeline
      bound = std::max(bound, least * prefix + sum * s);
    } else {
      double idle = 0;
      if (m > w + 1) {
        idle = std::max(0.0, after - w * stage.forward) + std::max(0.0, after - w * stage.backward);
      } else {
        idle = std::max(0.0, after - (m - 1) * std::min(stage.forward, stage.backward));
      }
      bound = std::max(bound, prefix + m * s + idle);
      bound = std::max(bound, prefix + std::ceil(m / (w + 1)) * (s + after));
    }
    prefix += s;
    if (b < p - 1) {
      prefix += 2 * input.transfer[static_cast<size_t>(b)];
    }
  }
  return bound;
}

double lower_bound_any(const Schedule& schedule, const ReplayInput& input) {
  const int p = schedule.num_stages;
  double least = 1, sum = schedule.num_micro_batches;
  micro_batch_range(input, schedule.num_micro_batches, &least, &sum);
  double bound = 0, head = 0;
  for (int rank = 0; rank < p; ++rank) {
    double work = 0;
    for (int s = rank; s < static_cast<int>(input.stages.size()); s += p) {
      work += total(input.stages[static_cast<size_t>(s)]);
    }
    // Before its first forward the earlier ranks' first stages must have run; after its last input
    // gradient of stage `rank`, those of the earlier stages (their weight gradients may be done
    // before).
    double tail = 0;
    for (int s = 0; s < rank; ++s) {
      const StageTimes& stage = input.stages[static_cast<size_t>(s)];
      tail += stage.backward - (schedule.split_backward ? stage.weight_grad : 0) +
              input.transfer[static_cast<size_t>(s)];
    }
    tail *= least;
    if (schedule.split_backward) {  // the rank's own weight gradients may run during the tail
      double own = 0;
      for (int s = rank; s < static_cast<int>(input.stages.size()); s += p) {
        own += input.stages[static_cast<size_t>(s)].weight_grad;
      }
      tail = std::max(0.0, tail - own * sum);
    }
    bound = std::max(bound, least * head + tail + work * sum);
    head += input.stages[static_cast<size_t>(rank)].forward;
    if (rank < p - 1) {
      head += input.transfer[static_cast<size_t>(rank)];
    }
  }
  return bound;
}

}  // namespace trainrt
