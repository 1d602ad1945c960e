// Whatever ends a run, the work done so far is kept and the run can be continued.
#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>

#include "graph/base/error.h"
#include "runtime/checkpoint.h"
#include "tests/support/paths.h"
#include "tests/support/rank_processes.h"
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
using testing::write_model;

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

struct Ordeal {
  int kills;
  int longest_milliseconds;  // from start to kill
  int steps;
  int checkpoint_every;
};

// Kills a run of `model` at random moments, resuming it after each. No checkpoint that was complete
// may be lost, and the end must be that of a run never killed.
void expect_survival(const std::string& model,
                     const TemporaryFolder& folder,
                     const Ordeal& ordeal) {
  const std::string total = std::to_string(ordeal.steps);
  const std::string whole = folder.file("whole"), checkpoints = folder.file("killed");
  ASSERT_EQ(run_trainrt(run_arguments(model, whole, {"--steps", total})).exit_code, 0);
  const std::vector<std::string> arguments = run_arguments(model,
                                                           checkpoints,
                                                           {"--steps",
                                                            total,
                                                            "--checkpoint-every",
                                                            std::to_string(ordeal.checkpoint_every),
                                                            "--resume"});
  std::mt19937 random(11);
  int64_t newest = 0;
  for (int kill = 0; kill < ordeal.kills; ++kill) {
    const pid_t pid = start_trainrt(arguments, folder.path());
    sleep_milliseconds(20 + static_cast<int64_t>(random()) % ordeal.longest_milliseconds);
    ::kill(pid, SIGKILL);
    const ProgramResult result = finish_trainrt(pid, folder.path());
    if (result.exit_code == 0) {
      break;  // it was faster
    }
    ASSERT_EQ(result.exit_code, 128 + SIGKILL) << result.err;
    const std::optional<Checkpoint> checkpoint = Checkpoint::newest(checkpoints);
    const int64_t step = checkpoint ? checkpoint->position().step : 0;
    ASSERT_GE(step, newest) << "kill " << kill;
    newest = step;
  }
  ::testing::Test::RecordProperty("newest_checkpoint_before_the_end", std::to_string(newest));
  const ProgramResult last = run_trainrt(arguments);
  ASSERT_EQ(last.exit_code, 0) << last.err;
  const std::string tensors = concat("/step-", std::string(8 - total.size(), '0'), total) +
                              "/tensors-00000-of-00001.safetensors";
  ASSERT_FALSE(file_text(whole + tensors).empty());
  EXPECT_EQ(file_text(whole + tensors), file_text(checkpoints + tensors));
}

TEST(SurvivalTest, ARunKilledAtRandomMomentsEndsAsIfNeverKilled) {
  const TemporaryFolder folder;
  const std::string model = folder.file("tiny.onnx");
  testing::write_text(model, testing::tiny_model());
  expect_survival(model,
                  folder,
                  {.kills = 8, .longest_milliseconds = 150, .steps = 300, .checkpoint_every = 3});
}

// Saving after every step, a model whose checkpoints take longer than its steps: most kills fall
// into a save.
TEST(LongSurvivalTest, FiftyKillsAlsoDuringSavesLoseNothing) {
  const TemporaryFolder folder;
  const std::string model = folder.file("mlp.onnx");
  write_model("mlp --hidden 512", model);
  expect_survival(model,
                  folder,
                  {.kills = 50, .longest_milliseconds = 1500, .steps = 600, .checkpoint_every = 1});
}

bool is_running(const std::string& id) {
  const std::string status = file_text("/proc/" + id + "/stat");  // "17 (trainrt) R ..."
  const size_t name_end = status.rfind(") ");
  return name_end != std::string::npos && status.compare(name_end + 2, 1, "Z") != 0;
}

// A launcher that is killed can tell its ranks nothing: they end as if it had.
TEST(SurvivalTest, RanksOfALauncherThatIsKilledSaveAndLeave) {
  const TemporaryFolder folder;
  const std::string model = folder.file("tiny.onnx"), metrics = folder.file("m.jsonl");
  testing::write_text(model, testing::tiny_model());
  const std::string checkpoints = folder.file("ck");
  std::string command;
  for (const std::string& word : run_arguments(
           model, checkpoints, {"--steps", "100000000", "--dp", "2", "--metrics", metrics})) {
    command += " '" + word + "'";
  }
  std::string script;
  for (const char* rank : {"0", "1"}) {
    script += concat("OMPI_COMM_WORLD_RANK=",
                     rank,
                     " '",
                     testing::trainrt_binary(),
                     "'",
                     command,
                     " >'",
                     folder.file(concat("out", rank)),
                     "' 2>&1 & echo $! >'",
                     folder.file(concat("pid", rank)),
                     "'\n");
  }
  testing::RankProcesses launcher;
  launcher.start({"/bin/sh", "-c", script + "wait"},
                 {{"OMPI_COMM_WORLD_SIZE", "2"},
                  {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                  {"MASTER_PORT", std::to_string(testing::free_port())}});
  const auto lines = [&] {
    const std::string text = file_text(metrics);
    return std::count(text.begin(), text.end(), '\n');
  };
  for (int i = 0; i < 4000 && lines() < 3; ++i) {
    sleep_milliseconds(10);
  }
  ASSERT_GE(lines(), 3);
  launcher.send_signal(0, SIGKILL);
  for (const char* rank : {"0", "1"}) {
    std::string id = file_text(folder.file(concat("pid", rank)));
    id.pop_back();
    for (int i = 0; i < 2000 && is_running(id); ++i) {
      sleep_milliseconds(10);
    }
    EXPECT_FALSE(is_running(id)) << file_text(folder.file(concat("out", rank)));
    ::kill(std::stoi(id), SIGKILL);
  }
  EXPECT_THAT(checkpoint_steps(checkpoints), ::testing::ElementsAre(lines()));
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
