// Numbers in the data that an operator has no answer for: the kernels refuse them by node and
// value.
#include <gmock/gmock.h>

#include <limits>

#include "tests/graph/onnx_models.h"

namespace trainrt {
namespace {

using testing::at_batch;
using testing::error_of;
using ::testing::HasSubstr;
using testing::model_of;

using Feeds = std::map<std::string, Tensor>;

Tensor run(const std::string& signature, const std::string& body, Feeds feeds, bool reference) {
  const Graph graph = model_of(signature, "", body).bind(at_batch(2));
  for (const ValueId id : graph.values_of_kind(ValueKind::kInput)) {
    const Value& value = graph.value(id);
    feeds.emplace(value.name, Tensor(value.type.dtype, value.type.shape));
  }
  EvaluateOptions options;
  options.reference_kernels = reference;
  return evaluate(graph, feeds, {graph.outputs().at(0)}, options).at(0);
}

void expect_refusal(const std::string& signature,
                    const std::string& body,
                    const Feeds& feeds,
                    const std::string& message) {
  for (const bool reference : {false, true}) {
    const std::string error =
        error_of(ErrorCode::kInvalidArgument, [&] { run(signature, body, feeds, reference); });
    EXPECT_THAT(error, HasSubstr(message)) << body;
    EXPECT_THAT(error, HasSubstr("node '")) << body;
  }
}

TEST(OnnxBadDataTest, AnIndexOutsideOfItsAxis) {
  const auto indices = [](int64_t last, Shape shape) {
    return Feeds{{"i", Tensor::from<int64_t>({0, 1, -3, last}, std::move(shape))}};
  };
  for (const int64_t last : {3, -4}) {
    const std::string message =
        "index " + std::to_string(last) + " at position 3 is outside of an axis of size 3";
    expect_refusal("(float[2, 3] x, int64[2, 2] i) => (float[2, 2, 2] y)",
                   "y = Gather <axis = 1> (x, i)",
                   indices(last, {2, 2}),
                   message);
    expect_refusal("(float[2, 3] x, int64[2, 2] i) => (float[2, 2] y)",
                   "y = GatherElements <axis = 1> (x, i)",
                   indices(last, {2, 2}),
                   message);
    expect_refusal("(float[2, 3] x, int64[2, 2] i, float[2, 2] u) => (float[2, 3] y)",
                   "y = ScatterElements <axis = 1> (x, i, u)",
                   indices(last, {2, 2}),
                   message);
    expect_refusal("(float[2, 3] x, int64[2, 2, 1] i) => (float[2, 2] y)",
                   "y = GatherND <batch_dims = 1> (x, i)",
                   indices(last, {2, 2, 1}),
                   message);
    expect_refusal(
        "(float[2, 3] x, int64[2, 2, 2] i, float[2, 2] u) => (float[2, 3] y)",
        "y = ScatterND (x, i, u)",
        {{"i", Tensor::from<int64_t>({0, 0, 1, 2, -1, -3, 1, last}, {2, 2, 2})}},
        "index " + std::to_string(last) + " at position 7 is outside of an axis of size 3");
  }
}

TEST(OnnxBadDataTest, ALengthBeyondTheSteps) {
  for (const int64_t length : {3, -1}) {
    const std::string message =
        "length " + std::to_string(length) + " of sample 1 of the batch; wanted 0 to 2";
    expect_refusal("(float[2, 2] x, int64[2] l) => (float[2, 2] y)",
                   "y = ReverseSequence <batch_axis = 0, time_axis = 1> (x, l)",
                   {{"l", Tensor::from<int64_t>({2, length}, {2})}},
                   message);
    const std::string gates[] = {"16", "12", "4"}, types[] = {"LSTM", "GRU", "RNN"};
    for (int k = 0; k < 3; ++k) {
      expect_refusal("(float[2, 2, 5] x, int32[2] l) => (float[2, 1, 2, 4] y)",
                     "ws = Constant <value_ints = [1, " + gates[k] +
                         ", 5]> ()\n"
                         "rs = Constant <value_ints = [1, " +
                         gates[k] +
                         ", 4]> ()\n"
                         "w = ConstantOfShape(ws)\nr = ConstantOfShape(rs)\ny = " +
                         types[k] + " <hidden_size = 4> (x, w, r, , l)",
                     {{"l", Tensor::from<int32_t>({2, static_cast<int32_t>(length)}, {2})}},
                     message);
    }
  }
}

TEST(OnnxBadDataTest, AClassLabelOutsideOfTheClasses) {
  for (const std::string loss : {"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"}) {
    for (const std::string reduction : {"mean", "sum", "none"}) {
      for (const int64_t label : {3, -1}) {
        EXPECT_THAT(error_of(ErrorCode::kInvalidArgument,
                             [&] {
                               run("(float[2, 3] x, int64[2] l) => (float y)",
                                   "z = " + loss + " <ignore_index = -100, reduction = \"" +
                                       reduction + "\"> (x, l)\ny = ReduceSum(z)",
                                   {{"l", Tensor::from<int64_t>({-100, label}, {2})}},
                                   false);
                             }),
                    HasSubstr("class label " + std::to_string(label) + " at item 1"))
            << loss << " " << reduction;
      }
    }
  }
}

TEST(OnnxBadDataTest, AnIntegerDivisorOfZero) {
  for (const std::string body : {"y = Div(x, d)", "y = Mod(x, d)", "y = Mod <fmod = 1> (x, d)"}) {
    expect_refusal("(int64[2, 3] x, int64[2, 3] d) => (int64[2, 3] y)",
                   body,
                   {{"d", Tensor::from<int64_t>({2, -1, 1, 7, 0, 3}, {2, 3})}},
                   "divisor at position 4 of [2, 3] is 0");
    expect_refusal("(uint8[2] x, uint8 d) => (uint8[2] y)",
                   body,
                   {{"d", Tensor::scalar<uint8_t>(0)}},
                   "divisor at position 0 of [] is 0");
    EXPECT_THAT(error_of(ErrorCode::kInvalidArgument,
                         [&] {
                           model_of("(float[2] x) => (float[2] z)",
                                    "int64 x0 = {7}, int64 d = {0}",
                                    "y = " + body.substr(4, body.find('(') - 4) +
                                        "(x0, d)\nf = Cast <to = 1> (y)\nz = Add(x, f)")
                               .bind(at_batch(2));
                         }),
                HasSubstr("divisor at position 0"));
  }
}

TEST(OnnxBadDataTest, TheLeastIntegerByMinusOneWraps) {
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  const Feeds feeds = {{"x", Tensor::from<int64_t>({kLeast, 7}, {2})},
                       {"d", Tensor::scalar<int64_t>(-1)}};
  const std::string signature = "(int64[2] x, int64 d) => (int64[2] y)";
  for (const bool reference : {false, true}) {
    EXPECT_EQ(run(signature, "y = Div(x, d)", feeds, reference).to_int64(),
              (std::vector<int64_t>{kLeast, -7}));
    EXPECT_EQ(run(signature, "y = Mod(x, d)", feeds, reference).to_int64(),
              (std::vector<int64_t>{0, 0}));
  }
}

}  // namespace
}  // namespace trainrt
