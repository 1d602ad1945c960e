// Outputs that cannot be written while a run is under way: one message, and nothing trained is
// lost.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <filesystem>

#include "graph/base/error.h"
#include "runtime/checkpoint.h"
#include "runtime/file_bytes.h"
#include "tests/support/run_program.h"
#include "tests/support/tiny_model.h"

namespace trainrt {
namespace {

namespace fs = std::filesystem;

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::ProgramResult;
using testing::run_trainrt;

// For the programs started while it lives.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limited = {bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limited);
  }
  ~FileSizeLimit() { ::setrlimit(RLIMIT_FSIZE, &before_); }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_ = {};
};

class OutputFailuresTest : public ::testing::Test {
 protected:
  OutputFailuresTest() { testing::write_text(model_, testing::tiny_model()); }

  ProgramResult run(const std::vector<std::string>& more) const {
    std::vector<std::string> arguments = {"run", model_, "--loss", testing::kTinyLoss};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_trainrt(arguments);
  }

  testing::TemporaryFolder folder_;
  std::string model_ = folder_.file("tiny.onnx");
  std::string checkpoints_ = folder_.file("ck");
};

TEST_F(OutputFailuresTest, ADiskFullOfMetricsOrTracesDoesNotCostTheTraining) {
  for (const std::string devices : {"cpu", "cpu:2"}) {
    for (const std::string flag : {"--metrics", "--trace"}) {
      SCOPED_TRACE(flag + " on " + devices);
      fs::remove_all(checkpoints_);
      const ProgramResult result = run({"--steps",
                                        "9",
                                        "--devices",
                                        devices,
                                        flag,
                                        "/dev/full",
                                        "--checkpoint-dir",
                                        checkpoints_});
      EXPECT_EQ(result.exit_code, 5) << result.err;
      EXPECT_THAT(result.err,
                  AllOf(HasSubstr(flag + " '/dev/full'"),
                        HasSubstr("No space left"),
                        HasSubstr("up to step 1 is kept in " + checkpoints_)));
      EXPECT_THAT(checkpoint_steps(checkpoints_), ElementsAre(1));
      EXPECT_TRUE(Checkpoint::newest(checkpoints_).has_value());
    }
  }
}

TEST_F(OutputFailuresTest, AFileBeyondTheLimitOfItsSizeIsAnErrorAndLeavesNothing) {
  const std::string out = folder_.file("m.onnx");
  ProgramResult written, saved;
  {
    const FileSizeLimit limit(100'000);
    written = run_trainrt({"model", "mlp", "-o", out});
  }
  {
    const FileSizeLimit limit(1000);
    saved = run({"--steps", "1", "--checkpoint-dir", checkpoints_});
  }
  EXPECT_EQ(written.exit_code, 5);
  EXPECT_THAT(written.err, HasSubstr("File too large"));
  EXPECT_EQ(saved.exit_code, 5);
  EXPECT_TRUE(fs::is_empty(checkpoints_));
  fs::remove_all(checkpoints_);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_.path()), {}), 1);  // tiny.onnx
}

TEST_F(OutputFailuresTest, MetricsOnStdoutStandBesideWhatIsPrinted) {
  const ProgramResult result = run({"--steps", "3", "--metrics", "/dev/stdout"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("{\"step\":1,"),
                    HasSubstr("{\"step\":2,"),
                    HasSubstr("{\"step\":3,"),
                    HasSubstr("}\ntrained 3 steps")));
}

TEST_F(OutputFailuresTest, ALinkIsFollowedToAFileThatIsNotThereYet) {
  const std::string link = folder_.file("link.onnx");
  fs::create_symlink("new.onnx", link);
  EXPECT_EQ(run({"--steps", "1", "--export", link}).exit_code, 0);
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(folder_.file("new.onnx"))));
}

TEST_F(OutputFailuresTest, AFolderOfCheckpointsBelongsToOneRun) {
  fs::create_directories(checkpoints_);
  const FolderLock other(checkpoints_, "");
  const ProgramResult result = run({"--steps", "1", "--checkpoint-dir", checkpoints_});
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_THAT(result.err,
              HasSubstr("--checkpoint-dir '" + checkpoints_ + "': another run is writing there"));
}

}  // namespace
}  // namespace trainrt
