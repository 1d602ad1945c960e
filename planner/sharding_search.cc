// State: the placement of every value still alive. A node may be split along a factor of one of its
// parameters, or along the factor by which an input already is split, or run whole. An edge whose
// two ends disagree costs a collective: split -> whole is an all-gather (its gradient a
// reduce-scatter), whole -> split a slice (its gradient an all-gather), a whole input of a split
// operator an all-reduce of its gradient, once per value; a reduction factor leaves a sum,
// all-reduced or scattered along the sequence. Megatron's column -> row pair is the cheapest path
// through these costs.
#include "planner/sharding_search.h"

#include <algorithm>
#include <set>

#include "graph/base/error.h"

namespace trainrt {

namespace {

constexpr size_t kBeam = 24;

// Dim of the tensor that `factor` is the major part of, -1 if none.
int dim_of(const TensorFactors& dims, int factor) {
  for (size_t d = 0; d < dims.size(); ++d) {
    if (!dims[d].empty() && dims[d][0] == factor) {
      return static_cast<int>(d);
    }
  }
  return -1;
}

struct State {
  double seconds = 0;
  BlockSharding sharding;
  std::set<ValueId> gathered;  // split values of which a whole copy was made
  std::set<ValueId> reduced;   // whole values whose gradient is all-reduced already
};

class Search {
 public:
  Search(const ShardingRequest& request, const Block& block)
      : request_(request), graph_(*request.graph), block_(block) {
    border_ = Placement::replicate();
    if (request.sequence_parallel && block.input != kNoValue && fits_sequence(block.input)) {
      border_ = Placement::shard(1);
    }
  }

  BlockSharding run() {
    std::vector<State> beam(1);
    if (block_.input != kNoValue) {
      beam[0].sharding.placements[block_.input] = border_;
    }
    for (const NodeId id : block_.forward) {
      std::vector<State> next;
      for (const State& state : beam) {
        extend(state, id, &next);
      }
      beam = best(std::move(next));
    }
    for (State& state : beam) {
      close(&state);
    }
    return std::min_element(beam.begin(),
                            beam.end(),
                            [](const State& a, const State& b) { return a.seconds < b.seconds; })
        ->sharding;
  }

 private:
  bool fits_sequence(ValueId id) const {
    const Shape& shape = graph_.value(id).type.shape;
    return shape.size() >= 3 && shape[1] % request_.degree == 0;
  }

  double bytes(ValueId id) const { return static_cast<double>(graph_.value(id).type.bytes()); }
  bool trained(ValueId id) const { return request_.blocks->trained[static_cast<size_t>(id)]; }
  bool is_weight(ValueId id) const { return graph_.value(id).kind == ValueKind::kParameter; }

  static Placement placement(const State& state, ValueId id) {
    const auto found = state.sharding.placements.find(id);
    return found == state.sharding.placements.end() ? Placement::replicate() : found->second;
  }

  void add(std::vector<TensorCollective>* list, Collective kind, double size, State* state) const {
    list->push_back({kind, size});
    state->seconds +=
        collective_time(kind, size, *request_.group, request_.cost->device().architecture).seconds;
  }

  // Brings input `id` to `wanted` for an operator that is split or not.
  void move(ValueId id, const Placement& wanted, bool split, State* state) const {
    const Placement present = placement(*state, id);
    const bool gradient = trained(id);
    auto& forward = state->sharding.forward;
    auto& backward = state->sharding.backward;
    if (present == wanted) {
      if (wanted.kind == Placement::Kind::kReplicate && split && gradient &&
          state->reduced.insert(id).second) {
        add(&backward, Collective::kAllReduce, bytes(id), state);
      }
      return;
    }
    if (wanted.kind == Placement::Kind::kReplicate) {
      if (state->gathered.insert(id).second) {
        add(&forward, Collective::kAllGather, bytes(id), state);
        if (gradient && split) {
          add(&backward, Collective::kReduceScatter, bytes(id), state);
        }
      }
      return;
    }
    if (present.kind == Placement::Kind::kReplicate) {
      if (gradient) {
        add(&backward, Collective::kAllGather, bytes(id), state);
      }
      return;
    }
    add(&forward, Collective::kAllToAll, bytes(id), state);
    if (gradient) {
      add(&backward, Collective::kAllToAll, bytes(id), state);
    }
  }

  std::vector<int> candidates(const State& state,
                              const Node& node,
                              const ShardingRule& rule) const {
    std::set<int> found = {-1};
    for (size_t i = 0; i < node.inputs.size() && i < rule.inputs.size(); ++i) {
      const ValueId id = node.inputs[i];
      if (id == kNoValue) {
        continue;
      }
      if (is_weight(id) && graph_.value(id).type.shape.size() >= 2) {
        for (const DimFactors& dim : rule.inputs[i]) {
          if (!dim.empty()) {
            found.insert(dim[0]);
          }
        }
      }
      const Placement present = placement(state, id);
      if (present.kind == Placement::Kind::kShard &&
          static_cast<size_t>(present.dim) < rule.inputs[i].size() &&
          !rule.inputs[i][static_cast<size_t>(present.dim)].empty()) {
        found.insert(rule.inputs[i][static_cast<size_t>(present.dim)][0]);
      }
    }
    std::vector<int> allowed;
    for (const int factor : found) {
      if (factor < 0) {
        allowed.push_back(factor);
        continue;
      }
      const Factor& f = rule.factors[static_cast<size_t>(factor)];
      if ((f.kind == FactorKind::kParallel || f.kind == FactorKind::kReduction) &&
          f.size % request_.degree == 0) {
        allowed.push_back(factor);
      }
    }
    return allowed;
  }

  void extend(const State& state, NodeId id, std::vector<State>* next) const {
    const Node& node = graph_.node(id);
    const ShardingRule rule = get_op(node.op_type).sharding(OpContext(graph_, node));
    for (const int factor : candidates(state, node, rule)) {
      State grown = state;
      grown.sharding.factor[id] = factor;
      inputs(node, rule, factor, &grown);
      const Cost cost =
          get_op(node.op_type).cost(local_context(graph_, node, rule, factor, request_.degree));
      grown.seconds += 3 * request_.cost->op_seconds(cost);  // forward and about twice backward
      outputs(node, rule, factor, std::move(grown), next);
    }
  }

  void inputs(const Node& node, const ShardingRule& rule, int factor, State* state) const {
    for (size_t i = 0; i < node.inputs.size() && i < rule.inputs.size(); ++i) {
      const ValueId id = node.inputs[i];
      if (id == kNoValue) {
        continue;
      }
      const int dim = factor < 0 ? -1 : dim_of(rule.inputs[i], factor);
      const Placement wanted = dim < 0 ? Placement::replicate() : Placement::shard(dim);
      const ValueKind kind = graph_.value(id).kind;
      if (kind == ValueKind::kParameter || kind == ValueKind::kState) {
        state->sharding.placements[id] = wanted;
        // What is held whole is updated whole, on every rank.
        state->seconds += dim < 0 ? bytes(id) * 1e-13 : 0;
      } else if (kind == ValueKind::kIntermediate) {
        move(id, wanted, factor >= 0, state);
      }
    }
  }

  void outputs(const Node& node,
               const ShardingRule& rule,
               int factor,
               State grown,
               std::vector<State>* next) const {
    bool partial = false;
    for (size_t o = 0; o < node.outputs.size() && o < rule.outputs.size(); ++o) {
      const ValueId id = node.outputs[o];
      if (id == kNoValue || factor < 0) {
        continue;
      }
      const int dim = dim_of(rule.outputs[o], factor);
      if (dim >= 0) {
        grown.sharding.placements[id] = Placement::shard(dim);
      } else {
        partial = rule.factors[static_cast<size_t>(factor)].kind == FactorKind::kReduction;
      }
    }
    if (!partial) {
      next->push_back(std::move(grown));
      return;
    }
    const ValueId id = node.outputs[0];
    if (border_.kind == Placement::Kind::kShard && fits_sequence(id)) {
      State scattered = grown;
      add(&scattered.sharding.forward, Collective::kReduceScatter, bytes(id), &scattered);
      add(&scattered.sharding.backward, Collective::kAllGather, bytes(id), &scattered);
      scattered.sharding.placements[id] = Placement::shard(1);
      next->push_back(std::move(scattered));
    }
    add(&grown.sharding.forward, Collective::kAllReduce, bytes(id), &grown);
    next->push_back(std::move(grown));
  }

  // The cheapest states, one per combination of placements.
  static std::vector<State> best(std::vector<State> states) {
    std::stable_sort(states.begin(), states.end(), [](const State& a, const State& b) {
      return a.seconds < b.seconds;
    });
    if (states.size() > kBeam) {
      states.resize(kBeam);
    }
    return states;
  }

  void close(State* state) const {
    if (block_.output != kNoValue) {
      const Placement wanted =
          border_.kind == Placement::Kind::kShard && fits_sequence(block_.output)
              ? border_
              : Placement::replicate();
      move(block_.output, wanted, false, state);
      state->sharding.placements[block_.output] = wanted;
    }
  }

  const ShardingRequest& request_;
  const Graph& graph_;
  const Block& block_;
  Placement border_;
};

}  // namespace

OpContext local_context(
    const Graph& graph, const Node& node, const ShardingRule& rule, int factor, int degree) {
  const auto local = [&](ValueId id, const std::vector<TensorFactors>& factors, size_t i) {
    TensorType type = graph.value(id).type;
    if (factor >= 0 && i < factors.size()) {
      const int dim = dim_of(factors[i], factor);
      if (dim >= 0 && static_cast<size_t>(dim) < type.shape.size()) {
        int64_t& size = type.shape[static_cast<size_t>(dim)];
        size = std::max<int64_t>(1, size / degree);
      }
    }
    return type;
  };
  TensorTypes inputs, outputs;
  std::vector<bool> present;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    present.push_back(node.inputs[i] != kNoValue);
    inputs.push_back(present.back() ? local(node.inputs[i], rule.inputs, i) : TensorType{});
  }
  for (size_t o = 0; o < node.outputs.size(); ++o) {
    outputs.push_back(node.outputs[o] == kNoValue ? TensorType{}
                                                  : local(node.outputs[o], rule.outputs, o));
  }
  return OpContext(node, std::move(inputs), std::move(present), std::move(outputs));
}

BlockSharding search_sharding(const ShardingRequest& request, const Block& block) {
  if (request.degree <= 1) {
    return {};
  }
  return Search(request, block).run();
}

}  // namespace trainrt
