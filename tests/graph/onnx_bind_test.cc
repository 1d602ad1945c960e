// From a loaded model to a Graph at concrete sizes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "graph/evaluator.h"
#include "graph/onnx_import.h"
#include "graph/onnx_symbols.h"
#include "tests/graph/onnx_models.h"

namespace trainrt {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using testing::at_batch;
using testing::error_of;
using testing::model_of;
using testing::names_of_kind;
using testing::op_types;
using testing::output_shape;
using testing::roles;

TEST(OnnxBindTest, ASmallModelComputesWhatItSays) {
  const OnnxModel model = model_of("(float[batch, 4] x) => (float[batch, 4] y)",
                                   "float[4] scale = {1, 2, 3, 4}, float[4] shift = {0, 1, 0, -9}",
                                   "[a] h = Mul(x, scale)\n[b] s = Add(h, shift)\n[c] y = Relu(s)");
  BindOptions options;
  options.batch = 2;
  const Graph graph = model.bind(options);
  EXPECT_THAT(op_types(graph), ElementsAre("Mul", "Add", "Relu"));
  EXPECT_THAT(names_of_kind(graph, ValueKind::kParameter), ElementsAre("scale", "shift"));
  ASSERT_EQ(graph.outputs().size(), 1u);
  const Value& y = graph.value(graph.outputs()[0]);
  EXPECT_EQ(y.name, "y");
  EXPECT_EQ(y.type.shape, (Shape{2, 4}));
  EXPECT_EQ(graph.value(*graph.find_value("x")).batch_axis, 0);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(graph.node(i).source_index, i);
    EXPECT_EQ(graph.node(i).name, std::string(1, static_cast<char>('a' + i)));
  }
  const Tensor x = Tensor::from<float>({1, 1, 1, 1, 2, 2, 2, 2}, {2, 4});
  const Tensor result = evaluate(graph, {{"x", x}}, graph.outputs())[0];
  EXPECT_THAT(result.to_double(), ElementsAre(1, 3, 3, 0, 2, 5, 6, 0));
}

TEST(OnnxBindTest, UnboundDimsAreAllNamedAtOnce) {
  const OnnxModel model = model_of("(float[batch, seq, hidden] x) => (float[batch, seq, hidden] y)",
                                   "float[1] w = {2}",
                                   "y = Mul(x, w)");
  EXPECT_THAT(model.symbols(), ElementsAre("batch", "seq", "hidden"));
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { model.bind({}); }),
              AllOf(HasSubstr("'seq'"), HasSubstr("'hidden'"), HasSubstr("--bind")));
  BindOptions options;
  options.batch = 3;
  options.dims = {{"seq", 5}, {"hidden", 7}};
  const Graph graph = model.bind(options);
  EXPECT_EQ(graph.value(graph.outputs()[0]).type.shape, (Shape{3, 5, 7}));
  options.dims["sek"] = 1;
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { model.bind(options); }),
              HasSubstr("did you mean 'seq'"));
}

TEST(OnnxBindTest, UnsupportedOperatorsAreReportedTogetherWithTheirNodes) {
  const OnnxModel model =
      OnnxModel::parse_text(R"(<ir_version: 8, opset_import: ["" : 17, "my.domain" : 3]>
g (float[N, 4] x) => (float[N, 4] y) {
  [one] a = my.domain.Frobnicate(x)
  [two] b = Relu(a)
  [three] c = NoSuchOperator(b)
  [four] y = my.domain.Frobnicate(c)
})");
  const std::string message = error_of(ErrorCode::kUnsupported, [&] { model.bind({}); });
  EXPECT_THAT(message,
              AllOf(HasSubstr("my.domain.Frobnicate (opset 3), 2 nodes: 'one', 'four'"),
                    HasSubstr("NoSuchOperator (opset 17), 1 node: 'three'")));
  EXPECT_EQ(model.unsupported({}).size(), 2u);
}

TEST(OnnxBindTest, WhatNoOutputNeedsIsReportedUnused) {
  const OnnxModel model = model_of("(float[N, 4] x) => (float[N, 4] y)",
                                   "float[4] w = {1, 2, 3, 4}, float[3] lost = {1, 2, 3}",
                                   "y = Relu(x)\nz = Mul(x, w)");
  std::map<std::string, std::string> roles;
  for (const TensorReport& tensor : model.tensors({})) {
    roles[tensor.name] = tensor.role;
  }
  EXPECT_EQ(roles["w"], "unused");
  EXPECT_EQ(roles["lost"], "unused");
  EXPECT_TRUE(names_of_kind(model.bind({}), ValueKind::kParameter).empty());
}

TEST(OnnxBindTest, ShapeArithmeticVanishes) {
  // x.view(x.shape[0], -1) as exported.
  const OnnxModel model = model_of("(float[batch, 3, 4] x) => (float[batch, K] y)", "", R"(
    shape = Shape(x)
    zero = Constant<value: tensor = int64 {0}>()
    first = Gather<axis = 0>(shape, zero)
    axes = Constant<value: tensor = int64[1] {0}>()
    dim = Unsqueeze(first, axes)
    rest = Constant<value: tensor = int64[1] {-1}>()
    target = Concat<axis = 0>(dim, rest)
    y = Reshape(x, target))");
  const Graph graph = model.bind(at_batch(5));
  EXPECT_THAT(op_types(graph), ElementsAre("Reshape"));
  EXPECT_EQ(output_shape(graph), (Shape{5, 12}));
  EXPECT_EQ(graph.node(0).name, "Reshape:y");
}

TEST(OnnxBindTest, FloatShapeArithmeticWithAnInitializerVanishes) {
  // floor(shape * 0.5) with the factor as a float initializer, as Resize was exported.
  const OnnxModel model =
      model_of("(float[batch, 8] x) => (float[batch, 4] y)", "float factor = {0.5}", R"(
    shape = Shape<start = 1>(x)
    real = Cast<to = 1>(shape)
    half = Mul(real, factor)
    ends = Cast<to = 7>(half)
    starts = Constant<value: tensor = int64[1] {0}>()
    axes = Constant<value: tensor = int64[1] {1}>()
    y = Slice(x, starts, ends, axes))");
  const Graph graph = model.bind(at_batch(2));
  EXPECT_THAT(op_types(graph), ElementsAre("Slice"));
  EXPECT_EQ(output_shape(graph), (Shape{2, 4}));
  EXPECT_EQ(roles(model)["factor"], "constant");
}

TEST(OnnxBindTest, NearestOfResize10RoundsAsItsTestDataDo) {
  // Up on the first axis that changes, down on the second: ONNX's vectors of opset 10 have [1, 3]
  // for [1, 2, 3, 4] scaled by 0.6.
  const OnnxModel model = OnnxModel::parse_text(R"(
<ir_version: 5, opset_import: ["" : 10]>
net (float[1, 1, 1, 4] x) => (float[1, 1, 2, 2] y)
<float[4] scales = {1.0, 1.0, 2.0, 0.6}>
{ y = Resize<mode = "nearest">(x, scales) })");
  const Graph graph = model.bind({});
  const Tensor x = Tensor::from<float>({1, 2, 3, 4}, {1, 1, 1, 4});
  EXPECT_THAT(evaluate(graph, {{"x", x}}, graph.outputs())[0].to_double(), ElementsAre(1, 3, 1, 3));
}

TEST(OnnxBindTest, IntegersThatFloat64DoesNotHoldStayWhatTheyAre) {
  const OnnxModel model = OnnxModel::parse_text(R"(
<ir_version: 8, opset_import: ["" : 18]>
net (float[1, 2] x) => (int64[2] last, int64[2] odd, int64[4] cast, float[1, 2] y)
<float[4] far = {1e30, -1e30, 9.5, -9.5}>
{ s = Constant<value = int64[1] {2}>()
  last = ConstantOfShape<value = int64[1] {9223372036854775807}>(s)
  odd = ConstantOfShape<value = int64[1] {9007199254740993}>(s)
  cast = Cast<to = 7>(far)
  y = Identity(x) })");
  const Graph graph = model.bind({});
  const Tensor x = Tensor::from<float>({1, 2}, {1, 2});
  const std::vector<Tensor> results = evaluate(graph, {{"x", x}}, graph.outputs());
  EXPECT_THAT(results[0].to_int64(), ElementsAre(INT64_MAX, INT64_MAX));
  EXPECT_THAT(results[1].to_int64(), ElementsAre(9007199254740993, 9007199254740993));
  EXPECT_THAT(results[2].to_int64(), ElementsAre(INT64_MAX, INT64_MIN, 9, -9));
}

// Whatever type we keep them in: float32, or as stash_type says.
TEST(OnnxBindTest, StatisticsOfLayerNormalizationHaveTheTypeOfOnnx) {
  for (const char* type : {"float", "float16", "double"}) {
    for (const int stash : {1, 16}) {
      const std::string statistic = stash == 1 ? "float[N, 1]" : "bfloat16[N, 1]";
      const OnnxModel model =
          OnnxModel::parse_text(concat("<ir_version: 8, opset_import: [\"\" : 17]> g (",
                                       type,
                                       "[N, 4] x, ",
                                       type,
                                       "[4] s) => (",
                                       type,
                                       "[N, 4] y, ",
                                       statistic,
                                       " mean, ",
                                       statistic,
                                       " inv) { y, mean, inv = LayerNormalization<stash_type = ",
                                       stash,
                                       ">(x, s) }"));
      const Graph graph = model.bind(at_batch(3));
      for (const size_t i : {1u, 2u}) {
        const Value& value = graph.value(graph.outputs().at(i));
        EXPECT_EQ(value.type.dtype, stash == 1 ? DType::kFloat32 : DType::kBFloat16);
        EXPECT_EQ(value.name, i == 1 ? "mean" : "inv");
      }
    }
  }
}

TEST(OnnxBindTest, GroupNormalizationOfOpset18ScalesPerGroup) {
  // Deprecated as soon as it was replaced, but in files. Groups of two channels of two numbers.
  const OnnxModel model = OnnxModel::parse_text(R"(
<ir_version: 8, opset_import: ["" : 18]>
net (float[1, 4, 2] x) => (float[1, 4, 2] y)
<float[2] scale = {1, 10}, float[2] bias = {0, 5}>
{ y = GroupNormalization<num_groups = 2, epsilon = 0.0>(x, scale, bias) })");
  const Graph graph = model.bind({});
  const Tensor x = Tensor::from<float>({1, 3, 1, 3, 4, 2, 2, 4}, {1, 4, 2});
  EXPECT_THAT(evaluate(graph, {{"x", x}}, graph.outputs())[0].to_double(),
              ElementsAre(-1, 1, -1, 1, 15, -5, -5, 15));
}

TEST(OnnxBindTest, EveryOutputIsFoundByItsOwnName) {
  const OnnxModel model = model_of(
      "(float[N, 4] x) => (float[N, 4] y, float[N, 4] same, float[N, 4] again, float[4] w)",
      "float[4] w = {1, 2, 3, 4}",
      "y = Mul(x, w)\nsame = Identity(y)\nagain = Identity(x)");
  const Graph graph = model.bind(at_batch(2));
  std::vector<std::string> names;
  for (const ValueId id : graph.outputs()) {
    names.push_back(graph.value(id).name);
  }
  EXPECT_THAT(names, ElementsAre("y", "same", "again", "w"));
}

TEST(OnnxBindTest, ConstantsAreReadInEveryForm) {
  const OnnxModel model =
      model_of("(float[N, 2] x) => (float[N, 2] a, float[N, 2] b, int64[2] c, bool[2] d)", "", R"(
    two = Constant<value_float = 2.0>()
    a = Mul(x, two)
    pair = Constant<value_floats = [1.0, 2.0]>()
    b = Mul(x, pair)
    c = Constant<value_ints = [7, 8]>()
    d = Constant<value: tensor = bool[2] {1, 0}>())");
  const Graph graph = model.bind(at_batch(1));
  const std::vector<Tensor> results =
      evaluate(graph, {{"x", Tensor::from<float>({3, 5}, {1, 2})}}, graph.outputs());
  EXPECT_THAT(results[0].to_double(), ElementsAre(6, 10));
  EXPECT_THAT(results[1].to_double(), ElementsAre(3, 10));
  EXPECT_THAT(results[2].to_int64(), ElementsAre(7, 8));
  EXPECT_THAT(results[3].to_int64(), ElementsAre(1, 0));
}

TEST(OnnxBindTest, ALargeExpandStaysANode) {
  const OnnxModel model =
      model_of("(float[N, 1] x) => (float[1000, 1000] y, float[N, 1] z)", "", R"(
    one = Constant<value: tensor = float {1}>()
    shape = Constant<value: tensor = int64[2] {1000, 1000}>()
    y = Expand(one, shape)
    z = Relu(x))");
  EXPECT_THAT(op_types(model.bind(at_batch(1))), ElementsAre("Expand", "Relu"));
}

TEST(OnnxBindTest, BatchAxesAreFoundByNameAndOverruled) {
  const OnnxModel model = OnnxModel::parse_text(R"(<ir_version: 8, opset_import: ["" : 17]>
g (float[seq, batch_size, 4] x, float[layers, N, 2] h, float[time, 3] t, float scale)
  => (float[seq, batch_size, 4] y) { y = Mul(x, scale) })");
  std::vector<int> axes;
  for (const ModelInput& input : model.inputs()) {
    axes.push_back(input.batch_axis);
  }
  EXPECT_THAT(axes, ElementsAre(1, 1, -1, -1));
  EXPECT_THAT(model.symbols(), ElementsAre("batch_size", "N", "seq", "layers", "time"));
  BindOptions options = at_batch(3);
  options.dims = {{"batch_size", 5}, {"layers", 1}, {"time", 1}};
  options.batch_axes = {{"x", 0}};
  EXPECT_EQ(output_shape(model.bind(options)), (Shape{3, 5, 4}));
  options.batch_axes = {{"y", 0}};
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { model.bind(options); }),
              HasSubstr("no input 'y'"));
  options.batch_axes = {{"x", -1}};
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { model.bind(options); }),
              HasSubstr("--batch-axis x=-1 says that no axis of it enumerates samples"));
}

TEST(OnnxSymbolsTest, AnInputWithoutAShapeIsNamed) {
  EXPECT_THAT(error_of(ErrorCode::kInvalidModel,
                       [] { model_of("(float[] x) => (float[N] y)", "", "y = Relu(x)"); }),
              HasSubstr("input 'x' has no shape"));
}

TEST(OnnxSymbolsTest, TheDataGiveOpenDimsTheirSize) {
  const OnnxModel model =
      model_of("(float[batch, s, 2] x, float[batch, s, t] mask) => (float[batch, s, 2] y)",
               "",
               "axis = Constant<value: tensor = int64[1] {2}>()\n"
               "m = ReduceSum<keepdims = 1>(mask, axis)\ny = Mul(x, m)");
  BindOptions options = at_batch(3);
  using Sizes = std::map<std::string, int64_t>;
  EXPECT_EQ(dims_of_samples(model, options, {{"x", {{7, 2}, "x"}}, {"mask", {{7, 5}, "m"}}}),
            (Sizes{{"s", 7}, {"t", 5}}));
  // What --bind gives stays, and arrays of other dims say nothing.
  options.dims["s"] = 4;
  EXPECT_EQ(dims_of_samples(model, options, {{"x", {{14}, "x"}}, {"mask", {{7, 5}, "m"}}}),
            (Sizes{{"t", 5}}));
  options.dims.clear();
  EXPECT_THAT(
      error_of(ErrorCode::kInvalidArgument,
               [&] {
                 dims_of_samples(model, options, {{"x", {{7, 2}, "x"}}, {"mask", {{9, 5}, "m"}}});
               }),
      AllOf(HasSubstr("dim 's'"), HasSubstr("7 (axis 1 of 'x'"), HasSubstr("array 'm'")));
}

TEST(OnnxSymbolsTest, AModelIsDescribedAtASizeThatItTakes) {
  const OnnxModel model = model_of("(float[batch, s] x) => (float[batch, s] y)",
                                   "float[16] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}",
                                   "y = Add(x, w)");
  EXPECT_EQ(dims_to_describe(model, at_batch(2)), (std::map<std::string, int64_t>{{"s", 16}}));
}

}  // namespace
}  // namespace trainrt
