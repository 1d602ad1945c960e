// Where an operand lies when a kernel begins follows from how much else was touched since it was:
// the arena is cut into pages, each with the amount of memory touched up to its last use, and what
// a kernel reads comes from the cache that still holds that much. The step is walked twice; the
// second walk finds the pages as a step before has left them. No CPU has kernels of two nodes
// (graph/kernel_pair.h).
#include "planner/rank_work.h"

#include <algorithm>
#include <optional>

#include "graph/op_def.h"
#include "parallel/trace_events.h"
#include "planner/kernel_sample.h"

namespace trainrt {

namespace {

constexpr int64_t kPageBytes = 16384;

// The arena of one rank, as its caches see it.
class TouchedMemory {
 public:
  explicit TouchedMemory(int64_t arena_bytes)
      : pages_(static_cast<size_t>(arena_bytes / kPageBytes + 1), -1) {}

  // Seconds to move [offset, offset + bytes), at what the caches give for the time since its last
  // use; it is used now.
  double move(int64_t offset, int64_t bytes, const CostModel& cost) {
    double seconds = 0;
    for (int64_t at = offset; at < offset + bytes;) {
      const int64_t end = std::min(offset + bytes, (at / kPageBytes + 1) * kPageBytes);
      const double part = static_cast<double>(end - at);
      double& last = pages_.at(static_cast<size_t>(at / kPageBytes));
      const double distance = last < 0 ? 1e30 : touched_ - last;
      seconds += cost.move_seconds(part, distance + static_cast<double>(bytes));
      last = touched_;
      at = end;
    }
    return seconds;
  }
  void advance(double bytes) { touched_ += bytes; }

 private:
  std::vector<double> pages_;  // touched_ at the last use
  double touched_ = 0;
};

class Walk {
 public:
  Walk(const Program& program, const MemoryPlan& memory, const CostModel& cost)
      : program_(program), memory_(memory), cost_(cost), touched_(memory.arena_bytes) {}

  RankWork run() {
    RankWork work;
    work.at = program_.coordinates;
    if (!program_.runs_on()) {
      walk(program_.cells, 0, &work);
      work = {program_.coordinates, {}, {}, 0};
      walk(program_.cells, 0, &work);
      return work;
    }
    int first_slot = 0;
    constexpr int kSteps = 4;
    for (int step = 0; step < kSteps; ++step) {
      work.first_cell = work.cells.size();
      walk(program_.row(step == 0 ? StepWindow::kFill : StepWindow::kSteady), first_slot, &work);
      first_slot += static_cast<int>(program_.micro_batches.size());
    }
    return work;
  }

 private:
  // One step, whose first micro-batch has the stash slot `first_slot`.
  void walk(const std::vector<Cell>& cells, int first_slot, RankWork* work) {
    // The ranks sum their losses before the update; where steps go over into each other, rank 0 is
    // told of them and nobody waits.
    const std::optional<PhaseKind> updating = updating_phase(program_);
    const size_t before = work->cells.size();
    work->cells.insert(work->cells.end(), cells.begin(), cells.end());
    bool counted = false, combined = program_.runs_on();
    for (size_t i = 0; i < cells.size(); ++i) {
      const Cell& cell = cells[i];
      if (!counted && cell.phase != PhaseKind::kCount) {
        counted = true;
        sum_up("data", before + i, &work->acts);
      }
      if (!combined && cell.phase == updating) {
        combined = true;
        sum_up("world", before + i, &work->acts);
      }
      const size_t variant =
          cell.micro_batch < 0
              ? 0
              : static_cast<size_t>(
                    program_.micro_batches.at(static_cast<size_t>(cell.micro_batch)).variant);
      const int slot = first_slot + cell.micro_batch +
                       (cell.ahead ? static_cast<int>(program_.micro_batches.size()) : 0);
      for (const Phase& phase : program_.variants.at(variant).phases) {
        if (phase.kind == cell.phase && phase.virtual_stage == cell.virtual_stage) {
          run_phase(variant, phase, static_cast<int>(before + i), slot, &work->acts);
        }
      }
    }
    if (!counted) {
      sum_up("data", before, &work->acts);
    }
    if (!combined) {
      sum_up("world", before + (cells.empty() ? 0 : cells.size() - 1), &work->acts);
    }
  }

  // The step's own sums: items before the first forward, losses before the first update.
  void sum_up(const char* group, size_t cell, std::vector<RankAct>* acts) const {
    RankAct act;
    act.kind = RankAct::Kind::kCollective;
    act.cell = static_cast<int>(cell);
    act.name = concat("sums of the step, ", group, " ranks");
    act.op_type = comm_op::kAllReduce;
    act.bytes = sizeof(double);
    act.group = group;
    acts->push_back(std::move(act));
  }

  void run_phase(
      size_t variant, const Phase& phase, int cell, int slot, std::vector<RankAct>* acts) {
    const Graph& graph = program_.variants[variant].graph;
    feed(graph, phase, cell, acts);
    for (size_t i = 0; i < phase.nodes.size(); ++i) {
      const Node& node = graph.node(phase.nodes[i]);
      RankAct act;
      act.cell = cell;
      act.name = node.name;
      act.op_type = node.op_type;
      if (is_communication(node.op_type)) {
        communicate(graph, node, &act);
        acts->push_back(std::move(act));
        continue;
      }
      const OpContext op(graph, node);
      const Cost cost = get_op(node.op_type).cost(op);
      act.seconds = cost_.kernel_seconds(
          kernel_name(node), kernel_size(op, cost), cost, move_all(variant, node, slot));
      acts->push_back(std::move(act));
    }
  }

  // What the host writes before a phase.
  void feed(const Graph& graph, const Phase& phase, int cell, std::vector<RankAct>* acts) const {
    Cost cost;
    for (const ValueId id : phase.feeds) {
      cost.bytes += static_cast<double>(graph.value(id).type.bytes());
    }
    if (cost.bytes > 0) {
      RankAct act;
      act.cell = cell;
      act.name = act.op_type = kFeedKernel;
      act.seconds = cost_.kernel_seconds(kFeedKernel, stream_size(cost.bytes), cost, 0);
      acts->push_back(std::move(act));
    }
  }

  // Seconds to move all operands of a node once.
  double move_all(size_t variant, const Node& node, int slot) {
    double seconds = 0, bytes = 0;
    std::vector<int64_t> seen;  // outputs in place of an input move once
    const auto move = [&](const TensorAddress& at) {
      if (at.region == ArenaRegion::kNone || at.region == ArenaRegion::kHost || at.bytes == 0) {
        return;
      }
      const int64_t offset = memory_.absolute_offset(at, slot);
      if (std::find(seen.begin(), seen.end(), offset) != seen.end()) {
        return;
      }
      seen.push_back(offset);
      seconds += touched_.move(offset, at.bytes, cost_);
      bytes += static_cast<double>(at.bytes);
    };
    for (const std::vector<ValueId>* ids : {&node.inputs, &node.outputs}) {
      for (const ValueId id : *ids) {
        if (id != kNoValue) {
          move(memory_.variants[variant].values.at(static_cast<size_t>(id)));
        }
      }
    }
    touched_.advance(bytes);
    return seconds;
  }

  // Tensors that are not cut along their first axis are packed, or unpacked, piece by piece.
  double packing_seconds(const std::string& type, const Node& node, double bytes) const {
    const bool packs = type == comm_op::kAllToAll ||
                       ((type == comm_op::kReduceScatter || type == comm_op::kAllGather) &&
                        node.attributes.get_int("axis", 0) != 0);
    return packs ? cost_.move_seconds(2 * bytes, 2 * bytes) : 0;
  }

  void communicate(const Graph& graph, const Node& node, RankAct* act) const {
    const auto bytes = [&](const std::vector<ValueId>& ids) {
      double sum = 0;  // of all tensors of a bucket
      for (const ValueId id : ids) {
        sum += static_cast<double>(graph.value(id).type.bytes());
      }
      return sum;
    };
    act->group = node.attributes.get_string("group");
    act->bytes = std::max(bytes(node.inputs), bytes(node.outputs));
    act->kind = RankAct::Kind::kCollective;
    const std::string& type = node.op_type;
    if (type == comm_op::kSend || type == comm_op::kRecv) {
      act->kind = type == comm_op::kSend ? RankAct::Kind::kSend : RankAct::Kind::kRecv;
      act->peer = static_cast<int>(node.attributes.get_int("peer"));
      act->tag = static_cast<int>(node.attributes.get_int("tag", 0));
    } else {
      act->collective = type == comm_op::kReduceScatter ? Collective::kReduceScatter
                        : type == comm_op::kAllGather   ? Collective::kAllGather
                        : type == comm_op::kAllToAll    ? Collective::kAllToAll
                        : type == comm_op::kBroadcast   ? Collective::kBroadcast
                                                        : Collective::kAllReduce;
      act->seconds = packing_seconds(type, node, act->bytes);
    }
  }

  const Program& program_;
  const MemoryPlan& memory_;
  const CostModel& cost_;
  TouchedMemory touched_;
};

}  // namespace

std::shared_ptr<const RankWork> rank_work(const Program& program,
                                          const MemoryPlan& memory,
                                          const CostModel& cost) {
  return std::make_shared<const RankWork>(Walk(program, memory, cost).run());
}

}  // namespace trainrt
