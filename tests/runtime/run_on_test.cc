// Runs of a 2BW pipeline that goes over from step to step, as a user starts them: where it has to
// drain is nobody's concern.
#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "graph/base/error.h"
#include "tests/support/rank_processes.h"
#include "tests/support/run_program.h"
#include "tests/support/tiny_model.h"

namespace trainrt::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Words = std::vector<std::string>;

Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

class RunOnTest : public ::testing::Test {
 protected:
  RunOnTest() {
    write_text(model_, tiny_model());
    // Steps of 6 samples, and one of 4 at the end of an epoch.
    const std::string command =
        "/usr/bin/python3 -c \"import numpy as np\nr = np.random.RandomState(1)\nnp.savez('" +
        data_ + "', x=r.rand(28, 4), y=r.rand(28, 3))\"";
    EXPECT_EQ(std::system(command.c_str()), 0);
  }

  Words words(const Words& more) const {
    const Words all = {"run",
                       model_,
                       "--loss",
                       kTinyLoss,
                       "--threads",
                       "1",
                       "--pp",
                       "2",
                       "--schedule",
                       "2bw",
                       "--micro-batch-size",
                       "2",
                       "--batch-size",
                       "6",
                       "--optimizer",
                       "adamw",
                       "--lr",
                       "0.05"};
    return all + more;
  }
  Words trained(const Words& more) const {
    return words({"--data", data_, "--epochs", "2"}) + more;
  }

  // What metrics say of each step, but for its time.
  std::vector<std::string> steps_of(const std::string& metrics) const {
    std::vector<std::string> steps;
    std::istringstream stream(file_text(metrics));
    for (std::string line; std::getline(stream, line);) {
      nlohmann::json values = nlohmann::json::parse(line);
      values.erase("step_seconds");
      values.erase("peak_bytes");
      steps.push_back(values.dump());
    }
    return steps;
  }

  std::vector<std::string> course(const Words& more) const {
    const std::string metrics = folder_.file("m.jsonl");
    const ProgramResult result = run_trainrt(trained(more) + Words{"--metrics", metrics});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return steps_of(metrics);
  }

  TemporaryFolder folder_;
  std::string model_ = folder_.file("tiny.onnx");
  std::string data_ = folder_.file("data.npz");
};

const Words kThreads = {"--devices", "cpu:2"};

TEST_F(RunOnTest, WhereverThePipelineDrainsTheCourseIsTheSame) {
  const std::vector<std::string> drained = course(kThreads + Words{"--clip-norm", "1e9"});
  EXPECT_EQ(drained.size(), 10u);
  EXPECT_EQ(course(kThreads), drained);
  EXPECT_EQ(course({"--nproc", "2"}), drained);
  for (const std::string every : {"1", "3"}) {
    const Words saves = {
        "--checkpoint-dir", folder_.file("c" + every), "--checkpoint-every", every};
    EXPECT_EQ(course(kThreads + saves), drained) << every;
  }
  // From the checkpoint of step 3, through both epochs' short steps.
  std::filesystem::remove_all(folder_.file("c3") + "/step-00000006");
  std::filesystem::remove_all(folder_.file("c3") + "/step-00000009");
  std::filesystem::remove_all(folder_.file("c3") + "/step-00000010");
  const Words again = {"--checkpoint-dir", folder_.file("c3"), "--resume"};
  EXPECT_EQ(course(kThreads + again), drained);
  const std::string metrics = folder_.file("world.jsonl");
  RankProcesses ranks;
  ranks.start_world(2, trained({"--metrics", metrics}));
  for (const RankEnd& end : ranks.wait(std::chrono::seconds(60))) {
    EXPECT_EQ(end.result.exit_code, 0) << end.result.err;
  }
  EXPECT_EQ(steps_of(metrics), drained);
}

TEST_F(RunOnTest, AStopSignalDrainsThePipelineAndSaves) {
  for (const Words& devices : {kThreads, Words{"--nproc", "2"}}) {
    const std::string metrics = folder_.file("m" + devices[0]);
    const pid_t pid = start_trainrt(words({"--steps", "2000000", "--metrics", metrics}) + devices +
                                        Words{"--checkpoint-dir", folder_.file("s" + devices[0])},
                                    folder_.path());
    for (int i = 0; i < 6000 && steps_of(metrics).size() < 3; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    ::kill(pid, SIGTERM);
    const ProgramResult result = finish_trainrt(pid, folder_.path());
    EXPECT_EQ(result.exit_code, 128 + SIGTERM) << result.err;
    EXPECT_THAT(result.out, HasSubstr("continue with --resume"));
  }
}

TEST_F(RunOnTest, ALossThatIsNotFiniteIsToldWithItsStep) {
  const auto message = [&](const Words& more) {
    const ProgramResult result = run_trainrt(
        words({"--steps", "50", "--optimizer", "sgd", "--lr", "1e25"}) + kThreads + more);
    EXPECT_EQ(result.exit_code, 1) << result.err;
    return result.err.substr(result.err.find("error: "));
  };
  EXPECT_EQ(message({}), message({"--clip-norm", "1e300"}));
}

TEST_F(RunOnTest, ALossThatIsNotFiniteEndsAllProcesses) {
  RankProcesses ranks;
  ranks.start_world(2, words({"--steps", "50", "--optimizer", "sgd", "--lr", "1e25"}));
  const std::vector<RankEnd> ends = ranks.wait(std::chrono::seconds(60));
  for (const RankEnd& end : ends) {
    EXPECT_TRUE(end.ended);
    EXPECT_EQ(end.result.exit_code, 1) << end.result.err;
    EXPECT_THAT(end.result.err, HasSubstr("step 3: the loss is infinite, so training stops"));
  }
}

TEST_F(RunOnTest, ThreeProcessesTrainWhatThreeThreadsDo) {
  const Words pipeline = {"--pp", "3", "--micro-batch-size", "1"};
  const std::vector<std::string> threads = course(pipeline + Words{"--devices", "cpu:3"});
  EXPECT_EQ(threads.size(), 10u);
  EXPECT_EQ(course(pipeline + Words{"--nproc", "3"}), threads);
}

TEST_F(RunOnTest, TracesShowTheForwardsOfTheNextStep) {
  const std::string ran = folder_.file("run.json"), planned = folder_.file("plan.json");
  const ProgramResult run = run_trainrt(words({"--steps", "4", "--trace", ran}) + kThreads);
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(file_text(ran), HasSubstr("\"0F0'\""));
  Words plan = words({"--trace", planned}) + kThreads;
  plan[0] = "plan";
  std::erase_if(plan, [](const std::string& word) { return word == "--threads" || word == "1"; });
  const ProgramResult text = run_trainrt(plan);
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out, Not(HasSubstr("drains")));
  EXPECT_THAT(file_text(planned), HasSubstr("\"0F0'\""));
  EXPECT_THAT(run_trainrt(plan + Words{"--clip-norm", "1"}).out,
              HasSubstr("drains at the end of each step: --clip-norm"));
  const Words balanced = {"--devices", "cpu:4", "--dp", "2", "--batch-size", "8", "--rebalance"};
  EXPECT_THAT(run_trainrt(plan + balanced).out,
              HasSubstr("drains at the end of each step: --rebalance"));
}

}  // namespace
}  // namespace trainrt::testing
