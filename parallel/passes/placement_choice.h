// How one node of a graph is cut over the ranks of a mesh axis: the placements of tensors, and the
// choice among the factors of the node's sharding rule.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "graph/op_def.h"
#include "parallel/mesh_axis.h"
#include "parallel/passes/spmd_lowering.h"

namespace trainrt {

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

// Do `a` and `b` cut a dim of `extent` elements at the same places, whatever their units are
// called?
bool same_place(const Place& a, const Place& b, int64_t extent, int degree);

// A way to run one node: along one factor (-1: none), and the placements that follow.
struct Choice {
  int factor = -1;
  std::vector<Place> inputs;
  std::vector<Place> outputs;
  double bytes = 0;    // moved for its inputs
  int preference = 0;  // lower is better among equals
};

// Bytes of an all-to-all relative to those of the tensor, against 1 for an all-gather and 2 for an
// all-reduce: it moves a part of the tensor only, but has to be packed and unpacked.
inline constexpr double kAllToAllCost = 1.5;

// Chooses for the nodes of one graph, in order. `place_of` tells where a value lies so far; none:
// persistent, and nobody has placed it yet.
class PlacementChooser {
 public:
  using PlaceOf = std::function<const std::optional<Place>&(ValueId)>;
  PlacementChooser(const Graph& graph, const SpmdOptions& options, PlaceOf place_of)
      : graph_(graph), options_(options), place_of_(std::move(place_of)) {}

  // Equal cuts of the value `id`.
  bool same(ValueId id, const Place& a, const Place& b) const;
  // The cheapest way to run the node.
  Choice choose(const Node& node) const;

 private:
  Choice whole(const Node& node) const;
  std::optional<Choice> cut_along(const Node& node, const ShardingRule& rule, int factor) const;
  std::optional<Choice> stay_partial(const Node& node, const ShardingRule& rule) const;
  std::optional<Choice> as_table(const Node& node, const ShardingRule& rule) const;
  bool is_triggered(const Node& node, const ShardingRule& rule, int factor, bool heavy) const;
  double bytes_of(ValueId id) const { return static_cast<double>(graph_.value(id).type.bytes()); }
  double move_cost(ValueId id, const Place& to) const;

  const Graph& graph_;
  const SpmdOptions& options_;
  PlaceOf place_of_;
};

}  // namespace trainrt
