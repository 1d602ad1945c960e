// Models and data that do not fit each other, or have nothing to learn from: one clear message and
// the exit code of the contract each.
#include <gmock/gmock.h>
#include <onnx/defs/parser.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>

#include "runtime/checkpoint.h"
#include "tests/support/idx_file.h"
#include "tests/support/paths.h"
#include "tests/support/run_program.h"

namespace trainrt {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using testing::ProgramResult;
using testing::run_trainrt;
using testing::TemporaryFolder;
using testing::write_idx_folder;
using testing::write_model;
using testing::write_text;

struct BadData {
  const char* name;
  std::vector<std::string> arguments;  // files by name, in a folder that holds those made below
  int exit_code;
  std::vector<std::string> says;
};

void PrintTo(const BadData& input, std::ostream* out) {
  *out << input.name;
}

std::string model(const std::string& signature,
                  const std::string& initializers,
                  const std::string& body) {
  return "<ir_version: 8, opset_import: [\"\" : 17]>\ng " + signature + "\n" +
         (initializers.empty() ? "" : "<" + initializers + ">\n") + "{\n" + body + "\n}\n";
}

class BadDataTest : public ::testing::TestWithParam<BadData> {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder;
    write_models();
    write_data();
  }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
  }

  static void write_models() {
    const std::string w = "float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}";
    const std::string in_out = "(float[N, 4] x) => (float[N, 3] y)";
    const std::string same = "(float[N, 4] x) => (float[N, 4] y)";
    const std::string scale = "float[4] w = {1, 2, 3, 4}";
    const auto write = [](const std::string& name, const std::string& text) {
      write_text(folder_->file(name), text);
    };
    write("dense.onnx", model(in_out, w, "y = MatMul(x, w)"));
    write("huge.onnx",
          model(in_out,
                "float[4, 3] w = {1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6}",
                "y = MatMul(x, w)"));
    write("narrow.onnx",
          model("(float[N, 4] x) => (float[N, 1] y)",
                "float[4, 1] w = {1, 2, 3, 4}",
                "y = MatMul(x, w)"));
    write("tiny.yaml", "hosts:\n  - {count: 1, devices: [{count: 1, type: cpu, memory: 1000}]}\n");
    write("root.onnx",
          model(in_out,
                w + ", float[3, 3] v = {1, 0, 2, 0, 1, 0, 3, 1, 0}",
                "h = MatMul(x, w)\ns = Sqrt(h)\ny = MatMul(s, v)"));
    write("no_weights.onnx", model(same, "", "y = Relu(x)"));
    write("no_float_output.onnx",
          model("(float[N, 4] x) => (int64[N] y)",
                scale,
                "h = Mul(x, w)\ny = ArgMax<axis = 1, keepdims = 0>(h)"));
    write("unsupported.onnx",
          model("(float[N, 4, 4] x) => (float[N] y)",
                scale,
                "h = Mul(x, w)\n[inverse] d = Det(h)\n[odd] y = Frobnicate(d)"));
    write("cycle.onnx", model(same, scale, "h = Add(z, w)\nz = Relu(h)\ny = Add(z, x)"));
    write("double.onnx", model(same, scale, "y = Mul(x, w)\ny = Relu(x)"));
    write("embedding.onnx",
          model("(int64[N, 4] x) => (float[N, 2] y)",
                "float[3, 2] w = {1, 2, 3, 4, 5, 6}",
                "e = Gather(w, x)\ny = ReduceMean<axes = [1], keepdims = 0>(e)"));
    write_lookups();
    write("bytes.onnx",
          model("(int8[N] i) => (float loss)",
                "float[1] w = {1}",
                "u = Cast<to = 1>(i)\ne = Mul(u, w)\nloss = ReduceMean<keepdims = 0>(e)"));
    write("weights.bin", std::string(20, '\0'));
    write("missing.onnx", external("no_such.bin"));
    write("too_short.onnx", external("weights.bin"));
    write("outside.onnx", external("../weights.bin"));
    write("empty.onnx", "");
    const std::string whole = folder_->file("whole.onnx");
    EXPECT_EQ(run_trainrt({"model", "lenet", "-o", whole}).exit_code, 0);
    const std::string bytes = testing::file_text(whole);
    write("truncated.onnx", bytes.substr(0, bytes.size() / 2));
  }

  // Operators that pick three places by the indices `i`, each with a scalar loss.
  static void write_lookups() {
    const auto write = [](const std::string& name, const std::string& lookup) {
      write_text(folder_->file(name),
                 model("(int64[N] i) => (float loss)",
                       "float[3] w = {1, 2, 3}, float[2, 3] rows = {1, 2, 3, 4, 5, 6}, "
                       "int64[1] last = {1}",
                       "u = Cast<to = 1>(i)\ntuples = Unsqueeze(i, last)\ne = " + lookup +
                           "\nloss = ReduceMean<keepdims = 0>(e)"));
    };
    write("gather.onnx", "Gather<axis = -1>(rows, i)");
    write("gather_elements.onnx", "GatherElements(w, i)");
    write("gather_nd.onnx", "GatherND(w, tuples)");
    write("scatter_elements.onnx", "ScatterElements<reduction = \"add\">(w, i, u)");
    write("scatter_nd.onnx", "ScatterND<reduction = \"add\">(w, tuples, u)");
  }

  // The dense model with its 48 bytes of weights in another file.
  static std::string external(const std::string& location) {
    onnx::ModelProto proto;
    const std::string text = model("(float[N, 4] x) => (float[N, 3] y)",
                                   "float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}",
                                   "y = MatMul(x, w)");
    EXPECT_TRUE(onnx::OnnxParser::Parse(proto, text.c_str()).IsOK());
    onnx::TensorProto& w = *proto.mutable_graph()->mutable_initializer(0);
    w.clear_float_data();
    w.clear_raw_data();
    w.set_data_location(onnx::TensorProto::EXTERNAL);
    onnx::StringStringEntryProto& entry = *w.add_external_data();
    entry.set_key("location");
    entry.set_value(location);
    return proto.SerializeAsString();
  }

  static void write_data() {
    std::vector<std::vector<float>> samples(6), wide(6, std::vector<float>(5, 0.5f));
    for (size_t i = 0; i < 24; ++i) {
      samples[i / 4].push_back(static_cast<float>(std::sin(static_cast<double>(i))));
    }
    const std::vector<int32_t> labels = {0, 1, 2, 0, 1, 2};
    const auto write = [](const std::string& name, const auto& images, const auto& classes) {
      write_idx_folder(folder_->file(name), "train", images, classes);
      write_idx_folder(folder_->file(name), "t10k", images, classes);
    };
    write("good", samples, labels);
    write("wide", wide, labels);
    write("class_3_of_3", samples, std::vector<int32_t>{0, 1, 2, 3, 1, 2});
    write("class_300", samples, std::vector<int32_t>{0, 1, 300, 3, 1, 2});
    write("class_-1", samples, std::vector<int32_t>{0, 1, 2, -1, 1, 2});
    write("ignored", samples, std::vector<int32_t>(6, -100));
    write("zeros", std::vector<std::vector<float>>(6, std::vector<float>(4, 0.0f)), labels);
    samples[1][1] = std::numeric_limits<float>::quiet_NaN();
    write("nan", samples, labels);
  }

  static TemporaryFolder* folder_;
};

TemporaryFolder* BadDataTest::folder_ = nullptr;

TEST_P(BadDataTest, EndsInOneClearMessage) {
  std::vector<std::string> arguments = GetParam().arguments;
  for (std::string& argument : arguments) {
    if (std::filesystem::exists(folder_->file(argument))) {
      argument = folder_->file(argument);
    }
  }
  const ProgramResult result = run_trainrt(arguments);
  EXPECT_EQ(result.exit_code, GetParam().exit_code) << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, HasSubstr("error: "));
  for (const std::string& part : GetParam().says) {
    EXPECT_THAT(result.err, HasSubstr(part));
  }
}

const std::vector<BadData> kBadData = {
    {"LabelsOfAnotherName",
     {"run", "dense.onnx", "--data", "good", "--labels", "targets"},
     2,
     {"no array 'targets'"}},
    {"ArrayOfAnotherName",
     {"run", "dense.onnx", "--data", "good", "--input", "x=pixels"},
     2,
     {"no array 'pixels'"}},
    {"InputOfAnotherName",
     {"run", "dense.onnx", "--data", "good", "--input", "q=images"},
     2,
     {"no input 'q'", "'x'"}},
    {"OutputOfAnotherName",
     {"run", "dense.onnx", "--data", "good", "--output", "z"},
     2,
     {"no output 'z'", "'y'"}},
    {"InputOfAnotherShape",
     {"run", "dense.onnx", "--data", "wide"},
     2,
     {"'images'", "float32[5]", "input 'x'", "float32[4]"}},
    {"InputOfAnotherDtype",
     {"run", "embedding.onnx", "--data", "good"},
     2,
     {"'images'", "float32", "input 'x'", "int64"}},
    {"NumbersTooLargeForTheInput",
     {"run", "bytes.onnx", "--data", "class_300", "--input", "i=labels"},
     2,
     {"sample 2 of array 'labels'", "int8 of input 'i'"}},
    {"GatherIndex",
     {"run", "gather.onnx", "--data", "class_3_of_3", "--input", "i=labels"},
     2,
     {"(Gather): index 3", "sample 3 of array 'labels'", "holds 3; wanted -3 to 2"}},
    {"GatherElementsIndex",
     {"run", "gather_elements.onnx", "--data", "class_3_of_3", "--input", "i=labels"},
     2,
     {"(GatherElements): index 3", "sample 3 of array 'labels'", "holds 3; wanted -3 to 2"}},
    {"GatherNdIndex",
     {"run", "gather_nd.onnx", "--data", "class_3_of_3", "--input", "i=labels"},
     2,
     {"(GatherND): index 3", "sample 3 of array 'labels'", "holds 3; wanted -3 to 2"}},
    {"ScatterElementsIndex",
     {"run", "scatter_elements.onnx", "--data", "class_3_of_3", "--input", "i=labels"},
     2,
     {"(ScatterElements): index 3", "sample 3 of array 'labels'", "holds 3; wanted -3 to 2"}},
    {"ScatterNdIndex",
     {"run", "scatter_nd.onnx", "--data", "class_3_of_3", "--input", "i=labels"},
     2,
     {"(ScatterND): index 3", "sample 3 of array 'labels'", "holds 3; wanted -3 to 2"}},
    {"ExternalDataMissing", {"run", "missing.onnx", "--data", "good"}, 3, {"'w'", "no_such.bin"}},
    {"ExternalDataTooShort",
     {"run", "too_short.onnx", "--data", "good"},
     3,
     {"'w'", "weights.bin"}},
    {"ExternalDataOutside",
     {"run", "outside.onnx", "--data", "good"},
     3,
     {"'w'", "../weights.bin"}},
    {"ClassBeyondTheOutput",
     {"run", "dense.onnx", "--data", "class_3_of_3"},
     2,
     {"class label 3", "[0, 3)", "sample 3 of array 'labels'", "holds 3; wanted 0 to 2"}},
    {"NegativeClass",
     {"run", "dense.onnx", "--data", "class_-1"},
     2,
     {"class label -1", "-100", "sample 3 of array 'labels'"}},
    {"ClassBeyondTheOutputInEval",
     {"eval", "dense.onnx", "--data", "class_3_of_3"},
     2,
     {"class label 3", "[0, 3)"}},
    {"ClassesForALossOfNumbers",
     {"run", "dense.onnx", "--data", "good", "--loss", "mse"},
     2,
     {"array 'labels'", "loss mse", "output 'y'", "softmax_cross_entropy"}},
    {"ClassesForAnOutputOfOneNumber",
     {"run", "narrow.onnx", "--data", "good"},
     2,
     {"array 'labels'", "output 'y' [32, 1]", "--loss bce_with_logits"}},
    {"LabelsOfNoArray",
     {"run", "dense.onnx", "--data", "good", "--input", "x=labels", "--loss", "mse"},
     2,
     {"no labels", "'images' float32[4] per sample", "'labels'"}},
    {"AllLabelsIgnored",
     {"run", "dense.onnx", "--data", "ignored"},
     2,
     {"step 1: ", "every label is ignored"}},
    {"AllLabelsIgnoredInEval",
     {"eval", "dense.onnx", "--data", "ignored"},
     2,
     {"every label is ignored"}},
    {"NanInTheData",
     {"run", "dense.onnx", "--data", "nan"},
     1,
     {"step 1", "the loss", "--lr", "sample 1 of array 'images'", "holds nan"}},
    {"NanInTheDataOfFloat16",
     {"run", "dense.onnx", "--data", "nan", "--precision", "fp16"},
     1,
     {"step 1", "the loss is not a number", "sample 1 of array 'images'", "holds nan"}},
    {"WeightsBeyondFloat16",
     {"run", "huge.onnx", "--data", "good", "--precision", "fp16", "--steps", "99"},
     1,
     {"at a loss scale of", "float16's range of 65504", "--precision bf16"}},
    {"NanInEval",
     {"eval", "dense.onnx", "--data", "nan"},
     1,
     {"batch 1: the loss is not a number", "the model's weights", "sample 1 of array 'images'"}},
    {"WeightsLeftOut",
     {"run", "missing.onnx", "--cluster", "tiny.yaml"},
     3,
     {"the weights", "'no_such.bin'", "'w'", "trainrt plan"}},
    {"NanInTheGradientAlone",
     {"run", "root.onnx", "--data", "zeros"},
     1,
     {"step 1", "norm of the gradient is not a number"}},
    {"EverythingFrozen",
     {"run", "dense.onnx", "--data", "good", "--freeze", "*"},
     2,
     {"no trainable parameter", "--freeze"}},
    {"NoWeights", {"run", "no_weights.onnx"}, 2, {"no trainable parameter"}},
    {"NoLoss", {"run", "no_float_output.onnx"}, 2, {"no output of the model is float", "--output"}},
    {"UnsupportedOperators",
     {"run", "unsupported.onnx"},
     3,
     {"Det", "'inverse'", "Frobnicate", "'odd'", "trainrt ops"}},
    {"Cycle", {"run", "cycle.onnx"}, 3, {"cycle.onnx", "form a cycle"}},
    {"NameDefinedTwice", {"run", "double.onnx"}, 3, {"double.onnx", "'y' is defined twice"}},
    {"EmptyFile", {"run", "empty.onnx"}, 3, {"empty.onnx", "is empty"}},
    {"TruncatedFile", {"run", "truncated.onnx"}, 3, {"truncated.onnx", "truncated or damaged"}},
    {"DimOfAnotherName",
     {"run", "dense.onnx", "--data", "good", "--bind", "K=2"},
     2,
     {"no input has a dim named 'K'"}},
    {"BatchAxisBeyondTheDims",
     {"run", "dense.onnx", "--data", "good", "--batch-axis", "x=5"},
     2,
     {"--batch-axis x=5", "2 dims"}},
    {"BatchAxisOfAnotherName",
     {"run", "dense.onnx", "--data", "good", "--batch-axis", "image=0"},
     2,
     {"--batch-axis image=0", "did you mean 'images'"}},
    {"BatchBound",
     {"run", "dense.onnx", "--data", "good", "--bind", "N=2"},
     2,
     {"--bind N=2", "input 'x'", "--batch-size"}},
    {"BatchBoundForInspect", {"inspect", "dense.onnx", "--bind", "N=2"}, 2, {"--bind N=2"}},
    {"ExportDiskFull",
     {"run", "dense.onnx", "--data", "good", "--export", "/dev/full"},
     5,
     {"/dev/full", "No space left"}},
};

INSTANTIATE_TEST_SUITE_P(Program, BadDataTest, ::testing::ValuesIn(kBadData), [](const auto& row) {
  return std::string(row.param.name);
});

TEST(BadCheckpointTest, ACheckpointOfAnotherModelIsRefused) {
  const TemporaryFolder folder;
  const std::string a = folder.file("a.onnx"), b = folder.file("b.onnx");
  write_text(a,
             model("(float[N, 4] x) => (float[N, 1] y)",
                   "float[4, 1] w = {1, 2, 3, 4}",
                   "y = MatMul(x, w)"));
  write_text(b,
             model("(float[N, 4] x) => (float[N, 1] y)",
                   "float[4, 1] v = {1, 2, 3, 4}",
                   "y = MatMul(x, v)"));
  const std::string checkpoints = folder.file("ck");
  const auto run = [&](const std::string& file) {
    return run_trainrt({"run", file, "--steps", "2", "--checkpoint-dir", checkpoints, "--resume"});
  };
  ASSERT_EQ(run(a).exit_code, 0);
  const ProgramResult result = run(b);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("step-00000002' is of another model than '" + b));
}

TEST(BadCheckpointTest, ASaveThatFailsLeavesTheOneBefore) {
  const TemporaryFolder folder;
  const std::string file = folder.file("m.onnx"), checkpoints = folder.file("ck");
  write_model("lenet", file);
  ASSERT_EQ(run_trainrt({"run", file, "--steps", "1", "--checkpoint-dir", checkpoints}).exit_code,
            0);
  // No file may grow beyond 64 KiB: to the program the same as a full disk.
  const int status = std::system(concat("trap '' XFSZ; ulimit -f 64; '",
                                        testing::trainrt_binary(),
                                        "' run '",
                                        file,
                                        "' --steps 2 --resume --checkpoint-dir '",
                                        checkpoints,
                                        "' 2> '",
                                        folder.file("err"),
                                        "' > /dev/null")
                                     .c_str());
  EXPECT_EQ(WEXITSTATUS(status), 5);
  EXPECT_THAT(testing::file_text(folder.file("err")), HasSubstr("File too large"));
  EXPECT_THAT(checkpoint_steps(checkpoints), ::testing::ElementsAre(1));
  EXPECT_EQ(run_trainrt({"run", file, "--steps", "2", "--resume", "--checkpoint-dir", checkpoints})
                .exit_code,
            0);
}

TEST(WeightedClassesTest, EvalGivesNoAccuracyThatIsNone) {
  const TemporaryFolder folder;
  const auto eval = [&](const std::string& weights, const std::string& input) {
    const std::string file = folder.file("m.onnx");
    write_text(file,
               model("(float[N, 4] x, int64[N] labels) => (float loss)",
                     "float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}" + weights,
                     "h = MatMul(x, w)\nloss = SoftmaxCrossEntropyLoss(h, labels" + input + ")"));
    const ProgramResult result = run_trainrt({"eval", file, "--steps", "1"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.out, HasSubstr("loss: "));
    return result.out;
  };
  EXPECT_THAT(eval("", ""), HasSubstr("accuracy: "));
  EXPECT_THAT(eval(", float[3] k = {1, 2, 0.5}", ", k"), Not(HasSubstr("accuracy")));
}

TEST(BadTokenTest, MoreCharactersThanTheVocabularyHasAreRefused) {
  const TemporaryFolder folder;
  const std::string file = folder.file("m.onnx"), text = folder.file("t.txt");
  write_model("gpt2 --layers 1 --hidden 16 --heads 2 --vocab 8 --seq 4", file);
  write_text(text, "abcdefghabcdefghabcdefghabcdefghi");
  const ProgramResult result = run_trainrt({"run", file, "--data", "text:" + text});
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_THAT(result.err, HasSubstr("has 9 different characters"));
  EXPECT_THAT(result.err, HasSubstr("tells only 8 apart"));
}

TEST(BadBatchTest, ABatchLargerThanTheDataIsCutToIt) {
  const TemporaryFolder folder;
  write_text(folder.file("m.onnx"),
             model("(float[N, 4] x) => (float[N, 3] y)",
                   "float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}",
                   "y = MatMul(x, w)"));
  write_idx_folder(folder.file("data"),
                   "train",
                   std::vector<std::vector<float>>(5, std::vector<float>(4, 0.5f)),
                   {0, 1, 2, 0, 1});
  const ProgramResult result = run_trainrt(
      {"run", folder.file("m.onnx"), "--data", folder.file("data"), "--batch-size", "64"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("trained 1 steps (5 samples)"));
}

}  // namespace
}  // namespace trainrt
