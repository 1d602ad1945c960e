// How threads wait has to be settled before OpenMP's runtime is loaded: the program starts itself
// anew, as the same process and with the same arguments, unless the user has settled it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "tests/support/run_program.h"
#include "tests/support/tiny_model.h"

namespace trainrt::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// The environment of a run that is under way.
std::string environment_of_a_run() {
  const TemporaryFolder folder;
  const std::string model = folder.file("m.onnx"), metrics = folder.file("m.jsonl");
  write_text(model, tiny_model());
  const pid_t pid = start_trainrt(
      {"run", model, "--loss", kTinyLoss, "--steps", "1000000000", "--metrics", metrics},
      folder.path());
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (file_text(metrics).empty() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const std::string text = file_text("/proc/" + std::to_string(pid) + "/environ");
  ::kill(pid, SIGKILL);
  finish_trainrt(pid, folder.path());
  return text;
}

TEST(ThreadWaitingTest, ThreadsSleepSoonUnlessTheUserSaysOtherwise) {
  ::unsetenv("GOMP_SPINCOUNT");
  ::unsetenv("OMP_WAIT_POLICY");
  EXPECT_THAT(environment_of_a_run(), HasSubstr("GOMP_SPINCOUNT=3000"));
  ::setenv("OMP_WAIT_POLICY", "active", 1);
  EXPECT_THAT(environment_of_a_run(), Not(HasSubstr("GOMP_SPINCOUNT")));
}

}  // namespace
}  // namespace trainrt::testing
