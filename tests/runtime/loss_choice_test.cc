// What a run takes for its loss and labels, on models whose form leaves room for doubt.
#include <gmock/gmock.h>

#include <cstdlib>

#include "tests/support/run_program.h"

namespace trainrt {
namespace {

using testing::file_text;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::ProgramResult;
using testing::run_trainrt;
using testing::TemporaryFolder;
using testing::write_text;

class LossChoiceTest : public ::testing::Test {
 protected:
  void write_model(const std::string& signature, const std::string& body) {
    write_text(model_,
               "<ir_version: 8, opset_import: [\"\" : 17]>\ng " + signature +
                   "\n<float[4, 3] w = {0.1, 0.5, -0.3, 0.2, 0.7, 0.4, -0.6, 0.3, 0.8, 0.9, -0.1, "
                   "0.2}>\n{\n" +
                   body + "\n}\n");
  }

  void write_data(const std::string& arrays) {
    const std::string command =
        "/usr/bin/python3 -c \"import numpy as np\nr = "
        "np.random.RandomState(0)\nnp.savez('" +
        data_ + "', " + arrays + ")\"";
    ASSERT_EQ(std::system(command.c_str()), 0);
  }

  ProgramResult run(std::vector<std::string> arguments) {
    const std::vector<std::string> common = {
        "run", model_, "--data", data_, "--precision", "fp64", "--steps", "1"};
    arguments.insert(arguments.begin(), common.begin(), common.end());
    return run_trainrt(arguments);
  }

  std::string loss(const ProgramResult& result) const {
    EXPECT_EQ(result.exit_code, 0) << result.err;
    const size_t at = result.out.find("last loss ");
    return at == std::string::npos ? "none" : result.out.substr(at, result.out.find('\n', at) - at);
  }

  TemporaryFolder folder_;
  std::string model_ = folder_.file("m.onnx");
  std::string data_ = folder_.file("d.npz");
};

TEST_F(LossChoiceTest, ALossOfOneElementIsOneAtEveryBatch) {
  write_model("(float[N, 4] x) => (float[1] loss)",
              "h = MatMul(x, w)\nflat = Constant<value = int64[1] {-1}>()\n"
              "e = Reshape(h, flat)\nloss = ReduceMean<keepdims = 1>(e)");
  write_data("x=r.rand(6, 4).astype('f4')");
  for (const std::string batch : {"1", "6"}) {
    const ProgramResult result = run({"--batch-size", batch});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr("loss output, fp64")) << batch;
  }
  EXPECT_EQ(loss(run({"--batch-size", "6", "--micro-batch-size", "1"})),
            loss(run({"--batch-size", "6", "--micro-batch-size", "6"})));
}

TEST_F(LossChoiceTest, APredictionOfOneElementIsNone) {
  write_model("(float[N, 4] x) => (float[N] y)",
              "h = MatMul(x, w)\ny = ReduceMean<axes = [1], keepdims = 0>(h)");
  write_data("x=r.rand(6, 4).astype('f4'), labels=r.rand(6).astype('f4')");
  EXPECT_THAT(run({"--batch-size", "1"}).err, HasSubstr("loss mse"));
}

TEST_F(LossChoiceTest, ASumInAnyFormDoesNotDependOnTheCut) {
  write_data("x=r.randint(0, 4, (6, 4)).astype('f4') / 4");
  for (const std::string body :
       {"loss = ReduceSumSquare<keepdims = 0>(h)",
        "s = ReduceSum<keepdims = 0>(h)\nhalf = Constant<value = float {0.5}>()\n"
        "loss = Mul(s, half)",
        "s = ReduceSum<keepdims = 0>(h)\nsix = Constant<value = float {6.0}>()\n"
        "loss = Div(s, six)",
        "loss = Einsum<equation = \"ij,ij->\">(h, h)"}) {
    write_model("(float[N, 4] x) => (float loss)", "h = MatMul(x, w)\n" + std::string(body));
    const std::string whole = loss(run({"--batch-size", "6", "--micro-batch-size", "6"}));
    EXPECT_THAT(whole, HasSubstr("last loss")) << body;
    EXPECT_EQ(loss(run({"--batch-size", "6", "--micro-batch-size", "2"})), whole) << body;
    EXPECT_EQ(loss(run({"--batch-size", "6", "--devices", "cpu:2", "--dp", "2"})), whole) << body;
  }
}

TEST_F(LossChoiceTest, ASoftmaxUnderCrossEntropyNamesTheScoresBeforeIt) {
  write_model("(float[N, 4] x) => (float[N, 3] y)",
              "b = Constant<value = float[3] {0.1, 0.2, 0.3}>()\nh = MatMul(x, w)\n"
              "scores = Add(h, b)\ny = Softmax(scores)");
  write_data("x=r.rand(6, 4).astype('f4'), labels=r.randint(0, 3, 6)");
  EXPECT_THAT(run({}).err, HasSubstr("with the scores 'scores' for an output"));
}

TEST_F(LossChoiceTest, LabelsThatFitBothWaysAreWarnedOf) {
  write_model("(float[T, batch, 4] x) => (float[T, batch, 3] y)", "y = MatMul(x, w)");
  const auto warning = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--labels", "t", "--bind", "T=6", "--batch-size", "6"});
    arguments.insert(arguments.end(), {"--batch-axis", "x=1"});
    const ProgramResult result = run(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.err;
  };
  write_data("x=r.rand(6, 6, 4).astype('f4'), t=r.randint(0, 3, (6, 6))");
  EXPECT_THAT(warning({}), HasSubstr("use --batch-axis t=1"));
  EXPECT_THAT(warning({"--batch-axis", "t=1"}), Not(HasSubstr("--batch-axis")));
  EXPECT_THAT(warning({"--batch-axis", "t=0"}), Not(HasSubstr("--batch-axis")));
}

}  // namespace
}  // namespace trainrt
