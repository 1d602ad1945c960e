// What a block keeps for its backward, and what runs again for it, under each kind of recompute.
#pragma once

#include <array>
#include <map>
#include <set>
#include <string>

#include "graph/op_def.h"
#include "planner/block_finder.h"
#include "planner/model_blocks.h"

namespace trainrt {

struct KeptValues {
  std::set<ValueId> whole;      // without recompute; by storage
  std::set<ValueId> selective;  // what is not made again by nodes bound by memory
  std::set<NodeId> rerun;       // these
};
KeptValues kept_values(const Graph& graph, const Block& block);

// Bytes of a block on one tensor rank.
struct BlockBytes {
  std::array<double, 3> kept = {0, 0, 0};  // by RecomputeMode, of one micro-batch
  double transient = 0;                    // most alive at once beside them
  double split = 0;  // of gradients that weight gradients read, where these are put off
};

// How the bytes of a class's tensors are told.
struct BlockBytesRequest {
  const ModelBlocks* model = nullptr;
  // Over the tensor group, by name; `known`: tells all names for which an absent one is replicated.
  // Tensors of other names are split as what they are made from.
  const std::map<std::string, Placement>* placements = nullptr;
  const Graph* known = nullptr;
  int tensor_parallel = 1;
  double float32_scale = 1;            // of float32 tensors, where 16 bits stand for them
  const DeviceSpec* device = nullptr;  // for workspaces; null: none are counted
};
BlockBytes block_bytes(const BlockBytesRequest& request, int block_class);

// The factor of its rule along which a node is split whose inputs are placed so: that of the
// largest of them. -1: none.
int inherited_factor(const Graph& graph,
                     const Node& node,
                     const std::map<ValueId, Placement>& placements,
                     int tensor_parallel,
                     const ShardingRule& rule);

}  // namespace trainrt
