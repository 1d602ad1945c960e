#include "graph/algorithm_cache.h"

#include <gtest/gtest.h>

#include "graph/base/log.h"
#include "tests/support/run_program.h"

namespace trainrt::testing {
namespace {

using Choice = std::optional<std::string>;

class AlgorithmCacheTest : public ::testing::Test {
 protected:
  void TearDown() override { set_log_level(LogLevel::kInfo); }

  TemporaryFolder folder_;
  std::string path_ = folder_.file("new/algorithms");
};

TEST_F(AlgorithmCacheTest, WhatOneRunKeepsTheNextOneFinds) {
  AlgorithmCache first(path_);
  EXPECT_EQ(first.find("conv 3x3"), Choice());
  first.keep("conv 3x3", "A2");
  first.keep("conv 5x5", "A0");
  EXPECT_EQ(first.find("conv 3x3"), Choice("A2"));
  const AlgorithmCache second(path_);
  EXPECT_EQ(second.find("conv 3x3"), Choice("A2"));
  EXPECT_EQ(second.find("conv 5x5"), Choice("A0"));
}

TEST_F(AlgorithmCacheTest, LinesThatWereCutOffOrAreSomethingElseArePassedOver) {
  set_log_level(LogLevel::kSilent);
  const std::string path = folder_.file("algorithms");
  write_text(path, "conv\tA1\nno tab\n\tno key\nno choice\t\ncut off\tA");
  const AlgorithmCache cache(path);
  EXPECT_EQ(cache.find("conv"), Choice("A1"));
  EXPECT_EQ(cache.find("no choice"), Choice());
  EXPECT_EQ(cache.find("cut off"), Choice());
}

TEST_F(AlgorithmCacheTest, AFileThatCannotBeWrittenCostsTheNextRunAMeasurement) {
  set_log_level(LogLevel::kSilent);
  write_text(folder_.file("file"), "");
  AlgorithmCache cache(folder_.file("file") + "/algorithms");
  cache.keep("conv", "A1");
  EXPECT_EQ(cache.find("conv"), Choice("A1"));
}

}  // namespace
}  // namespace trainrt::testing
