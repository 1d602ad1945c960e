#include "runtime/token_batches.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "graph/base/error.h"

namespace trainrt {
namespace {

using ::testing::ElementsAre;

TokenLengths lengths_of(std::vector<int32_t> of_sample, int64_t width) {
  TokenLengths lengths;
  lengths.symbol = "S";
  lengths.width = width;
  lengths.of_sample = std::move(of_sample);
  return lengths;
}

std::vector<int32_t> long_tail(std::mt19937& random, size_t n, int32_t width) {
  std::lognormal_distribution<double> draw(std::log(width / 10.0), 0.8);
  std::vector<int32_t> lengths(n);
  for (int32_t& length : lengths) {
    length = std::clamp(static_cast<int32_t>(draw(random)), 1, width);
  }
  return lengths;
}

int64_t load(const std::vector<MicroBatch>& micro_batches, int64_t width) {
  int64_t tokens = 0;
  for (const MicroBatch& micro_batch : micro_batches) {
    tokens += padded_tokens(micro_batch, width);
  }
  return tokens;
}

TEST(TokenBatchesTest, EverySampleOfAStepRunsOnceWithinTheBudget) {
  std::mt19937 random(11);
  for (int round = 0; round < 200; ++round) {
    const auto width = static_cast<int32_t>(8 + random() % 120);
    const size_t n = 1 + random() % 300;
    const auto of_sample = long_tail(random, n, width);
    const int64_t longest = *std::max_element(of_sample.begin(), of_sample.end());
    const int64_t budget = longest + static_cast<int64_t>(random() % 500);
    const auto batch = static_cast<int64_t>(1 + random() % n);
    const TokenBatches batches(
        lengths_of(of_sample, width), static_cast<int64_t>(n), budget, batch);
    std::vector<int64_t> samples(n);
    std::iota(samples.begin(), samples.end(), int64_t{0});
    std::shuffle(samples.begin(), samples.end(), random);
    samples.resize(static_cast<size_t>(batch));
    std::vector<int64_t> wanted = samples;
    std::vector<double> weights(1 + random() % 4, 1.0);
    weights[0] = 0.5;
    const auto dealt = batches.deal(samples, weights);
    std::vector<int64_t> found;
    for (const std::vector<MicroBatch>& own : dealt) {
      for (const MicroBatch& m : own) {
        const MicroBatchShape& shape = batches.shapes().at(static_cast<size_t>(m.variant));
        EXPECT_EQ(shape, (MicroBatchShape{m.num_samples, m.length}));
        EXPECT_LE(padded_tokens(m, width), budget);
        for (int64_t i = m.first_sample; i < m.first_sample + m.num_samples; ++i) {
          found.push_back(samples.at(static_cast<size_t>(i)));
          EXPECT_LE(of_sample[static_cast<size_t>(found.back())], m.length);
        }
      }
    }
    std::sort(found.begin(), found.end());
    std::sort(wanted.begin(), wanted.end());
    EXPECT_EQ(found, wanted);
  }
}

TEST(TokenBatchesTest, RanksGetTokensByTheirWeights) {
  std::mt19937 random(5);
  const auto of_sample = long_tail(random, 4096, 512);
  const TokenBatches batches(lengths_of(of_sample, 512), 4096, 4096, 128);
  for (int64_t step = 0; step < 32; ++step) {
    std::vector<int64_t> samples(128);
    std::iota(samples.begin(), samples.end(), step * 128);
    for (const auto& weights :
         {std::vector<double>{1, 1, 1}, {2, 1, 1}, {1, 0, 3}, {1, 1, 1, 1, 1}}) {
      const auto dealt = batches.deal(samples, weights);
      const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
      int64_t total = 0;
      for (const auto& own : dealt) {
        total += load(own, 512);
      }
      for (size_t rank = 0; rank < weights.size(); ++rank) {
        EXPECT_LE(static_cast<double>(load(dealt[rank], 512)),
                  1.15 * static_cast<double>(total) * weights[rank] / sum);
      }
    }
  }
}

TEST(TokenBatchesTest, BucketsHaveTheLeastPadding) {
  EXPECT_THAT(choose_buckets({1, 1, 1, 9, 10}, 2), ElementsAre(1, 10));
  EXPECT_THAT(choose_buckets({3, 3, 3}, 8), ElementsAre(3));
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    std::vector<int32_t> lengths(20);
    for (int32_t& length : lengths) {
      length = static_cast<int32_t>(1 + random() % 12);
    }
    const int32_t longest = *std::max_element(lengths.begin(), lengths.end());
    const auto padding = [&](std::vector<int64_t> ends) {
      int64_t sum = 0;
      for (const int32_t length : lengths) {
        sum += *std::lower_bound(ends.begin(), ends.end(), length) - length;
      }
      return sum;
    };
    int64_t best = INT64_MAX;
    for (int32_t a = 1; a < longest; ++a) {
      for (int32_t b = a; b < longest; ++b) {
        best = std::min(best, padding({a, b, longest}));
      }
    }
    EXPECT_EQ(padding(choose_buckets(lengths, 3)), longest == 1 ? 0 : best);
  }
}

TEST(TokenBatchesTest, ASampleThatIsTooLongIsRefused) {
  EXPECT_THROW(TokenBatches(lengths_of({3, 9}, 16), 2, 8, 2), Error);
}

}  // namespace
}  // namespace trainrt
