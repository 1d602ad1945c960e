// Lets a matrix product do what follows it: MatMul, Add -> MatMulAdd. On GPUs, where the library
// can, MatMul, ReluGrad -> MatMulReluGrad too, and the sum of a bias's gradient goes with the
// product of its weight's (MatMulWeightBiasGrad).
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
