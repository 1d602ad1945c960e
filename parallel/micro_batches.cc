#include "parallel/micro_batches.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "parallel/mesh_axis.h"

namespace trainrt {

namespace {

// `total` units over `weights` by largest remainder; ties go to the later rank.
std::vector<int64_t> largest_remainder(int64_t total, const std::vector<double>& weights) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> units;
  std::vector<double> remainders;
  int64_t left = total;
  for (const double weight : weights) {
    const double exact = static_cast<double>(total) * weight / sum;
    // A share that is whole but for rounding (3 * 1/3 ...) is whole.
    const double near = std::nearbyint(exact);
    const double whole =
        std::abs(exact - near) < 1e-9 * std::max(1.0, near) ? near : std::floor(exact);
    units.push_back(static_cast<int64_t>(whole));
    remainders.push_back(std::max(0.0, exact - whole));
    left -= units.back();
  }
  std::vector<size_t> order(weights.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const bool tie = std::abs(remainders[a] - remainders[b]) < 1e-9;
    return tie ? a > b : remainders[a] > remainders[b];
  });
  for (size_t i = 0; left > 0; i = (i + 1) % order.size()) {
    if (weights[order[i]] > 0) {
      ++units[order[i]];
      --left;
    }
  }
  return units;
}

// One weight per data rank, checked.
std::vector<double> share_weights(int64_t global_batch,
                                  int degree,
                                  int64_t micro_batch_size,
                                  const std::vector<double>& shares) {
  TRAINRT_REQUIRE(global_batch >= 1 && degree >= 1 && micro_batch_size >= 0,
                  kInvalidArgument,
                  "cannot cut a batch of ",
                  global_batch,
                  " samples over ",
                  degree,
                  " data ranks in micro-batches of ",
                  micro_batch_size);
  TRAINRT_REQUIRE(shares.empty() || static_cast<int>(shares.size()) == degree,
                  kInvalidArgument,
                  "--shares has ",
                  shares.size(),
                  " entries for ",
                  degree,
                  " data ranks; give one per data rank");
  double sum = 0;
  for (const double weight : shares) {
    TRAINRT_REQUIRE(std::isfinite(weight) && weight >= 0,
                    kInvalidArgument,
                    "a share is ",
                    weight,
                    ", wanted at least 0");
    sum += weight;
  }
  TRAINRT_REQUIRE(shares.empty() || sum > 0,
                  kInvalidArgument,
                  "all shares are 0; give one data rank some samples");
  return shares.empty() ? std::vector<double>(static_cast<size_t>(degree), 1.0) : shares;
}

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// The shards of which a run of samples consists. Throws when it cuts one.
ShardRange shards_within(const Plan& plan, int data_rank, int64_t first, int64_t num_samples) {
  const int count = static_cast<int>(num_shards(plan));
  ShardRange range;
  for (int s = 0; s < count; ++s) {
    const ShardRange shard = shard_range(plan.global_batch, count, s);
    const bool inside = shard.offset >= first && shard.offset + shard.size <= first + num_samples;
    const bool outside = shard.offset >= first + num_samples || shard.offset + shard.size <= first;
    TRAINRT_REQUIRE(inside || outside,
                    kInvalidArgument,
                    "data rank ",
                    data_rank,
                    " has the samples from ",
                    first,
                    " to ",
                    first + num_samples,
                    " of the step, which cut logical shard ",
                    s,
                    " (",
                    shard.size,
                    " samples from ",
                    shard.offset,
                    "): under reduction exact shares are whole shards");
    if (inside) {
      range.offset = range.size == 0 ? s : range.offset;
      ++range.size;
    }
  }
  return range;
}

void append_cuts(std::vector<MicroBatchCut>& cuts,
                 int64_t first,
                 int64_t num_samples,
                 int64_t micro_batch_size,
                 int64_t shard) {
  for (int64_t begin = 0; begin < num_samples; begin += micro_batch_size) {
    cuts.push_back({first + begin, std::min(micro_batch_size, num_samples - begin), shard});
  }
}

const DataShare& share_of(const Plan& plan, int data_rank) {
  for (const DataShare& share : plan.shares) {
    if (share.data_rank == data_rank) {
      return share;
    }
  }
  TRAINRT_FAIL(kInvalidArgument, "the plan's shares leave out data rank ", data_rank);
}

// The cut, whatever num_micro_batches says.
std::vector<MicroBatchCut> cut_share(const Plan& plan, int data_rank) {
  int64_t first = 0;
  for (int d = 0; d < data_rank; ++d) {
    first += share_of(plan, d).num_samples;
  }
  const DataShare& share = share_of(plan, data_rank);
  std::vector<MicroBatchCut> cuts;
  if (share.num_samples == 0) {
    return cuts;
  }
  TRAINRT_REQUIRE(share.micro_batch_size > 0,
                  kInvalidArgument,
                  "data rank ",
                  data_rank,
                  " has ",
                  share.num_samples,
                  " samples in micro-batches of ",
                  share.micro_batch_size);
  if (!plan.exact_reduction) {
    append_cuts(cuts, first, share.num_samples, share.micro_batch_size, 0);
    return cuts;
  }
  const int count = static_cast<int>(num_shards(plan));
  const ShardRange own = shards_within(plan, data_rank, first, share.num_samples);
  for (int64_t s = own.offset; s < own.offset + own.size; ++s) {
    const ShardRange shard = shard_range(plan.global_batch, count, static_cast<int>(s));
    append_cuts(cuts, shard.offset, shard.size, share.micro_batch_size, s);
  }
  return cuts;
}

}  // namespace

std::vector<DataShare> make_shares(int64_t global_batch,
                                   int degree,
                                   int64_t micro_batch_size,
                                   const std::vector<double>& shares) {
  const std::vector<double> weights = share_weights(global_batch, degree, micro_batch_size, shares);
  const int64_t unit = micro_batch_size == 0 ? 1 : micro_batch_size;
  const std::vector<int64_t> units = largest_remainder(ceil_div(global_batch, unit), weights);
  std::vector<DataShare> result;
  int64_t left = global_batch;
  for (int rank = 0; rank < degree; ++rank) {
    DataShare share;
    share.data_rank = rank;
    share.num_samples = std::min(left, units[static_cast<size_t>(rank)] * unit);
    share.micro_batch_size =
        micro_batch_size == 0 ? share.num_samples : std::min(micro_batch_size, share.num_samples);
    share.num_micro_batches =
        share.num_samples == 0 ? 0 : ceil_div(share.num_samples, share.micro_batch_size);
    left -= share.num_samples;
    result.push_back(share);
  }
  return result;
}

std::vector<DataShare> make_sized_shares(int64_t global_batch,
                                         const std::vector<int64_t>& micro_batch_sizes,
                                         const std::vector<double>& shares) {
  std::vector<DataShare> result =
      make_shares(global_batch, static_cast<int>(micro_batch_sizes.size()), 0, shares);
  for (DataShare& share : result) {
    const int64_t size = micro_batch_sizes[static_cast<size_t>(share.data_rank)];
    TRAINRT_CHECK(size >= 1, "data rank ", share.data_rank, " has no micro-batch size");
    share.micro_batch_size = std::min(size, share.num_samples);
    share.num_micro_batches =
        share.num_samples == 0 ? 0 : ceil_div(share.num_samples, share.micro_batch_size);
  }
  return result;
}

std::vector<DataShare> make_exact_shares(int64_t global_batch,
                                         int degree,
                                         int64_t micro_batch_size,
                                         const std::vector<double>& shares,
                                         int64_t logical_shards) {
  const std::vector<double> weights = share_weights(global_batch, degree, micro_batch_size, shares);
  const int count = static_cast<int>(std::min(logical_shards, global_batch));
  const std::vector<int64_t> units = largest_remainder(count, weights);
  const int64_t largest = shard_range(global_batch, count, 0).size;
  std::vector<DataShare> result;
  int64_t next = 0;
  for (int rank = 0; rank < degree; ++rank) {
    DataShare share{rank, 0, 0, 0};
    for (int64_t i = 0; i < units[static_cast<size_t>(rank)]; ++i, ++next) {
      const int64_t size = shard_range(global_batch, count, static_cast<int>(next)).size;
      share.micro_batch_size =
          micro_batch_size == 0 ? largest : std::min(micro_batch_size, largest);
      share.num_samples += size;
      share.num_micro_batches += ceil_div(size, share.micro_batch_size);
    }
    result.push_back(share);
  }
  return result;
}

int64_t num_shards(const Plan& plan) {
  return plan.exact_reduction ? std::min(plan.logical_shards, plan.global_batch) : 1;
}

std::vector<MicroBatchCut> cut_micro_batches(const Plan& plan, int data_rank) {
  std::vector<MicroBatchCut> cuts = cut_share(plan, data_rank);
  const DataShare& share = share_of(plan, data_rank);
  TRAINRT_REQUIRE(static_cast<int64_t>(cuts.size()) == share.num_micro_batches,
                  kInvalidArgument,
                  "plan.shares: num_micro_batches of data rank ",
                  data_rank,
                  " is ",
                  share.num_micro_batches,
                  ", but ",
                  share.num_samples,
                  " samples in micro-batches of ",
                  share.micro_batch_size,
                  " make ",
                  cuts.size());
  return cuts;
}

void count_micro_batches(Plan& plan) {
  for (DataShare& share : plan.shares) {
    const int64_t wanted = static_cast<int64_t>(cut_share(plan, share.data_rank).size());
    if (share.num_micro_batches < 0) {
      share.num_micro_batches = wanted;
    }
    static_cast<void>(cut_micro_batches(plan, share.data_rank));
  }
}

}  // namespace trainrt
