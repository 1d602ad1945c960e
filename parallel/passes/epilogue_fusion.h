// Lets a matrix product add what is added to it: MatMul, Add -> MatMulAdd.
//
// On one rank's graph, after everything else: sharding looks at product and addition apart (a bias
// is added once, after the products of the ranks are summed), and the two must run in one phase.
// On a CPU the bits stay: the kernel adds to the finished product, rounded as if it had been stored
// in between.
#pragma once

#include "parallel/rank_graph.h"

namespace trainrt {

void fuse_epilogues(RankGraph& rank_graph, Backend backend);

}  // namespace trainrt
