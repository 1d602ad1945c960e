// Models whose exporter kept the example batch as a number.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "graph/onnx_baked_batch.h"
#include "tests/graph/onnx_models.h"

namespace trainrt {
namespace {

using ::testing::AllOf;
using testing::at_batch;
using testing::error_of;
using ::testing::HasSubstr;
using testing::model_of;
using testing::output_shape;

const char* const kBakedView = R"(
  [flatten] flat = Reshape(x, shape)
  [head] y = MatMul(flat, w))";

TEST(OnnxBatchTest, SizesBeyondInt64AreInNoProportion) {
  EXPECT_TRUE(scales_with_batch({4, 6}, {4, 9}, 2, 3));
  EXPECT_FALSE(scales_with_batch({INT64_MAX}, {INT64_MAX - 1}, 1, 2));
  EXPECT_FALSE(scales_with_batch({3}, {INT64_MAX}, 2, 3));
}

TEST(OnnxBatchTest, AReshapeThatKeptTheExampleBatchFollows) {
  for (const std::string batch : {"batch", "2"}) {  // symbolic, or fixed as well
    const OnnxModel model =
        model_of("(float[" + batch + ", 2, 3] x) => (float[" + batch + ", 1] y)",
                 "int64[2] shape = {2, 6}, float[6, 1] w = {1, 2, 3, 4, 5, 6}",
                 kBakedView);
    EXPECT_EQ(output_shape(model.bind(at_batch(2))), (Shape{2, 1}));
    EXPECT_EQ(output_shape(model.bind(at_batch(6))), (Shape{6, 1})) << batch;
    BindOptions options = at_batch(6);
    options.rewrite_baked_batch = false;
    EXPECT_THAT(error_of(ErrorCode::kInvalidModel, [&] { model.bind(options); }),
                AllOf(HasSubstr("'flatten'"), HasSubstr("batch size 2")));
  }
}

TEST(OnnxBatchTest, AnExampleBatchOfOneBesideAnInferredDimFollows) {
  const OnnxModel model = model_of("(float[batch, 2, 3] x) => (float[batch, 1] y)",
                                   "int64[2] shape = {1, -1}, float[6, 1] w = {1, 2, 3, 4, 5, 6}",
                                   kBakedView);
  const Graph graph = model.bind(at_batch(4));
  EXPECT_EQ(output_shape(graph), (Shape{4, 1}));
  const Tensor x = Tensor::from<float>(std::vector<float>(24, 1), {4, 2, 3});
  EXPECT_THAT(evaluate(graph, {{"x", x}}, graph.outputs())[0].to_double(),
              ::testing::ElementsAre(21, 21, 21, 21));
}

TEST(OnnxBatchTest, MergedDimsScaleWithTheBatch) {
  // Attention as exported at batch 2: [2, 3, 8] -> [2 * 4 heads, 3, 2] and back.
  const OnnxModel model =
      model_of("(float[batch, 3, 8] x) => (float[batch, 3, 8] y)",
               "int64[3] split = {8, 3, 2}, int64[3] merge = {2, 3, 8}",
               "heads = Reshape(x, split)\nact = Relu(heads)\ny = Reshape(act, merge)");
  const Graph graph = model.bind(at_batch(5));
  EXPECT_EQ(output_shape(graph), (Shape{5, 3, 8}));
  EXPECT_EQ(graph.value(*graph.find_value("heads")).type.shape, (Shape{20, 3, 2}));
}

// Multi-head attention as PyTorch traces it at batch 1, time first: [3, 1, 4] -> [3, 1 * 2 heads,
// 2]
// -> products over [2, 3, 3] -> [3, 4] -> [3, 1, 4].
TEST(OnnxBatchTest, HeadsExportedAtABatchOfOneStayWithTheirSamples) {
  const OnnxModel model = model_of("(float[1, 3, 4] x) => (float[1, 3, 4] y)",
                                   "int64[3] heads = {3, 2, 2}, int64[2] rows = {3, 4},"
                                   "int64[3] samples = {3, 1, 4}",
                                   R"(
    t = Transpose<perm = [1, 0, 2]>(x)
    h = Reshape(t, heads)
    q = Transpose<perm = [1, 0, 2]>(h)
    k = Transpose<perm = [1, 2, 0]>(h)
    s = MatMul(q, k)
    p = Softmax(s)
    o = MatMul(p, q)
    b = Transpose<perm = [1, 0, 2]>(o)
    r = Reshape(b, rows)
    u = Reshape(r, samples)
    y = Transpose<perm = [1, 0, 2]>(u))");
  std::vector<float> values(36);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>((i * 7) % 11) / 10;
  }
  const Graph whole = model.bind(at_batch(3)), single = model.bind(at_batch(1));
  const std::vector<double> together =
      evaluate(whole, {{"x", Tensor::from<float>(values, {3, 3, 4})}}, whole.outputs())[0]
          .to_double();
  for (size_t n = 0; n < 3; ++n) {
    const std::vector<float> own(values.begin() + static_cast<std::ptrdiff_t>(n * 12),
                                 values.begin() + static_cast<std::ptrdiff_t>(n * 12 + 12));
    const std::vector<double> alone =
        evaluate(single, {{"x", Tensor::from<float>(own, {1, 3, 4})}}, single.outputs())[0]
            .to_double();
    for (size_t i = 0; i < 12; ++i) {
      EXPECT_NEAR(together[n * 12 + i], alone[i], 1e-6);
    }
  }
}

TEST(OnnxBatchTest, ARewriteThatWouldMixSamplesIsRefused) {
  // At batch 1 nobody can tell whether [1, 3, 4] -> [3, 4] -> products of all rows is meant so.
  const OnnxModel model = model_of("(float[1, 3, 4] x) => (float[3, 4] y)",
                                   "int64[2] rows = {3, 4}",
                                   R"(
    r = Reshape(x, rows)
    k = Transpose<perm = [1, 0]>(r)
    [scores] s = MatMul(r, k)
    y = MatMul(s, r))");
  EXPECT_NO_THROW(model.bind(at_batch(1)));
  EXPECT_THAT(error_of(ErrorCode::kInvalidModel, [&] { model.bind(at_batch(2)); }),
              AllOf(HasSubstr("'scores'"), HasSubstr("different samples together")));
}

TEST(OnnxBatchTest, ABatchMergedBehindTheTimeIsFoundAgain) {
  // Attention that works time first, exported at batch 2: [3, 2, 4] -> [3 * 2, 4] and back.
  const OnnxModel model =
      model_of("(float[2, 3, 4] x) => (float[2, 3, 4] y)",
               "int64[2] merge = {6, 4}, int64[3] split = {3, 2, 4}, float[4] one = {1, 1, 1, 1}",
               R"(
    t = Transpose<perm = [1, 0, 2]>(x)
    m = Reshape(t, merge)
    h = Mul(m, one)
    s = Reshape(h, split)
    y = Transpose<perm = [1, 0, 2]>(s))");
  const Graph graph = model.bind(at_batch(5));
  ASSERT_EQ(output_shape(graph), (Shape{5, 3, 4}));
  EXPECT_EQ(graph.value(*graph.find_value("s")).type.shape, (Shape{3, 5, 4}));
  std::vector<float> numbers(60);
  std::iota(numbers.begin(), numbers.end(), 0.0f);
  const Tensor x = Tensor::from<float>(numbers, {5, 3, 4});
  EXPECT_EQ(evaluate(graph, {{"x", x}}, graph.outputs())[0].to_double(), x.to_double());
}

TEST(OnnxBatchTest, AResizeToBakedSizesAndAStateOfTheExampleBatchFollow) {
  const OnnxModel image = model_of("(float[2, 1, 2, 2] x) => (float[2, 1, 4, 4] y)",
                                   "int64[4] sizes = {2, 1, 4, 4}",
                                   "y = Resize<mode = \"nearest\">(x, , , sizes)");
  EXPECT_EQ(output_shape(image.bind(at_batch(5))), (Shape{5, 1, 4, 4}));
  // Zeros for two samples, expanded to the number of samples that the input has.
  const OnnxModel state = model_of("(float[2, 3] x) => (float[2, 3] y)",
                                   "float[2, 3] zeros = {0, 0, 0, 0, 0, 0}",
                                   "shape = Shape(x)\nh = Expand(zeros, shape)\ny = Add(x, h)");
  EXPECT_EQ(output_shape(state.bind(at_batch(5))), (Shape{5, 3}));
}

TEST(OnnxBatchTest, ABatchThatCannotBeRewrittenIsShownWhereItStands) {
  const OnnxModel model = model_of("(float[2, 3] x) => (float[2, 3] y)",
                                   "float[2, 1] per_sample = {1, 2}",
                                   "[scale] y = Mul(x, per_sample)");
  EXPECT_EQ(output_shape(model.bind(at_batch(2))), (Shape{2, 3}));
  EXPECT_THAT(error_of(ErrorCode::kInvalidModel, [&] { model.bind(at_batch(8)); }),
              AllOf(HasSubstr("'scale'"), HasSubstr("multiples of 2")));
}

TEST(OnnxBatchTest, ABakedLengthIsNamed) {
  const OnnxModel model = model_of("(float[batch, s, 4] x) => (float[batch, s, 2, 2] y)",
                                   "int64[4] heads = {-1, 10, 2, 2}",
                                   "[split] y = Reshape(x, heads)");
  BindOptions options = at_batch(3);
  options.dims["s"] = 9;
  EXPECT_THAT(error_of(ErrorCode::kInvalidModel, [&] { model.bind(options); }),
              AllOf(HasSubstr("baked s=10"), HasSubstr("'split'"), HasSubstr("--bind s=10")));
  options.dims["s"] = 10;
  EXPECT_EQ(output_shape(model.bind(options)), (Shape{3, 10, 2, 2}));
}

TEST(OnnxBatchTest, ReshapesThatFollowTheBatchThemselvesAreLeftAlone) {
  const OnnxModel model = model_of(
      "(float[2, 2, 3] x) => (float[2, 6] y)", "int64[2] shape = {-1, 6}", "y = Reshape(x, shape)");
  BindOptions options = at_batch(7);
  options.rewrite_baked_batch = false;  // nothing to rewrite
  EXPECT_EQ(output_shape(model.bind(options)), (Shape{7, 6}));
}

TEST(OnnxBatchTest, AnExpandedTokenFollows) {
  // ViT's class token, expanded to the example batch of 2 and put before the patches.
  const OnnxModel model =
      model_of("(float[batch, 3, 4] x) => (float[batch, 4, 4] y)",
               "int64[3] shape = {2, 1, 4}, float[1, 1, 4] token = {1, 2, 3, 4}",
               "tokens = Expand(token, shape)\ny = Concat<axis = 1>(tokens, x)");
  EXPECT_EQ(output_shape(model.bind(at_batch(2))), (Shape{2, 4, 4}));
  EXPECT_EQ(output_shape(model.bind(at_batch(5))), (Shape{5, 4, 4}));
}

TEST(OnnxBatchTest, AShapeErrorThatHasNothingToDoWithTheBatchStaysWhatItIs) {
  const OnnxModel model = model_of("(float[batch, 4] x) => (float[batch, 4] y)",
                                   "float[5] w = {1, 2, 3, 4, 5}",
                                   "[bad] y = Mul(x, w)");
  EXPECT_THAT(error_of(ErrorCode::kInvalidModel, [&] { model.bind(at_batch(3)); }),
              AllOf(HasSubstr("'bad'"), HasSubstr("do not broadcast")));
}

// One table for all samples is what a batch of 1 bakes; where it cannot be told from a table of one
// sample, the node that it does not fit is named.
TEST(OnnxBatchTest, ATableOfOneSampleForIndicesOfMany) {
  const std::string table = "float[1, 3] d = {1, 2, 3}, int64[2] s = {1, 3}";
  const std::string expanded = "t = Expand(d, s)\ny = GatherND <batch_dims = 1> (t, i)";
  const std::string signature = "(int64[n, 2, 1] i) => (float[n, 2] y)";
  BindOptions options = at_batch(5);
  EXPECT_EQ(output_shape(model_of(signature, table, expanded).bind(options)), (Shape{5, 2}));
  options.rewrite_baked_batch = false;
  EXPECT_THAT(error_of(ErrorCode::kInvalidModel,
                       [&] { model_of(signature, table, expanded).bind(options); }),
              HasSubstr("baked batch size 1 into 'Expand:t'"));
  for (const std::string batch : {"n", "1"}) {
    EXPECT_THAT(
        error_of(ErrorCode::kInvalidModel,
                 [&] {
                   model_of("(int64[" + batch + ", 2, 1] i) => (float[" + batch + ", 2] y)",
                            table,
                            "y = GatherND <batch_dims = 1> (d, i)")
                       .bind(at_batch(5));
                 }),
        ::testing::AllOf(HasSubstr("differ in their first 1 dims"), HasSubstr("'GatherND:y'")))
        << batch;
  }
}

}  // namespace
}  // namespace trainrt
