// State: the placement of every value still alive. A node may be split along a factor of one of its
// parameters, or along the factor by which an input already is split, or run whole. An edge whose
// two ends disagree costs a collective: split -> whole is an all-gather (its gradient a
// reduce-scatter), whole -> split a slice (its gradient an all-gather), a whole input of a split
// operator an all-reduce of its gradient, once per value; a reduction factor leaves a sum,
// all-reduced or scattered along the sequence. Megatron's column -> row pair is the cheapest path
// through these costs.
#include "planner/sharding_search.h"

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "graph/base/error.h"
#include "planner/kernel_sample.h"
#include "planner/shard_part.h"

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

// How a value lies: split along `dim` into `units` as of cut_units(), or whole.
struct Cut {
  int32_t dim = -1;
  int32_t units = 0;
  bool operator==(const Cut&) const = default;
};
constexpr Cut kWhole;

// A value as the block sees it, by a number of its own.
struct Local {
  ValueId id = kNoValue;
  bool trained = false;
  std::optional<Cut> pin;  // that a given plan says
};

// What a node needs for one choice of its factor.
struct Choice {
  double seconds = 0;
  std::vector<Cut> inputs;   // how each input is wanted
  std::vector<Cut> outputs;  // ... each output then lies
  bool partial = false;      // output 0 is a sum yet to be reduced
};

struct NodeInfo {
  NodeId id = kNoNode;
  const ShardingRule* rule = nullptr;
  std::vector<int> inputs, outputs;            // locals; -1: absent
  std::vector<bool> can_split;                 // by factor
  std::vector<std::optional<Choice>> choices;  // by factor + 1, made when first asked for
};

// How a state came about: enough to tell the whole path once the search is over.
struct Step {
  int before = -1;
  int node = -1;
  int factor = -1;
  std::vector<TensorCollective> forward, backward;
};

struct State {
  double seconds = 0;
  int step = -1;               // index of its last step
  std::vector<Cut> cuts;       // by local
  std::vector<int8_t> copied;  // by local: kGathered, kReduced
};

constexpr int8_t kGathered = 1;  // a whole copy of the split value was made
constexpr int8_t kReduced = 2;   // the whole value's gradient is all-reduced already

class Search {
 public:
  Search(const ShardingRequest& request, const Block& block)
      : request_(request), graph_(*request.graph), block_(block) {
    if (request.sequence_parallel && block.input != kNoValue && fits_sequence(block.input)) {
      border_ = {1, request.degree};
    }
    for (const NodeId id : block.forward) {
      const Node& node = graph_.node(id);
      NodeInfo info;
      info.id = id;
      info.rule = &request.facts->rule(graph_, id);
      info.choices.resize(info.rule->factors.size() + 1);
      for (const ValueId input : node.inputs) {
        info.inputs.push_back(local(input));
      }
      for (const ValueId output : node.outputs) {
        info.outputs.push_back(local(output));
      }
      for (size_t f = 0; f < info.rule->factors.size(); ++f) {
        info.can_split.push_back(can_split(node, *info.rule, static_cast<int>(f)));
      }
      nodes_.push_back(std::move(info));
    }
    input_ = local(block.input);
    output_ = local(block.output);
    collective_seconds_.assign(kNumCollectives * locals_.size(), -1);
  }

  BlockSharding run() {
    std::vector<State> beam(1);
    beam[0].cuts.assign(locals_.size(), kWhole);
    beam[0].copied.assign(locals_.size(), 0);
    if (input_ >= 0) {
      cut(beam[0], input_) = border_;
    }
    for (size_t n = 0; n < nodes_.size(); ++n) {
      std::vector<State> next;
      for (const State& state : beam) {
        extend(state, static_cast<int>(n), &next);
      }
      beam = best(std::move(next));
    }
    for (State& state : beam) {
      close(&state);
    }
    return told(*std::min_element(beam.begin(), beam.end(), [](const State& a, const State& b) {
      return a.seconds < b.seconds;
    }));
  }

 private:
  static constexpr size_t kNumCollectives = 5;

  bool fits_sequence(ValueId id) const {
    const Shape& shape = graph_.value(id).type.shape;
    return shape.size() >= 3 && shape[1] % request_.degree == 0;
  }

  // Whether `factor` has a part for every rank. Parts that differ are cut in units of the factor,
  // which a plan can say of a weight only where they are its elements.
  bool can_split(const Node& node, const ShardingRule& rule, int factor) const {
    const Factor& f = rule.factors[static_cast<size_t>(factor)];
    if (!is_splittable(f) || f.size < request_.degree) {
      return false;
    }
    if (f.size % request_.degree == 0) {
      return true;
    }
    for (size_t i = 0; i < node.inputs.size() && i < rule.inputs.size(); ++i) {
      const ValueId input = node.inputs[i];
      const int dim = input == kNoValue || !is_persistent(graph_.value(input).kind)
                          ? -1
                          : dim_of(rule.inputs[i], factor);
      if (dim >= 0 && graph_.value(input).type.shape[static_cast<size_t>(dim)] != f.size) {
        return false;
      }
    }
    return true;
  }

  double bytes(int local) const {
    return static_cast<double>(graph_.value(locals_[static_cast<size_t>(local)].id).type.bytes());
  }

  // How a given plan cuts a tensor; nothing: it does not say.
  std::optional<Cut> pin(ValueId id) const {
    if (request_.pins == nullptr || request_.pins->placements.empty()) {
      return std::nullopt;
    }
    const auto found = request_.pins->placements.find(graph_.value(id).name);
    if (found == request_.pins->placements.end()) {
      return std::nullopt;
    }
    const Placement& placement = found->second;
    return placement.kind == Placement::Kind::kShard
               ? cut_of(placement.dim, num_units(graph_.value(id).type.shape, placement))
               : kWhole;
  }

  // Into `size` units along `dim`.
  Cut cut_of(int dim, int64_t size) const {
    return {dim, static_cast<int32_t>(cut_units(size, request_.degree))};
  }

  Cut cut_under(const TensorFactors& dims, const ShardingRule& rule, int factor) const {
    const int dim = dim_of(dims, factor);
    return dim < 0 ? kWhole : cut_of(dim, rule.factors[static_cast<size_t>(factor)].size);
  }

  int local(ValueId id) {
    if (id == kNoValue) {
      return -1;
    }
    const auto [entry, is_new] = local_of_.emplace(id, static_cast<int>(locals_.size()));
    if (is_new) {
      locals_.push_back({id, (*request_.trained)[static_cast<size_t>(id)], pin(id)});
    }
    return entry->second;
  }

  static Cut& cut(State& state, int local) { return state.cuts[static_cast<size_t>(local)]; }

  // True the first time.
  static bool mark(State* state, int local, int8_t flag) {
    int8_t& copied = state->copied[static_cast<size_t>(local)];
    const bool first = (copied & flag) == 0;
    copied = static_cast<int8_t>(copied | flag);
    return first;
  }

  void add(std::vector<TensorCollective>* list, Collective kind, int local, State* state) {
    const double size = bytes(local);
    list->push_back({kind, size});
    double& seconds = collective_seconds_[static_cast<size_t>(kind) * locals_.size() +
                                          static_cast<size_t>(local)];
    if (seconds < 0) {
      seconds =
          request_.split_at_any_price
              ? 0
              : collective_time(kind, size, *request_.group, request_.cost->device().architecture)
                    .seconds;
    }
    state->seconds += seconds;
  }

  // Brings a value to `wanted` for an operator that is split or not.
  void move(int local, Cut wanted, bool split, State* state, Step* step) {
    const Cut present = cut(*state, local);
    const bool gradient = locals_[static_cast<size_t>(local)].trained;
    if (present == wanted) {
      if (wanted == kWhole && split && gradient && mark(state, local, kReduced)) {
        add(&step->backward, Collective::kAllReduce, local, state);
      }
      return;
    }
    if (wanted == kWhole) {
      if (mark(state, local, kGathered)) {
        add(&step->forward, Collective::kAllGather, local, state);
        if (gradient && split) {
          add(&step->backward, Collective::kReduceScatter, local, state);
        }
      }
      return;
    }
    if (present == kWhole) {
      if (gradient) {
        add(&step->backward, Collective::kAllGather, local, state);
      }
      return;
    }
    // To other units of the same dim the whole is gathered and sliced.
    const Collective kind =
        present.dim == wanted.dim ? Collective::kAllGather : Collective::kAllToAll;
    add(&step->forward, kind, local, state);
    if (gradient) {
      add(&step->backward, kind, local, state);
    }
  }

  const std::vector<int>& candidates(const State& state, const NodeInfo& info) {
    std::vector<int>& found = candidates_;
    found.assign(1, -1);
    const auto offer = [&](const DimFactors& dim) {
      if (!dim.empty() && info.can_split[static_cast<size_t>(dim[0])]) {
        found.push_back(dim[0]);
      }
    };
    for (size_t i = 0; i < info.inputs.size() && i < info.rule->inputs.size(); ++i) {
      if (info.inputs[i] < 0) {
        continue;
      }
      const Local& input = locals_[static_cast<size_t>(info.inputs[i])];
      const TensorFactors& dims = info.rule->inputs[i];
      if (is_weight_matrix(graph_.value(input.id))) {
        std::for_each(dims.begin(), dims.end(), offer);
      }
      const Cut present = state.cuts[static_cast<size_t>(info.inputs[i])];
      if (present.dim >= 0 && static_cast<size_t>(present.dim) < dims.size()) {
        const DimFactors& dim = dims[static_cast<size_t>(present.dim)];
        if (!dim.empty() && cut_under(dims, *info.rule, dim[0]) == present) {
          offer(dim);
        }
      }
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  }

  const Choice& choice(NodeInfo* info, int factor) const {
    std::optional<Choice>& made = info->choices[static_cast<size_t>(factor + 1)];
    if (made.has_value()) {
      return *made;
    }
    const Node& node = graph_.node(info->id);
    const ShardingRule& rule = *info->rule;
    made.emplace();
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      made->inputs.push_back(
          factor < 0 || i >= rule.inputs.size() ? kWhole : cut_under(rule.inputs[i], rule, factor));
    }
    for (size_t o = 0; o < node.outputs.size(); ++o) {
      const bool split = factor >= 0 && o < rule.outputs.size() && node.outputs[o] != kNoValue;
      made->outputs.push_back(split ? cut_under(rule.outputs[o], rule, factor) : kWhole);
      if (split && made->outputs.back() == kWhole) {
        made->partial = rule.factors[static_cast<size_t>(factor)].kind == FactorKind::kReduction;
      }
    }
    const OpContext local = local_context(graph_, node, rule, factor, request_.degree);
    const Cost cost = get_op(node.op_type).cost(local);
    const double seconds =
        request_.cost->device().kernels.empty()
            ? request_.cost->op_seconds(cost)
            : request_.cost->kernel_seconds(kernel_name(node), kernel_size(local, cost), cost, 0);
    made->seconds = 3 * seconds;  // forward and about twice backward
    return *made;
  }

  void extend(const State& state, int n, std::vector<State>* next) {
    NodeInfo& info = nodes_[static_cast<size_t>(n)];
    for (const int factor : candidates(state, info)) {
      const Choice& chosen = choice(&info, factor);
      State grown = state;
      Step step;
      step.before = state.step;
      step.node = n;
      step.factor = factor;
      for (size_t i = 0; i < info.inputs.size() && i < info.rule->inputs.size(); ++i) {
        if (info.inputs[i] >= 0) {
          input(info.inputs[i], chosen.inputs[i], factor >= 0, &grown, &step);
        }
      }
      grown.seconds += chosen.seconds;
      for (size_t o = 0; o < info.outputs.size(); ++o) {
        const int output = info.outputs[o];
        if (output >= 0 && chosen.outputs[o] != kWhole) {
          cut(grown, output) = chosen.outputs[o];
        }
        const std::optional<Cut> pinned =
            output < 0 || chosen.partial ? std::nullopt : locals_[static_cast<size_t>(output)].pin;
        if (pinned) {
          move(output, *pinned, false, &grown, &step);
          cut(grown, output) = *pinned;
        }
      }
      if (chosen.partial) {
        reduce(info, std::move(grown), std::move(step), next);
      } else {
        push(std::move(grown), std::move(step), next);
      }
    }
  }

  void input(int local, Cut wanted, bool split, State* state, Step* step) {
    const ValueKind kind = graph_.value(locals_[static_cast<size_t>(local)].id).kind;
    const std::optional<Cut> pinned = locals_[static_cast<size_t>(local)].pin;
    const bool held = kind == ValueKind::kParameter || kind == ValueKind::kState;
    if (held && pinned) {
      cut(*state, local) = *pinned;
      if (*pinned != wanted) {
        move(local, wanted, split, state, step);
      }
    } else if (held) {
      cut(*state, local) = wanted;
      state->seconds += wanted == kWhole ? bytes(local) * request_.whole_seconds_per_byte : 0;
    } else if (kind == ValueKind::kIntermediate) {
      move(local, wanted, split, state, step);
    }
  }

  // The sum over the ranks of output 0: whole on all, or scattered along the sequence.
  void reduce(const NodeInfo& info, State grown, Step step, std::vector<State>* next) {
    const int sum = info.outputs[0];
    if (const std::optional<Cut> pinned = locals_[static_cast<size_t>(sum)].pin) {
      const bool scatters = *pinned != kWhole;
      add(&step.forward,
          scatters ? Collective::kReduceScatter : Collective::kAllReduce,
          sum,
          &grown);
      if (scatters) {
        add(&step.backward, Collective::kAllGather, sum, &grown);
      }
      cut(grown, sum) = *pinned;
      push(std::move(grown), std::move(step), next);
      return;
    }
    if (border_ != kWhole && fits_sequence(locals_[static_cast<size_t>(sum)].id)) {
      State scattered = grown;
      Step with = step;
      add(&with.forward, Collective::kReduceScatter, sum, &scattered);
      add(&with.backward, Collective::kAllGather, sum, &scattered);
      cut(scattered, sum) = border_;
      push(std::move(scattered), std::move(with), next);
    }
    add(&step.forward, Collective::kAllReduce, sum, &grown);
    push(std::move(grown), std::move(step), next);
  }

  void push(State state, Step step, std::vector<State>* next) {
    state.step = static_cast<int>(steps_.size());
    steps_.push_back(std::move(step));
    next->push_back(std::move(state));
  }

  // The cheapest states.
  static std::vector<State> best(std::vector<State> states) {
    std::stable_sort(states.begin(), states.end(), [](const State& a, const State& b) {
      return a.seconds < b.seconds;
    });
    if (states.size() > kBeam) {
      states.resize(kBeam);
    }
    return states;
  }

  void close(State* state) {
    if (output_ < 0) {
      return;
    }
    const Cut wanted = border_ != kWhole && fits_sequence(block_.output) ? border_ : kWhole;
    Step step;
    step.before = state->step;
    move(output_, wanted, false, state, &step);
    cut(*state, output_) = wanted;
    state->step = static_cast<int>(steps_.size());
    steps_.push_back(std::move(step));
  }

  BlockSharding told(const State& state) const {
    BlockSharding sharding;
    sharding.seconds = state.seconds;
    std::vector<int> path;
    for (int at = state.step; at >= 0; at = steps_[static_cast<size_t>(at)].before) {
      path.push_back(at);
    }
    std::for_each(path.rbegin(), path.rend(), [&](int at) {
      const Step& step = steps_[static_cast<size_t>(at)];
      if (step.node >= 0) {
        sharding.factor[nodes_[static_cast<size_t>(step.node)].id] = step.factor;
      }
      sharding.forward.insert(sharding.forward.end(), step.forward.begin(), step.forward.end());
      sharding.backward.insert(sharding.backward.end(), step.backward.begin(), step.backward.end());
    });
    for (size_t i = 0; i < locals_.size(); ++i) {
      const auto [dim, units] = state.cuts[i];
      if (dim >= 0) {
        sharding.placements[locals_[i].id] = Placement::shard(dim, units);
      }
    }
    return sharding;
  }

  const ShardingRequest& request_;
  const Graph& graph_;
  const Block& block_;
  Cut border_;
  std::vector<NodeInfo> nodes_;
  std::vector<Local> locals_;
  std::unordered_map<ValueId, int> local_of_;
  int input_ = -1, output_ = -1;
  std::vector<Step> steps_;
  std::vector<int> candidates_;             // that were last asked for
  std::vector<double> collective_seconds_;  // by kind and local; below 0: not asked for yet
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
        const int64_t units = rule.factors[static_cast<size_t>(factor)].size;
        size = size / units * shard_range(units, degree, 0).size;
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
