// What a run says about itself before its first step, and how it ends when it is told to meanwhile.
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "graph/base/error.h"
#include "tests/support/idx_file.h"
#include "tests/support/paths.h"
#include "tests/support/run_program.h"
#include "tests/support/tiny_model.h"

namespace trainrt {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using testing::ProgramResult;
using testing::run_trainrt;
using testing::TemporaryFolder;
using testing::write_model;

class StartTextTest : public ::testing::Test {
 protected:
  StartTextTest() { testing::write_text(model_, testing::tiny_model()); }

  std::string started(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"run", model_, "--loss", "mse", "--steps", "1"});
    const ProgramResult result = run_trainrt(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.err;
  }

  TemporaryFolder folder_;
  std::string model_ = folder_.file("tiny.onnx");
};

TEST_F(StartTextTest, NamesTheUpdateWithItsDefaults) {
  EXPECT_THAT(
      started({}),
      HasSubstr("train adamw, lr 0.001 constant, weight decay 0.01, beta1 0.9, beta2 0.999, "
                "eps 1e-08, no clipping, seed 0"));
  EXPECT_THAT(started({"--optimizer",
                       "momentum",
                       "--nesterov",
                       "--lr-schedule",
                       "cosine",
                       "--warmup-steps",
                       "3",
                       "--clip-norm",
                       "2"}),
              HasSubstr("train momentum, lr 0.001 cosine after 3 warm-up steps, weight decay 0, "
                        "momentum 0.9 (Nesterov), clip norm 2, seed 0"));
}

TEST_F(StartTextTest, NamesThePlansMicroBatch) {
  EXPECT_THAT(started({"--micro-batch-size", "8"}), HasSubstr("pipeline, micro-batch 8"));
  EXPECT_THAT(started({"--devices", "cpu:2", "--dp", "2", "--reduction", "exact"}),
              HasSubstr("exact reduction"));
}

TEST_F(StartTextTest, PrintsAConfigurationBack) {
  testing::write_text(folder_.file("c.yaml"), "lr: 0.25\n");
  const std::string text = started({"--config", folder_.file("c.yaml")});
  EXPECT_THAT(text, HasSubstr("configuration:"));
  EXPECT_THAT(text, HasSubstr("\nlr: 0.25\n"));
}

TEST_F(StartTextTest, WarnsOfABatchLargerThanTheData) {
  testing::write_idx_folder(folder_.file("data"),
                            "train",
                            std::vector<std::vector<float>>(5, std::vector<float>(4, 0.5f)),
                            {0, 1, 2, 0, 1});
  const ProgramResult result = run_trainrt({"run", model_, "--data", folder_.file("data")});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("--batch-size 32 is larger than the data (5 samples)"));
}

TEST_F(StartTextTest, WarnsOfBatchStatisticsOfMicroBatches) {
  testing::write_text(model_,
                      "<ir_version: 8, opset_import: [\"\" : 17]>\n"
                      "g (float[N, 4] x) => (float[N, 4] y)\n"
                      "<float[4] s = {1, 1, 1, 1}, float[4] b = {0, 0, 0, 0},\n"
                      " float[4] m = {0, 0, 0, 0}, float[4] v = {1, 1, 1, 1}>\n"
                      "{\n  y, m2, v2 = BatchNormalization<training_mode = 1>(x, s, b, m, v)\n}\n");
  const std::string warning = "BatchNorm's statistics are those of micro-batches of 8 samples";
  EXPECT_THAT(started({"--micro-batch-size", "8"}), HasSubstr(warning));
  EXPECT_THAT(started({"--micro-batch-size", "8", "--batch-norm", "sync"}),
              Not(HasSubstr("BatchNorm's")));
  EXPECT_THAT(started({}), Not(HasSubstr("BatchNorm's")));
}

TEST_F(StartTextTest, WarnsOnceOfBatchNormInInferenceForm) {
  const auto write = [&](const char* outputs, const char* mode) {
    testing::write_text(model_,
                        concat("<ir_version: 8, opset_import: [\"\" : 17]>\n"
                               "g (float[N, 4] x) => (float[N, 4] y)\n"
                               "<float[4] s = {1, 1, 1, 1}, float[4] b = {0, 0, 0, 0},\n"
                               " float[4] m = {0, 0, 0, 0}, float[4] v = {1, 1, 1, 1},\n"
                               " float[4] w = {1, 2, 3, 4}>\n"
                               "{\n  [bn] h",
                               outputs,
                               " = BatchNormalization",
                               mode,
                               "(x, s, b, m, v)\n  a = Relu(h)\n  y = Mul(a, w)\n}\n"));
  };
  const std::string warning = "warning: 1 BatchNormalization node in inference form ('bn')";
  write("", "");
  const std::string text = started({"--devices", "cpu:2", "--dp", "2"});
  EXPECT_THAT(text, HasSubstr(warning));
  EXPECT_EQ(text.find(warning), text.rfind(warning));
  EXPECT_THAT(started({"--freeze", "s", "--freeze", "b"}), Not(HasSubstr("inference form")));
  EXPECT_THAT(run_trainrt({"eval", model_, "--loss", "mse", "--steps", "1"}).err,
              Not(HasSubstr("inference form")));
  write(", m2, v2", "<training_mode = 1>");
  EXPECT_THAT(started({}), Not(HasSubstr("inference form")));
}

TEST_F(StartTextTest, ASignalBeforeTheFirstStepEndsTheRunAtOnce) {
  // A pipe that nobody writes to holds the run up for as long as it takes.
  const std::string pipe = folder_.file("text.txt");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  write_model("gpt2 --layers 1 --hidden 16 --heads 2 --vocab 32 --seq 8", model_);
  const pid_t pid =
      testing::start_trainrt({"run", model_, "--data", "text:" + pipe}, folder_.path());
  // Its handler stands when the model is read; whenever the signal comes, the process ends by it.
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  ::kill(pid, SIGTERM);
  const ProgramResult result = testing::finish_trainrt(pid, folder_.path());
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
}

TEST(HelpTextTest, NamesTheModelsAndTheArguments) {
  const std::string model = run_trainrt({"model", "--help"}).out;
  EXPECT_THAT(model, HasSubstr(" gpt2 "));
  EXPECT_THAT(model, HasSubstr(" gpt3-175b"));
  const std::string doctor = run_trainrt({"doctor", "--help"}).out;
  EXPECT_THAT(doctor, Not(HasSubstr("arguments")));
  EXPECT_THAT(run_trainrt({"run", "--quiet"}).err, HasSubstr("unknown option --quiet; see"));
  EXPECT_THAT(run_trainrt({"frob"}).err, HasSubstr("unknown command 'frob'; 'trainrt --help'"));
}

TEST(InstalledCopyTest, TheLibraryBesideTheProgramIsTaken) {
  namespace fs = std::filesystem;
  const TemporaryFolder folder;
  const fs::path binary = testing::trainrt_binary();
  fs::copy_file(binary, folder.file("trainrt"));
  fs::copy_file(binary.parent_path() / "libdnnl.so.3", folder.file("libdnnl.so.3"));
  const std::string list = folder.file("list");
  ASSERT_EQ(std::system(("ldd '" + folder.file("trainrt") + "' > '" + list + "'").c_str()), 0);
  EXPECT_THAT(testing::file_text(list), HasSubstr("=> " + folder.file("libdnnl.so.3")));
}

}  // namespace
}  // namespace trainrt
