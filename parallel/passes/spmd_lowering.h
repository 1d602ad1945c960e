// One program for many ranks: rewrites a graph over whole tensors into one rank's graph over pieces
// of them, along one mesh axis, with the collectives that move pieces where they are wanted.
//
// Used for the tensor axis (all nodes) and for the data axis (the update alone: gradients arrive as
// partial sums, and ZeRO is nothing but sharded optimizer state).
#pragma once

#include <functional>
#include <map>
#include <string>

#include "graph/training_graph.h"
#include "parallel/mesh_axis.h"
#include "parallel/plan.h"

namespace trainrt {

struct SpmdOptions {
  MeshAxis axis;
  // Placements that are given, by tensor name. Persistent tensors not named here take what their
  // first reader finds best (tensor axis) or are replicated.
  std::map<std::string, Placement> pinned;
  // Weights of matrix products and embeddings are cut where nothing is pinned.
  bool cut_weights = false;
  // Partial sums are scattered along the sequence dim instead of being summed everywhere.
  bool sequence_parallel = false;
  // A partial sum is summed where it is first read, not where a non-linear operator wants it.
  bool sum_at_once = false;
  // Nodes to lower; others are this rank's already, and what they make is a partial sum. Empty:
  // all.
  std::function<bool(const Node&)> lowered;
};

// `pieces` receives how each persistent tensor that is cut lies in the whole (cuts are appended).
// `placements`, if given, receives where every persistent tensor came to lie, for the graphs of
// other micro-batch sizes to be pinned to: an accumulator holds the same kind of sum in all.
TrainingGraph lower_to_rank(const TrainingGraph& whole,
                            const SpmdOptions& options,
                            std::map<std::string, TensorPiece>* pieces,
                            std::map<std::string, Placement>* placements = nullptr);

}  // namespace trainrt
