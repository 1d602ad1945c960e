// Greedy by size (Pisarchyk & Lee, arXiv 2001.03288, section 4.3): tensors are placed from the
// largest to the smallest, each into the smallest gap that is free during its whole life, or on
// top.
//
// The cost is in finding what is placed already and alive at the same time. Placed tensors are kept
// per block of instants: each is entered in the blocks its life touches, sorted by offset, so a
// short-lived tensor looks only at its neighbours in time. Long-lived tensors (a stash) are entered
// in many blocks but are few; a query over many blocks walks one list of all tensors instead.
#include "parallel/assign_offsets.h"

#include <algorithm>
#include <numeric>

namespace trainrt {

OffsetAssigner::OffsetAssigner(int num_instants)
    : block_(std::max(16, num_instants / 256)),
      blocks_(static_cast<size_t>(num_instants / block_ + 1)) {}

void OffsetAssigner::insert(const Lifetime& life, int64_t offset) {
  const Placed placed{offset, offset + align(life.bytes), life.first_use, life.last_use};
  const auto enter = [&](std::vector<Placed>& list) {
    const auto at = std::upper_bound(
        list.begin(), list.end(), offset, [](int64_t o, const Placed& p) { return o < p.begin; });
    list.insert(at, placed);
  };
  enter(all_);
  for (int b = life.first_use / block_; b <= life.last_use / block_; ++b) {
    enter(blocks_[static_cast<size_t>(b)]);
  }
  extent_ = std::max(extent_, placed.end);
}

void OffsetAssigner::overlapping(const Lifetime& life, std::vector<Placed>* found) const {
  found->clear();
  const int first = life.first_use / block_, last = life.last_use / block_;
  const std::vector<Placed>& list = first == last ? blocks_[static_cast<size_t>(first)] : all_;
  for (const Placed& placed : list) {
    if (placed.first_use <= life.last_use && placed.last_use >= life.first_use) {
      found->push_back(placed);
    }
  }
}

int64_t OffsetAssigner::place(const Lifetime& life, int64_t barrier) {
  overlapping(life, &scratch_);
  const int64_t bytes = align(life.bytes);
  int64_t best = -1, best_gap = 0, top = 0;
  const auto consider = [&](int64_t begin, int64_t end) {
    if (end - begin >= bytes && (best < 0 || end - begin < best_gap)) {
      best = begin;
      best_gap = end - begin;
    }
  };
  const auto gap = [&](int64_t begin, int64_t end) {
    if (begin < barrier && barrier < end) {
      consider(begin, barrier);
      consider(barrier, end);
    } else {
      consider(begin, end);
    }
  };
  for (const Placed& placed : scratch_) {
    if (placed.begin > top) {
      gap(top, placed.begin);
    }
    top = std::max(top, placed.end);
  }
  if (best < 0) {
    // Below the barrier there may be room at the top too.
    best = top < barrier && top + bytes > barrier ? barrier : top;
  }
  insert(life, best);
  return best;
}

std::vector<size_t> largest_first(const std::vector<Lifetime>& lifetimes) {
  std::vector<size_t> order(lifetimes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const Lifetime &x = lifetimes[a], &y = lifetimes[b];
    if (x.bytes != y.bytes) {
      return x.bytes > y.bytes;
    }
    return x.last_use - x.first_use > y.last_use - y.first_use;
  });
  return order;
}

int64_t assign_offsets(const std::vector<Lifetime>& lifetimes, std::vector<int64_t>* offsets) {
  int last = 0;
  for (const Lifetime& life : lifetimes) {
    TRAINRT_CHECK(life.bytes >= 0 && 0 <= life.first_use && life.first_use <= life.last_use,
                  "a lifetime of ",
                  life.bytes,
                  " bytes in [",
                  life.first_use,
                  ", ",
                  life.last_use,
                  "]");
    last = std::max(last, life.last_use);
  }
  OffsetAssigner assigner(last + 1);
  offsets->assign(lifetimes.size(), 0);
  for (const size_t i : largest_first(lifetimes)) {
    if (lifetimes[i].bytes > 0) {
      (*offsets)[i] = assigner.place(lifetimes[i]);
    }
  }
  return assigner.extent();
}

}  // namespace trainrt
