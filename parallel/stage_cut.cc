// Forward nodes in graph order: a node stands in the stage that the plan gives it, but never before
// one of its inputs. Backward nodes stand with their forward node, but never after (a lower stage's
// backward runs later) one of their inputs; those that read no activation, though, where they are
// wanted first. The update is walked twice: forwards for where results
// can be had without moving anything, backwards for where they are wanted.
#include "parallel/stage_cut.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>

#include "graph/op_def.h"

namespace trainrt {

namespace {

constexpr int kNoStage = -1;

void check_stages(const Plan& plan) {
  const int wanted = plan.pipeline_parallel * plan.virtual_stages;
  TRAINRT_REQUIRE(static_cast<int>(plan.stages.size()) == wanted,
                  kInvalidArgument,
                  "the plan has ",
                  plan.stages.size(),
                  " stages for ",
                  plan.pipeline_parallel,
                  " pipeline ranks of ",
                  plan.virtual_stages,
                  " virtual stages");
  int next = 0;
  for (int s = 0; s < wanted; ++s) {
    const PlanStage& stage = plan.stages[static_cast<size_t>(s)];
    TRAINRT_REQUIRE(stage.virtual_stage == s && stage.rank_stage == s % plan.pipeline_parallel,
                    kInvalidArgument,
                    "stage ",
                    s,
                    " of the plan is called ",
                    stage.virtual_stage,
                    " on pipeline rank ",
                    stage.rank_stage,
                    ", wanted ",
                    s,
                    " on rank ",
                    s % plan.pipeline_parallel);
    TRAINRT_REQUIRE(stage.first_node == next && stage.last_node >= stage.first_node,
                    kInvalidArgument,
                    "stage ",
                    s,
                    " has the nodes [",
                    stage.first_node,
                    ", ",
                    stage.last_node,
                    "], but should begin at ",
                    next,
                    ": every node lies in exactly one stage");
    next = stage.last_node + 1;
  }
}

class Cutter {
 public:
  Cutter(const Graph& graph, const Plan& plan, bool first_reports)
      : graph_(graph),
        plan_(plan),
        num_reporting_(first_reports ? 1 : static_cast<size_t>(plan.pipeline_parallel)),
        consumers_(graph.consumers()) {
    cut_.virtual_stage.assign(static_cast<size_t>(graph.num_nodes()), kNoStage);
    cut_.update_ranks.resize(static_cast<size_t>(graph.num_nodes()));
    cut_.holders.resize(static_cast<size_t>(graph.num_values()));
  }

  StageCut run() {
    const int last = plan_.pipeline_parallel * plan_.virtual_stages - 1;
    for (NodeId id = 0; id < graph_.num_nodes(); ++id) {
      const Region region = graph_.node(id).region;
      if (region == Region::kCount) {
        stage(id) = last;
      } else if (region == Region::kForward) {
        stage(id) = forward_stage(id);
      }
    }
    place_sources(Region::kForward, /*behind=*/false);
    for (NodeId id = 0; id < graph_.num_nodes(); ++id) {
      if (graph_.node(id).region == Region::kBackward && !waits_for_nothing(id)) {
        stage(id) = backward_stage(id);
      }
    }
    place_sources(Region::kBackward, /*behind=*/true);
    check_micro_batch_states();
    find_holders();
    place_update();
    check_update_reads();
    return std::move(cut_);
  }

 private:
  int& stage(NodeId id) { return cut_.virtual_stage[static_cast<size_t>(id)]; }
  int pipeline_rank(NodeId id) { return stage(id) % plan_.pipeline_parallel; }

  NodeId producer(ValueId id) const { return id == kNoValue ? kNoNode : graph_.value(id).producer; }

  int forward_stage(NodeId id) {
    const Node& node = graph_.node(id);
    int result = kNoStage;
    if (node.source_index >= 0) {
      // Nodes past the last stage's end are ours to place; fused ones keep their root's index.
      for (const PlanStage& s : plan_.stages) {
        if (node.source_index >= s.first_node) {
          result = s.virtual_stage;
        }
      }
    }
    for (const ValueId input : node.inputs) {
      if (producer(input) != kNoNode) {
        result = std::max(result, stage(producer(input)));
      }
    }
    return result;
  }

  // All that it is made of is there before the step.
  bool waits_for_nothing(NodeId id) {
    const std::vector<ValueId>& inputs = graph_.node(id).inputs;
    return std::all_of(inputs.begin(), inputs.end(), [&](ValueId input) {
      const NodeId from = producer(input);
      return from == kNoNode ||
             (graph_.node(from).region == Region::kBackward && stage(from) == kNoStage);
    });
  }

  int backward_stage(NodeId id) {
    const Node& node = graph_.node(id);
    int earliest = kNoStage;
    for (const ValueId input : node.inputs) {
      const NodeId from = producer(input);
      if (from != kNoNode && graph_.node(from).region == Region::kBackward &&
          stage(from) != kNoStage) {
        earliest = earliest == kNoStage ? stage(from) : std::min(earliest, stage(from));
      }
    }
    if (node.forward_node == kNoNode || stage(node.forward_node) == kNoStage) {
      return earliest;
    }
    const int own = stage(node.forward_node);
    return earliest == kNoStage ? own : std::min(own, earliest);
  }

  // Nodes that wait for nothing stand where they are first wanted.
  void place_sources(Region region, bool behind) {
    const int last = plan_.pipeline_parallel * plan_.virtual_stages - 1;
    for (NodeId id = graph_.num_nodes(); id-- > 0;) {
      if (graph_.node(id).region != region || stage(id) != kNoStage) {
        continue;
      }
      int wanted = kNoStage;
      for (const ValueId output : graph_.node(id).outputs) {
        if (output == kNoValue) {
          continue;
        }
        for (const NodeId reader : consumers_[static_cast<size_t>(output)]) {
          const int s = stage(reader);
          if (s != kNoStage && graph_.node(reader).region == region) {
            wanted = wanted == kNoStage ? s : behind ? std::max(wanted, s) : std::min(wanted, s);
          }
        }
      }
      stage(id) = wanted == kNoStage ? last : wanted;
    }
  }

  void find_holders() {
    for (ValueId id = 0; id < graph_.num_values(); ++id) {
      const ValueKind kind = graph_.value(id).kind;
      if (kind != ValueKind::kParameter && kind != ValueKind::kState &&
          kind != ValueKind::kGradient) {
        continue;
      }
      std::set<int> ranks;
      for (const NodeId reader : consumers_[static_cast<size_t>(id)]) {
        if (graph_.node(reader).region != Region::kUpdate) {
          ranks.insert(pipeline_rank(reader));
        }
      }
      cut_.holders[static_cast<size_t>(id)].assign(ranks.begin(), ranks.end());
    }
    // What the update alone reads (a newer version of a weight, a running average) stays with what
    // it is combined with there.
    for (ValueId id = 0; id < graph_.num_values(); ++id) {
      const ValueKind kind = graph_.value(id).kind;
      std::vector<int>& at = cut_.holders[static_cast<size_t>(id)];
      if (!at.empty() || (kind != ValueKind::kParameter && kind != ValueKind::kState &&
                          kind != ValueKind::kGradient)) {
        continue;
      }
      std::set<int> ranks;
      for (const NodeId reader : consumers_[static_cast<size_t>(id)]) {
        add_sources_of(reader, ranks);
        if (!ranks.empty()) {
          break;
        }
      }
      at.assign(ranks.begin(), ranks.end());
      if (at.empty()) {
        at.push_back(0);
      }
    }
  }

  // Pipeline ranks that the inputs of an update node come from.
  void add_sources_of(NodeId id, std::set<int>& ranks) {
    for (const ValueId input : graph_.node(id).inputs) {
      const NodeId from = producer(input);
      if (from != kNoNode && graph_.node(from).region == Region::kUpdate) {
        add_sources_of(from, ranks);
      } else if (from != kNoNode) {
        ranks.insert(pipeline_rank(from));
      } else if (input != kNoValue && graph_.value(input).kind == ValueKind::kParameter) {
        const std::vector<int>& at = cut_.holders[static_cast<size_t>(input)];
        ranks.insert(at.begin(), at.end());
      }
    }
  }

  // Where `id` can be read without moving it; empty: everywhere.
  std::vector<int> available(ValueId id) {
    const Value& value = graph_.value(id);
    if (value.producer == kNoNode) {
      return cut_.holders[static_cast<size_t>(id)];
    }
    if (graph_.node(value.producer).region != Region::kUpdate) {
      return {pipeline_rank(value.producer)};
    }
    return available_[static_cast<size_t>(value.producer)];
  }

  void place_update() {
    std::vector<int> all(static_cast<size_t>(plan_.pipeline_parallel));
    for (size_t r = 0; r < all.size(); ++r) {
      all[r] = static_cast<int>(r);
    }
    const std::vector<int> reporting(all.begin(),
                                     all.begin() + static_cast<std::ptrdiff_t>(num_reporting_));
    available_.resize(static_cast<size_t>(graph_.num_nodes()));
    // Who overwrites a shared parameter does so wherever it is held.
    std::vector<std::vector<int>> overwrites(static_cast<size_t>(graph_.num_nodes()));
    for (const StateUpdate& update : graph_.updates()) {
      const std::vector<int>& at = cut_.holders[static_cast<size_t>(update.target)];
      if (producer(update.new_value) != kNoNode && !at.empty()) {
        overwrites[static_cast<size_t>(producer(update.new_value))] = at;
      }
    }
    for (NodeId id = 0; id < graph_.num_nodes(); ++id) {
      if (graph_.node(id).region != Region::kUpdate) {
        continue;
      }
      // Where all inputs are, or else one of them: two stages that share a parameter add its
      // gradients up, and others have none of them.
      std::vector<int> common = all;
      std::set<int> some;
      for (const ValueId input : graph_.node(id).inputs) {
        const std::vector<int> at = input == kNoValue ? std::vector<int>{} : available(input);
        if (!at.empty()) {
          std::vector<int> both;
          std::set_intersection(
              common.begin(), common.end(), at.begin(), at.end(), std::back_inserter(both));
          common = std::move(both);
          some.insert(at.begin(), at.end());
        }
      }
      if (common.empty()) {
        common.assign(some.begin(), some.end());
      }
      if (!overwrites[static_cast<size_t>(id)].empty()) {
        common = overwrites[static_cast<size_t>(id)];
      }
      // Who reports the results of the step, a rank without parameters too.
      for (const ValueId output : graph_.node(id).outputs) {
        const std::vector<ValueId>& results = graph_.outputs();
        if (output != kNoValue &&
            std::find(results.begin(), results.end(), output) != results.end()) {
          common = reporting;
        }
      }
      available_[static_cast<size_t>(id)] = common.empty() ? all : common;
    }
    // A walk shows where the states of the update are read, and whoever reads one makes its new
    // contents himself: walked until nothing is added. A state that no other node reads is made
    // where that is possible first.
    state_makers_.resize(static_cast<size_t>(graph_.num_nodes()));
    for (const StateUpdate& update : graph_.updates()) {
      const NodeId from = producer(update.new_value);
      if (from != kNoNode && graph_.node(from).region == Region::kUpdate &&
          graph_.value(update.target).kind == ValueKind::kOptimizerState) {
        state_makers_[static_cast<size_t>(from)].emplace();
      }
    }
    do {
      walk_back(reporting);
    } while (add_state_makers());
  }

  // Where the nodes of the update run, from where their results are wanted.
  void walk_back(const std::vector<int>& reporting) {
    std::vector<std::set<int>> wanted(static_cast<size_t>(graph_.num_nodes()));
    const auto want = [&](ValueId id, const std::vector<int>& ranks) {
      const NodeId from = producer(id);
      if (from != kNoNode && graph_.node(from).region == Region::kUpdate) {
        wanted[static_cast<size_t>(from)].insert(ranks.begin(), ranks.end());
      }
    };
    for (const StateUpdate& update : graph_.updates()) {
      want(update.new_value, cut_.holders[static_cast<size_t>(update.target)]);
    }
    for (const ValueId output : graph_.outputs()) {
      want(output, reporting);
    }
    for (NodeId id = graph_.num_nodes(); id-- > 0;) {
      if (graph_.node(id).region != Region::kUpdate) {
        continue;
      }
      const std::vector<int>& at = available_[static_cast<size_t>(id)];
      const std::set<int>& ranks = wanted[static_cast<size_t>(id)];
      const std::optional<std::set<int>>& makers = state_makers_[static_cast<size_t>(id)];
      std::vector<int>& runs = cut_.update_ranks[static_cast<size_t>(id)];
      runs.clear();
      std::set_intersection(
          at.begin(), at.end(), ranks.begin(), ranks.end(), std::back_inserter(runs));
      const bool travels = runs.size() < ranks.size();
      if ((runs.empty() && (travels || !makers)) || (travels && runs.front() != at.front())) {
        runs.insert(runs.begin(), at.front());
      }
      if (makers) {
        std::set<int> all(runs.begin(), runs.end());
        all.insert(makers->begin(), makers->end());
        runs.assign(all.begin(), all.end());
      }
      for (const ValueId input : graph_.node(id).inputs) {
        if (input != kNoValue) {
          want(input, runs);
        }
      }
    }
  }

  // The ranks that read a state of the update to those that make its new contents; whether any is
  // new.
  bool add_state_makers() {
    bool grown = false;
    std::optional<NodeId> idle;  // the first that is wanted nowhere
    for (const StateUpdate& update : graph_.updates()) {
      const NodeId from = producer(update.new_value);
      if (from == kNoNode || !state_makers_[static_cast<size_t>(from)] ||
          graph_.value(update.target).kind != ValueKind::kOptimizerState) {
        continue;
      }
      std::set<int>& makers = *state_makers_[static_cast<size_t>(from)];
      const size_t before = makers.size();
      for (const NodeId reader : consumers_[static_cast<size_t>(update.target)]) {
        if (graph_.node(reader).region == Region::kUpdate) {
          const std::vector<int>& at = cut_.update_ranks[static_cast<size_t>(reader)];
          makers.insert(at.begin(), at.end());
        } else {
          makers.insert(pipeline_rank(reader));
        }
      }
      grown = grown || makers.size() > before;
      if (!idle && makers.empty() && cut_.update_ranks[static_cast<size_t>(from)].empty()) {
        idle = from;
      }
    }
    if (!grown && idle) {
      state_makers_[static_cast<size_t>(*idle)]->insert(
          available_[static_cast<size_t>(*idle)].front());
      return true;
    }
    return grown;
  }

  // What a micro-batch leaves in a state the next one finds there, so both lie in one stage.
  void check_micro_batch_states() {
    for (const StateUpdate& update : graph_.updates()) {
      const NodeId from = producer(update.new_value);
      if (from == kNoNode || graph_.node(from).region == Region::kUpdate) {
        continue;
      }
      for (const NodeId reader : consumers_[static_cast<size_t>(update.target)]) {
        TRAINRT_REQUIRE(
            graph_.node(reader).region == Region::kUpdate || stage(reader) == stage(from),
            kInfeasiblePlan,
            "node '",
            graph_.node(from).name,
            "' changes '",
            graph_.value(update.target).name,
            "' in stage ",
            stage(from),
            " of the pipeline, and node '",
            graph_.node(reader).name,
            "' reads it in stage ",
            stage(reader),
            "; both must lie in one stage: use --pp 1, or stages that keep them "
            "together");
      }
    }
  }

  // Of what is not on all ranks, a node reads the copy of its own rank.
  void check_update_reads() {
    for (NodeId id = 0; id < graph_.num_nodes(); ++id) {
      for (const ValueId input : graph_.node(id).inputs) {
        if (input == kNoValue || cut_.holders[static_cast<size_t>(input)].empty()) {
          continue;
        }
        const std::vector<int>& at = cut_.holders[static_cast<size_t>(input)];
        for (const int rank : cut_.update_ranks[static_cast<size_t>(id)]) {
          TRAINRT_REQUIRE(std::find(at.begin(), at.end(), rank) != at.end(),
                          kInfeasiblePlan,
                          "node '",
                          graph_.node(id).name,
                          "' (",
                          graph_.node(id).op_type,
                          ") of the update runs on pipeline rank ",
                          rank,
                          " and reads '",
                          graph_.value(input).name,
                          "', which rank ",
                          at.front(),
                          " holds; use --pp 1, or have the update read a copy of it");
        }
      }
    }
  }

  const Graph& graph_;
  const Plan& plan_;
  size_t num_reporting_;  // pipeline ranks
  std::vector<std::vector<NodeId>> consumers_;
  StageCut cut_;
  std::vector<std::vector<int>> available_;  // by node of the update
  // By node: ranks where it makes new contents of the update's states, if it makes any.
  std::vector<std::optional<std::set<int>>> state_makers_;
};

}  // namespace

StageCut cut_stages(const Graph& graph, const Plan& plan, bool first_reports) {
  check_stages(plan);
  return Cutter(graph, plan, first_reports).run();
}

}  // namespace trainrt
