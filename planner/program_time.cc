// Ranks are walked round-robin, each until it meets a collective that not all of its group have
// reached, or a message that has not been sent: as many rounds as there are waits, and every act is
// visited once.
#include "planner/program_time.h"

#include <algorithm>
#include <deque>
#include <map>
#include <span>
#include <tuple>

#include "graph/base/error.h"

namespace trainrt {

namespace {

using Work = std::vector<std::shared_ptr<const RankWork>>;

// Who waits for longer goes to sleep, and has to be woken.
constexpr double kAwakeSeconds = 50e-6;

class Replayer {
 public:
  Replayer(const Plan& plan,
           const Topology& topology,
           const std::vector<int>& devices,
           const Work& work)
      : plan_(plan), topology_(topology), devices_(devices), work_(work) {
    const size_t n = work.size();
    next_.resize(n, 0);
    drawn_.resize(n);
    before_.resize(n);
    begun_.resize(n, false);
    result_.ranks.resize(n);
    for (size_t rank = 0; rank < n; ++rank) {
      result_.ranks[rank].cell_start.assign(work[rank]->cells.size(), -1);
      result_.ranks[rank].cell_end.assign(work[rank]->cells.size(), 0);
    }
  }

  ProgramTime run() {
    for (bool progress = true; progress;) {
      progress = false;
      for (size_t rank = 0; rank < work_.size(); ++rank) {
        while (next_[rank] < work_[rank]->acts.size() &&
               step(rank, work_[rank]->acts[next_[rank]])) {
          progress = true;
        }
      }
    }
    for (size_t rank = 0; rank < work_.size(); ++rank) {
      TRAINRT_CHECK(next_[rank] == work_[rank]->acts.size(),
                    "programs wait for each other: rank ",
                    rank,
                    " at '",
                    work_[rank]->acts[next_[rank]].name,
                    "'");
      result_.seconds = std::max(result_.seconds, result_.ranks[rank].end - before_[rank].end);
    }
    leave_out_before();
    return std::move(result_);
  }

 private:
  // What came before the step that is meant: until a rank is at its first cell.
  void note_before(size_t rank) {
    if (begun_[rank] ||
        static_cast<size_t>(work_[rank]->acts[next_[rank]].cell) < work_[rank]->first_cell) {
      return;
    }
    begun_[rank] = true;
    before_[rank] = result_.ranks[rank];
    drawn_[rank] = Drawn();
  }

  // Time counts from when the first rank begins the step.
  void leave_out_before() {
    double begin = 1e300;
    for (const RankTime& before : before_) {
      begin = std::min(begin, before.end);
    }
    for (size_t rank = 0; rank < work_.size(); ++rank) {
      RankTime& time = result_.ranks[rank];
      const RankTime& before = before_[rank];
      for (double RankTime::*spent : {&RankTime::compute,
                                      &RankTime::optimizer,
                                      &RankTime::tensor,
                                      &RankTime::gradients,
                                      &RankTime::gather,
                                      &RankTime::transfer,
                                      &RankTime::waiting}) {
        time.*spent -= before.*spent;
      }
      time.end -= begin;
      time.events.erase(time.events.begin(),
                        time.events.begin() + static_cast<std::ptrdiff_t>(before.events.size()));
      for (TraceEvent& event : time.events) {
        event.start_seconds -= begin;
      }
      for (std::vector<double>* times : {&time.cell_start, &time.cell_end}) {
        times->erase(times->begin(),
                     times->begin() + static_cast<std::ptrdiff_t>(work_[rank]->first_cell));
      }
      for (size_t cell = 0; cell < time.cell_start.size(); ++cell) {
        if (time.cell_start[cell] >= 0) {
          time.cell_start[cell] -= begin;
          time.cell_end[cell] -= begin;
        }
      }
    }
  }

  // The members of the group that `rank` belongs to, in order, as ranks.
  std::vector<int> members(int rank, const std::string& group) const {
    const RankCoordinates own = rank_coordinates(plan_, rank);
    std::vector<int> all;
    if (group == "data") {
      for (int d = 0; d < plan_.data_parallel; ++d) {
        all.push_back(rank_of(plan_, {own.stage, d, own.tensor_rank}));
      }
    } else if (group == "tensor") {
      for (int t = 0; t < plan_.tensor_parallel; ++t) {
        all.push_back(rank_of(plan_, {own.stage, own.data_rank, t}));
      }
    } else if (group == "world") {
      for (int r = 0; r < plan_.world_size(); ++r) {
        all.push_back(r);
      }
    } else {
      TRAINRT_CHECK(group == "pipeline", group);
      for (int s = 0; s < plan_.pipeline_parallel; ++s) {
        all.push_back(rank_of(plan_, {s, own.data_rank, own.tensor_rank}));
      }
    }
    return all;
  }

  GroupLinks links(const std::vector<int>& ranks) const {
    std::vector<int> devices;
    for (const int rank : ranks) {
      devices.push_back(devices_.at(static_cast<size_t>(rank)));
    }
    return group_links(topology_, devices, 1);
  }

  bool step(size_t rank, const RankAct& act) {
    note_before(rank);
    switch (act.kind) {
      case RankAct::Kind::kCompute:
        compute(rank, act);
        break;
      case RankAct::Kind::kSend:
        send(rank, act);
        break;
      case RankAct::Kind::kRecv:
        return receive(rank, act);
      case RankAct::Kind::kCollective:
        return meet(rank, act);
    }
    ++next_[rank];
    return true;
  }

  void note(size_t rank, const RankAct& act, TraceLane lane, double start, double seconds) {
    RankTime& time = result_.ranks[rank];
    time.end = std::max(time.end, start + seconds);
    if (const size_t cell = static_cast<size_t>(act.cell); cell < time.cell_end.size()) {
      time.cell_start[cell] = time.cell_start[cell] < 0 ? start : time.cell_start[cell];
      time.cell_end[cell] = start + seconds;
    }
    TraceEvent event{act.name, lane, start, seconds, 1};
    event.op_type = act.op_type;
    if (act.kind != RankAct::Kind::kCompute) {
      event.bytes = static_cast<int64_t>(act.bytes);
    }
    time.events.push_back(std::move(event));
  }

  void compute(size_t rank, const RankAct& act) {
    RankTime& time = result_.ranks[rank];
    const bool updates =
        work_[rank]->cells[static_cast<size_t>(act.cell)].phase == PhaseKind::kUpdate;
    (updates ? time.optimizer : time.compute) += act.seconds;
    draw_cell(rank, act);
    note(rank, act, TraceLane::kOperator, time.end, act.seconds);
  }

  // A cell is drawn as what it computes between two communications.
  void draw_cell(size_t rank, const RankAct& act) {
    RankTime& time = result_.ranks[rank];
    Drawn& drawn = drawn_[rank];
    if (drawn.cell == act.cell && time.end <= drawn.end) {
      time.events[drawn.event].seconds += act.seconds;
      drawn.end += act.seconds;
      return;
    }
    drawn = {act.cell, time.end + act.seconds, time.events.size()};
    time.events.push_back({cell_name(work_[rank]->cells[static_cast<size_t>(act.cell)]),
                           TraceLane::kCompute,
                           time.end,
                           act.seconds,
                           1});
  }

  using Mailbox = std::tuple<int, int, int>;  // from, to, tag

  void send(size_t rank, const RankAct& act) {
    const std::vector<int> group = members(static_cast<int>(rank), act.group);
    const int to = group.at(static_cast<size_t>(act.peer));
    RankTime& time = result_.ranks[rank];
    const MessageTime message = message_time(act.bytes, links({static_cast<int>(rank), to}));
    time.transfer += message.sending;
    note(rank, act, TraceLane::kCommunication, time.end, message.sending);
    mail_[{static_cast<int>(rank), to, act.tag}].push_back(time.end);
  }

  bool receive(size_t rank, const RankAct& act) {
    const std::vector<int> group = members(static_cast<int>(rank), act.group);
    const int from = group.at(static_cast<size_t>(act.peer));
    std::deque<double>& box = mail_[{from, static_cast<int>(rank), act.tag}];
    if (box.empty()) {
      return false;
    }
    RankTime& time = result_.ranks[rank];
    const MessageTime message = message_time(act.bytes, links({from, static_cast<int>(rank)}));
    const double start = time.end;
    const double arrived = box.front() <= start ? start : box.front() + message.travelling;
    box.pop_front();
    time.waiting += arrived - start;
    time.transfer += message.receiving;
    note(rank, act, TraceLane::kBubble, start, arrived - start + message.receiving);
    ++next_[rank];
    return true;
  }

  struct Meeting {
    std::vector<int> members;
    std::map<int, double> arrived;  // by rank
  };

  bool meet(size_t rank, const RankAct& act) {
    const std::vector<int> group = members(static_cast<int>(rank), act.group);
    if (group.size() == 1) {
      ++next_[rank];
      return true;
    }
    Meeting& meeting = meetings_[{group.front(), act.group}];
    if (meeting.members.empty()) {
      meeting.members = group;
    }
    meeting.arrived[static_cast<int>(rank)] = result_.ranks[rank].end + act.seconds;
    if (meeting.arrived.size() < group.size()) {
      return false;  // the last to come ends it for all
    }
    double begin = 0, first = 1e300;
    for (const auto& [member, arrived] : meeting.arrived) {
      begin = std::max(begin, arrived);
      first = std::min(first, arrived);
    }
    const GroupLinks between = links(group);
    const double seconds =
        collective_time(
            act.collective, act.bytes, between, topology_.type_of(devices_.at(rank)).architecture)
            .seconds +
        (begin - first > kAwakeSeconds ? between.intra.wake_seconds : 0);
    for (const auto& [member, arrived] : meeting.arrived) {
      const size_t other = static_cast<size_t>(member);
      const RankAct& own = work_[other]->acts[next_[other]];
      RankTime& time = result_.ranks[other];
      const double start = time.end;
      time.waiting += begin - arrived;
      (act.group == "tensor"                      ? time.tensor
       : act.collective == Collective::kAllGather ? time.gather
                                                  : time.gradients) += seconds + own.seconds;
      note(other, own, TraceLane::kCommunication, start, begin - start + seconds);
      ++next_[other];
    }
    meetings_.erase({group.front(), act.group});
    return true;
  }

  const Plan& plan_;
  const Topology& topology_;
  const std::vector<int>& devices_;
  const Work& work_;
  std::vector<size_t> next_;  // act, by rank
  std::map<Mailbox, std::deque<double>> mail_;
  std::map<std::pair<int, std::string>, Meeting> meetings_;
  struct Drawn {
    int cell = -1;
    double end = 0;
    size_t event = 0;
  };
  std::vector<Drawn> drawn_;      // by rank, the last piece of a cell
  std::vector<RankTime> before_;  // by rank, when the step that is meant began
  std::vector<bool> begun_;
  ProgramTime result_;
};

}  // namespace

ProgramTime replay_programs(const Plan& plan,
                            const Topology& topology,
                            const std::vector<int>& devices,
                            const Work& work) {
  return Replayer(plan, topology, devices, work).run();
}

void take_time(const ProgramTime& time,
               const Work& work,
               const Plan& plan,
               int data_rank,
               StepPrediction* prediction) {
  const auto last = std::max_element(
      time.ranks.begin(), time.ranks.end(), [](const RankTime& a, const RankTime& b) {
        return a.end < b.end;
      });
  prediction->seconds = time.seconds;
  prediction->lower_bound = std::min(prediction->lower_bound, time.seconds);
  StepBreakdown& breakdown = prediction->breakdown;
  breakdown.compute = last->compute;
  breakdown.tensor_communication = last->tensor;
  breakdown.transfer = last->transfer;
  breakdown.bubble = last->waiting;
  breakdown.gradients = last->gradients;
  breakdown.gather = last->gather;
  breakdown.optimizer = last->optimizer;
  prediction->bubble_fraction = time.seconds > 0 ? last->waiting / time.seconds : 0;
  TRAINRT_CHECK(prediction->timeline != nullptr);
  Timeline timeline{prediction->timeline->schedule, {}};
  for (const RankTime& rank : time.ranks) {
    timeline.events.push_back(rank.events);
  }
  Replay& replay = timeline.replay;
  replay.seconds = time.seconds;
  for (int stage = 0; stage < plan.pipeline_parallel; ++stage) {
    const size_t rank = static_cast<size_t>(rank_of(plan, {stage, data_rank, 0}));
    const RankTime& own = time.ranks[rank];
    replay.rank_end.push_back(own.end);
    replay.rank_compute.push_back(own.compute + own.optimizer);
    replay.rank_transfer.push_back(own.transfer);
    replay.cells.emplace_back();
    double end = 0;
    for (const Cell& cell : timeline.schedule.ranks[static_cast<size_t>(stage)]) {
      // A program leaves out cells in which it would do nothing.
      const auto cells = std::span(work[rank]->cells).subspan(work[rank]->first_cell);
      const auto at =
          static_cast<size_t>(std::find(cells.begin(), cells.end(), cell) - cells.begin());
      const bool runs = at < cells.size() && own.cell_start[at] >= 0;
      replay.cells.back().push_back(runs ? CellTime{own.cell_start[at], own.cell_end[at]}
                                         : CellTime{end, end});
      end = replay.cells.back().back().end;
    }
  }
  prediction->timeline = std::make_shared<const Timeline>(std::move(timeline));
}

}  // namespace trainrt
