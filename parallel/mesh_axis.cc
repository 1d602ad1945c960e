#include "parallel/mesh_axis.h"

#include <algorithm>
#include <cstring>

namespace trainrt {

namespace {

// Element ranges of the piece along each dim of the whole tensor.
std::vector<ShardRange> box_of(const TensorPiece& piece) {
  std::vector<ShardRange> box;
  for (const int64_t extent : piece.whole_shape) {
    box.push_back({0, extent});
  }
  for (const PieceCut& cut : piece.cuts) {
    ShardRange& range = box.at(static_cast<size_t>(cut.dim));
    const int64_t unit = cut.count == 0 ? 0 : range.size / cut.count;
    range = {range.offset + cut.range.offset * unit, cut.range.size * unit};
  }
  return box;
}

// Calls copy(offset in whole, offset in piece, bytes) for each run of contiguous bytes.
template <typename Copy>
void for_each_run(const std::vector<ShardRange>& box,
                  const Shape& whole,
                  int64_t element_bytes,
                  Copy&& copy) {
  if (whole.empty()) {
    copy(0, 0, element_bytes);
    return;
  }
  const size_t last = whole.size() - 1;
  int64_t rows = 1;
  for (size_t d = 0; d < last; ++d) {
    rows *= box[d].size;
  }
  const Shape strides = row_major_strides(whole);
  const int64_t run = box[last].size * element_bytes;
  for (int64_t row = 0; row < rows && run > 0; ++row) {
    int64_t rest = row, from = box[last].offset;
    for (size_t d = last; d-- > 0;) {
      from += (box[d].offset + rest % box[d].size) * strides[d];
      rest /= box[d].size;
    }
    copy(from * element_bytes, row * run, run);
  }
}

}  // namespace

ShardRange shard_range(int64_t count, int degree, int index) {
  const int64_t base = count / degree, more = count % degree;
  return {index * base + std::min<int64_t>(index, more), base + (index < more ? 1 : 0)};
}

Tensor cut_piece(const Tensor& whole, const TensorPiece& piece) {
  TRAINRT_CHECK(whole.shape() == piece.whole_shape,
                "a piece of ",
                shape_string(piece.whole_shape),
                " is cut from ",
                shape_string(whole.shape()));
  const std::vector<ShardRange> box = box_of(piece);
  Shape shape;
  for (const ShardRange& range : box) {
    shape.push_back(range.size);
  }
  Tensor local(whole.dtype(), shape);
  for_each_run(box,
               piece.whole_shape,
               dtype_bytes(whole.dtype()),
               [&](int64_t from, int64_t to, int64_t bytes) {
                 std::memcpy(local.raw() + to, whole.raw() + from, static_cast<size_t>(bytes));
               });
  return local;
}

void place_piece(Tensor& whole, const TensorPiece& piece, const Tensor& local) {
  for_each_run(box_of(piece),
               piece.whole_shape,
               dtype_bytes(whole.dtype()),
               [&](int64_t to, int64_t from, int64_t bytes) {
                 std::memcpy(whole.raw() + to, local.raw() + from, static_cast<size_t>(bytes));
               });
}

}  // namespace trainrt
