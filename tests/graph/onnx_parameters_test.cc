// Which tensors of a file are trained.
#include "graph/onnx_parameters.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "graph/onnx_weight_contents.h"
#include "tests/graph/onnx_models.h"

namespace trainrt {
namespace {

using testing::at_batch;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::model_of;
using testing::names_of_kind;
using testing::op_types;
using testing::roles;

using Roles = std::map<std::string, std::string>;

TEST(OnnxParametersTest, FloatInitializersOnADifferentiablePathAreParameters) {
  const OnnxModel model =
      model_of("(float[N, 2] x) => (float[N, 2] y, int64[N, 2] ids)",
               "float[2, 2] w = {1, 2, 3, 4}, int64[1] two = {2}, float[2] cut = {1, 1},"
               "float[2] lost = {1, 2}",
               R"(
    h = MatMul(x, w)
    factor = Cast<to = 1>(two)
    y = Mul(h, factor)
    z = Add(x, cut)
    ids = Cast<to = 7>(z))");
  EXPECT_EQ(roles(model), (Roles{{"w", "parameter"}, {"cut", "constant"}, {"lost", "unused"}}));
}

TEST(OnnxParametersTest, AGradientPassesTransposeCastSliceAndConcat) {
  const OnnxModel model = model_of("(float[N, 2] x) => (float[N, 4] y)",
                                   "float16[2, 2] a = {1, 2, 3, 4}, float[2, 2] b = {1, 2, 3, 4}",
                                   R"(
    wide = Cast<to = 1>(a)
    turned = Transpose<perm = [1, 0]>(wide)
    both = Concat<axis = 1>(turned, b)
    y = MatMul(x, both))");
  EXPECT_EQ(roles(model), (Roles{{"a", "parameter"}, {"b", "parameter"}}));
  EXPECT_THAT(op_types(model.bind(at_batch(1))),
              ElementsAre("Cast", "Transpose", "Concat", "MatMul"));
}

TEST(OnnxParametersTest, ATiedWeightIsOneParameterWithTwoReaders) {
  const OnnxModel model =
      model_of("(float[N, 2] x) => (float[N, 2] y)",
               "float[2, 2] w = {1, 2, 3, 4}",
               "h = MatMul(x, w)\nt = Transpose<perm = [1, 0]>(w)\ny = MatMul(h, t)");
  const Graph graph = model.bind(at_batch(1));
  EXPECT_THAT(names_of_kind(graph, ValueKind::kParameter), ElementsAre("w"));
  EXPECT_EQ(graph.consumers()[static_cast<size_t>(*graph.find_value("w"))].size(), 2u);
}

TEST(OnnxParametersTest, WeightsThatAreConstantNodesArePromoted) {
  const OnnxModel model = model_of("(float[N, 2] x) => (float[N, 2] y)", "", R"(
    w = Constant<value: tensor = float[2, 2] {1, 2, 3, 4}>()
    t = Transpose<perm = [1, 0]>(w)
    h = MatMul(x, t)
    b = Constant<value: tensor = float[2] {1, 2}>()
    s = Add(h, b)
    mask = Constant<value: tensor = float[2] {0, -1e9}>()
    m = Add(s, mask)
    half = Constant<value: tensor = float {0.5}>()
    y = Mul(m, half))");
  EXPECT_EQ(roles(model), (Roles{{"w", "parameter"}, {"b", "parameter"}, {"mask", "constant"}}));
  EXPECT_THAT(model.tensors(at_batch(1))[0].why, HasSubstr("Constant node"));
}

TEST(OnnxParametersTest, ConstantsBesideInitializersStayConstants) {
  const OnnxModel model =
      model_of("(float[N, 2] x) => (float[N, 2] y)", "float[2, 2] w = {1, 2, 3, 4}", R"(
    h = MatMul(x, w)
    mean = Constant<value: tensor = float[2] {0.4, 0.5}>()
    y = Sub(h, mean))");
  EXPECT_EQ(roles(model), (Roles{{"w", "parameter"}, {"mean", "constant"}}));
}

TEST(OnnxParametersTest, SingleNumbersUnderMadeUpNamesAreConstants) {
  const OnnxModel model = model_of("(float[N, 2] x) => (float[N, 2] y)",
                                   "float val_12 = {0.5}, float logit_scale = {0.5}",
                                   "h = Mul(x, val_12)\ny = Mul(h, logit_scale)");
  EXPECT_EQ(roles(model), (Roles{{"val_12", "constant"}, {"logit_scale", "parameter"}}));
}

TEST(OnnxParametersTest, GlobsChooseWhatIsTrained) {
  const OnnxModel model =
      model_of("(float[N, 2] x) => (float[N, 2] y)",
               "float[2] \"body.a\" = {1, 2}, float[2] \"body.b\" = {1, 2},"
               "float[2] \"head.w\" = {3, 4}",
               "h = Mul(x, \"body.a\")\ng = Mul(h, \"body.b\")\ny = Mul(g, \"head.w\")");
  BindOptions options = at_batch(1);
  options.freeze = {"body.*"};
  EXPECT_EQ(roles(model, options),
            (Roles{{"body.a", "frozen"}, {"body.b", "frozen"}, {"head.w", "parameter"}}));
  const Graph graph = model.bind(options);
  const Value& frozen = graph.value(*graph.find_value("body.a"));
  EXPECT_EQ(frozen.kind, ValueKind::kConstant);
  EXPECT_FALSE(frozen.constant.defined()) << "a frozen weight is read when the run needs it";
  EXPECT_THAT(initial_value(frozen).to_double(), ElementsAre(1, 2));
  options.freeze = {"body.a"};
  options.trainable = {"body.*"};
  EXPECT_EQ(roles(model, options),
            (Roles{{"body.a", "frozen"}, {"body.b", "parameter"}, {"head.w", "frozen"}}));
  options.trainable = {"hed.*"};
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { model.bind(options); }),
              HasSubstr("'hed.*' matches no parameter"));
}

TEST(OnnxParametersTest, WildcardsChooseAmongParametersAndAFullNameMakesOne) {
  const OnnxModel model = model_of("(float[N, 2] x) => (float[N, 2] y)",
                                   "float val_12 = {0.5}, float[2] w = {1, 2}",
                                   "h = Mul(x, val_12)\ny = Mul(h, w)");
  BindOptions options = at_batch(1);
  options.trainable = {"*"};
  EXPECT_EQ(roles(model, options), (Roles{{"val_12", "constant"}, {"w", "parameter"}}));
  options.trainable = {"val_12"};
  EXPECT_EQ(roles(model, options), (Roles{{"val_12", "parameter"}, {"w", "frozen"}}));
}

TEST(OnnxParametersTest, BuffersAreToldByTheirContents) {
  const OnnxModel model = model_of(
      "(float[N, 2, 4] x) => (float[N, 2, 4] y)",
      "float[2, 2] mask = {0, -1e9, 0, 0}, float[2, 4] pe = {0, 1, 0, 1, 0.8, 0.5, 0.1, 0.9},"
      "float[2, 4] cos = {1, 1, 1, 1, 0.5, 0.6, 0.7, 0.8},"
      "float[2, 4] sin = {0, 0, 0, 0, 0.5, 0.6, 0.7, 0.8},"
      "float[2, 4] padded = {0, 0, 0, 0, 0.5, 0.6, 0.7, 0.8}, float[4] inv_freq = {1, 0.1, 0.01, "
      "0}",
      R"(
    a = MatMul(mask, x)
    b = Add(a, pe)
    c = Mul(b, cos)
    d = Mul(c, sin)
    e = Add(d, padded)
    y = Mul(e, inv_freq))");
  EXPECT_EQ(roles(model),
            (Roles{{"mask", "constant"},
                   {"pe", "constant"},
                   {"cos", "constant"},
                   {"sin", "constant"},
                   {"padded", "parameter"},
                   {"inv_freq", "constant"}}));
}

TEST(OnnxParametersTest, AnUntiedHeadIsPointedOut) {
  const OnnxModel model =
      model_of("(float[N, 2] x) => (float[N, 2] y)",
               "float[3, 2] embedding = {1, 2, 3, 4, 5, 6}, float[2, 3] head = {1, 3, 5, 2, 4, 6}",
               "h = MatMul(x, head)\ny = MatMul(h, embedding)");
  const std::vector<TensorReport> reports = model.tensors(at_batch(1));
  ASSERT_EQ(reports.size(), 2u);
  EXPECT_THAT(reports[1].why, HasSubstr("has the elements of 'head'"));
  EXPECT_THAT(names_of_kind(model.bind(at_batch(1)), ValueKind::kParameter),
              ElementsAre("head", "embedding"));
}

TEST(OnnxParametersTest, ANaNMakesNoMaskOfAWeight) {
  Value value;
  value.type = {DType::kFloat32, {2}};
  value.source.load = [] {
    return Tensor::from<float>({1, std::numeric_limits<float>::quiet_NaN()}, {2});
  };
  EXPECT_EQ(buffer_reason(value, WeightCandidate(), false), "");
}

// What looks like a buffer by half of its name or one of its numbers, and is a weight.
TEST(OnnxParametersTest, WeightsAreNotTakenForBuffers) {
  const OnnxModel model = model_of(
      "(float[N, 4] x) => (float[N, 4] y)",
      "float[4] \"dense/bias\" = {180000, 180000, 180000, 180000},"
      "float[2, 4] \"single_emb.weight\" = {0, 0, 0, 0, 0.5, 0.6, 0.7, 0.8},"
      "float interval_scale = {0.5}, float constant = {0.5}, float[1] \"onnx::PRelu_5\" = {0.25},"
      "int64[1] rows = {1}",
      R"(
    a = Add(x, "dense/bias")
    b = Gather("single_emb.weight", rows)
    c = Add(a, b)
    d = Mul(c, interval_scale)
    e = Mul(d, constant)
    y = PRelu(e, "onnx::PRelu_5"))");
  for (const auto& [name, role] : roles(model)) {
    EXPECT_EQ(role, name == "rows" ? "constant" : "parameter") << name;
  }
}

TEST(OnnxParametersTest, WhatAnExporterMadeUpBesideInitializersIsConstant) {
  const OnnxModel model =
      model_of("(float[N, 2] x) => (float[N, 2] y)",
               "float[2, 2] w = {1, 2, 3, 4}, float two = {2}, float[1] p = {3}",
               R"(
    h = MatMul(x, w)
    one = Constant<value: tensor = float[2] {1, 1}>()
    n = LayerNormalization(h, one)
    s = Pow(n, two)
    y = Pow(s, p))");
  EXPECT_EQ(
      roles(model),
      (Roles{{"w", "parameter"}, {"one", "constant"}, {"two", "constant"}, {"p", "parameter"}}));
}

TEST(OnnxParametersTest, ConstantNodesInRecurrentLayersAndGroupNormsArePromoted) {
  const OnnxModel model = model_of("(float[3, N, 2] x) => (float[3, N, 2] y)", "", R"(
    w = Constant<value: tensor = float[1, 2, 2] {1, 2, 3, 4}>()
    r = Constant<value: tensor = float[1, 2, 2] {0.1, 0.2, 0.3, 0.4}>()
    h, last = RNN<hidden_size = 2>(x, w, r)
    axis = Constant<value: tensor = int64[1] {1}>()
    s = Squeeze(h, axis)
    t = Transpose<perm = [1, 2, 0]>(s)
    scale = Constant<value: tensor = float[2] {1, 2}>()
    shift = Constant<value: tensor = float[2] {3, 4}>()
    n = InstanceNormalization(t, scale, shift)
    y = Transpose<perm = [2, 0, 1]>(n))");
  const Roles found = roles(model);
  for (const char* name : {"w", "r", "scale", "shift"}) {
    EXPECT_EQ(found.count(name) != 0 ? found.at(name) : "missing", "parameter") << name;
  }
}

TEST(OnnxParametersTest, QuantizationScalesAreConstants) {
  const OnnxModel model = model_of("(float[N, 2] x) => (float[N, 2] y)",
                                   "float s = {0.1}, uint8 zero = {0}, float[2] b = {1, 2}",
                                   R"(
    [q] q = QuantizeLinear(x, s, zero)
    d = DequantizeLinear(q, s, zero)
    y = Add(d, b))");
  EXPECT_EQ(roles(model), (Roles{{"s", "constant"}, {"b", "parameter"}}));
}

TEST(OnnxParametersTest, EverythingMayBeFrozen) {
  const OnnxModel model =
      model_of("(float[N, 2] x) => (float[N, 2] y)", "float[2] w = {1, 2}", "y = Mul(x, w)");
  BindOptions options = at_batch(1);
  options.freeze = {"*"};
  EXPECT_THAT(names_of_kind(model.bind(options), ValueKind::kParameter), IsEmpty());
}

TEST(OnnxParametersTest, InitializersThatAreAlsoInputsAreParameters) {
  const OnnxModel model = OnnxModel::parse_text(R"(<ir_version: 3, opset_import: ["" : 9]>
g (float[N, 2] x, float[2] w) => (float[N, 2] y) <float[2] w = {1, 2}> { y = Mul(x, w) })");
  ASSERT_EQ(model.inputs().size(), 1u);
  EXPECT_EQ(roles(model), (Roles{{"w", "parameter"}}));
}

}  // namespace
}  // namespace trainrt
