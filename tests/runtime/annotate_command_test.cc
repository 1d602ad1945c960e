// A plan that travels in the model: written by `plan --annotate`, followed by `run`.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/run_program.h"

namespace trainrt {
namespace {

using ::testing::HasSubstr;
using testing::ProgramResult;
using testing::run_trainrt;
using testing::TemporaryFolder;
using testing::write_model;

TEST(AnnotateCommandTest, APlannedModelRunsAsPlanned) {
  const TemporaryFolder folder;
  const std::string model = folder.file("m.onnx"), annotated = folder.file("a.onnx");
  write_model("mlp --hidden 32", model);
  const ProgramResult plan =
      run_trainrt({"plan", model, "--devices", "cpu:2", "--dp", "2", "--annotate", annotated});
  ASSERT_EQ(plan.exit_code, 0) << plan.err;
  const ProgramResult run = run_trainrt({"run", annotated, "--devices", "cpu:2", "--steps", "2"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.err, HasSubstr("the one that the model carries"));
  EXPECT_THAT(run.err, HasSubstr("2 data x 1 tensor"));
  // On other devices the plan does not fit, and is not used.
  const ProgramResult alone = run_trainrt({"run", annotated, "--steps", "2"});
  EXPECT_EQ(alone.exit_code, 0) << alone.err;
  // Planning again starts from what the model says.
  const ProgramResult again = run_trainrt({"plan", annotated, "--devices", "cpu:2"});
  EXPECT_EQ(again.exit_code, 0) << again.err;
  EXPECT_THAT(again.out, HasSubstr("dp 2"));
}

}  // namespace
}  // namespace trainrt
