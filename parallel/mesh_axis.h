// One dimension of the mesh of ranks, and how tensors are cut along it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "graph/shape.h"
#include "graph/tensor.h"

namespace trainrt {

struct MeshAxis {
  std::string name;  // "data", "tensor"
  int degree = 1;
  int index = 0;  // this rank's
};

struct ShardRange {
  int64_t offset = 0;
  int64_t size = 0;
};

// Rank `index`'s part of `count` units: the first count % degree ranks have one more.
ShardRange shard_range(int64_t count, int degree, int index);

// One cut of a tensor: dim `dim` is `count` units (rows, heads ...) of equal size, and this piece
// has the units `range` of them.
struct PieceCut {
  int dim = 0;
  int64_t count = 0;
  ShardRange range;
};

// How a rank's persistent tensor lies in the whole one: cuts applied one after the other.
struct TensorPiece {
  Shape whole_shape;
  std::vector<PieceCut> cuts;
};

// This rank's piece of the whole tensor, and the reverse: writes `local` to its place in `whole`.
Tensor cut_piece(const Tensor& whole, const TensorPiece& piece);
void place_piece(Tensor& whole, const TensorPiece& piece, const Tensor& local);

}  // namespace trainrt
