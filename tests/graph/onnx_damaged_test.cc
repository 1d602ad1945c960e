// Nodes that the ONNX checker lets pass and no exporter writes: what fuzzing found.
#include <gmock/gmock.h>

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

}  // namespace
}  // namespace trainrt
