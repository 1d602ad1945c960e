// Micro-batches of one bucket have a power of two of samples, so that a handful of programs serves
// all steps: a bucket's samples of a step are cut into as many of the largest size as there are and
// the rest by its binary digits. They are dealt out longest first to the rank that would end first
// (Graham's LPT rule: at most 4/3 of the best possible). While that leaves ranks unequal the
// largest micro-batch is halved, which the sizes allow.
#include "runtime/token_batches.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

namespace trainrt {

namespace {

constexpr size_t kMostBuckets = 8;
constexpr double kEvenEnough = 1.02;  // slowest rank's work over the mean

int64_t power_of_two_below(int64_t n) {
  int64_t power = 1;
  while (2 * power <= n) {
    power *= 2;
  }
  return power;
}

// Which rank runs each of `cuts`, and when the last ends.
struct Deal {
  std::vector<size_t> rank_of;
  double ends = std::numeric_limits<double>::infinity();
};

Deal longest_first(const std::vector<MicroBatch>& cuts,
                   const std::vector<double>& weights,
                   int64_t width) {
  std::vector<size_t> order(cuts.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return padded_tokens(cuts[a], width) > padded_tokens(cuts[b], width);
  });
  Deal deal;
  deal.rank_of.resize(cuts.size());
  std::vector<double> loads(weights.size(), 0.0);
  for (const size_t cut : order) {
    const auto tokens = static_cast<double>(padded_tokens(cuts[cut], width));
    size_t best = weights.size();
    double ends = 0;
    for (size_t rank = 0; rank < weights.size(); ++rank) {
      const double own = (loads[rank] + tokens) / weights[rank];
      if (weights[rank] > 0 && (best == weights.size() || own <= ends)) {
        best = rank;
        ends = own;
      }
    }
    loads[best] += tokens;
    deal.rank_of[cut] = best;
  }
  deal.ends = 0;
  for (size_t rank = 0; rank < weights.size(); ++rank) {
    deal.ends = std::max(deal.ends, weights[rank] > 0 ? loads[rank] / weights[rank] : 0);
  }
  return deal;
}

}  // namespace

int64_t padded_tokens(const MicroBatch& micro_batch, int64_t width) {
  return micro_batch.num_samples * (micro_batch.length > 0 ? micro_batch.length : width);
}

// best[k][i]: least padding when the i shortest lengths go to k buckets. O(count * lengths^2) in
// the number of different lengths.
std::vector<int64_t> choose_buckets(const std::vector<int32_t>& lengths, size_t count) {
  std::map<int64_t, int64_t> counts;
  for (const int32_t length : lengths) {
    ++counts[length];
  }
  // Beyond so many different lengths neighbours are taken together.
  constexpr size_t kMostLengths = 512;
  const auto longest = counts.empty() ? int64_t{0} : counts.rbegin()->first;
  const int64_t grain = 1 + longest / static_cast<int64_t>(kMostLengths);
  std::map<int64_t, std::pair<int64_t, int64_t>> grouped;  // length -> samples, tokens
  for (const auto& [length, samples] : counts) {
    auto& group = grouped[std::min(longest, (length + grain - 1) / grain * grain)];
    group.first += samples;
    group.second += samples * length;
  }
  std::vector<int64_t> ends;
  std::vector<int64_t> samples = {0}, tokens = {0};  // of all lengths below
  for (const auto& [length, group] : grouped) {
    ends.push_back(length);
    samples.push_back(samples.back() + group.first);
    tokens.push_back(tokens.back() + group.second);
  }
  const size_t n = ends.size();
  count = std::min(count, n);
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::vector<std::vector<int64_t>> best(count + 1, std::vector<int64_t>(n + 1, kNone));
  std::vector<std::vector<size_t>> from(count + 1, std::vector<size_t>(n + 1, 0));
  best[0][0] = 0;
  for (size_t k = 1; k <= count; ++k) {
    for (size_t i = 1; i <= n; ++i) {
      for (size_t j = 0; j < i; ++j) {
        if (best[k - 1][j] == kNone) {
          continue;
        }
        const int64_t padding =
            ends[i - 1] * (samples[i] - samples[j]) - (tokens[i] - tokens[j]) + best[k - 1][j];
        if (padding < best[k][i]) {
          best[k][i] = padding;
          from[k][i] = j;
        }
      }
    }
  }
  std::vector<int64_t> buckets;
  for (size_t k = count, i = n; k > 0; --k) {
    buckets.push_back(ends[i - 1]);
    i = from[k][i];
  }
  std::reverse(buckets.begin(), buckets.end());
  return buckets;
}

TokenBatches::TokenBatches(TokenLengths lengths,
                           int64_t num_samples,
                           int64_t max_tokens,
                           int64_t batch_size)
    : lengths_(std::move(lengths)) {
  buckets_ = lengths_.of_sample.empty() ? std::vector<int64_t>{lengths_.width}
                                        : choose_buckets(lengths_.of_sample, kMostBuckets);
  TRAINRT_REQUIRE(buckets_.back() <= max_tokens,
                  kInvalidArgument,
                  "--max-tokens is ",
                  max_tokens,
                  ", but the longest sample has ",
                  buckets_.back(),
                  " tokens; give at least as many");
  std::vector<int64_t> held(buckets_.size(), 0);
  for (const int32_t length : lengths_.of_sample) {
    ++held[bucket_of(length)];
  }
  for (size_t i = 0; i < buckets_.size(); ++i) {
    const int64_t there = lengths_.of_sample.empty() ? num_samples : held[i];
    most_samples_.push_back(
        power_of_two_below(std::min({max_tokens / buckets_[i], batch_size, there})));
    for (int64_t samples = most_samples_[i]; samples > 0; samples /= 2) {
      shapes_.push_back({samples, lengths_.symbol.empty() ? 0 : buckets_[i]});
    }
  }
  std::stable_sort(shapes_.begin(), shapes_.end(), [](const auto& a, const auto& b) {
    const int64_t of_a = a.num_samples * std::max<int64_t>(1, a.length);
    const int64_t of_b = b.num_samples * std::max<int64_t>(1, b.length);
    return of_a != of_b ? of_a > of_b : a.length > b.length;
  });
}

size_t TokenBatches::bucket_of(int64_t length) const {
  return static_cast<size_t>(std::lower_bound(buckets_.begin(), buckets_.end(), length) -
                             buckets_.begin());
}

MicroBatch TokenBatches::micro_batch(size_t bucket,
                                     int64_t first_sample,
                                     int64_t num_samples) const {
  const MicroBatchShape shape{num_samples, lengths_.symbol.empty() ? 0 : buckets_[bucket]};
  const auto at = std::find(shapes_.begin(), shapes_.end(), shape);
  TRAINRT_CHECK(at != shapes_.end());
  return {static_cast<int>(at - shapes_.begin()), first_sample, num_samples, 0, shape.length};
}

std::vector<std::vector<MicroBatch>> TokenBatches::deal(std::vector<int64_t>& samples,
                                                        const std::vector<double>& weights) const {
  std::stable_sort(samples.begin(), samples.end(), [&](int64_t a, int64_t b) {
    return bucket_of(lengths_.at(a)) > bucket_of(lengths_.at(b));
  });
  std::vector<MicroBatch> cuts;
  for (size_t begin = 0; begin < samples.size();) {
    const size_t bucket = bucket_of(lengths_.at(samples[begin]));
    size_t end = begin;
    while (end < samples.size() && bucket_of(lengths_.at(samples[end])) == bucket) {
      ++end;
    }
    while (begin < end) {
      const int64_t size =
          std::min(most_samples_[bucket], power_of_two_below(static_cast<int64_t>(end - begin)));
      cuts.push_back(micro_batch(bucket, static_cast<int64_t>(begin), size));
      begin += static_cast<size_t>(size);
    }
  }
  const int64_t width = lengths_.width;
  double total = 0;
  for (const MicroBatch& cut : cuts) {
    total += static_cast<double>(padded_tokens(cut, width));
  }
  const double even = total / std::accumulate(weights.begin(), weights.end(), 0.0);
  Deal best = longest_first(cuts, weights, width);
  std::vector<MicroBatch> best_cuts = cuts;
  for (size_t tries = 4 * weights.size(); tries > 0 && best.ends > kEvenEnough * even; --tries) {
    const auto largest =
        std::max_element(cuts.begin(), cuts.end(), [&](const auto& a, const auto& b) {
          const auto size = [&](const MicroBatch& m) {
            return m.num_samples > 1 ? padded_tokens(m, width) : 0;
          };
          return size(a) < size(b);
        });
    if (largest->num_samples == 1) {
      break;
    }
    const MicroBatch whole = *largest;
    const int64_t half = whole.num_samples / 2;
    const size_t bucket = bucket_of(whole.length > 0 ? whole.length : width);
    *largest = micro_batch(bucket, whole.first_sample, half);
    cuts.insert(largest + 1, micro_batch(bucket, whole.first_sample + half, half));
    const Deal deal = longest_first(cuts, weights, width);
    if (deal.ends < best.ends) {
      best = deal;
      best_cuts = cuts;
    }
  }
  std::vector<std::vector<MicroBatch>> by_rank(weights.size());
  for (size_t i = 0; i < best_cuts.size(); ++i) {
    by_rank[best.rank_of[i]].push_back(best_cuts[i]);
  }
  return by_rank;
}

}  // namespace trainrt
