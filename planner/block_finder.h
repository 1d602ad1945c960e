// Cuts a model's forward pass where one activation alone is alive, and tells which pieces are
// copies of each other: repeated layers are found by structure, priced once and placed once.
#pragma once

#include <string>
#include <vector>

#include "graph/graph.h"

namespace trainrt {

struct Block {
  std::vector<NodeId> forward;   // in order
  std::vector<NodeId> backward;  // nodes of its gradients, in order
  ValueId input = kNoValue;      // the one activation that comes from the block before
  ValueId output = kNoValue;     // ... that goes to the next
  int block_class = 0;           // blocks of one class are structurally equal
};

struct BlockList {
  std::vector<Block> blocks;
  int num_classes = 0;
  std::vector<int> representative;  // by class: the first block of it
  std::vector<bool> trained;        // by value: depends on a parameter
};

BlockList find_blocks(const Graph& graph);

}  // namespace trainrt
