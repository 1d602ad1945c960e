// What a run exports is the model it trained: evaluating the file gives the trained loss, also for
// a model with constants (Dropout's ratio, masks) and BatchNorm statistics, and from several ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/run_program.h"

namespace trainrt {
namespace {

using testing::ProgramResult;
using testing::run_trainrt;
using testing::write_model;

double loss_of(const std::string& model) {
  const ProgramResult result =
      run_trainrt({"eval", model, "--steps", "4", "--batch-size", "32", "--format", "json"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return nlohmann::json::parse(result.out)["loss"].get<double>();
}

TEST(ExportCommandTest, TheExportedModelIsTheTrainedOne) {
  testing::TemporaryFolder folder;
  const std::string model = folder.file("cnn.onnx"), trained = folder.file("trained.onnx");
  write_model("cnn --hidden 4 --ffn 16", model);
  for (const std::string devices : {"cpu", "cpu:2"}) {
    const ProgramResult run = run_trainrt({"run",
                                           model,
                                           "--steps",
                                           "60",
                                           "--batch-size",
                                           "32",
                                           "--devices",
                                           devices,
                                           "--export",
                                           trained});
    ASSERT_EQ(run.exit_code, 0) << devices << run.err;
    EXPECT_LT(loss_of(trained), 0.8 * loss_of(model)) << devices;
  }
}

}  // namespace
}  // namespace trainrt
