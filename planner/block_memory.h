// What a block of a model needs while it runs, beyond what it leaves for its backward: the most
// bytes alive at once, node by node, as parallel/memory_plan would overlay them.
#pragma once

#include <functional>
#include <set>

#include "planner/block_finder.h"

namespace trainrt {

// The value whose storage `id` shares: a view of a tensor takes no room of its own.
ValueId storage_of(const Graph& graph, ValueId id);

struct BlockTransients {
  double forward = 0;
  double backward = 0;  // gradients on their way included, those of parameters until they are added
};

// `kept`: values (by storage) that are there anyway. `bytes` of a value, `workspace` of a node.
BlockTransients block_transients(const Graph& graph,
                                 const Block& block,
                                 const std::set<ValueId>& kept,
                                 const std::function<double(ValueId)>& bytes,
                                 const std::function<double(NodeId)>& workspace);

}  // namespace trainrt
