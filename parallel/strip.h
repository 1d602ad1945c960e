// Several pieces of memory that count as one: the tensors of a bucket, one after the other, as a
// transport sees them that cuts them into packets of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "parallel/communicator.h"

namespace trainrt {

class Strip {
 public:
  // Continues the last piece where the memory does.
  void add(void* data, int64_t bytes);
  void add(const void* data, int64_t bytes) { add(const_cast<void*>(data), bytes); }

  int64_t bytes() const { return ends_.empty() ? 0 : ends_.back(); }
  bool is_one_piece() const { return pieces_.size() <= 1; }

  // Where bytes [at, at + bytes) lie; null when not in one piece.
  std::byte* find(int64_t at, int64_t bytes) const;
  // The parts of [at, at + bytes) in order: where each lies, and how far from `at` it begins.
  void visit(int64_t at,
             int64_t bytes,
             const std::function<void(std::byte* data, int64_t from, int64_t bytes)>& fn) const;
  // Copies [at, at + bytes) to `to`, or from `from`.
  void read(int64_t at, int64_t bytes, void* to) const;
  void write(int64_t at, int64_t bytes, const void* from) const;

 private:
  std::vector<std::byte*> pieces_;
  std::vector<int64_t> ends_;  // of the pieces, in the strip
};

Strip strip_of(const std::vector<WholeTensor>& tensors, int64_t item_bytes);
// Of tensors that are cut over `num_ranks`, the own segments; and the whole ones, sorted by rank:
// segment 0 of all tensors comes first.
Strip segments_of(const std::vector<CutTensor>& tensors,
                  size_t rank,
                  int64_t item_bytes,
                  bool input);
Strip wholes_of(const std::vector<CutTensor>& tensors, int64_t item_bytes, bool input);
// Elements of all tensors together for each rank.
std::vector<int64_t> counts_of(const std::vector<CutTensor>& tensors, size_t num_ranks);

}  // namespace trainrt
