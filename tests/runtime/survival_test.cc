// Whatever ends a run, the work done so far is kept and the run can be continued.
#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>

#include "runtime/checkpoint.h"
#include "tests/support/run_program.h"
#include "tests/support/tiny_model.h"

namespace trainrt {
namespace {

using testing::file_text;
using testing::finish_trainrt;
using ::testing::HasSubstr;
using testing::ProgramResult;
using testing::run_trainrt;
using testing::start_trainrt;
using testing::TemporaryFolder;

std::vector<std::string> run_arguments(const std::string& model,
                                       const std::string& checkpoints,
                                       std::vector<std::string> more) {
  std::vector<std::string> arguments = {"run",
                                        model,
                                        "--loss",
                                        testing::kTinyLoss,
                                        "--checkpoint-dir",
                                        checkpoints,
                                        "--threads",
                                        "1"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

void sleep_milliseconds(int64_t count) {
  std::this_thread::sleep_for(std::chrono::milliseconds(count));
}

TEST(SurvivalTest, ARunKilledAtRandomMomentsEndsAsIfNeverKilled) {
  const TemporaryFolder folder;
  const std::string model = folder.file("tiny.onnx");
  testing::write_text(model, testing::tiny_model());
  const std::string tensors = "/step-00000300/tensors-00000-of-00001.safetensors";
  ASSERT_EQ(run_trainrt(run_arguments(model, folder.file("whole"), {"--steps", "300"})).exit_code,
            0);
  std::mt19937 random(11);
  const std::string checkpoints = folder.file("killed");
  const std::vector<std::string> arguments =
      run_arguments(model, checkpoints, {"--steps", "300", "--checkpoint-every", "3", "--resume"});
  int kills = 0;
  while (kills < 8) {
    const pid_t pid = start_trainrt(arguments, folder.path());
    sleep_milliseconds(20 + static_cast<int64_t>(random() % 150));
    ::kill(pid, SIGKILL);
    const ProgramResult result = finish_trainrt(pid, folder.path());
    ++kills;
    if (result.exit_code == 0) {
      break;  // it was faster
    }
    ASSERT_EQ(result.exit_code, 128 + SIGKILL) << result.err;
  }
  const ProgramResult last = run_trainrt(arguments);
  ASSERT_EQ(last.exit_code, 0) << last.err;
  ASSERT_FALSE(file_text(folder.file("whole") + tensors).empty());
  EXPECT_EQ(file_text(folder.file("whole") + tensors), file_text(checkpoints + tensors));
}

TEST(SurvivalTest, AStopSignalSavesAndLeaves) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const TemporaryFolder folder;
    const std::string model = folder.file("tiny.onnx");
    testing::write_text(model, testing::tiny_model());
    const std::string checkpoints = folder.file("ck"), metrics = folder.file("m.jsonl");
    const pid_t pid = start_trainrt(
        run_arguments(model, checkpoints, {"--steps", "100000000", "--metrics", metrics}),
        folder.path());
    const auto lines = [&] {
      const std::string text = file_text(metrics);
      return std::count(text.begin(), text.end(), '\n');
    };
    for (int i = 0; i < 2000 && lines() < 3; ++i) {
      sleep_milliseconds(10);
    }
    ::kill(pid, signal);
    const ProgramResult result = finish_trainrt(pid, folder.path());
    EXPECT_EQ(result.exit_code, 128 + signal) << result.err;
    EXPECT_THAT(result.out, HasSubstr("--resume"));
    // Every step that was told is in the checkpoint.
    EXPECT_THAT(checkpoint_steps(checkpoints), ::testing::ElementsAre(lines()));
    const std::string total = std::to_string(lines() + 2);
    const ProgramResult resumed =
        run_trainrt(run_arguments(model, checkpoints, {"--steps", total, "--resume"}));
    EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
    EXPECT_THAT(resumed.out, HasSubstr("trained 2 steps"));
  }
}

}  // namespace
}  // namespace trainrt
