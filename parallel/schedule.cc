// Pipeline schedules as tables. Each is generated per rank from counts alone:
//   GPipe         all forwards, then all backwards (Huang et al., arXiv 1811.06965);
//   1F1B          min(p-r-1, m) forwards ahead, then forward and backward in turn (also called
//                 PipeDream-flush);
//   interleaved   the same over v virtual stages per rank, micro-batches in groups of p
//                 (Narayanan et al., arXiv 2104.04473, section 2.2);
//   zero bubble   1F1B with the weight gradient W of a micro-batch put off by r micro-batches,
//                 which evens out the number of unfinished micro-batches at p on every rank (H1
//                 of Qi et al., arXiv 2401.10241);
//   2BW           1F1B over two weight versions, whose steps go over into each other: a step's
//                 warm-up runs among the last backwards of the one before (Narayanan et al.,
//                 arXiv 2006.09503).
// Backwards run in micro-batch order in all of them, so gradients accumulate in one order and the
// schedules give equal bits.
#include "parallel/schedule.h"

#include <algorithm>
#include <array>
#include <sstream>

namespace trainrt {

namespace {

constexpr std::array<std::pair<ScheduleKind, const char*>, 5> kNames = {{
    {ScheduleKind::kGPipe, "gpipe"},
    {ScheduleKind::k1F1B, "1f1b"},
    {ScheduleKind::kInterleaved, "interleaved"},
    {ScheduleKind::kZeroBubbleH1, "zb-h1"},
    {ScheduleKind::k2BW, "2bw"},
}};

Cell cell(PhaseKind phase, int virtual_stage, int micro_batch) {
  return {phase, virtual_stage, micro_batch};
}

std::vector<Cell> gpipe_row(int rank, int m) {
  std::vector<Cell> row;
  for (const PhaseKind phase : {PhaseKind::kForward, PhaseKind::kBackward}) {
    for (int i = 0; i < m; ++i) {
      row.push_back(cell(phase, rank, i));
    }
  }
  return row;
}

// `forwards` and `backwards` merged: `warm_up` forwards first, then one of each in turn.
std::vector<Cell> one_forward_one_backward(const std::vector<Cell>& forwards,
                                           const std::vector<Cell>& backwards,
                                           size_t warm_up) {
  std::vector<Cell> row(forwards.begin(), forwards.begin() + static_cast<std::ptrdiff_t>(warm_up));
  for (size_t i = 0; i < backwards.size(); ++i) {
    if (warm_up + i < forwards.size()) {
      row.push_back(forwards[warm_up + i]);
    }
    row.push_back(backwards[i]);
  }
  return row;
}

std::vector<Cell> one_f_one_b_row(int rank, int p, int m) {
  std::vector<Cell> forwards, backwards;
  for (int i = 0; i < m; ++i) {
    forwards.push_back(cell(PhaseKind::kForward, rank, i));
    backwards.push_back(cell(PhaseKind::kBackward, rank, i));
  }
  return one_forward_one_backward(
      forwards, backwards, static_cast<size_t>(std::min(p - rank - 1, m)));
}

// A short last group is a full one without the missing micro-batches' cells: what is left keeps its
// order, so it can neither deadlock nor end later. (Groups of fewer than p in the generator itself
// do deadlock.)
std::vector<Cell> interleaved_row(int rank, int p, int m, int v) {
  std::vector<Cell> forwards, backwards;
  const int full = (m + p - 1) / p * p;
  for (int begin = 0; begin < full; begin += p) {
    for (int part = 0; part < v; ++part) {
      for (int i = begin; i < begin + p; ++i) {
        forwards.push_back(cell(PhaseKind::kForward, part * p + rank, i));
        backwards.push_back(cell(PhaseKind::kBackward, (v - 1 - part) * p + rank, i));
      }
    }
  }
  const int warm_up = std::min(2 * (p - rank - 1) + (v - 1) * p, full * v);
  std::vector<Cell> row =
      one_forward_one_backward(forwards, backwards, static_cast<size_t>(warm_up));
  std::erase_if(row, [&](const Cell& c) { return c.micro_batch >= m; });
  return row;
}

std::vector<Cell> zero_bubble_row(int rank, int p, int m) {
  std::vector<Cell> row;
  int weights = 0;
  for (const Cell& next : one_f_one_b_row(rank, p, m)) {
    row.push_back(next);
    if (next.phase == PhaseKind::kBackward && next.micro_batch >= rank) {
      row.push_back(cell(PhaseKind::kWeightGrad, rank, weights++));
    }
  }
  while (weights < m) {
    row.push_back(cell(PhaseKind::kWeightGrad, rank, weights++));
  }
  return row;
}

// What a cell waits for on other cells; -1 in micro_batch: nothing.
Cell dependency(const Cell& next, int last_virtual_stage) {
  switch (next.phase) {
    case PhaseKind::kForward:
      return next.virtual_stage == 0
                 ? cell(PhaseKind::kForward, 0, -1)
                 : cell(PhaseKind::kForward, next.virtual_stage - 1, next.micro_batch);
    case PhaseKind::kBackward:
      return next.virtual_stage == last_virtual_stage
                 ? cell(PhaseKind::kForward, next.virtual_stage, next.micro_batch)
                 : cell(PhaseKind::kBackward, next.virtual_stage + 1, next.micro_batch);
    default:
      return cell(PhaseKind::kBackward, next.virtual_stage, next.micro_batch);
  }
}

// Which (phase, virtual stage, micro-batch) are done, for the three phases of a schedule.
class DoneTable {
 public:
  DoneTable(int num_virtual_stages, int num_micro_batches)
      : stages_(num_virtual_stages),
        micro_batches_(num_micro_batches),
        done_(static_cast<size_t>(3 * num_virtual_stages * num_micro_batches), false) {}
  std::vector<bool>::reference operator()(const Cell& c) {
    const int phase = c.phase == PhaseKind::kForward ? 0 : c.phase == PhaseKind::kBackward ? 1 : 2;
    return done_[static_cast<size_t>((phase * stages_ + c.virtual_stage) * micro_batches_ +
                                     c.micro_batch)];
  }

 private:
  int stages_;
  int micro_batches_;
  std::vector<bool> done_;
};

// The cells of each rank are in range and occur once.
void verify_cells(const Schedule& schedule) {
  const int p = schedule.num_stages, m = schedule.num_micro_batches, v = schedule.virtual_stages;
  TRAINRT_CHECK(static_cast<int>(schedule.ranks.size()) == p,
                "schedule has ",
                schedule.ranks.size(),
                " rows for ",
                p,
                " stages");
  DoneTable seen(p * v, m);
  for (int rank = 0; rank < p; ++rank) {
    const std::vector<Cell>& row = schedule.ranks[static_cast<size_t>(rank)];
    for (const Cell& c : row) {
      const bool known = c.phase == PhaseKind::kForward || c.phase == PhaseKind::kBackward ||
                         (schedule.split_backward && c.phase == PhaseKind::kWeightGrad);
      TRAINRT_CHECK(known && c.virtual_stage % p == rank && c.virtual_stage >= 0 &&
                        c.virtual_stage < p * v && c.micro_batch >= 0 && c.micro_batch < m,
                    "cell ",
                    cell_name(c),
                    " does not belong on rank ",
                    rank);
      TRAINRT_CHECK(!seen(c), "cell ", cell_name(c), " occurs twice");
      seen(c) = true;
    }
    const int phases = schedule.split_backward ? 3 : 2;
    TRAINRT_CHECK(static_cast<int>(row.size()) == phases * v * m,
                  "rank ",
                  rank,
                  " has ",
                  row.size(),
                  " cells, wanted ",
                  phases * v * m);
  }
}

}  // namespace

std::string cell_name(const Cell& c) {
  return std::to_string(c.virtual_stage) + phase_letter(c.phase) +
         (c.micro_batch < 0 ? "" : std::to_string(c.micro_batch)) + (c.ahead ? "'" : "");
}

const char* phase_letter(PhaseKind kind) {
  switch (kind) {
    case PhaseKind::kCount:
      return "C";
    case PhaseKind::kGather:
      return "G";
    case PhaseKind::kForward:
      return "F";
    case PhaseKind::kBackward:
      return "B";
    case PhaseKind::kWeightGrad:
      return "W";
    case PhaseKind::kReduce:
      return "R";
    case PhaseKind::kUpdate:
      return "U";
  }
  return "?";
}

const char* schedule_name(ScheduleKind kind) {
  for (const auto& [known, name] : kNames) {
    if (known == kind) {
      return name;
    }
  }
  return "?";
}

std::optional<ScheduleKind> schedule_from_name(std::string_view name) {
  for (const auto& [kind, known] : kNames) {
    if (known == name) {
      return kind;
    }
  }
  return std::nullopt;
}

Schedule make_schedule(ScheduleKind kind,
                       int num_stages,
                       int num_micro_batches,
                       int virtual_stages) {
  const int p = num_stages, m = num_micro_batches, v = virtual_stages;
  TRAINRT_REQUIRE(p >= 1 && m >= 1 && v >= 1,
                  kInfeasiblePlan,
                  "schedule '",
                  schedule_name(kind),
                  "' wants at least one stage, micro-batch and virtual stage, got ",
                  p,
                  ", ",
                  m,
                  " and ",
                  v);
  TRAINRT_REQUIRE(v == 1 || kind == ScheduleKind::kInterleaved,
                  kInfeasiblePlan,
                  "schedule '",
                  schedule_name(kind),
                  "' has one virtual stage per rank, got ",
                  v,
                  "; use the schedule 'interleaved'");
  TRAINRT_REQUIRE(kind != ScheduleKind::k2BW || m >= p,
                  kInfeasiblePlan,
                  "schedule '2bw' keeps two weight versions, which suffices only with at least as "
                  "many micro-batches as stages, got ",
                  m,
                  " micro-batches and ",
                  p,
                  " stages; use more micro-batches or '1f1b'");
  Schedule schedule{kind, p, v, m, kind == ScheduleKind::kZeroBubbleH1, {}};
  for (int rank = 0; rank < p; ++rank) {
    switch (kind) {
      case ScheduleKind::kGPipe:
        schedule.ranks.push_back(gpipe_row(rank, m));
        break;
      case ScheduleKind::k1F1B:
      case ScheduleKind::k2BW:
        schedule.ranks.push_back(one_f_one_b_row(rank, p, m));
        break;
      case ScheduleKind::kInterleaved:
        schedule.ranks.push_back(interleaved_row(rank, p, m, v));
        break;
      case ScheduleKind::kZeroBubbleH1:
        schedule.ranks.push_back(zero_bubble_row(rank, p, m));
        break;
    }
  }
  return schedule;
}

const char* window_name(StepWindow window) {
  constexpr std::array<const char*, kNumWindows> names = {"whole", "fill", "steady", "drain"};
  return names.at(static_cast<size_t>(window));
}

bool goes_on(ScheduleKind kind) {
  return kind == ScheduleKind::k2BW;
}

int num_ahead(ScheduleKind kind, int num_stages, int rank) {
  return goes_on(kind) ? num_stages - 1 - rank : 0;
}

Schedule make_window(const Schedule& whole, StepWindow window) {
  TRAINRT_CHECK(goes_on(whole.kind),
                "steps under '",
                schedule_name(whole.kind),
                "' do not go over into each other");
  if (window == StepWindow::kWhole) {
    return whole;
  }
  const bool carried = window != StepWindow::kFill, ahead = window != StepWindow::kDrain;
  Schedule result = whole;
  for (int rank = 0; rank < whole.num_stages; ++rank) {
    const int warm_up = num_ahead(whole.kind, whole.num_stages, rank);
    std::vector<Cell> forwards, backwards;
    for (int i = 0; i < whole.num_micro_batches; ++i) {
      if (!carried || i >= warm_up) {
        forwards.push_back(cell(PhaseKind::kForward, rank, i));
      }
      backwards.push_back(cell(PhaseKind::kBackward, rank, i));
    }
    for (int i = 0; ahead && i < warm_up; ++i) {
      forwards.push_back({PhaseKind::kForward, rank, i, true});
    }
    result.ranks[static_cast<size_t>(rank)] =
        one_forward_one_backward(forwards, backwards, carried ? 0 : static_cast<size_t>(warm_up));
  }
  return result;
}

void verify_schedule(const Schedule& schedule) {
  verify_cells(schedule);
  const int last = schedule.num_stages * schedule.virtual_stages - 1;
  DoneTable done(last + 1, schedule.num_micro_batches);
  // Runs every rank as far as it gets, until all are done or none moves: with sends that do not
  // wait for their receive, that is a deadlock.
  std::vector<size_t> position(schedule.ranks.size(), 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      const std::vector<Cell>& row = schedule.ranks[rank];
      while (position[rank] < row.size()) {
        const Cell& next = row[position[rank]];
        const Cell wanted = dependency(next, last);
        if (wanted.micro_batch >= 0 && !done(wanted)) {
          break;
        }
        TRAINRT_CHECK(next.phase != PhaseKind::kBackward ||
                          done(cell(PhaseKind::kForward, next.virtual_stage, next.micro_batch)),
                      cell_name(next),
                      " runs before its forward");
        done(next) = true;
        ++position[rank];
        moved = true;
      }
    }
  }
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    TRAINRT_CHECK(position[rank] == schedule.ranks[rank].size(),
                  "schedule '",
                  schedule_name(schedule.kind),
                  "' (p=",
                  schedule.num_stages,
                  ", m=",
                  schedule.num_micro_batches,
                  ", v=",
                  schedule.virtual_stages,
                  ") deadlocks: rank ",
                  rank,
                  " waits before ",
                  cell_name(schedule.ranks[rank][position[rank]]));
  }
}

int max_in_flight(const std::vector<Cell>& row, int virtual_stage) {
  bool split = false, any = false;
  for (const Cell& c : row) {
    const bool here = c.virtual_stage == virtual_stage;
    split = split || (c.phase == PhaseKind::kWeightGrad && here);
    any = any || ((c.phase == PhaseKind::kWeightGrad || c.phase == PhaseKind::kBackward) && here);
  }
  if (!any) {
    return row.empty() ? 0 : 1;  // forward only: a micro-batch is done when its forward is
  }
  const PhaseKind last = split ? PhaseKind::kWeightGrad : PhaseKind::kBackward;
  int in_flight = 0, most = 0;
  for (const Cell& c : row) {
    if (c.virtual_stage != virtual_stage) {
      continue;
    }
    in_flight += c.phase == PhaseKind::kForward ? 1 : 0;
    most = std::max(most, in_flight);
    in_flight -= c.phase == last ? 1 : 0;
  }
  return most;
}

int max_in_flight(const Schedule& schedule, int virtual_stage) {
  return max_in_flight(schedule.ranks.at(static_cast<size_t>(virtual_stage % schedule.num_stages)),
                       virtual_stage);
}

std::string schedule_table(const Schedule& schedule) {
  std::ostringstream out;
  for (const std::vector<Cell>& row : schedule.ranks) {
    for (size_t i = 0; i < row.size(); ++i) {
      out << (i == 0 ? "" : ",") << cell_name(row[i]);
    }
    out << "\n";
  }
  return out.str();
}

}  // namespace trainrt
