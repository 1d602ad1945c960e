// Makes one node of element-wise operators that follow each other (graph/fused_elementwise.h), on
// GPUs: what the inner ones make stays in registers, and one kernel is launched for all.
//
// On one rank's graph, after everything else: the operators must run in one phase and give tensors
// of one shape. What a matrix product takes along (epilogue_fusion, graph/kernel_pair.h) is left to
// it. Communication keeps its order, whatever other ranks fuse. The bits stay: a result that is not
// stored any more is rounded as if it were.
#pragma once

#include <vector>

#include "graph/training_graph.h"
#include "parallel/program.h"

namespace trainrt {

// `phases` are ordered; their nodes' numbers and order change with the graph's.
void fuse_elementwise(TrainingGraph& local, std::vector<Phase>& phases, Backend backend);

}  // namespace trainrt
