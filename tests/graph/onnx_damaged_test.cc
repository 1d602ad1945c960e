// Nodes that the ONNX checker lets pass and no exporter writes: what fuzzing found.
#include <gmock/gmock.h>

#include "graph/evaluator.h"
#include "tests/graph/onnx_models.h"

namespace trainrt {
namespace {

using testing::at_batch;
using testing::error_of;
using ::testing::HasSubstr;
using testing::model_of;

std::string refusal(const std::string& signature, const std::string& body) {
  return error_of(ErrorCode::kUnsupported,
                  [&] { model_of(signature, "", body).bind(at_batch(1)); });
}

TEST(OnnxDamagedTest, ABiasOfARecurrentNodeThatIsTooSmall) {
  EXPECT_THAT(refusal("(float[1, 2, 5] x, float[1, 16, 5] w, float[1, 16, 4] r, float[1] b) => "
                      "(float[1, 1, 2, 4] y)",
                      "y = LSTM <hidden_size = 4> (x, w, r, b)"),
              HasSubstr("too small"));
}

TEST(OnnxDamagedTest, AnEinsumIndexOfTheOutputAlone) {
  EXPECT_THAT(
      refusal("(float[1, 3] x) => (float[1, 3] y)", "y = Einsum <equation = \"ij->ik\"> (x)"),
      HasSubstr("no operand has the output's index 'k'"));
}

TEST(OnnxDamagedTest, AnOutputPaddingBeyondTheStride) {
  EXPECT_THAT(refusal("(float[1, 1, 4] x, float[1, 1, 3] w) => (float[1, 1, 6] y)",
                      "y = ConvTranspose <output_padding = [9223372036854775807]> (x, w)"),
              HasSubstr("output_padding"));
}

TEST(OnnxDamagedTest, OperatorsThatAreOursAloneAreNoneOfAFile) {
  for (const char* body : {"y = SoftmaxCrossEntropyGrad (x)",
                           "y = Accumulate (x, x)",
                           "y = MeanLoss (x, x)",
                           "y = AllReduce (x)"}) {
    EXPECT_THAT(refusal("(float[1] x) => (float[1] y)", body), HasSubstr("no such operator here"));
  }
}

TEST(OnnxDamagedTest, AxesOfASequenceThatOnlyAddUpToOne) {
  for (const char* axes :
       {"batch_axis = 9223372036854775807, time_axis = 1", "batch_axis = 3, time_axis = -2"}) {
    EXPECT_THAT(error_of(ErrorCode::kInvalidModel,
                         [&] {
                           model_of("(float[2, 3] x, int64[3] n) => (float[2, 3] y)",
                                    "",
                                    concat("y = ReverseSequence <", axes, "> (x, n)"))
                               .bind(at_batch(2));
                         }),
                HasSubstr("wanted one to be 0, the other 1"));
  }
}

TEST(OnnxDamagedTest, ADiagonalBeyondAnyMatrixKeepsAllOrNothing) {
  for (const auto& [k, kept] :
       {std::pair("9223372036854775807", true), std::pair("-9223372036854775808", false)}) {
    const OnnxModel model = model_of("(float[2, 3] x) => (float[2, 3] y)",
                                     concat("int64 k = {", k, "}"),
                                     "y = Trilu <upper = 0> (x, k)");
    const Graph graph = model.bind(at_batch(2));
    const Tensor x = Tensor::from<float>({1, 2, 3, 4, 5, 6}, {2, 3});
    const std::vector<Tensor> results = evaluate(graph, {{"x", x}}, {graph.outputs()[0]});
    EXPECT_EQ(results[0].to_double()[5], kept ? 6 : 0) << k;
  }
}

// A transform over the samples, too long at the size that the file was made for alone.
TEST(OnnxDamagedTest, AnOutputThatOneBatchHasAndAnotherHasNot) {
  EXPECT_THAT(error_of(ErrorCode::kInvalidModel,
                       [] {
                         model_of("(float[65536, 7, 2] x) => (float[65536, 7, 2] y)",
                                  "",
                                  "y = DFT <axis = 0> (x)")
                             .tensors(at_batch(32));
                       }),
              HasSubstr("cannot be rewritten to 32"));
}

TEST(OnnxDamagedTest, IndexTuplesWiderThanTheData) {
  const auto of = [](const std::string& body, const std::string& inputs) {
    return error_of(ErrorCode::kInvalidModel, [&] {
      model_of("(float[4, 5] x, " + inputs + ") => (float[4, 5] y)", "", body).bind(at_batch(4));
    });
  };
  EXPECT_THAT(of("y = ScatterND(x, i, u)", "int64[4, 9] i, float[4] u"), HasSubstr("k <= 2"));
  EXPECT_THAT(of("y = GatherND <batch_dims = -1> (x, i)", "int64[4, 0] i"),
              HasSubstr("with -1 batch dims"));
}

const std::string kLstmShapes = "int64[3] ws = {1, 16, 3}, int64[3] rs = {1, 16, 4}";

struct Case {
  std::string signature, initializers, body, message;
  int opset = 18;
};

void expect_refusals(const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    SCOPED_TRACE(c.body);
    EXPECT_THAT(
        error_of(ErrorCode::kInvalidModel,
                 [&] { model_of(c.signature, c.initializers, c.body, c.opset).bind(at_batch(4)); }),
        HasSubstr(c.message));
  }
}

TEST(OnnxDamagedTest, StepsBlocksAndCountsOfZero) {
  expect_refusals({
      {"(float[4, 6] x) => (float[4, 6] y)",
       "int64[1] a = {0}, int64[1] b = {4}",
       "y = Slice(x, a, b, a, a)",
       "a step of 0 along axis 0"},
      {"(float[4, 6] x) => (float[4, 6] y)",
       "int64[2] a = {0, 1}, int64[2] b = {3, 4}, int64[2] c = {1, -1}",
       "y = Slice(x, a, b, c)",
       "cuts axis 1 twice"},
      {"(float[4, 4, 6, 6] x) => (float[4, 4, 6, 6] y)",
       "",
       "y = DepthToSpace <blocksize = 0> (x)",
       "blocksize is 0"},
      {"(float[4, 4, 6, 6] x) => (float[4, 4, 6, 6] y)",
       "",
       "y = DepthToSpace <blocksize = 4> (x)",
       "4 channels do not divide into blocks of 4 x 4"},
      {"(float[4, 4, 6, 6] x) => (float[4, 4, 6, 6] y)",
       "",
       "y = SpaceToDepth <blocksize = 0> (x)",
       "blocksize is 0"},
      {"(float[4, 4, 6, 6] x) => (float[4, 4, 6, 6] y)",
       "",
       "y = SpaceToDepth <blocksize = 4> (x)",
       "images of 6 x 6 do not divide"},
      {"(float[4, 6] x) => (float[4, 6] y)",
       "",
       "y = Split <axis = 1, num_outputs = 0> (x)",
       "num_outputs is 0, but the node has 1"},
      {"(float[4, 2, 6] x) => (float[4, 2, 6] y)",
       "",
       "y = MaxPool <kernel_shape = [2], strides = [0], auto_pad = \"SAME_UPPER\"> (x)",
       "strides and dilations must be positive"},
      {"(float[4, 4, 3] x) => (float[4, 1, 4, 4] y)",
       kLstmShapes,
       "w = ConstantOfShape(ws)\nr = ConstantOfShape(rs)\ny = LSTM <hidden_size = 0> (x, w, r)",
       "hidden_size is 0"},
  });
}

TEST(OnnxDamagedTest, OperandsWithTooFewDims) {
  expect_refusals({
      {"(float x) => (float y)",
       "float[1] s = {1}",
       "y = InstanceNormalization(x, s, s)",
       "x is []; wanted [n, c, ...]"},
      {"(float[4, 9, 1] x) => (float[4, 2, 3, 2] y)",
       "int64 s = {2}, float w = {1}",
       "y = STFT(x, s, w)",
       "the window is []"},
      {"(float[4, 4, 3] x) => (float[4, 1, 4, 4] y)",
       kLstmShapes + ", float b = {1}",
       "w = ConstantOfShape(ws)\nr = ConstantOfShape(rs)\ny = LSTM <hidden_size = 4> (x, w, r, b)",
       "input 3 is []"},
      {"(float[4, 2, 3] x) => (float[4, 2, 5] y)",
       "int64[3] ws = {2, 2, 3}, float b = {1}",
       "w = ConstantOfShape(ws)\ny = ConvTranspose(x, w, b)",
       "the bias is [], wanted [2]"},
  });
}

TEST(OnnxDamagedTest, AnIdentityMatrixThatNobodyCouldWriteOut) {
  const OnnxModel model = model_of(
      "(float[4, 90000000] x) => (float[4, 90000000] y)", "", "t = EyeLike(x)\ny = Add(x, t)");
  EXPECT_THAT(error_of(ErrorCode::kUnsupported, [&] { model.bind({}); }),
              HasSubstr("more than 67108864 elements"));
}

TEST(OnnxDamagedTest, SizesThatAreNone) {
  const std::string x = "(float[4, 6] x) => (float[4, 6] y)";
  expect_refusals({
      {x, "int64[1] s = {-3}", "t = ConstantOfShape(s)\nr = ReduceSum(t)\ny = Add(x, r)", "[-3]"},
      {x, "int64[2] s = {-2, -12}", "y = Reshape(x, s)", "[-2, -12]"},
      {x, "int64[3] s = {-1, -2, 6}", "y = Reshape(x, s)", "has the dim -2"},
      {x, "int64[3] s = {-2, 4, 6}", "y = Expand(x, s)", "[-2, 4, 6]"},
      {x, "int64[2] s = {1, -2}", "y = Tile(x, s)", "has the dim -2"},
      {x, "int64[2] s = {8, -2}", "y, z = Split <axis = 1> (x, s)", "has the dim -2"},
      {x,
       "int64 s = {-2}, float[2] v = {0, 1}",
       "i = Cast <to = 7> (x)\ny = OneHot(i, s, v)",
       "-2"},
      {x, "int64[4] s = {0, -9, 0, 2}", "y = Pad(x, s)", "crops more than dim 1"},
      {x, "int64[4] s = {0, -6, 0, 2}", "y = Pad <mode = \"edge\"> (x, s)", "could repeat"},
      {x, "int64[4] s = {0, -6, 0, 2}", "y = Pad <mode = \"reflect\"> (x, s)", "could repeat"},
      {x, "int64[4] s = {0, -6, 0, 2}", "y = Pad <mode = \"wrap\"> (x, s)", "could repeat", 19},
      {x, "float[2] s = {1, 0}", "y = Resize(x, , s)", "resized by 0"},
      {x, "float[2] s = {1, -2}", "y = Resize(x, , s)", "resized by -2"},
      {x, "int64[2] s = {4, 0}", "y = Resize(x, , , s)", "cannot become one of size 0"},
  });
}

TEST(OnnxDamagedTest, SizesThatNoMachineHolds) {
  const std::string huge = "9223372036854775807";
  expect_refusals({
      {"(float[4, 1, " + huge + "] x) => (float[4, 2, 3] y)",
       "float[1, 2, 3] w = {0, 1, 2, 3, 4, 5}",
       "y = ConvTranspose(x, w)",
       "more than 2^48 elements"},
      {"(float[4, 0, " + huge + "] x) => (float[4, 0, 3] y)", "", "y = Relu(x)", "more than 2^48"},
      {"(float[4, 6] x) => (float[4, 6] y)",
       "int64[2] s = {281474976710656, 2}",
       "t = ConstantOfShape(s)\nr = ReduceSum(t)\ny = Add(x, r)",
       "more than 2^48"},
  });
  EXPECT_THAT(refusal("(float[4, 1, 281474976710] x, float[1, 2, 3] w) => (float[4, 2, 3] y)",
                      "y = ConvTranspose <strides = [1073741824]> (x, w)"),
              HasSubstr("must not go beyond 2^30"));
  EXPECT_THAT(refusal("(float[4, 1, 3] x, float[1, 2, 3] w) => (float[4, 2, 3] y)",
                      "y = ConvTranspose <output_shape = [" + huge + "]> (x, w)"),
              HasSubstr("must not go beyond 2^30"));
}

TEST(OnnxDamagedTest, IndicesAndLengthsThatDoNotFitTheData) {
  const std::string y = ") => (float[4, 6] y)";
  expect_refusals({
      {"(float[4, 6] x, int64[4, 9] i" + y,
       "",
       "y = GatherElements <axis = 0> (x, i)",
       "indices [4, 9] are larger than data [4, 6] in dim 1"},
      {"(float[4, 6] x, int64[4, 9] i, float[4, 9] u" + y,
       "",
       "y = ScatterElements <axis = 0> (x, i, u)",
       "larger than data"},
      {"(float[4, 6] x" + y,
       "int64[2, 1] i = {0, 0}",
       "y = GatherND <batch_dims = 1> (x, i)",
       "differ in their first 1 dims"},
      {"(float[4, 6] x" + y,
       "int64[2] l = {1, 1}",
       "y = ReverseSequence <batch_axis = 0, time_axis = 1> (x, l)",
       "one int64 length per sample"},
      {"(float[4, 6] x, int64[4] l" + y,
       "",
       "y = ReverseSequence <batch_axis = 1, time_axis = 1> (x, l)",
       "wanted one to be 0, the other 1"},
      {"(float[4, 4, 3] x) => (float[4, 1, 4, 4] y)",
       kLstmShapes + ", int32[2] l = {1, 1}",
       "w = ConstantOfShape(ws)\nr = ConstantOfShape(rs)\n"
       "y = LSTM <hidden_size = 4> (x, w, r, , l)",
       "lens is [2], wanted [4]"},
      {"(float[4, 6] x" + y, "int64 a = {5}", "y = CumSum(x, a)", "axis 5 is outside"},
      {"(float[4, 6] x" + y, "int64[2] a = {0, 1}", "y = CumSum(x, a)", "has 2 elements"},
      {"(float[4, 6] x" + y,
       "bool[5] c = {1, 0, 1, 0, 1}",
       "y = Compress <axis = 0> (x, c)",
       "5 elements for an axis of size 4"},
      {"(float[4, 1, 3] x, int64[4, 3, 1] i" + y,
       "",
       "y = MaxUnpool <kernel_shape = [2], strides = [2]> (x, i)",
       "the indices [4, 3, 1]"},
  });
}

}  // namespace
}  // namespace trainrt
