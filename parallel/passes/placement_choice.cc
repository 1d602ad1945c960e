// The factors of a node's rule are candidates; the one whose inputs need the fewest bytes of
// collectives is taken, cut before whole among equals. Partial sums that meet in an operator that
// is linear in them pass through, if that makes nothing larger.
#include "parallel/passes/placement_choice.h"

#include <algorithm>

namespace trainrt {

namespace {

// Where a tensor of the rule must be when `factor` is cut; none if it cannot be.
std::optional<Place> place_under(const TensorFactors& dims, const Factor& cut, int factor) {
  for (size_t d = 0; d < dims.size(); ++d) {
    const auto at = std::find(dims[d].begin(), dims[d].end(), factor);
    if (at == dims[d].begin() && at != dims[d].end()) {
      return Place::shard(static_cast<int>(d), cut.size);
    }
    if (at != dims[d].end()) {
      return std::nullopt;  // a minor factor: the piece would not be contiguous
    }
  }
  return Place::replicate();
}

bool occurs(const TensorFactors& dims, int factor) {
  return std::any_of(dims.begin(), dims.end(), [&](const DimFactors& dim) {
    return std::find(dim.begin(), dim.end(), factor) != dim.end();
  });
}

bool is_partial_sum(const std::optional<Place>& place) {
  return place && place->is_partial() && place->reduction == ReductionKind::kSum;
}

}  // namespace

bool same_place(const Place& a, const Place& b, int64_t extent, int degree) {
  if (a.kind != b.kind || a.dim != b.dim) {
    return false;
  }
  if (a.is_partial()) {
    return a.reduction == b.reduction;
  }
  if (a.is_shard() && a.count != b.count) {
    for (int r = 1; r < degree; ++r) {
      if (shard_range(a.count, degree, r).offset * (extent / a.count) !=
          shard_range(b.count, degree, r).offset * (extent / b.count)) {
        return false;
      }
    }
  }
  return true;
}

bool PlacementChooser::same(ValueId id, const Place& a, const Place& b) const {
  const Shape& shape = graph_.value(id).type.shape;
  const int64_t extent =
      a.is_shard() && a.dim == b.dim ? shape.at(static_cast<size_t>(a.dim)) : int64_t{1};
  return same_place(a, b, extent, options_.axis.degree);
}

double PlacementChooser::move_cost(ValueId id, const Place& to) const {
  const std::optional<Place>& from = place_of_(id);
  if (!from || same(id, *from, to) || (from->is_replicate() && !to.is_partial())) {
    return 0;
  }
  if (from->is_partial()) {
    return bytes_of(id) * (to.is_shard() ? 1 : 2);
  }
  return bytes_of(id) * (to.is_shard() ? kAllToAllCost : 1);
}

std::optional<Choice> PlacementChooser::cut_along(const Node& node,
                                                  const ShardingRule& rule,
                                                  int factor) const {
  const Factor& cut = rule.factors[static_cast<size_t>(factor)];
  if (cut.size < options_.axis.degree ||
      (cut.kind != FactorKind::kParallel && cut.kind != FactorKind::kReduction)) {
    return std::nullopt;
  }
  Choice choice;
  choice.factor = factor;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const std::optional<Place> place =
        node.inputs[i] == kNoValue ? Place::replicate() : place_under(rule.inputs[i], cut, factor);
    if (!place) {
      return std::nullopt;
    }
    choice.inputs.push_back(*place);
    choice.bytes += node.inputs[i] == kNoValue ? 0 : move_cost(node.inputs[i], *place);
  }
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    const std::optional<Place> place = place_under(rule.outputs[i], cut, factor);
    if (!place) {
      return std::nullopt;
    }
    const bool sum = cut.kind == FactorKind::kReduction && !place->is_shard();
    choice.outputs.push_back(sum ? Place::partial(cut.reduction) : *place);
  }
  return choice;
}

// Would anything be gained by cutting this factor: is it cut in an input already, or in a weight
// that is still to be placed?
bool PlacementChooser::is_triggered(const Node& node,
                                    const ShardingRule& rule,
                                    int factor,
                                    bool heavy) const {
  bool open_weight = false, in_open_weight = false, in_cut_input = false;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const ValueId id = node.inputs[i];
    if (id == kNoValue) {
      continue;
    }
    const std::optional<Place>& place = place_of_(id);
    const TensorFactors& dims = rule.inputs[i];
    const bool here = occurs(dims, factor);
    if (!place && graph_.value(id).kind == ValueKind::kParameter) {
      open_weight = true;
      const bool row = !heavy && !dims.empty() && occurs({dims[0]}, factor) &&
                       rule.factors[static_cast<size_t>(factor)].kind == FactorKind::kReduction;
      in_open_weight = in_open_weight || (here && (heavy || row));
    } else if (place && place->is_shard() && here) {
      const DimFactors& dim = dims[static_cast<size_t>(place->dim)];
      in_cut_input = in_cut_input || (!dim.empty() && dim[0] == factor);
    } else if (place && place->is_partial() && here && options_.sequence_parallel) {
      const DimFactors& dim = dims[dims.size() >= 3 ? 1 : 0];
      in_cut_input = in_cut_input || (dims.size() >= 2 && dim.size() == 1 && dim[0] == factor);
    }
  }
  // A weight to be placed decides: never cut a matrix product along the samples instead.
  return heavy && open_weight ? in_open_weight : in_open_weight || in_cut_input;
}

// Partial sums of exactly one linear set of inputs pass through.
std::optional<Choice> PlacementChooser::stay_partial(const Node& node,
                                                     const ShardingRule& rule) const {
  std::vector<int> partial;
  double in_bytes = 0, out_bytes = 0;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const ValueId id = node.inputs[i];
    if (id == kNoValue) {
      continue;
    }
    const std::optional<Place>& place = place_of_(id);
    const bool open_sum = !place && graph_.value(id).kind == ValueKind::kGradient;
    if (is_partial_sum(place) || open_sum) {
      partial.push_back(static_cast<int>(i));
      in_bytes += open_sum ? 0 : bytes_of(id);
    } else if (place && !place->is_replicate()) {
      return std::nullopt;
    }
  }
  if (in_bytes == 0 ||
      std::find(rule.linear.begin(), rule.linear.end(), partial) == rule.linear.end()) {
    return std::nullopt;
  }
  Choice choice;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const bool is_partial =
        std::find(partial.begin(), partial.end(), static_cast<int>(i)) != partial.end();
    choice.inputs.push_back(is_partial ? Place::partial(ReductionKind::kSum) : Place::replicate());
  }
  for (const ValueId output : node.outputs) {
    choice.outputs.push_back(Place::partial(ReductionKind::kSum));
    out_bytes += output == kNoValue ? 0 : bytes_of(output);
  }
  return out_bytes <= in_bytes ? std::optional<Choice>(choice) : std::nullopt;
}

// The gradient of a table lies as the table does, or each rank would accumulate a whole one, unless
// what it is made of takes more bytes to gather than the sum would.
std::optional<Choice> PlacementChooser::as_table(const Node& node, const ShardingRule& rule) const {
  if (node.op_type != "GatherGrad" || node.forward_node == kNoNode ||
      graph_.node(node.forward_node).op_type != "Gather") {
    return std::nullopt;
  }
  const std::optional<Place>& table = place_of_(graph_.node(node.forward_node).inputs[0]);
  if (!table || !table->is_shard()) {
    return std::nullopt;
  }
  const int factor = rule.outputs[0][static_cast<size_t>(table->dim)][0];
  std::optional<Choice> cut = cut_along(node, rule, factor);
  const ValueId gradient = node.outputs[0];
  const bool pays =
      cut && same(gradient, cut->outputs[0], *table) && cut->bytes <= bytes_of(gradient);
  return pays ? cut : std::nullopt;
}

Choice PlacementChooser::whole(const Node& node) const {
  Choice choice;
  for (const ValueId input : node.inputs) {
    choice.inputs.push_back(Place::replicate());
    choice.bytes += input == kNoValue ? 0 : move_cost(input, Place::replicate());
  }
  choice.outputs.assign(node.outputs.size(), Place::replicate());
  return choice;
}

Choice PlacementChooser::choose(const Node& node) const {
  // An accumulator that lies somewhere stays there, and its term goes to it.
  if (node.op_type == "Accumulate" && place_of_(node.inputs[0])) {
    const Place place = *place_of_(node.inputs[0]);
    return {.inputs = {place, place}, .outputs = {place}};
  }
  const OpDef& def = get_op(node.op_type);
  const OpContext op(graph_, node);
  const ShardingRule rule = def.sharding(op);
  if (!options_.sum_at_once) {
    if (const std::optional<Choice> linear = stay_partial(node, rule)) {
      return *linear;
    }
  }
  if (std::optional<Choice> cut = as_table(node, rule)) {
    return *cut;
  }
  Choice best = whole(node);
  if (def.random && !def.localize) {
    return best;  // draws by the index within the whole tensor, which a piece does not know
  }
  const bool heavy = !def.cost(op).matmuls.empty();
  for (size_t f = 0; f < rule.factors.size(); ++f) {
    const int factor = static_cast<int>(f);
    if (!is_triggered(node, rule, factor, heavy)) {
      continue;
    }
    std::optional<Choice> cut = cut_along(node, rule, factor);
    if (!cut) {
      continue;
    }
    // Among equals: an embedding by its rows, all else without a partial result.
    const bool sums = rule.factors[f].kind == FactorKind::kReduction;
    cut->preference = sums == heavy ? -1 : -2;
    if (cut->bytes < best.bytes ||
        (cut->bytes == best.bytes && cut->preference < best.preference)) {
      best = std::move(*cut);
    }
  }
  return best;
}

}  // namespace trainrt
