// A walk over the nodes in order. Every value has a placement along the axis: replicate, shard (of
// a dim, in units of a factor) or partial sum. For each node the factors of its sharding rule
// (graph/shard_spec) are candidates to cut it along; the one whose inputs need the fewest bytes of
// collectives is taken, cut before whole among equals. Megatron's pattern follows: a weight that
// nobody has placed is cut along its output dim when the input is whole (column-parallel, no
// bytes), along its input dim when the input is cut there (row-parallel, no bytes, partial output),
// and the all-reduce appears where a non-linear operator wants the sum. Backward and update inherit
// the placements of the weights. Sums that meet in a linear operator stay partial and are reduced
// once.
//
// Resharding: replicate -> shard is a slice; shard -> replicate an all-gather; partial -> replicate
// an all-reduce; partial -> shard a reduce-scatter; shard -> another shard gathers and slices.
#include "parallel/passes/spmd_lowering.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include "graph/graph_builder.h"
#include "graph/op_def.h"

namespace trainrt {

namespace {

// A placement with the units of its cut.
struct Place {
  Placement::Kind kind = Placement::Kind::kReplicate;
  int dim = -1;
  int64_t count = 0;  // units along dim
  ReductionKind reduction = ReductionKind::kSum;

  static Place replicate() { return {}; }
  static Place partial(ReductionKind kind) { return {Placement::Kind::kPartial, -1, 0, kind}; }
  static Place shard(int dim, int64_t count) {
    return {Placement::Kind::kShard, dim, count, ReductionKind::kSum};
  }
  bool is_shard() const { return kind == Placement::Kind::kShard; }
  bool is_partial() const { return kind == Placement::Kind::kPartial; }
  bool is_replicate() const { return kind == Placement::Kind::kReplicate; }
};

struct LocalValue {
  ValueId id = kNoValue;
  ValueId made = kNoValue;     // as the node made it; `id` may have been moved since
  std::optional<Place> place;  // none: persistent, nobody has placed it yet
};

// A way to run one node: along one factor (-1: none), and the placements that follow.
struct Choice {
  int factor = -1;
  std::vector<Place> inputs;
  std::vector<Place> outputs;
  double bytes = 0;    // moved for its inputs
  int preference = 0;  // lower is better among equals
};

class Lowering {
 public:
  Lowering(const TrainingGraph& whole,
           const SpmdOptions& options,
           std::map<std::string, TensorPiece>* pieces)
      : whole_(whole),
        graph_(whole.graph),
        options_(options),
        axis_(options.axis),
        pieces_(pieces) {
    values_.resize(static_cast<size_t>(graph_.num_values()));
    goals_.resize(static_cast<size_t>(graph_.num_values()));
    nodes_.assign(static_cast<size_t>(graph_.num_nodes()), kNoNode);
  }

  TrainingGraph run() {
    add_sources();
    set_goals();
    for (NodeId id = 0; id < graph_.num_nodes(); ++id) {
      try {
        lower(id);
      } catch (Error& error) {
        error.add_context(concat("while cutting node '",
                                 graph_.node(id).name,
                                 "' over ",
                                 axis_.degree,
                                 " ranks of the ",
                                 axis_.name,
                                 " axis"));
        throw;
      }
    }
    return finish();
  }

 private:
  bool is_lowered(const Node& node) const { return !options_.lowered || options_.lowered(node); }
  LocalValue& value(ValueId id) { return values_[static_cast<size_t>(id)]; }

  // ---- placements ------------------------------------------------------------------------------

  int64_t units_offset(const Place& place, int rank) const {
    return shard_range(place.count, axis_.degree, rank).offset;
  }

  // Equal cuts of the same dim, whatever the units are called.
  bool same(const Place& a, const Place& b, int64_t extent) const {
    if (a.kind != b.kind || a.dim != b.dim) {
      return false;
    }
    if (a.is_partial()) {
      return a.reduction == b.reduction;
    }
    if (a.is_shard() && a.count != b.count) {
      for (int r = 1; r < axis_.degree; ++r) {
        if (units_offset(a, r) * (extent / a.count) != units_offset(b, r) * (extent / b.count)) {
          return false;
        }
      }
    }
    return true;
  }

  int64_t extent(ValueId id, int dim) const {
    return graph_.value(id).type.shape.at(static_cast<size_t>(dim));
  }

  bool same_for(ValueId id, const Place& a, const Place& b) const {
    return same(a, b, a.is_shard() && a.dim == b.dim ? extent(id, a.dim) : 1);
  }

  Shape local_shape(ValueId id, const Place& place) const {
    Shape shape = graph_.value(id).type.shape;
    if (place.is_shard()) {
      int64_t& dim = shape.at(static_cast<size_t>(place.dim));
      dim = dim / place.count * shard_range(place.count, axis_.degree, axis_.index).size;
    }
    return shape;
  }

  Place pinned_place(const Value& pinned, const Placement& placement) const {
    if (placement.kind == Placement::Kind::kPartial) {
      return Place::partial(ReductionKind::kSum);
    }
    if (placement.kind == Placement::Kind::kReplicate) {
      return Place::replicate();
    }
    TRAINRT_REQUIRE(
        placement.dim >= 0 && placement.dim < static_cast<int>(pinned.type.shape.size()),
        kInvalidArgument,
        "'",
        pinned.name,
        "' is placed ",
        placement_string(placement),
        ", but its shape is ",
        shape_string(pinned.type.shape));
    return Place::shard(placement.dim, pinned.type.shape[static_cast<size_t>(placement.dim)]);
  }

  std::optional<Place> pin_of(ValueId id) const {
    const auto pin = options_.pinned.find(graph_.value(id).name);
    return pin == options_.pinned.end()
               ? std::nullopt
               : std::optional<Place>(pinned_place(graph_.value(id), pin->second));
  }

  // ---- values without a producer ---------------------------------------------------------------

  void add_sources() {
    for (ValueId id = 0; id < graph_.num_values(); ++id) {
      const Value& source = graph_.value(id);
      if (source.producer != kNoNode) {
        continue;
      }
      LocalValue& local = value(id);
      local.id = local_.add_value(source);
      const bool open = options_.cut_weights && (source.kind == ValueKind::kParameter ||
                                                 source.kind == ValueKind::kOptimizerState ||
                                                 source.kind == ValueKind::kGradient);
      if (const std::optional<Place> pin = pin_of(id)) {
        assign(id, *pin);
      } else if (!open) {
        local.place = Place::replicate();
      }
    }
  }

  // Places a persistent value: from now on the local tensor is this rank's piece.
  void assign(ValueId id, const Place& place) {
    LocalValue& local = value(id);
    local.place = place;
    if (!place.is_shard()) {
      return;
    }
    Value& piece_value = local_.value(local.id);
    TensorPiece& piece = (*pieces_)[piece_value.name];
    if (piece.cuts.empty()) {
      piece.whole_shape = piece_value.type.shape;
    }
    const PieceCut cut{place.dim, place.count, shard_range(place.count, axis_.degree, axis_.index)};
    piece.cuts.push_back(cut);
    const TensorPiece own{piece_value.type.shape, {cut}};
    piece_value.type.shape = local_shape(id, place);
    if (piece_value.constant.defined()) {
      piece_value.constant = cut_piece(piece_value.constant, own);
    }
    if (piece_value.source.load) {
      piece_value.source.load = [load = piece_value.source.load, own] {
        return cut_piece(load(), own);
      };
    }
  }

  // Gradients of parameters whose optimizer state is cut go there at once, so that the norm reads
  // the same shard as the update.
  void set_goals() {
    for (const Node& node : graph_.nodes()) {
      if (node.region != Region::kUpdate) {
        continue;
      }
      for (const ValueId state : node.inputs) {
        if (state == kNoValue || graph_.value(state).kind != ValueKind::kOptimizerState ||
            !value(state).place || !value(state).place->is_shard()) {
          continue;
        }
        for (const ValueId other : node.inputs) {
          if (other != kNoValue && graph_.value(other).producer != kNoNode &&
              graph_.value(other).type.shape == graph_.value(state).type.shape) {
            goals_[static_cast<size_t>(other)] = value(state).place;
          }
        }
      }
    }
  }

  // ---- choosing --------------------------------------------------------------------------------

  double bytes_of(ValueId id) const { return static_cast<double>(graph_.value(id).type.bytes()); }

  double move_cost(ValueId id, const Place& to) {
    const std::optional<Place>& from = value(id).place;
    if (!from || same_for(id, *from, to) || (from->is_replicate() && !to.is_partial())) {
      return 0;
    }
    if (from->is_partial()) {
      return bytes_of(id) * (to.is_shard() ? 1 : 2);
    }
    return bytes_of(id) * (to.is_shard() ? 1.5 : 1);
  }

  // Where a tensor of the rule must be when `factor` is cut; none if it cannot be.
  static std::optional<Place> place_under(const TensorFactors& dims,
                                          const Factor& cut,
                                          int factor) {
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

  static bool occurs(const TensorFactors& dims, int factor) {
    return std::any_of(dims.begin(), dims.end(), [&](const DimFactors& dim) {
      return std::find(dim.begin(), dim.end(), factor) != dim.end();
    });
  }

  std::optional<Choice> cut_along(const Node& node, const ShardingRule& rule, int factor) {
    const Factor& cut = rule.factors[static_cast<size_t>(factor)];
    if (cut.size < axis_.degree ||
        (cut.kind != FactorKind::kParallel && cut.kind != FactorKind::kReduction)) {
      return std::nullopt;
    }
    Choice choice;
    choice.factor = factor;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      const std::optional<Place> place = node.inputs[i] == kNoValue
                                             ? Place::replicate()
                                             : place_under(rule.inputs[i], cut, factor);
      if (!place) {
        return std::nullopt;
      }
      choice.inputs.push_back(*place);
      choice.bytes += node.inputs[i] == kNoValue ? 0 : move_cost(node.inputs[i], *place);
    }
    choice.preference = -1;
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
  bool is_triggered(const Node& node, const ShardingRule& rule, int factor, bool heavy) {
    bool open_weight = false, in_open_weight = false, in_cut_input = false;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      const ValueId id = node.inputs[i];
      if (id == kNoValue) {
        continue;
      }
      const LocalValue& input = value(id);
      const bool here = occurs(rule.inputs[i], factor);
      if (!input.place && graph_.value(id).kind == ValueKind::kParameter) {
        open_weight = true;
        const bool row = !heavy && !rule.inputs[i].empty() && occurs({rule.inputs[i][0]}, factor) &&
                         rule.factors[static_cast<size_t>(factor)].kind == FactorKind::kReduction;
        in_open_weight = in_open_weight || (here && (heavy || row));
      } else if (input.place && input.place->is_shard() && here) {
        const DimFactors& dim = rule.inputs[i][static_cast<size_t>(input.place->dim)];
        in_cut_input = in_cut_input || (!dim.empty() && dim[0] == factor);
      } else if (input.place && input.place->is_partial() && here && options_.sequence_parallel) {
        const size_t sequence = rule.inputs[i].size() >= 3 ? 1 : 0;
        const DimFactors& dim = rule.inputs[i][sequence];
        in_cut_input =
            in_cut_input || (rule.inputs[i].size() >= 2 && dim.size() == 1 && dim[0] == factor);
      }
    }
    // A weight to be placed decides: never cut a matrix product along the samples instead.
    return heavy && open_weight ? in_open_weight : in_open_weight || in_cut_input;
  }

  // Partial sums of exactly one linear set of inputs pass through.
  std::optional<Choice> stay_partial(const Node& node, const ShardingRule& rule) {
    std::vector<int> partial;
    double in_bytes = 0, out_bytes = 0;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      const ValueId id = node.inputs[i];
      if (id == kNoValue) {
        continue;
      }
      const std::optional<Place>& place = value(id).place;
      const bool open_sum = !place && graph_.value(id).kind == ValueKind::kGradient;
      if ((place && place->is_partial() && place->reduction == ReductionKind::kSum) || open_sum) {
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
      choice.inputs.push_back(is_partial ? Place::partial(ReductionKind::kSum)
                                         : Place::replicate());
    }
    for (const ValueId output : node.outputs) {
      choice.outputs.push_back(Place::partial(ReductionKind::kSum));
      out_bytes += output == kNoValue ? 0 : bytes_of(output);
    }
    return out_bytes <= in_bytes ? std::optional<Choice>(choice) : std::nullopt;
  }

  Choice choose(const Node& node) {
    const OpDef& def = get_op(node.op_type);
    const OpContext op(graph_, node);
    const ShardingRule rule = def.sharding(op);
    if (const std::optional<Choice> linear = stay_partial(node, rule)) {
      return *linear;
    }
    Choice best;
    for (const ValueId input : node.inputs) {
      best.inputs.push_back(Place::replicate());
      best.bytes += input == kNoValue ? 0 : move_cost(input, Place::replicate());
    }
    best.outputs.assign(node.outputs.size(), Place::replicate());
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

  // ---- moving ----------------------------------------------------------------------------------

  // Appends a node of ours, placed in the pipeline like `like`.
  ValueId emit(const std::string& op_type,
               ValueId input,
               Attributes attributes,
               const Node& like,
               const std::string& name) {
    GraphBuilder builder(local_);
    builder.set_region(like.region);
    builder.set_source_index(like.source_index);
    if (like.forward_node != kNoNode) {
      builder.set_forward_node(nodes_[static_cast<size_t>(like.forward_node)]);
    }
    return builder.op(op_type, {input}, std::move(attributes), concat(name, ".", axis_.name));
  }

  std::vector<int64_t> sizes_of(ValueId id, const Place& place) const {
    std::vector<int64_t> sizes;
    for (int r = 0; r < axis_.degree; ++r) {
      sizes.push_back(shard_range(place.count, axis_.degree, r).size *
                      (extent(id, place.dim) / place.count));
    }
    return sizes;
  }

  ValueId slice(ValueId id, ValueId whole, const Place& to, const Node& reader) {
    const ShardRange range = shard_range(to.count, axis_.degree, axis_.index);
    const int64_t unit = extent(id, to.dim) / to.count;
    return emit("Slice",
                whole,
                {{"axes", std::vector<int64_t>{to.dim}},
                 {"starts", std::vector<int64_t>{range.offset * unit}},
                 {"ends", std::vector<int64_t>{(range.offset + range.size) * unit}},
                 {"steps", std::vector<int64_t>{1}}},
                reader,
                graph_.value(id).name + "/piece");
  }

  Attributes collective(ValueId id, const Place& cut) const {
    return {{"group", axis_.name},
            {"axis", int64_t{cut.dim}},
            {"sizes", sizes_of(id, cut)},
            {"index", int64_t{axis_.index}}};
  }

  ValueId move(ValueId id, const Place& to, const Node& reader) {
    const LocalValue& local = value(id);
    const Place from = *local.place;
    const std::string& name = graph_.value(id).name;
    if (from.is_replicate()) {
      TRAINRT_CHECK(to.is_shard(), "'", name, "' is whole and wanted as a partial sum");
      return slice(id, local.id, to, reader);
    }
    if (from.is_shard()) {
      const ValueId whole =
          emit("AllGather", local.id, collective(id, from), reader, name + "/all_gather");
      return to.is_shard() ? slice(id, whole, to, reader) : whole;
    }
    static const char* const kReductions[] = {"sum", "max", "min"};
    const std::string reduction = kReductions[static_cast<int>(from.reduction)];
    // A sum belongs to the stage that made it.
    const NodeId producer = graph_.value(id).producer;
    const Node& maker = producer != kNoNode && graph_.node(producer).region == reader.region
                            ? graph_.node(producer)
                            : reader;
    if (to.is_shard() && from.reduction == ReductionKind::kSum) {
      Attributes attributes = collective(id, to);
      attributes.set("reduction", reduction);
      return emit(
          "ReduceScatter", local.id, std::move(attributes), maker, name + "/reduce_scatter");
    }
    const ValueId sum = emit("AllReduce",
                             local.id,
                             {{"group", axis_.name}, {"reduction", reduction}},
                             maker,
                             name + "/all_reduce");
    return to.is_shard() ? slice(id, sum, to, reader) : sum;
  }

  // The local tensor of `id` placed as `to`, for `reader`.
  ValueId read(ValueId id, const Place& to, const Node& reader) {
    LocalValue& local = value(id);
    if (!local.place) {
      assign(id, to);
    }
    const std::optional<Place>& goal = goals_[static_cast<size_t>(id)];
    if (goal && local.place->is_partial()) {
      local = {move(id, *goal, reader), local.made, goal};
    }
    if (same_for(id, *local.place, to)) {
      return local.id;
    }
    // What is gathered is gathered again for the backward: it would be kept that long otherwise.
    const bool per_region = local.place->is_shard();
    const bool per_reader = per_region && is_persistent(graph_.value(id).kind);
    const auto key = std::make_tuple(id,
                                     static_cast<int>(to.kind),
                                     to.dim,
                                     to.count,
                                     per_region ? static_cast<int>(reader.region) : -1,
                                     per_reader ? reader.name : "");
    const auto [at, is_new] = moved_.try_emplace(key, kNoValue);
    if (is_new) {
      at->second = move(id, to, reader);
    }
    return at->second;
  }

  // ---- nodes -----------------------------------------------------------------------------------

  void append(NodeId id,
              const Choice& choice,
              const std::vector<ValueId>& inputs,
              Attributes attributes) {
    const Node& source = graph_.node(id);
    Node node = source;
    node.inputs = inputs;
    node.outputs.clear();
    node.attributes = std::move(attributes);
    if (source.forward_node != kNoNode) {
      node.forward_node = nodes_[static_cast<size_t>(source.forward_node)];
    }
    TensorTypes types;
    std::vector<bool> present;
    for (const ValueId input : inputs) {
      present.push_back(input != kNoValue);
      types.push_back(input == kNoValue ? TensorType{} : local_.value(input).type);
    }
    TensorTypes outputs = get_op(node.op_type).infer_types(OpContext(node, types, present, {}));
    outputs.resize(source.outputs.size());
    std::vector<std::string> names;
    for (const ValueId output : source.outputs) {
      names.push_back(output == kNoValue ? "" : graph_.value(output).name);
    }
    const NodeId local_id = local_.add_node(std::move(node), outputs, names);
    nodes_[static_cast<size_t>(id)] = local_id;
    for (size_t i = 0; i < source.outputs.size(); ++i) {
      ValueId& local_output = local_.node(local_id).outputs[i];
      const ValueId output = source.outputs[i];
      if (output == kNoValue) {
        local_output = kNoValue;
        continue;
      }
      const Shape wanted = local_shape(output, choice.outputs[i]);
      TRAINRT_CHECK(local_.value(local_output).type.shape == wanted,
                    "output ",
                    i,
                    " of '",
                    source.name,
                    "' (",
                    source.op_type,
                    ") is ",
                    shape_string(local_.value(local_output).type.shape),
                    " on this rank, wanted ",
                    shape_string(wanted));
      local_.value(local_output).batch_axis = graph_.value(output).batch_axis;
      value(output) = {local_output, local_output, choice.outputs[i]};
    }
  }

  void lower(NodeId id) {
    const Node& node = graph_.node(id);
    Choice choice;
    if (is_lowered(node)) {
      // A gradient with a goal is moved there before anything else is considered.
      for (const ValueId input : node.inputs) {
        if (input != kNoValue && goals_[static_cast<size_t>(input)] && value(input).place &&
            value(input).place->is_partial()) {
          read(input, *goals_[static_cast<size_t>(input)], node);
        }
      }
      choice = choose(node);
    } else {
      choice.inputs.assign(node.inputs.size(), Place::replicate());
      choice.outputs.assign(node.outputs.size(), Place::partial(ReductionKind::kSum));
    }
    std::vector<ValueId> inputs;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      const ValueId input = node.inputs[i];
      const bool own = input != kNoValue && !is_lowered(node) && value(input).place &&
                       value(input).place->is_partial();
      inputs.push_back(input == kNoValue ? kNoValue
                       : own             ? value(input).id
                                         : read(input, choice.inputs[i], node));
    }
    Attributes attributes = node.attributes;
    const OpDef& def = get_op(node.op_type);
    if (choice.factor >= 0 && def.localize) {
      const OpContext op(graph_, node);
      const int64_t full = def.sharding(op).factors[static_cast<size_t>(choice.factor)].size;
      const ShardRange range = shard_range(full, axis_.degree, axis_.index);
      attributes = def.localize(op, {choice.factor, range.offset, range.size, full});
    }
    append(id, choice, inputs, std::move(attributes));
    for (const ValueId output : node.outputs) {
      const std::optional<Place> pin = output == kNoValue ? std::nullopt : pin_of(output);
      if (pin && !same_for(output, *value(output).place, *pin)) {
        const ValueId moved = move(output, *pin, node);
        value(output) = {moved, value(output).made, pin};
      }
    }
  }

  ValueId result(ValueId id) {
    if (id == kNoValue) {
      return kNoValue;
    }
    const Node& maker = graph_.node(graph_.value(id).producer);
    return is_lowered(maker) ? read(id, Place::replicate(), maker) : value(id).made;
  }

  TrainingGraph finish() {
    TrainingGraph lowered;
    lowered.loss_sum = result(whole_.loss_sum);
    lowered.item_count = result(whole_.item_count);
    lowered.grad_norm = result(whole_.grad_norm);
    lowered.correct = result(whole_.correct);
    lowered.parameters = whole_.parameters;
    for (const StateUpdate& update : graph_.updates()) {
      const LocalValue& target = value(update.target);
      const NodeId producer = graph_.value(update.new_value).producer;
      ValueId new_value =
          producer == kNoNode ? value(update.new_value).id : value(update.new_value).made;
      if (producer != kNoNode && is_lowered(graph_.node(producer))) {
        new_value = read(
            update.new_value, target.place.value_or(Place::replicate()), graph_.node(producer));
      }
      local_.updates().push_back({target.id, new_value});
    }
    for (const ValueId output : graph_.outputs()) {
      const ValueId local_output = result(output);
      local_.outputs().push_back(local_output);
    }
    lowered.graph = std::move(local_);
    return lowered;
  }

  const TrainingGraph& whole_;
  const Graph& graph_;
  const SpmdOptions& options_;
  const MeshAxis axis_;
  std::map<std::string, TensorPiece>* pieces_;
  Graph local_;
  std::vector<LocalValue> values_;           // by whole value
  std::vector<std::optional<Place>> goals_;  // by whole value
  std::vector<NodeId> nodes_;                // whole node -> local node
  std::map<std::tuple<ValueId, int, int, int64_t, int, std::string>, ValueId> moved_;
};

}  // namespace

TrainingGraph lower_to_rank(const TrainingGraph& whole,
                            const SpmdOptions& options,
                            std::map<std::string, TensorPiece>* pieces) {
  return Lowering(whole, options, pieces).run();
}

}  // namespace trainrt
