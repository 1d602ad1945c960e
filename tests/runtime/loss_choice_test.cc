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
    EXPECT_THAT(result.err, HasSubstr("loss output:loss, fp64")) << batch;
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
        "loss = Einsum<equation = \"ij,ij->\">(h, h)",
        "shape = Shape<start = 0, end = 1>(x)\nn = Cast<to = 1>(shape)\ne = Div(h, n)\n"
        "loss = ReduceSum<keepdims = 0>(e)",
        "shape = Shape<start = 0, end = 1>(x)\nn = Cast<to = 1>(shape)\ne = Mul(h, n)\n"
        "loss = ReduceMean<keepdims = 0>(e)"}) {
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

// The same predictions, laid out in ways that exporters know; labels come batch first.
TEST_F(LossChoiceTest, LabelsFollowTheSamplesToWhereTheOutputHasThem) {
  const std::string flat = "rows = Constant<value = int64[2] {-1, 3}>()\n";
  const std::vector<std::pair<std::string, std::string>> forms = {
      {"(float[N, 5, 4] x) => (float[N, 5, 3] y)", "y = MatMul(x, w)"},
      {"(float[N, 5, 4] x) => (float[5, N, 3] y)",
       "h = MatMul(x, w)\ny = Transpose<perm = [1, 0, 2]>(h)"},
      {"(float[N, 5, 4] x) => (float[R, 3] y)", flat + "h = MatMul(x, w)\ny = Reshape(h, rows)"},
      {"(float[N, 5, 4] x) => (float[R, 3] y)",
       flat + "h = MatMul(x, w)\nt = Transpose<perm = [1, 0, 2]>(h)\ny = Reshape(t, rows)"},
      {"(float[N, 5, 4] x) => (float[5, 3, N] y)",
       "h = MatMul(x, w)\ny = Transpose<perm = [1, 2, 0]>(h)"}};
  for (const std::string labels :
       {"labels=r.randint(0, 3, (6, 5))", "labels=r.rand(6, 5, 3).astype('f4')"}) {
    write_data("x=r.rand(6, 5, 4).astype('f4'), " + labels);
    std::string first;
    for (const auto& [signature, body] : forms) {
      write_model(signature, body);
      for (const std::string micro_batch : {"1", "4"}) {
        const std::string found =
            loss(run({"--batch-size", "6", "--micro-batch-size", micro_batch}));
        first = first.empty() ? found : first;
        EXPECT_EQ(found.substr(0, 18), first.substr(0, 18)) << labels << "\n" << body;
      }
    }
  }
}

// Time first in the input, flattened in the output, as PyTorch's word_language_model has it.
TEST_F(LossChoiceTest, LabelsFollowSamplesThatAreMergedWithTime) {
  const std::string flat = "rows = Constant<value = int64[2] {-1, 3}>()\n";
  write_data("x=r.rand(6, 5, 4).astype('f4'), labels=r.randint(0, 3, (6, 5))");
  write_model("(float[N, 5, 4] x) => (float[N, 5, 3] y)", "y = MatMul(x, w)");
  const std::string wanted = loss(run({"--batch-size", "6"}));
  const std::string body = flat + "h = MatMul(x, w)\ny = Reshape(h, rows)";
  for (const std::string arrays :
       {"labels=r.randint(0, 3, (6, 5))", "labels=r.randint(0, 3, (6, 5)).T"}) {
    write_data("x=r.rand(6, 5, 4).astype('f4').transpose(1, 0, 2), " + arrays);
    const std::string axis = arrays.ends_with(".T") ? "1" : "0";
    // The labels by themselves, and as an input of the model that nothing reads.
    for (const std::string input : {"", ", int64[N, 5] labels"}) {
      if (axis == "1" && !input.empty()) {
        continue;
      }
      write_model("(float[5, N, 4] x" + input + ") => (float[R, 3] y)", body);
      for (const std::string micro_batch : {"1", "4"}) {
        EXPECT_EQ(loss(run({"--batch-size",
                            "6",
                            "--micro-batch-size",
                            micro_batch,
                            "--batch-axis",
                            "x=1",
                            "--batch-axis",
                            "labels=" + axis}))
                      .substr(0, 18),
                  wanted.substr(0, 18))
            << arrays << input;
      }
    }
  }
}

TEST_F(LossChoiceTest, LossesThatReadOtherNumbersThanTheOutputHasAreWarnedOf) {
  write_data("x=r.rand(6, 4).astype('f4'), labels=r.randint(0, 2, (6, 3))");
  write_model("(float[N, 4] x) => (float[N, 3] y)", "scores = MatMul(x, w)\ny = Sigmoid(scores)");
  EXPECT_THAT(run({"--loss", "bce_with_logits"}).err, HasSubstr("made by a Sigmoid"));
  write_data("x=r.rand(6, 4).astype('f4'), labels=r.randint(0, 3, 6)");
  write_model("(float[N, 4] x) => (float[N, 3] y)", "y = MatMul(x, w)");
  EXPECT_THAT(run({"--loss", "nll"}).err, HasSubstr("--loss softmax_cross_entropy"));
  write_model("(float[N, 4] x) => (float[N, 3] y)", "h = MatMul(x, w)\ny = LogSoftmax(h)");
  EXPECT_THAT(run({"--loss", "nll"}).err, Not(HasSubstr("logarithms")));
}

TEST_F(LossChoiceTest, TargetsOfBinaryCrossEntropyLieBetweenZeroAndOne) {
  write_model("(float[N, 4] x) => (float[N, 3] y)", "y = MatMul(x, w)");
  for (const std::string target : {"-100", "3", "1.5"}) {
    write_data("x=r.rand(6, 4).astype('f4'), labels=np.array([[0, 1, 0]] * 5 + [[0, " + target +
               ", 1]])");
    const ProgramResult result = run({"--loss", "bce_with_logits"});
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_THAT(result.err, HasSubstr("sample 5 of array 'labels'"));
    EXPECT_THAT(result.err, HasSubstr("holds " + target + ", as element 1"));
  }
}

TEST_F(LossChoiceTest, OfTwoScalarsTheFirstIsNamedAndTheOtherCanBeChosen) {
  write_model("(float[N, 4] x) => (float a, float b)",
              "h = MatMul(x, w)\na = ReduceMean<keepdims = 0>(h)\n"
              "b = ReduceSumSquare<keepdims = 0>(h)");
  write_data("x=r.rand(6, 4).astype('f4'), t=r.rand(6)");
  const std::string first = run({}).err;
  EXPECT_THAT(first, HasSubstr("loss output:a"));
  EXPECT_THAT(first, HasSubstr("--loss output:NAME chooses another ('b')"));
  EXPECT_THAT(run({"--output", "b"}).err, HasSubstr("loss output:b"));
  const ProgramResult labels = run({"--labels", "t"});
  EXPECT_EQ(labels.exit_code, 2);
  EXPECT_THAT(labels.err, HasSubstr("--labels t has no effect"));
}

TEST_F(LossChoiceTest, DimsInAnotherOrderAreNoReshape) {
  write_model("(float[N, 3, 4] x) => (float[N, 3, 3] y)", "y = MatMul(x, w)");
  write_data("x=r.rand(6, 4, 3).astype('f4'), labels=r.rand(6, 3, 3).astype('f4')");
  const ProgramResult input = run({});
  EXPECT_EQ(input.exit_code, 2);
  EXPECT_THAT(input.err, HasSubstr("float32[4, 3] per sample, input 'x' wants float64[3, 4]"));
  EXPECT_THAT(input.err, HasSubstr("transpose the array"));
  for (const std::string shape : {"(6, 12)", "(6, 3, 1, 4)", "(6, 3, 2, 2)"}) {
    write_data("x=r.rand(*" + shape + ").astype('f4'), labels=r.rand(6, 3, 3).astype('f4')");
    EXPECT_EQ(run({}).exit_code, 0) << shape;
  }
  write_model("(float[N, 2, 4] x) => (float[N, 2, 3] y)", "y = MatMul(x, w)");
  write_data("x=r.rand(6, 2, 4).astype('f4'), labels=r.rand(6, 3, 2).astype('f4')");
  const ProgramResult labels = run({});
  EXPECT_EQ(labels.exit_code, 2);
  EXPECT_THAT(labels.err, HasSubstr("wants [2, 3], the same dims in another order"));
}

// Keras' layout of a file, and numbers that no sample has.
TEST_F(LossChoiceTest, ArraysThatAreNotReadMayHaveOtherLengths) {
  write_model("(float[N, 4] x) => (float[N, 3] y)", "y = MatMul(x, w)");
  write_data(
      "x_test=r.rand(2, 4), y_test=r.randint(0, 3, 2), x_train=r.rand(6, 4), "
      "y_train=r.randint(0, 3, 6), weights=np.ones(3)");
  const ProgramResult named = run({"--input", "x=x_train", "--labels", "y_train"});
  EXPECT_EQ(named.exit_code, 0) << named.err;
  EXPECT_THAT(named.err, HasSubstr("6 samples"));
  EXPECT_EQ(run({"--labels", "y_train"}).exit_code, 0);  // the one of its length that is left
  const ProgramResult mixed = run({"--input", "x=x_train", "--labels", "y_test"});
  EXPECT_EQ(mixed.exit_code, 2);
  EXPECT_THAT(mixed.err, HasSubstr("'y_test' has 2 samples, array 'x_train' has 6"));
  EXPECT_THAT(run({}).err, HasSubstr("where --input NAME=ARRAY"));
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

// As many classes as tokens: the labels of both orders look alike.
TEST_F(LossChoiceTest, ClassesThatMayLieAlongEitherAxisAreWarnedOf) {
  for (const auto& [tokens, warned] : {std::pair<std::string, bool>{"3", true}, {"5", false}}) {
    write_model("(float[batch, " + tokens + ", 4] x) => (float[batch, " + tokens + ", 3] y)",
                "y = MatMul(x, w)");
    write_data("x=r.rand(6, " + tokens + ", 4).astype('f4'), labels=r.randint(0, 3, (6, " + tokens +
               "))");
    const std::string err = run({"--batch-size", "6"}).err;
    EXPECT_EQ(err.find("to have its classes along axis 2") != std::string::npos, warned) << err;
  }
}

}  // namespace
}  // namespace trainrt
