// What operators with shape-like attributes share when they are cut into shards.
#pragma once

#include <string>

#include "graph/op_def.h"

namespace trainrt {

// The node's attributes with the ints attribute `name`, which lists the dims of output 0, cut to
// one shard: every dim in which the shard's factor is major-most shrinks in proportion.
Attributes localize_output_shape(const OpContext& op,
                                 const FactorShard& shard,
                                 const std::string& name);

}  // namespace trainrt
