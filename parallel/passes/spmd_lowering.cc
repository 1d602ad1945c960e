// A walk over the nodes in order. Every value has a placement along the axis: replicate, shard (of
// a dim, in units of a factor) or partial sum; parallel/passes/placement_choice says along which
// factor a node runs. Megatron's pattern follows: a weight that nobody has placed is cut along its
// output dim when the input is whole (column-parallel, no bytes), along its input dim when the
// input is cut there (row-parallel, no bytes, partial output), and the all-reduce appears where a
// non-linear operator wants the sum. Backward and update inherit the placements of the weights.
// Sums that meet in a linear operator stay partial and are reduced once.
//
// Resharding: replicate -> shard is a slice; shard -> replicate an all-gather; partial -> replicate
// an all-reduce; partial -> shard a reduce-scatter; shard -> a shard of another dim an all-to-all;
// shard -> other units of the same dim gathers and slices.
#include "parallel/passes/spmd_lowering.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include "graph/graph_builder.h"
#include "graph/op_def.h"
#include "parallel/passes/placement_choice.h"

namespace trainrt {

namespace {

struct LocalValue {
  ValueId id = kNoValue;
  std::optional<Place> place;  // none: persistent, nobody has placed it yet
  // As the node made it; `id` may have been moved since.
  ValueId made = kNoValue;
  std::optional<Place> made_place = {};
};

class Lowering {
 public:
  Lowering(const TrainingGraph& whole,
           const SpmdOptions& options,
           std::map<std::string, TensorPiece>* pieces,
           std::map<std::string, Placement>* placements)
      : whole_(whole),
        graph_(whole.graph),
        options_(options),
        axis_(options.axis),
        pieces_(pieces),
        placements_(placements),
        chooser_(graph_, options, [this](ValueId id) -> const std::optional<Place>& {
          return value(id).place;
        }) {
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

  int64_t extent(ValueId id, int dim) const {
    return graph_.value(id).type.shape.at(static_cast<size_t>(dim));
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
    const int64_t extent = pinned.type.shape[static_cast<size_t>(placement.dim)];
    return Place::shard(placement.dim, placement.units > 0 ? placement.units : extent);
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
      const bool open =
          options_.cut_weights && is_persistent(source.kind) && source.kind != ValueKind::kConstant;
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

  // ---- moving ----------------------------------------------------------------------------------

  // Appends a node of ours, placed in the pipeline like `like`.
  ValueId emit(const std::string& op_type,
               const std::vector<ValueId>& inputs,
               Attributes attributes,
               const Node& like,
               const std::string& name) {
    GraphBuilder builder(local_);
    builder.set_region(like.region);
    builder.set_source_index(like.source_index);
    if (like.forward_node != kNoNode) {
      builder.set_forward_node(nodes_[static_cast<size_t>(like.forward_node)]);
    }
    return builder.op(op_type, inputs, std::move(attributes), concat(name, ".", axis_.name));
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
                {whole},
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

  // A whole tensor as a term of a sum over the ranks: one has all of it, the others nothing. A
  // product with zero and not a Fill, so that the term still waits for its tensor, in its stage.
  ValueId as_term(ValueId id, ValueId whole, const Node& reader) {
    if (axis_.index == 0) {
      return whole;
    }
    const ValueId zero = GraphBuilder(local_).scalar(0, local_.value(whole).type.dtype);
    return emit("Mul", {whole, zero}, {}, reader, graph_.value(id).name + "/no_term");
  }

  ValueId move(ValueId id, const Place& to, const Node& reader) {
    const LocalValue& local = value(id);
    const Place from = *local.place;
    const std::string& name = graph_.value(id).name;
    if (from.is_replicate() && to.is_partial()) {
      return as_term(id, local.id, reader);
    }
    if (from.is_replicate()) {
      return slice(id, local.id, to, reader);
    }
    if (from.is_shard() && to.is_shard() && from.dim != to.dim) {
      Attributes attributes = collective(id, to);
      attributes.set("concat_axis", int64_t{from.dim});
      attributes.set("concat_sizes", sizes_of(id, from));
      return emit("AllToAll", {local.id}, std::move(attributes), reader, name + "/all_to_all");
    }
    if (from.is_shard()) {
      const ValueId whole =
          emit("AllGather", {local.id}, collective(id, from), reader, name + "/all_gather");
      return to.is_shard()     ? slice(id, whole, to, reader)
             : to.is_partial() ? as_term(id, whole, reader)
                               : whole;
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
          "ReduceScatter", {local.id}, std::move(attributes), maker, name + "/reduce_scatter");
    }
    const ValueId sum = emit("AllReduce",
                             {local.id},
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
      local.id = move(id, *goal, reader);
      local.place = goal;
    }
    if (chooser_.same(id, *local.place, to)) {
      return local.id;
    }
    // What is gathered is gathered again for the backward: it would be kept that long otherwise.
    // What a micro-batch has made is nothing for the update.
    constexpr int kOncePerStep = -1, kPerMicroBatch = -2;
    const bool per_region = local.place->is_shard();
    const bool per_reader = per_region && is_persistent(graph_.value(id).kind);
    const auto key = std::make_tuple(id,
                                     static_cast<int>(to.kind),
                                     to.dim,
                                     to.count,
                                     per_region ? static_cast<int>(reader.region)
                                     : reader.region == Region::kUpdate ? kOncePerStep
                                                                        : kPerMicroBatch,
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
      value(output) = {local_output, choice.outputs[i], local_output, choice.outputs[i]};
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
      choice = chooser_.choose(node);
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
      if (pin && !chooser_.same(output, *value(output).place, *pin)) {
        value(output).id = move(output, *pin, node);
        value(output).place = pin;
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
      const LocalValue& made = value(update.new_value);
      ValueId new_value = producer == kNoNode ? made.id : made.made;
      const Place wanted = target.place.value_or(Place::replicate());
      if (producer != kNoNode && is_lowered(graph_.node(producer)) &&
          !chooser_.same(update.new_value, *made.made_place, wanted)) {
        new_value = read(update.new_value, wanted, graph_.node(producer));
      }
      local_.updates().push_back({target.id, new_value});
    }
    for (const ValueId output : graph_.outputs()) {
      const ValueId local_output = result(output);
      local_.outputs().push_back(local_output);
    }
    for (ValueId id = 0; placements_ != nullptr && id < graph_.num_values(); ++id) {
      const ValueKind kind = graph_.value(id).kind;
      if (is_persistent(kind) && kind != ValueKind::kConstant) {
        const Place place = value(id).place.value_or(Place::replicate());
        (*placements_)[graph_.value(id).name] = {place.kind, place.dim, place.count};
      }
    }
    lowered.graph = std::move(local_);
    return lowered;
  }

  const TrainingGraph& whole_;
  const Graph& graph_;
  const SpmdOptions& options_;
  const MeshAxis axis_;
  std::map<std::string, TensorPiece>* pieces_;
  std::map<std::string, Placement>* placements_;
  PlacementChooser chooser_;
  Graph local_;
  std::vector<LocalValue> values_;           // by whole value
  std::vector<std::optional<Place>> goals_;  // by whole value
  std::vector<NodeId> nodes_;                // whole node -> local node
  std::map<std::tuple<ValueId, int, int, int64_t, int, std::string>, ValueId> moved_;
};

}  // namespace

TrainingGraph lower_to_rank(const TrainingGraph& whole,
                            const SpmdOptions& options,
                            std::map<std::string, TensorPiece>* pieces,
                            std::map<std::string, Placement>* placements) {
  return Lowering(whole, options, pieces, placements).run();
}

}  // namespace trainrt
