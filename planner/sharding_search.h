// Which loop of each operator is split over the tensor group: the placement of every tensor of a
// block, found from the operators' sharding rules alone, so that any graph has one.
#pragma once

#include <map>
#include <vector>

#include "graph/op_def.h"
#include "parallel/plan.h"
#include "planner/block_finder.h"
#include "planner/cost_model.h"
#include "planner/model_profile.h"
#include "planner/node_facts.h"

namespace trainrt {

struct BlockSharding {
  std::map<NodeId, int> factor;  // of the operator's rule; -1: not split
  // Of values and parameters, in units as of cut_units(); absent: replicate.
  std::map<ValueId, Placement> placements;
  std::vector<TensorCollective> forward;  // collectives in forward and in backward
  std::vector<TensorCollective> backward;
  double seconds = 0;  // that were least: of compute and of collectives
};

struct ShardingRequest {
  const Graph* graph = nullptr;
  NodeFacts* facts = nullptr;                  // of `graph`
  const std::vector<bool>* trained = nullptr;  // by value: depends on a parameter
  const CostModel* cost = nullptr;
  const GroupLinks* group = nullptr;
  int degree = 1;
  bool sequence_parallel = false;
  bool split_at_any_price = false;  // as if collectives took no time
  // What a byte of a parameter costs that every rank holds: it is updated on each.
  double whole_seconds_per_byte = 1e-13;
  const BlockPins* pins = nullptr;  // optional
};

// Least time by beam search over the block's nodes; block borders are replicated, or split along
// dim 1 (the sequence) under sequence parallelism.
BlockSharding search_sharding(const ShardingRequest& request, const Block& block);

// Whether ranks can share what an operator does along the factor.
inline bool is_splittable(const Factor& factor) {
  return factor.kind == FactorKind::kParallel || factor.kind == FactorKind::kReduction;
}
// What an operator is split for though none of its inputs is yet.
inline bool is_weight_matrix(const Value& value) {
  return value.kind == ValueKind::kParameter && value.type.shape.size() >= 2;
}

// The operator's types when `factor` is split `degree` ways, on the rank with the most of it.
OpContext local_context(
    const Graph& graph, const Node& node, const ShardingRule& rule, int factor, int degree);

}  // namespace trainrt
