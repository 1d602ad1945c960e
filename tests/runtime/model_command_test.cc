// `trainrt model --external-weights`: weights of any size beside the model, whole or not at all.
#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "tests/support/run_program.h"

namespace trainrt {
namespace {

namespace fs = std::filesystem;

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::ProgramResult;
using testing::run_trainrt;
using ::testing::SizeIs;

class ModelCommandTest : public ::testing::Test {
 protected:
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_.path())) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

  testing::TemporaryFolder folder_;
  std::string model_ = folder_.file("m.onnx");
};

TEST_F(ModelCommandTest, WeightsBesideTheModelAreThoseOfOneFile) {
  const std::string whole = folder_.file("whole.onnx");
  const ProgramResult written =
      run_trainrt({"model", "lenet", "--seed", "3", "--external-weights", "-o", model_});
  ASSERT_EQ(written.exit_code, 0) << written.err;
  EXPECT_THAT(written.err,
              AllOf(HasSubstr("writing 241 KiB of weights to " + model_ + ".weights\n"),
                    Not(HasSubstr("left out"))));
  ASSERT_EQ(run_trainrt({"model", "lenet", "--seed", "3", "-o", whole}).exit_code, 0);
  EXPECT_LT(fs::file_size(model_), fs::file_size(whole) / 10);
  EXPECT_THAT(files(), SizeIs(3));
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"run", "--steps", "2", "--batch-size", "4", "--metrics"},
        std::vector<std::string>{"eval", "--steps", "2", "--batch-size", "4", "-o"}}) {
    SCOPED_TRACE(command[0]);
    std::string results[2];
    for (const bool beside : {false, true}) {
      const std::string result_file = folder_.file("result");
      std::vector<std::string> arguments = command;
      arguments.push_back(result_file);
      arguments.insert(arguments.begin() + 1, beside ? model_ : whole);
      const ProgramResult result = run_trainrt(arguments);
      ASSERT_EQ(result.exit_code, 0) << result.err;
      const std::string text = testing::file_text(result_file);
      for (size_t at = text.find("loss"); at != std::string::npos; at = text.find("loss", at + 1)) {
        results[beside ? 1 : 0] += text.substr(at, text.find_first_of(",\n", at) - at) + "\n";
      }
    }
    EXPECT_EQ(results[0], results[1]);
    EXPECT_THAT(results[0], Not(IsEmpty()));
  }
  const ProgramResult plan = run_trainrt({"plan", model_, "--cluster", "dgx-a100:1"});
  EXPECT_EQ(plan.exit_code, 0) << plan.err;
}

TEST_F(ModelCommandTest, AFullDiskIsOneErrorAndLeavesNoHalfFile) {
  fs::create_symlink("/dev/full", model_ + ".weights");
  const ProgramResult result = run_trainrt({"model", "mlp", "--external-weights", "-o", model_});
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_THAT(result.err, HasSubstr("m.onnx.weights' failed: No space left on device"));
  EXPECT_THAT(files(), ::testing::ElementsAre("m.onnx.weights"));  // the link
}

TEST_F(ModelCommandTest, WeightsThatHaveNoRoomAreRefusedBeforehand) {
  const ProgramResult result =
      run_trainrt({"model", "mlp", "--hidden", "16000000", "--external-weights", "-o", model_});
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("the weights take 931 TiB, and where '" + model_ + ".weights'"),
                    HasSubstr("are free")));
  EXPECT_THAT(files(), IsEmpty());
}

TEST_F(ModelCommandTest, WeightsLeftOutAreToldWithTheirSizeAndTheWayOut) {
  const ProgramResult result = run_trainrt({"model", "gpt2-1.5b", "-o", model_});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, HasSubstr("weights left out: 5.8 GiB; --external-weights writes them"));
  EXPECT_THAT(files(), ::testing::ElementsAre("m.onnx"));
}

TEST_F(ModelCommandTest, ASignalLeavesNoHalfFile) {
  const testing::TemporaryFolder output;
  const pid_t pid = testing::start_trainrt(
      {"model", "gpt2-124m", "--external-weights", "-o", model_}, output.path());
  while (files().empty()) {  // the test's own limit of time ends this
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ::kill(pid, SIGTERM);
  const ProgramResult result = testing::finish_trainrt(pid, output.path());
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_THAT(result.err, HasSubstr("stopped by a signal: nothing is written"));
  EXPECT_THAT(files(), IsEmpty());
}

}  // namespace
}  // namespace trainrt
