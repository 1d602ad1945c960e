// Seconds of kernels from samples: exact where there is one, in between elsewhere.
#include "planner/kernel_sample.h"

#include <gtest/gtest.h>

#include "parallel/cluster_file.h"
#include "planner/cost_model.h"

namespace trainrt {
namespace {

KernelSample product(double m, double n, double k, double seconds = 0) {
  return {1, m, n, k, 4 * (m * n + m * k + n * k), seconds};
}

TEST(KernelSampleTest, ASampleOfTheSizeDecides) {
  const std::vector<KernelSample> samples = {
      product(64, 64, 64, 5e-6), product(512, 512, 512, 1e-3), product(2048, 2048, 64, 3e-3)};
  for (const KernelSample& sample : samples) {
    EXPECT_NEAR(interpolate(samples, sample), sample.seconds, 1e-3 * sample.seconds);
  }
}

TEST(KernelSampleTest, BetweenSamplesTheRateLiesBetweenTheirs) {
  const std::vector<KernelSample> samples = {product(64, 64, 64, 1e-5),
                                             product(256, 256, 256, 2e-4)};
  const double rate = 128.0 * 128 * 128 / interpolate(samples, product(128, 128, 128));
  EXPECT_GT(rate, 64.0 * 64 * 64 / 1e-5);
  EXPECT_LT(rate, 256.0 * 256 * 256 / 2e-4);
}

TEST(KernelSampleTest, StreamsGoByBytes) {
  const std::vector<KernelSample> samples = {{0, 0, 0, 0, 1e5, 1e-5}, {0, 0, 0, 0, 1e7, 2e-3}};
  EXPECT_NEAR(interpolate(samples, {0, 0, 0, 0, 1e5, 0}), 1e-5, 1e-7);
  EXPECT_NEAR(interpolate(samples, {0, 0, 0, 0, 2e7, 0}), 4e-3, 2e-4);
}

TEST(KernelSampleTest, TheFilesSamplesAndCachesPriceAKernel) {
  const Topology topology = parse_cluster(R"(
hosts: [{count: 1, devices: [{count: 1, type: here}]}]
devices:
  here:
    base: cpu
    efficiency: {gap_seconds: 1e-6}
    streams:
      - [1e6, 1e11]
      - [1e8, 1e10]
    kernels:
      MatMul:
        - [1, 64, 64, 64, 49152, 5e-6]
)",
                                          "here.yaml");
  const CostModel cost(topology.types[0], "fp32");
  EXPECT_DOUBLE_EQ(cost.move_seconds(1e5, 5e5), 1e-6);
  EXPECT_GT(cost.move_seconds(1e5, 5e7), 1e-6);
  EXPECT_LT(cost.move_seconds(1e5, 5e7), 1e-5);
  EXPECT_DOUBLE_EQ(cost.move_seconds(1e5, 1e12), 1e-5);
  const Cost own{0, 49152, {{1, 64, 64, 64}}};
  const KernelSample size = product(64, 64, 64);
  EXPECT_NEAR(cost.kernel_seconds("MatMul", size, own, 0), 5e-6 + 1e-6, 1e-9);
  EXPECT_NEAR(cost.kernel_seconds("MatMul", size, own, 1e-3), 1e-3 + 1e-6, 1e-9);
}

}  // namespace
}  // namespace trainrt
