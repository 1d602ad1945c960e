// Pads the dims of matrix products and convolutions to multiples that the matrix units want: zeros
// are appended to the operands, and what they make is cut off the result again, so that no padded
// element reaches a norm, a loss, a gradient or a checkpoint.
//
// Any operator that has products (OpDef::cost) and is linear in each of its inputs can be padded;
// which dims, its sharding rule says: appending zeros to a factor leaves the other results as they
// are, whether the factor is parallel or summed over.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "graph/cost.h"
#include "graph/op_def.h"
#include "graph/training_graph.h"

namespace trainrt {

// What padding one node would mean.
struct NodePadding {
  std::vector<Shape> inputs;  // padded shapes, as the operands have them where nothing changes
  Shape output;
  bool any = false;                  // some dim is no multiple yet
  int64_t copied_bytes = 0;          // read and written by the pads and the cut
  std::vector<MatmulDims> products;  // of the padded node
};

// The innermost dims that can be cut, of each operand and of the result, as multiples of
// `multiple`. `any` is false for operators that cannot be padded.
NodePadding node_padding(const OpContext& op, int64_t multiple);
// Of an operator with products, whose rule is known.
NodePadding node_padding(const OpContext& op, const ShardingRule& rule, int64_t multiple);

// Pads the nodes named in `multiples` (Plan::padding). A name that the graph does not have belongs
// to another rank. Returns the graph unchanged when nothing is to be padded.
TrainingGraph pad_products(TrainingGraph graph, const std::map<std::string, int64_t>& multiples);

}  // namespace trainrt
