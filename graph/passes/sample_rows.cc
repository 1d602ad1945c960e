// A tensor's samples are a loop of `batch` steps within one of its dims, `stride` rows apart. A
// sharding rule reads every dim as a product of factors (loops), so if the samples lie within one
// factor of an input, they lie there in every tensor in which the factor occurs.
//
// Forward first. Draws without a sample-dependent operand (stochastic depth: Bernoulli of a
// constant, RandomNormalLike, whose shape alone came from the data) get their place from the
// tensors they are combined with: a second sweep from the end, over what depends on no input.
//
// With a batch of one, Reshape's rule has no factor for the samples; but then the whole tensor is
// one sample, and any axis stands for it.
#include "graph/passes/sample_rows.h"

#include <algorithm>
#include <optional>

#include "graph/op_def.h"

namespace trainrt {

namespace {

constexpr const char* kStream = "rng_stream";

struct Place {
  int axis = 0;
  int64_t stride = 1;
};

// The factor in which the samples lie, and their stride within it.
struct Loop {
  int factor = -1;
  int64_t stride = 1;
};

class SampleFollower {
 public:
  SampleFollower(const Graph& graph, int64_t batch)
      : graph_(graph),
        batch_(batch),
        places_(static_cast<size_t>(graph.num_values())),
        depends_(static_cast<size_t>(graph.num_values())) {
    course_.reduced.resize(static_cast<size_t>(graph.num_values()));
    course_.summed.resize(static_cast<size_t>(graph.num_values()));
    for (ValueId id = 0; id < graph.num_values(); ++id) {
      const Value& value = graph.value(id);
      if (value.kind == ValueKind::kInput && value.batch_axis >= 0) {
        places_[static_cast<size_t>(id)] = Place{value.batch_axis, 1};
        depends_[static_cast<size_t>(id)] = true;
      }
    }
    for (const Node& node : graph.nodes()) {
      follow(node);
    }
    for (NodeId id = graph.num_nodes(); id-- > 0;) {
      follow_back(graph.node(id));
    }
  }

  const std::optional<Place>& place(ValueId id) const { return places_[static_cast<size_t>(id)]; }
  bool depends(ValueId id) const { return depends_[static_cast<size_t>(id)]; }
  SampleCourse course() const {
    SampleCourse course = course_;
    course.depends = depends_;
    for (ValueId id = 0; id < graph_.num_values(); ++id) {
      const std::optional<Place>& at = place(id);
      const Shape& shape = graph_.value(id).type.shape;
      course.places.emplace_back();
      if (at) {
        const int64_t rows = shape[static_cast<size_t>(at->axis)] / batch_;
        course.places.back() = SamplePlace{at->axis, rows / at->stride, at->stride};
      }
    }
    return course;
  }

 private:
  // The rule of a node on tensors that have elements; without them there is nothing to follow.
  std::optional<ShardingRule> rule_of(const Node& node) const {
    for (const std::vector<ValueId>* ids : {&node.inputs, &node.outputs}) {
      for (const ValueId id : *ids) {
        if (id != kNoValue && num_elements(graph_.value(id).type.shape) == 0) {
          return std::nullopt;
        }
      }
    }
    return get_op(node.op_type).sharding(OpContext(graph_, node));
  }

  std::optional<Loop> loop_in(const ShardingRule& rule,
                              const TensorFactors& dims,
                              const Place& place) const {
    int64_t inner = 1;  // size of the factors minor to the one at hand
    const DimFactors& factors = dims.at(static_cast<size_t>(place.axis));
    for (size_t i = factors.size(); i-- > 0;) {
      const int64_t size = rule.factors[static_cast<size_t>(factors[i])].size;
      if (place.stride % inner == 0 && place.stride * batch_ <= inner * size) {
        return Loop{factors[i], place.stride / inner};
      }
      inner *= size;
    }
    return std::nullopt;
  }

  std::optional<Place> place_of(const ShardingRule& rule,
                                const TensorFactors& dims,
                                const Shape& shape,
                                const Loop& loop) const {
    for (size_t d = 0; d < dims.size(); ++d) {
      int64_t inner = 1;
      for (size_t i = dims[d].size(); i-- > 0;) {
        if (dims[d][i] == loop.factor && shape[d] % (loop.stride * inner * batch_) == 0) {
          return Place{static_cast<int>(d), loop.stride * inner};
        }
        inner *= rule.factors[static_cast<size_t>(dims[d][i])].size;
      }
    }
    return std::nullopt;
  }

  std::optional<Loop> find_loop(const ShardingRule& rule,
                                const std::vector<ValueId>& ids,
                                const std::vector<TensorFactors>& tensors) const {
    for (size_t i = 0; i < ids.size() && i < tensors.size(); ++i) {
      if (ids[i] != kNoValue && place(ids[i])) {
        if (std::optional<Loop> loop = loop_in(rule, tensors[i], *place(ids[i]))) {
          return loop;
        }
      }
    }
    return std::nullopt;
  }

  template <typename Wanted>
  void set_places(const ShardingRule& rule,
                  const std::vector<ValueId>& ids,
                  const std::vector<TensorFactors>& tensors,
                  const Loop& loop,
                  Wanted&& wanted) {
    for (size_t i = 0; i < ids.size() && i < tensors.size(); ++i) {
      if (ids[i] != kNoValue && !place(ids[i]) && wanted(ids[i])) {
        places_[static_cast<size_t>(ids[i])] =
            place_of(rule, tensors[i], graph_.value(ids[i]).type.shape, loop);
      }
    }
  }

  bool is_reduced(ValueId id) const {
    return id != kNoValue && course_.reduced[static_cast<size_t>(id)];
  }

  // Outputs without the loop of the samples are reduced over them.
  void note_reduced(const Node& node, const ShardingRule& rule, const std::optional<Loop>& loop) {
    const bool from_reduced = std::any_of(
        node.inputs.begin(), node.inputs.end(), [&](ValueId id) { return is_reduced(id); });
    const bool adds = loop && !from_reduced && adds_up(node, rule, *loop);
    for (size_t i = 0; i < node.outputs.size() && i < rule.outputs.size(); ++i) {
      const ValueId id = node.outputs[i];
      if (id == kNoValue || place(id)) {
        continue;
      }
      const bool keeps_loop =
          loop &&
          std::any_of(
              rule.outputs[i].begin(), rule.outputs[i].end(), [&](const DimFactors& factors) {
                return std::find(factors.begin(), factors.end(), loop->factor) != factors.end();
              });
      course_.reduced[static_cast<size_t>(id)] = from_reduced || (loop && !keeps_loop);
      course_.summed[static_cast<size_t>(id)] = adds && !keeps_loop;
    }
  }

  // Whether what the node leaves of the loop is a sum, of each sample with itself alone.
  bool adds_up(const Node& node, const ShardingRule& rule, const Loop& loop) const {
    for (size_t i = 0; i < node.inputs.size() && i < rule.inputs.size(); ++i) {
      if (node.inputs[i] == kNoValue || !depends(node.inputs[i])) {
        continue;
      }
      const std::optional<Place>& at = place(node.inputs[i]);
      const std::optional<Loop> own = at ? loop_in(rule, rule.inputs[i], *at) : std::nullopt;
      if (!own || own->factor != loop.factor || own->stride != loop.stride) {
        return false;
      }
    }
    const Factor& factor = rule.factors[static_cast<size_t>(loop.factor)];
    return factor.kind == FactorKind::kReduction && factor.reduction == ReductionKind::kSum;
  }

  void note_course(const Node& node, const ShardingRule& rule) {
    const auto any_input = [&](auto&& is) {
      return std::any_of(node.inputs.begin(), node.inputs.end(), is);
    };
    if (course_.met.empty() && any_input([&](ValueId id) { return is_reduced(id); }) &&
        any_input([&](ValueId id) { return id != kNoValue && place(id).has_value(); })) {
      course_.met = node.name;
    }
    std::optional<Loop> first;
    for (size_t i = 0; i < node.inputs.size() && i < rule.inputs.size(); ++i) {
      if (node.inputs[i] == kNoValue || !place(node.inputs[i])) {
        continue;
      }
      const std::optional<Loop> loop = loop_in(rule, rule.inputs[i], *place(node.inputs[i]));
      std::string& found = loop ? course_.mixed : course_.lost;
      const bool apart =
          loop && (!first || (first->factor == loop->factor && first->stride == loop->stride));
      if (!apart && found.empty()) {
        found = node.name;
      }
      first = first ? first : loop;
    }
  }

  void follow(const Node& node) {
    const bool reached = std::any_of(node.inputs.begin(), node.inputs.end(), [&](ValueId id) {
      return id != kNoValue && depends(id);
    });
    if (!reached) {
      return;
    }
    for (const ValueId id : node.outputs) {
      if (id != kNoValue) {
        depends_[static_cast<size_t>(id)] = true;
      }
    }
    if (const std::optional<ShardingRule> rule = rule_of(node)) {
      note_course(node, *rule);
      const std::optional<Loop> loop = find_loop(*rule, node.inputs, rule->inputs);
      if (loop) {
        set_places(*rule, node.outputs, rule->outputs, *loop, [](ValueId) { return true; });
      }
      note_reduced(node, *rule, loop);
    }
    for (const ValueId id : node.outputs) {
      if (batch_ == 1 && id != kNoValue && !place(id) && !graph_.value(id).type.shape.empty()) {
        places_[static_cast<size_t>(id)] = Place{};
      }
    }
  }

  void follow_back(const Node& node) {
    const auto made_of_nothing = [&](ValueId id) {
      return id != kNoValue && !depends(id) && graph_.value(id).producer != kNoNode;
    };
    if (!std::any_of(node.inputs.begin(), node.inputs.end(), made_of_nothing)) {
      return;
    }
    const std::optional<ShardingRule> rule = rule_of(node);
    if (!rule) {
      return;
    }
    std::optional<Loop> loop = find_loop(*rule, node.outputs, rule->outputs);
    loop = loop ? loop : find_loop(*rule, node.inputs, rule->inputs);
    if (loop) {
      set_places(*rule, node.inputs, rule->inputs, *loop, made_of_nothing);
    }
  }

  const Graph& graph_;
  const int64_t batch_;
  std::vector<std::optional<Place>> places_;
  std::vector<bool> depends_;  // on an input that has samples
  SampleCourse course_;
};

int64_t batch_of(const Graph& graph) {
  for (const ValueId id : graph.values_of_kind(ValueKind::kInput)) {
    const Value& value = graph.value(id);
    if (value.batch_axis >= 0) {
      return value.type.shape.at(static_cast<size_t>(value.batch_axis));
    }
  }
  return 0;
}

}  // namespace

SampleCourse follow_samples(const Graph& graph) {
  const int64_t batch = batch_of(graph);
  return batch > 1 ? SampleFollower(graph, batch).course() : SampleCourse{};
}

std::vector<std::string> locate_samples(Graph& graph) {
  std::vector<std::string> lost;
  const int64_t batch = batch_of(graph);
  const auto draws = [](const Node& node) { return node.attributes.has(kStream); };
  if (batch == 0 || std::none_of(graph.nodes().begin(), graph.nodes().end(), draws)) {
    return lost;
  }
  const SampleFollower follower(graph, batch);
  for (NodeId id = 0; id < graph.num_nodes(); ++id) {
    Node& node = graph.node(id);
    if (!draws(node)) {
      continue;
    }
    const ValueId output = node.outputs.at(0);
    const Shape& shape = graph.value(output).type.shape;
    std::optional<Place> place = follower.place(output);
    int64_t rows = 1;
    if (place) {
      rows = shape[static_cast<size_t>(place->axis)] / batch;
    } else if (follower.depends(output) && !shape.empty()) {
      place = Place{0, shape[0]};
      rows = shape[0];
      lost.push_back(node.name);
    }
    node.attributes.set(sample_rows::kBatchAxis, int64_t{place ? place->axis : -1});
    node.attributes.set(sample_rows::kRowsPerSample, rows);
    node.attributes.set(sample_rows::kSampleStride, place ? place->stride : int64_t{1});
  }
  return lost;
}

}  // namespace trainrt
