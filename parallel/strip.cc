#include "parallel/strip.h"

#include <algorithm>
#include <cstring>

namespace trainrt {

namespace {

std::byte* side(const CutTensor& tensor, bool input) {
  return static_cast<std::byte*>(input ? const_cast<void*>(tensor.input) : tensor.output);
}

}  // namespace

void Strip::add(void* data, int64_t bytes) {
  std::byte* const begin = static_cast<std::byte*>(data);
  const int64_t start = pieces_.size() > 1 ? ends_[ends_.size() - 2] : 0;  // of the last piece
  if (bytes > 0 && !pieces_.empty() && pieces_.back() + (ends_.back() - start) == begin) {
    ends_.back() += bytes;
  } else if (bytes > 0) {
    ends_.push_back(this->bytes() + bytes);
    pieces_.push_back(begin);
  }
}

std::byte* Strip::find(int64_t at, int64_t bytes) const {
  std::byte* found = nullptr;
  visit(at, bytes, [&](std::byte* data, int64_t, int64_t part) {
    found = part == bytes ? data : nullptr;
  });
  return found;
}

void Strip::visit(
    int64_t at,
    int64_t bytes,
    const std::function<void(std::byte* data, int64_t from, int64_t bytes)>& fn) const {
  if (bytes == 0) {
    return;
  }
  const int64_t end = at + bytes;
  for (size_t i =
           static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), at) - ends_.begin());
       i < ends_.size();
       ++i) {
    const int64_t begin = i == 0 ? 0 : ends_[i - 1];
    if (begin >= end) {
      return;
    }
    const int64_t first = std::max(at, begin), last = std::min(end, ends_[i]);
    fn(pieces_[i] + (first - begin), first - at, last - first);
  }
}

void Strip::read(int64_t at, int64_t bytes, void* to) const {
  visit(at, bytes, [to](const std::byte* data, int64_t from, int64_t part) {
    std::memcpy(static_cast<std::byte*>(to) + from, data, static_cast<size_t>(part));
  });
}

void Strip::write(int64_t at, int64_t bytes, const void* from) const {
  visit(at, bytes, [from](std::byte* data, int64_t begin, int64_t part) {
    const std::byte* source = static_cast<const std::byte*>(from) + begin;
    if (source != data) {
      std::memcpy(data, source, static_cast<size_t>(part));
    }
  });
}

Strip strip_of(const std::vector<WholeTensor>& tensors, int64_t item_bytes) {
  Strip strip;
  for (const WholeTensor& tensor : tensors) {
    strip.add(tensor.data, tensor.count * item_bytes);
  }
  return strip;
}

Strip segments_of(const std::vector<CutTensor>& tensors,
                  size_t rank,
                  int64_t item_bytes,
                  bool input) {
  Strip strip;
  for (const CutTensor& tensor : tensors) {
    strip.add(side(tensor, input), tensor.counts.at(rank) * item_bytes);
  }
  return strip;
}

Strip wholes_of(const std::vector<CutTensor>& tensors, int64_t item_bytes, bool input) {
  const size_t num_ranks = tensors.empty() ? 0 : tensors[0].counts.size();
  std::vector<int64_t> begins(tensors.size(), 0);  // of the next segment
  Strip strip;
  for (size_t r = 0; r < num_ranks; ++r) {
    for (size_t t = 0; t < tensors.size(); ++t) {
      const int64_t bytes = tensors[t].counts.at(r) * item_bytes;
      strip.add(side(tensors[t], input) + begins[t], bytes);
      begins[t] += bytes;
    }
  }
  return strip;
}

std::vector<int64_t> counts_of(const std::vector<CutTensor>& tensors, size_t num_ranks) {
  std::vector<int64_t> counts(num_ranks, 0);
  for (const CutTensor& tensor : tensors) {
    for (size_t r = 0; r < num_ranks; ++r) {
      counts[r] += tensor.counts.at(r);
    }
  }
  return counts;
}

}  // namespace trainrt
