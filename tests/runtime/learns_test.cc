// The example models learn Fashion-MNIST: the accuracy on the test images that such networks are
// known to reach, through the program as a user calls it.
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/support/paths.h"
#include "tests/support/run_program.h"

namespace trainrt {
namespace {

using testing::fashion_mnist;
using testing::ProgramResult;
using testing::run_trainrt;
using testing::TemporaryFolder;

class LongLearnsTest : public ::testing::Test {
 protected:
  // Trains the example model `name` and returns the accuracy of what was exported.
  double accuracy(const std::string& name, const std::vector<std::string>& options) {
    const TemporaryFolder folder;
    const std::string model = folder.file("model.onnx"), trained = folder.file("trained.onnx");
    const auto run = [](std::vector<std::string> arguments) {
      const ProgramResult result = run_trainrt(arguments);
      EXPECT_EQ(result.exit_code, 0) << result.err;
      return result.out;
    };
    run({"model", name, "-o", model});
    std::vector<std::string> arguments = {"run",
                                          model,
                                          "--data",
                                          fashion_mnist(),
                                          "--batch-size",
                                          "128",
                                          "--lr-schedule",
                                          "cosine",
                                          "--export",
                                          trained};
    arguments.insert(arguments.end(), options.begin(), options.end());
    run(arguments);
    const std::string out = run({"eval", trained, "--data", fashion_mnist()});
    const size_t at = out.find("accuracy: ");
    const double found = at == std::string::npos ? 0 : std::strtod(out.c_str() + at + 10, nullptr);
    RecordProperty("accuracy", std::to_string(found));
    return found;
  }
};

TEST_F(LongLearnsTest, AnMlpReaches88AndAHalfPercent) {
  EXPECT_GE(accuracy("mlp", {"--epochs", "6"}), 0.885);
}

TEST_F(LongLearnsTest, ACnnWithBatchNormAndDropoutReaches91Percent) {
  EXPECT_GE(accuracy("cnn", {"--epochs", "6", "--lr", "2e-3"}), 0.91);
}

}  // namespace
}  // namespace trainrt
