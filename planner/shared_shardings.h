// How every class of block is split over the tensor group, when blocks share parameters: an
// embedding that is the head's matrix too lies one way only.
#pragma once

#include <vector>

#include "planner/model_blocks.h"
#include "planner/sharding_search.h"

namespace trainrt {

// By class. Each takes the least time by itself, but where classes would hold a parameter in
// different ways: then it lies so that all blocks together take least.
std::vector<BlockSharding> shard_blocks(const ModelBlocks& model, const ShardingRequest& request);

// Most ranks that a tensor of the model can be shared by; 1: none can.
int64_t most_tensor_ranks(const ModelBlocks& model);

}  // namespace trainrt
