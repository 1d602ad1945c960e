// Predictions against published measurements: a figure that worsens fails. Bars are what the model
// reaches, rounded up; where the wanted bar is not met, the cause stands beside the row.
#include "planner/validation.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "tests/support/paths.h"

namespace trainrt {
namespace {

FileResult validate(const std::string& name) {
  std::ifstream file(testing::source_path("tests/data/validation/" + name));
  std::ostringstream text;
  text << file.rdbuf();
  return validate_rows(name, parse_csv(text.str(), name), engine_of_file(name), nullptr);
}

struct Bar {
  const char* file;
  int least_used;
  double mape;
  double memory_mape;
  double regret_mean;
  double regret_max;
  double least_tau;
};

class ValidationTest : public ::testing::TestWithParam<Bar> {};

TEST_P(ValidationTest, FiguresDoNotWorsen) {
  const Bar& bar = GetParam();
  const FileResult result = validate(bar.file);
  EXPECT_GE(result.used, bar.least_used);
  EXPECT_LE(result.mape, bar.mape) << "bias " << result.bias << " worst " << result.worst;
  EXPECT_LE(result.memory_mape, bar.memory_mape);
  EXPECT_LE(result.regret_mean, bar.regret_mean);
  EXPECT_LE(result.regret_max, bar.regret_max);
  EXPECT_GE(result.kendall_tau, bar.least_tau);
  for (const MeasuredRow& row : result.left_out) {
    EXPECT_FALSE(row.unusable.empty());
  }
}

INSTANTIATE_TEST_SUITE_P(
    Files,
    ValidationTest,
    ::testing::Values(
        Bar{"korthikanti22_iteration.csv", 9, 0.025, 1, 0.01, 0.01, 0.9},
        // Regret (3 and 20 % are wanted): the 900 rows are sums. Those of a width, tensor degree
        // and micro-batch follow layers * micro-batches * a + micro-batches * b + layers * c + d to
        // 3e-4 with the same a under every data and pipeline degree, so they hold 32 layer times,
        // and what is odd about one of these returns in all its rows. Two are odd: 2.75 ms (width
        // 2048, tensor degree 4, micro-batch 2), where half the work took 2.99 and twice the
        // work 4.95, and 3.18 ms (1024, 2, 4), where half the work took 3.58. A model that knew
        // everything else exactly and had 3.75 and 4.0 ms there would show a mean regret of 3.0 %,
        // a worst of 22 %. Beyond that: the rows say full recompute, but from micro-batch 4 to 8
        // layers grow by 0.57 to 0.78 of what that costs (seven of eight), as if nothing ran again
        // (0.74).
        Bar{"vtrain_single_node_a100.csv", 900, 0.075, 1, 0.048, 0.26, 0.84},
        Bar{"vtrain_multi_node_a100.csv", 62, 0.06, 1, 0.02, 0.05, 0.75},
        Bar{"megatron_core_h100.csv", 9, 0.08, 1, 1, 1, 0},
        Bar{"megatron_a100_v100.csv", 44, 0.085, 1, 0.01, 0.07, 0},
        Bar{"zero_bubble_a100.csv", 12, 0.055, 0.04, 1, 1, 0},
        Bar{"simumax_b200.csv", 12, 0.05, 0.02, 0.01, 0.01, 0},
        Bar{"llmfoundry_mpt_fsdp.csv", 131, 0.12, 1, 1, 1, 0},
        Bar{"torchtitan.csv", 10, 0.03, 0.05, 0.01, 0.01, 0},
        Bar{"bigscience_a100_topology.csv", 46, 0.09, 0.10, 0.005, 0.02, 0.7},
        // Small micro-batches in tensor parallel stages of V100 at 10 Gbit/s took twice what their
        // neighbours say; without the V100 hosts the rank correlation is 0.82.
        Bar{"amp_t4_v100_mixed.csv", 90, 0.145, 1, 0.055, 0.105, 0.7},
        Bar{"sailor_gh200_and_mixed.csv", 25, 0.12, 0.09, 0.01, 0.10, 0.85},
        Bar{"llmc_gpt2.csv", 4, 0.135, 1, 1, 1, 0}),
    [](const auto& tested) {
      std::string name = tested.param.file;
      for (char& c : name) {
        c = std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
      }
      return name;
    });

TEST(ValidationTest, RunsThatRanOutOfMemoryAreForeseen) {
  const FileResult result = validate("bigscience_a100_topology.csv");
  ASSERT_EQ(result.out_of_memory.size(), 3u);  // rows 0069, 0076 and 0077
  for (const RowResult& row : result.out_of_memory) {
    EXPECT_FALSE(row.fits) << row.row.id;
  }
  for (const RowResult& row : result.results) {  // and those that ran fit
    EXPECT_TRUE(row.fits) << row.row.id;
  }
}

TEST(ValidationTest, DoubtfulRowsAreLeftOut) {
  const FileResult result = validate("llmc_gpt2.csv");
  ASSERT_EQ(result.left_out.size(), 1u);
  EXPECT_EQ(result.left_out[0].unusable, "the table's notes doubt this row");
}

TEST(ValidationTest, UnusableRowsSayWhy) {
  const FileResult nemo = validate("nemo_megatron_bridge.csv");
  EXPECT_EQ(nemo.used, 0);
  ASSERT_EQ(nemo.left_out.size(), 21u);
  EXPECT_EQ(nemo.left_out[0].unusable, "fp8 is not offered");
  const FileResult launcher = validate("nemo_launcher_a100.csv");
  ASSERT_FALSE(launcher.left_out.empty());
  EXPECT_EQ(launcher.left_out[0].unusable, "the layout (tp, pp, dp) is not stated");
}

}  // namespace
}  // namespace trainrt
