// `trainrt inspect` says all at once: tensors and their roles, loss candidates, and what is
// missing.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tests/support/run_program.h"

namespace trainrt {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::ProgramResult;
using testing::run_trainrt;
using testing::TemporaryFolder;
using testing::write_text;

class InspectCommandTest : public ::testing::Test {
 protected:
  std::string inspect(const std::string& signature,
                      const std::string& initializers,
                      const std::string& body,
                      const std::string& format = "text") {
    const std::string file = folder_.file("m.onnx");
    write_text(file,
               "<ir_version: 8, opset_import: [\"\" : 17]>\ng " + signature + "\n<" + initializers +
                   ">\n{\n" + body + "\n}\n");
    const ProgramResult result = run_trainrt({"inspect", file, "--format", format});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.out;
  }

  TemporaryFolder folder_;
};

TEST_F(InspectCommandTest, RolesAreSaidWithTheirReasons) {
  EXPECT_THAT(
      inspect("(float[N, 2, 4] x) => (float[N, 2, 4] y)",
              "float[2] s = {1, 1}, float[2] b = {0, 0}, float[2] m = {0, 0}, float[2] v = {1, 1}, "
              "float[4] unused = {1, 2, 3, 4}",
              "[bn] y = BatchNormalization(x, s, b, m, v)"),
      AllOf(HasSubstr("parameter s float32[2]: float initializer"),
            HasSubstr("state m float32[2]: running mean of BatchNormalization 'bn'"),
            HasSubstr("unused unused float32[4]"),
            HasSubstr("trained    4 elements in 2 tensors")));
}

TEST_F(InspectCommandTest, BatchNormsInInferenceFormAreNamed) {
  const std::string signature = "(float[N, 2, 4] x) => (float[N, 2, 4] y)";
  const std::string values =
      "float[2] s = {1, 1}, float[2] b = {0, 0}, float[2] m = {0, 0}, float[2] v = {1, 1}";
  const std::string body =
      "h = BatchNormalization(x, s, b, m, v)\n"
      "[second] y = BatchNormalization(h, s, b, m, v)";
  EXPECT_THAT(inspect(signature, values, body),
              HasSubstr("frozen     2 BatchNormalization nodes in inference form "
                        "('BatchNormalization:h', 'second')"));
  EXPECT_EQ(nlohmann::json::parse(inspect(signature, values, body, "json"))["frozen_batch_norms"],
            (std::vector<std::string>{"BatchNormalization:h", "second"}));
  EXPECT_THAT(
      inspect(signature, values, "y, m2, v2 = BatchNormalization<training_mode=1>(x, s, b, m, v)"),
      Not(HasSubstr("frozen ")));
}

TEST_F(InspectCommandTest, LossCandidatesAreNamed) {
  const std::string signature =
      "(float[N, 4] x) => (float[N, 4] scores, float[N, 1] size, int64[N] best)";
  const std::string body =
      "scores = Mul(x, w)\nsize = ReduceSum<keepdims = 1>(scores, axis)\n"
      "best = ArgMax<axis = 1, keepdims = 0>(scores)";
  const std::string weights = "float[4] w = {1, 2, 3, 4}, int64[1] axis = {1}";
  EXPECT_THAT(inspect(signature, weights, body),
              AllOf(HasSubstr("loss       softmax_cross_entropy of 'scores' against 'labels'\n"),
                    HasSubstr("loss       mse of 'size' against 'labels' (--output)\n")));
  const nlohmann::json json = nlohmann::json::parse(inspect(signature, weights, body, "json"));
  ASSERT_EQ(json["losses"].size(), 2u);
  EXPECT_EQ(json["losses"][1]["output"], "size");
}

TEST_F(InspectCommandTest, EverythingUnsupportedIsListedAndTheRestDescribed) {
  EXPECT_THAT(inspect("(float[N, 4, 4] x) => (float[N] y)",
                      "float[4] w = {1, 2, 3, 4}",
                      "h = Mul(x, w)\n[inverse] d = Det(h)\n[odd] y = Frobnicate(d)"),
              AllOf(HasSubstr("UNSUPPORTED Det (opset 17), 1 nodes, first 'inverse'"),
                    HasSubstr("UNSUPPORTED Frobnicate"),
                    HasSubstr("input      x float32[N, 4, 4], samples along axis 0")));
}

}  // namespace
}  // namespace trainrt
