// Cuts a model's forward pass where one activation alone is alive, and tells which pieces are
// copies of each other: repeated layers are found by structure, priced once and placed once.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "parallel/plan.h"

namespace trainrt {

struct Block {
  std::vector<NodeId> forward;   // in order
  std::vector<NodeId> backward;  // nodes of its gradients, in order
  ValueId input = kNoValue;      // the one activation that comes from the block before
  ValueId output = kNoValue;     // ... that goes to the next
  // Where a plan demands a cut between: the other activations alive there.
  std::vector<ValueId> also_crossing;
  int block_class = 0;  // blocks of one class are structurally equal

  NodeId node(size_t place) const {  // forward, then backward
    return place < forward.size() ? forward[place] : backward[place - forward.size()];
  }
};

struct BlockList {
  std::vector<Block> blocks;
  int num_classes = 0;
  std::vector<int> representative;  // by class: the first block of it
  std::vector<bool> trained;        // by value: depends on a parameter
};

// What a given plan demands of the blocks. Blocks for which it demands different things are of
// different classes.
struct BlockPins {
  std::vector<int> cuts;  // source indices that a block has to begin with, ascending
  std::map<std::string, Placement> placements;  // of tensors over the tensor group, by name
  std::map<std::string, int64_t> padding;       // of nodes, by name
};

BlockList find_blocks(const Graph& graph, const BlockPins& pins = {});

// Blocks of another form of a graph (in another precision), by where those of the first end and
// what class they are of: a node is in the first block that does not end before its source.
BlockList blocks_at(const Graph& graph,
                    const std::vector<int>& last_source,
                    const std::vector<int>& classes);

}  // namespace trainrt
