// `trainrt validate` as users run it: models built by name, the committed table of error bands, and
// the device that --calibrate writes, which plan reads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "parallel/csv.h"
#include "tests/support/paths.h"
#include "tests/support/run_program.h"

namespace trainrt {
namespace {

using ::testing::HasSubstr;
using testing::ProgramResult;
using testing::run_trainrt;
using testing::write_model;

std::string data_file(const std::string& name) {
  return testing::source_path("tests/data/validation/" + name);
}

// Files whose rows the error bands come from.
const std::vector<std::string>& measured_files() {
  static const std::vector<std::string> kFiles = {"amp_t4_v100_mixed.csv",
                                                  "bigscience_a100_topology.csv",
                                                  "bigscience_v100.csv",
                                                  "korthikanti22_iteration.csv",
                                                  "llmc_gpt2.csv",
                                                  "llmfoundry_mpt_fsdp.csv",
                                                  "megatron_a100_v100.csv",
                                                  "megatron_core_h100.csv",
                                                  "sailor_gh200_and_mixed.csv",
                                                  "simumax_b200.csv",
                                                  "torchtitan.csv",
                                                  "vision_and_bert_nvidia.csv",
                                                  "vtrain_multi_node_a100.csv",
                                                  "vtrain_single_node_a100.csv",
                                                  "zero_bubble_a100.csv"};
  return kFiles;
}

TEST(ValidateCommandTest, ModelsBuiltByNameArePredicted) {
  const ProgramResult result =
      run_trainrt({"validate", data_file("vision_and_bert_nvidia.csv"), "--format", "json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const nlohmann::json file = nlohmann::json::parse(result.out)[0];
  EXPECT_EQ(file["rows"], 36);
  EXPECT_EQ(file["used"], 20);
  EXPECT_LE(file["mape"], 0.075);
  EXPECT_EQ(file["residuals"].size(), 20u);
  EXPECT_THAT(file["left_out"][0]["reason"].get<std::string>(), HasSubstr("length is not stated"));
}

TEST(ValidateCommandTest, TheCommittedErrorBandsAreThoseOfTheData) {
  testing::TemporaryFolder folder;
  std::vector<std::string> command = {"validate"};
  for (const std::string& name : measured_files()) {
    command.push_back(data_file(name));
  }
  for (const char* word : {"--convention", "auto", "--bands"}) {
    command.emplace_back(word);
  }
  command.push_back(folder.file("bands.csv"));
  const ProgramResult result = run_trainrt(command);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::vector<CsvRow> made = parse_csv(testing::file_text(folder.file("bands.csv")), "bands.csv");
  std::vector<CsvRow> committed = parse_csv(
      testing::file_text(testing::source_path("planner/data/error_bands.csv")), "error_bands.csv");
  ASSERT_EQ(made.size(), committed.size());
  for (size_t i = 0; i < made.size(); ++i) {
    for (const char* column : {"kind", "machine", "hosts", "rows", "from"}) {
      EXPECT_EQ(made[i][column], committed[i][column]);
    }
    // Images are priced by our own graph: a change of an operator or a fusion may move them a
    // little.
    const double slack = made[i]["kind"] == "image" ? 0.05 : 0.011;
    for (const char* column : {"low", "high"}) {
      EXPECT_NEAR(std::stod(made[i][column]), std::stod(committed[i][column]), slack)
          << made[i]["machine"];
    }
  }
}

TEST(ValidateCommandTest, PlanReadsTheCalibratedDevice) {
  testing::TemporaryFolder folder;
  const std::string device = folder.file("device.yaml"), model = folder.file("gpt2.onnx");
  const ProgramResult fitted = run_trainrt({"validate",
                                            data_file("korthikanti22_iteration.csv"),
                                            "--convention",
                                            "megatron",
                                            "--calibrate",
                                            device});
  ASSERT_EQ(fitted.exit_code, 0) << fitted.err;
  EXPECT_THAT(fitted.out, HasSubstr("held out by depth"));
  write_model("gpt2 --layers 2 --hidden 256 --heads 4", model);
  const ProgramResult plan = run_trainrt({"plan", model, "--cluster", device, "--format", "json"});
  ASSERT_EQ(plan.exit_code, 0) << plan.err;
  EXPECT_TRUE(nlohmann::json::parse(plan.out)["feasible"].get<bool>());
}

TEST(ValidateCommandTest, CalibrationRefusesWhatIsNoOneDevice) {
  testing::TemporaryFolder folder;
  const ProgramResult mixed = run_trainrt({"validate",
                                           data_file("amp_t4_v100_mixed.csv"),
                                           "--convention",
                                           "deepspeed",
                                           "--calibrate",
                                           folder.file("x.yaml")});
  EXPECT_EQ(mixed.exit_code, 2);
  EXPECT_THAT(mixed.err, HasSubstr("one kind of device"));
  const ProgramResult engine = run_trainrt({"validate",
                                            data_file("llmc_gpt2.csv"),
                                            "--convention",
                                            "auto",
                                            "--calibrate",
                                            folder.file("x.yaml")});
  EXPECT_EQ(engine.exit_code, 2);
  EXPECT_THAT(engine.err, HasSubstr("--convention"));
}

}  // namespace
}  // namespace trainrt
