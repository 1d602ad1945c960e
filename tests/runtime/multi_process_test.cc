// Ranks as processes: they train what threads train, to the last bit.
#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/support/paths.h"
#include "tests/support/rank_processes.h"
#include "tests/support/tiny_model.h"

namespace trainrt {
namespace {

namespace fs = std::filesystem;
using testing::file_text;
using ::testing::HasSubstr;
using testing::ProgramResult;
using testing::RankEnd;
using testing::RankProcesses;
using testing::run_trainrt;
using testing::TemporaryFolder;
using testing::Variables;
using testing::write_text;
using Words = std::vector<std::string>;

constexpr std::chrono::milliseconds kPatient{60000};

Words joined(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

class MultiProcessTest : public ::testing::Test {
 protected:
  MultiProcessTest() { write_text(model_, testing::tiny_model()); }

  Words train_words(const Words& more) const {
    return joined({"run", model_, "--loss", testing::kTinyLoss, "--threads", "1"}, more);
  }

  // What a run says of each step, but for its time.
  std::vector<std::string> course(const Words& more) {
    const std::string file = folder_.file("m.jsonl");
    const ProgramResult result = run_trainrt(train_words(joined(more, {"--metrics", file})));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::vector<std::string> steps;
    std::istringstream stream(file_text(file));
    for (std::string line; std::getline(stream, line);) {
      nlohmann::json values = nlohmann::json::parse(line);
      values.erase("step_seconds");
      steps.push_back(values.dump());
    }
    return steps;
  }

  std::string write_data(int64_t num_samples) {
    const std::string file = folder_.file("data" + std::to_string(num_samples) + ".npz");
    const std::string n = std::to_string(num_samples);
    const std::string command =
        "/usr/bin/python3 -c \"import numpy as np\nr = np.random.RandomState(" + n +
        ")\nnp.savez('" + file + "', x=r.rand(" + n + ", 4), y=r.rand(" + n + ", 3))\"";
    EXPECT_EQ(std::system(command.c_str()), 0);
    return file;
  }

  TemporaryFolder folder_;
  std::string model_ = folder_.file("tiny.onnx");
};

// Column- and row-parallel, in two data ranks with sharded optimizer state.
std::string tensor_plan() {
  using Json = nlohmann::json;
  const auto share = [](int rank) {
    return Json{{"data_rank", rank},
                {"num_samples", 16},
                {"micro_batch_size", 16},
                {"num_micro_batches", 1}};
  };
  const auto placed = [](const std::string& tensor) {
    return Json{{"data", "replicate"}, {"tensor", tensor}};
  };
  const Json stage = {{"virtual_stage", 0},
                      {"rank_stage", 0},
                      {"nodes", {0, 4}},
                      {"recompute", {{"mode", "none"}, {"nodes", Json::array()}}}};
  return Json{
      {"version", 1},
      {"global_batch", 32},
      {"micro_batch_size", 16},
      {"data_parallel", 2},
      {"tensor_parallel", 2},
      {"zero_stage", 1},
      {"shares", {share(0), share(1)}},
      {"stages", Json::array({stage})},
      {"placements",
       {{"w1", placed("shard(1)")}, {"b1", placed("shard(0)")}, {"w2", placed("shard(0)")}}}}
      .dump();
}

TEST_F(MultiProcessTest, ProcessesGiveTheBitsOfThreads) {
  const std::string plan = folder_.file("plan.json");
  write_text(plan, tensor_plan());
  const std::vector<Words> splits = {{"2", "--dp", "2"},
                                     {"2", "--pp", "2", "--micro-batch-size", "8"},
                                     {"3", "--dp", "3", "--zero", "1", "--batch-size", "13"},
                                     {"4", "--plan", plan},
                                     {"4", "--dp", "2", "--pp", "2", "--zero", "3"},
                                     {"4", "--dp", "4", "--shares", "1,2,3,4"}};
  for (const Words& split : splits) {
    const Words pins = joined({split.begin() + 1, split.end()}, {"--steps", "5"});
    const auto threads = course(joined(pins, {"--devices", "cpu:" + split[0]}));
    const auto processes = course(joined(pins, {"--nproc", split[0]}));
    EXPECT_EQ(threads.size(), 5u);
    EXPECT_EQ(threads, processes) << ::testing::PrintToString(split);
  }
}

// The last batch holds one sample, so two of three ranks idle in it.
TEST_F(MultiProcessTest, RanksWithoutSamplesTakePart) {
  const Words words = {
      "--dp", "3", "--data", write_data(33), "--labels", "y", "--epochs", "1", "--loss", "mse"};
  const auto threads = course(joined(words, {"--devices", "cpu:3"}));
  EXPECT_EQ(threads.size(), 2u);
  EXPECT_EQ(threads, course(joined(words, {"--nproc", "3"})));
}

TEST_F(MultiProcessTest, ACheckpointMovesBetweenProcessesAndThreads) {
  const auto step = [&](const std::string& total, const Words& split) {
    const ProgramResult result = run_trainrt(train_words(joined(split,
                                                                {"--steps",
                                                                 total,
                                                                 "--checkpoint-dir",
                                                                 folder_.file("ck"),
                                                                 "--resume",
                                                                 "--precision",
                                                                 "fp64",
                                                                 "--metrics",
                                                                 folder_.file("moved.jsonl")})));
    EXPECT_EQ(result.exit_code, 0) << result.err;
  };
  step("2", {"--nproc", "4", "--dp", "2", "--pp", "2", "--zero", "1"});
  // Written once: the folder holds one file of each rank and the manifest.
  size_t files = 0;
  for (const auto& entry : fs::directory_iterator(folder_.file("ck/step-00000002"))) {
    files += entry.is_regular_file() ? 1 : 0;
  }
  EXPECT_EQ(files, 5u);
  step("4", {"--nproc", "3", "--dp", "3"});
  const std::string plan = folder_.file("plan.json");
  write_text(plan, tensor_plan());
  step("6", {"--nproc", "4", "--plan", plan});
  step("8", {"--devices", "cpu:2", "--pp", "2"});
  step("9", {});
  const auto lines = [&](const std::string& file) {
    std::vector<double> losses;
    std::istringstream stream(file_text(file));
    for (std::string line; std::getline(stream, line);) {
      losses.push_back(nlohmann::json::parse(line)["loss"]);
    }
    return losses;
  };
  ASSERT_EQ(
      run_trainrt(
          train_words(
              {"--steps", "9", "--precision", "fp64", "--metrics", folder_.file("one.jsonl")}))
          .exit_code,
      0);
  EXPECT_THAT(lines(folder_.file("moved.jsonl")),
              ::testing::Pointwise(::testing::DoubleNear(1e-7), lines(folder_.file("one.jsonl"))));
}

TEST_F(MultiProcessTest, EvaluationCountsEachSampleOnce) {
  for (int64_t num_samples = 1; num_samples <= 6; ++num_samples) {
    const std::string data = write_data(num_samples);
    const auto loss = [&](const Words& more) {
      const ProgramResult result = run_trainrt(joined({"eval",
                                                       model_,
                                                       "--loss",
                                                       "mse",
                                                       "--labels",
                                                       "y",
                                                       "--data",
                                                       data,
                                                       "--precision",
                                                       "fp64",
                                                       "--format",
                                                       "json"},
                                                      more));
      EXPECT_EQ(result.exit_code, 0) << result.err;
      return nlohmann::json::parse(result.out)["loss"].get<double>();
    };
    const double one = loss({});
    EXPECT_NEAR(loss({"--nproc", "3"}), one, 1e-12 * one) << num_samples << " samples";
    EXPECT_NEAR(loss({"--nproc", "3", "--batch-size", "4"}), one, 1e-12 * one) << num_samples;
    EXPECT_NEAR(loss({"--devices", "cpu:3"}), one, 1e-12 * one) << num_samples << " samples";
  }
}

TEST_F(MultiProcessTest, OnlyRankZeroSpeaks) {
  RankProcesses ranks;
  ranks.start_world(3, train_words({"--steps", "3", "--dp", "3"}));
  const std::vector<RankEnd> ends = ranks.wait(kPatient);
  EXPECT_THAT(ends[0].result.out, HasSubstr("trained 3 steps"));
  for (const size_t rank : {size_t{1}, size_t{2}}) {
    EXPECT_EQ(ends[rank].result.exit_code, 0);
    EXPECT_EQ(ends[rank].result.out + ends[rank].result.err, "");
  }
}

struct LauncherRow {
  const char* name;
  std::vector<Variables> ranks;  // %P: a free port
};

void PrintTo(const LauncherRow& row, std::ostream* out) {
  *out << row.name;
}

class LaunchedByTest : public ::testing::TestWithParam<LauncherRow> {};

TEST_P(LaunchedByTest, TheBinaryIsARank) {
  const TemporaryFolder folder;
  const std::string model = folder.file("tiny.onnx");
  write_text(model, testing::tiny_model());
  const std::string port = std::to_string(testing::free_port());
  RankProcesses ranks;
  for (Variables variables : GetParam().ranks) {
    for (auto& [name, value] : variables) {
      value = value == "%P" ? port : value;
    }
    ranks.start({testing::trainrt_binary(),
                 "run",
                 model,
                 "--loss",
                 testing::kTinyLoss,
                 "--dp",
                 "2",
                 "--steps",
                 "2"},
                variables);
  }
  std::string out;
  for (const RankEnd& end : ranks.wait(kPatient)) {
    EXPECT_EQ(end.result.exit_code, 0) << end.result.err;
    out += end.result.out;
  }
  EXPECT_THAT(out, HasSubstr("trained 2 steps"));
}

Variables ompi(const std::string& rank) {
  return {{"OMPI_COMM_WORLD_RANK", rank},
          {"OMPI_COMM_WORLD_SIZE", "2"},
          {"OMPI_COMM_WORLD_LOCAL_RANK", rank},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
          {"PMIX_RANK", rank},
          {"MASTER_PORT", "%P"}};
}
Variables torchrun(const std::string& rank) {
  return {{"RANK", rank},
          {"WORLD_SIZE", "2"},
          {"LOCAL_RANK", rank},
          {"LOCAL_WORLD_SIZE", "2"},
          {"MASTER_ADDR", "localhost"},
          {"MASTER_PORT", "%P"},
          {"TORCHELASTIC_RUN_ID", "none"},
          {"TORCHELASTIC_RESTART_COUNT", "1"}};
}
Variables slurm(const std::string& rank) {
  return {{"SLURM_PROCID", rank},
          {"SLURM_NTASKS", "2"},
          {"SLURM_LOCALID", rank},
          {"SLURM_JOB_ID", "71"},
          {"SLURM_JOB_NODELIST", "localhost"},
          {"MASTER_PORT", "%P"}};
}
Variables pmi2(const std::string& rank) {
  Variables variables = slurm(rank);
  variables.insert(variables.end(), {{"PMI_RANK", rank}, {"PMI_SIZE", "2"}});
  return variables;
}
Variables pmix(const std::string& rank) {
  return {{"PMIX_RANK", rank},
          {"PMIX_NAMESPACE", "prterun-1"},
          {"TRAINRT_WORLD_SIZE", "2"},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", "%P"}};
}
Variables kubernetes(const std::string& rank) {
  return {{"JOB_COMPLETION_INDEX", rank},
          {"TRAINRT_WORLD_SIZE", "2"},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", "%P"}};
}
Variables kubeflow(const std::string& node) {
  return {{"PET_NODE_RANK", node},
          {"PET_NNODES", "2"},
          {"PET_NPROC_PER_NODE", "1"},
          {"PET_MASTER_ADDR", "127.0.0.1"},
          {"PET_MASTER_PORT", "%P"}};
}

INSTANTIATE_TEST_SUITE_P(Launcher,
                         LaunchedByTest,
                         ::testing::Values(LauncherRow{"torchrun", {torchrun("0"), torchrun("1")}},
                                           LauncherRow{"openmpi", {ompi("1"), ompi("0")}},
                                           LauncherRow{"slurm", {slurm("0"), slurm("1")}},
                                           LauncherRow{"slurm_pmi2", {pmi2("0"), pmi2("1")}},
                                           LauncherRow{"pmix", {pmix("0"), pmix("1")}},
                                           LauncherRow{"kubernetes",
                                                       {kubernetes("1"), kubernetes("0")}},
                                           LauncherRow{"kubeflow", {kubeflow("0"), kubeflow("1")}},
                                           LauncherRow{"kubeflow_two_ranks_a_pod",
                                                       {{{"PET_NODE_RANK", "0"},
                                                         {"PET_NNODES", "1"},
                                                         {"PET_NPROC_PER_NODE", "2"},
                                                         {"PET_MASTER_ADDR", "127.0.0.1"},
                                                         {"PET_MASTER_PORT", "%P"}}}}),
                         [](const auto& row) { return std::string(row.param.name); });

}  // namespace
}  // namespace trainrt
