// Random draws belong to samples: a model draws the same numbers for a sample in whatever
// micro-batch it comes, wherever reshapes and transposes have put the batch.
#include "graph/passes/sample_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/graph/onnx_models.h"

namespace trainrt {
namespace {

using testing::at_batch;
using testing::model_of;

constexpr int64_t kSamples = 6;

struct Case {
  std::string name;
  std::string signature;
  std::string initializers;
  std::string body;
  int axis = 0;       // of the samples in x and y
  bool fuse = false;  // with the fusions of the operators
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

const std::string kDropout = "float half = {0.5}, bool on = {1}";

std::vector<Case> cases() {
  const std::string batch_first = "(float[batch, 4, 8] x) => (float[batch, 4, 8] y)";
  const std::string heads =
      "xh = Reshape(x, split)\n q = Transpose<perm = [0, 2, 1, 3]>(xh)\n"
      "k = Transpose<perm = [0, 2, 3, 1]>(xh)\n s = MatMul(q, k)\n p = Softmax<axis = 3>(s)\n"
      "pd = Dropout(p, half, on)\n o = MatMul(pd, q)\n"
      "ot = Transpose<perm = [0, 2, 1, 3]>(o)\n y = Reshape(ot, join)";
  const std::string heads_shapes = "int64[4] split = {0, 4, 2, 4}, int64[3] join = {0, 4, 8}";
  return {
      {"leading", batch_first, kDropout, "y = Dropout(x, half, on)"},
      {"tokens_merged",
       batch_first,
       kDropout + ", int64[2] flat = {-1, 8}, int64[3] join = {-1, 4, 8}",
       "rows = Reshape(x, flat)\n r = Dropout(rows, half, on)\n y = Reshape(r, join)"},
      {"features_first",
       batch_first,
       kDropout,
       "t = Transpose<perm = [2, 1, 0]>(x)\n r = Dropout(t, half, on)\n"
       "y = Transpose<perm = [2, 1, 0]>(r)"},
      {"time_first",
       "(float[4, batch, 8] x) => (float[4, batch, 8] y)",
       kDropout,
       "y = Dropout(x, half, on)",
       1},
      {"time_first_merged",
       "(float[4, batch, 8] x) => (float[4, batch, 8] y)",
       kDropout + ", int64[2] flat = {-1, 8}, int64[3] join = {4, -1, 8}",
       "rows = Reshape(x, flat)\n r = Dropout(rows, half, on)\n y = Reshape(r, join)",
       1},
      {"heads_merged",
       batch_first,
       kDropout + ", int64[4] split = {0, 4, 2, 4}, int64[3] flat = {-1, 4, 4}, "
                  "int64[4] apart = {-1, 2, 4, 4}, int64[3] join = {0, 4, 8}",
       "xh = Reshape(x, split)\n q = Transpose<perm = [0, 2, 1, 3]>(xh)\n f = Reshape(q, flat)\n"
       "r = Dropout(f, half, on)\n a = Reshape(r, apart)\n t = Transpose<perm = [0, 2, 1, 3]>(a)\n"
       "y = Reshape(t, join)"},
      {"attention", batch_first, kDropout + ", " + heads_shapes, heads},
      {"attention_fused", batch_first, kDropout + ", " + heads_shapes, heads, 0, true},
      {"behind_a_matmul",
       batch_first,
       kDropout + ", int64[2] flat = {-1, 8}, float[8, 2] w = {1, 2, 3, 4, 5, 6, 7, 8, "
                  "9, 10, 11, 12, 13, 14, 15, 16}, int64[3] join = {-1, 4, 2}",
       "rows = Reshape(x, flat)\n h = MatMul(rows, w)\n r = Dropout(h, half, on)\n"
       "y = Reshape(r, join)"},
      {"noise_like",
       batch_first,
       "int64[2] flat = {-1, 8}, int64[3] join = {-1, 4, 8}",
       "rows = Reshape(x, flat)\n n = RandomNormalLike(rows)\n s = Add(rows, n)\n"
       "y = Reshape(s, join)"},
      {"stochastic_depth",
       batch_first,
       "int64[1] zero = {0}, int64[2] ones = {1, 1}, float keep = {0.5}",
       "shape = Shape(x)\n n = Gather(shape, zero)\n s = Concat<axis = 0>(n, ones)\n"
       "p = Expand(keep, s)\n drawn = Bernoulli(p)\n mask = Div(drawn, keep)\n y = Mul(x, mask)"},
      {"weights",
       batch_first,
       kDropout + ", float[8] w = {1, 2, 3, 4, 5, 6, 7, 8}",
       "wd = Dropout(w, half, on)\n y = Mul(x, wd)"},
  };
}

Tensor wave(const Shape& shape) {
  std::vector<float> values(static_cast<size_t>(num_elements(shape)));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(2 + std::sin(0.7 * static_cast<double>(i)));
  }
  return Tensor::from(values, shape);
}

// Samples [begin, end) along `axis`, as float64.
std::vector<double> samples_of(const Tensor& tensor, int axis, int64_t begin, int64_t end) {
  const std::vector<double> all = tensor.to_double();
  const int64_t inner = dims_product(tensor.shape(), axis + 1, tensor.shape().size());
  const int64_t outer = dims_product(tensor.shape(), 0, axis);
  const int64_t extent = tensor.shape()[static_cast<size_t>(axis)];
  std::vector<double> part;
  for (int64_t o = 0; o < outer; ++o) {
    const auto at = all.begin() + (o * extent + begin) * inner;
    part.insert(part.end(), at, at + (end - begin) * inner);
  }
  return part;
}

class SampleRowsTest : public ::testing::TestWithParam<Case> {
 protected:
  // y of samples [begin, end) of x, as one micro-batch.
  Tensor run(int64_t begin, int64_t end) const {
    const Case& c = GetParam();
    const OnnxModel model = model_of(c.signature, c.initializers, c.body);
    BindOptions options = at_batch(end - begin);
    options.batch_axes = {{"x", c.axis}};
    options.fuse = c.fuse;
    const Graph graph = model.bind(options);
    Shape shape = graph.value(*graph.find_value("x")).type.shape;
    Shape whole = shape;
    whole[static_cast<size_t>(c.axis)] = kSamples;
    std::vector<float> x;
    for (const double value : samples_of(wave(whole), c.axis, begin, end)) {
      x.push_back(static_cast<float>(value));
    }
    EvaluateOptions evaluation;
    evaluation.step = {.seed = 3, .step = 2, .first_sample = static_cast<uint64_t>(begin)};
    return evaluate(graph, {{"x", Tensor::from(x, shape)}}, graph.outputs(), evaluation)[0];
  }
};

TEST_P(SampleRowsTest, ASampleDrawsTheSameInEveryMicroBatch) {
  const int axis = GetParam().axis;
  const Tensor whole = run(0, kSamples);
  for (const int64_t size : {1, 2, 3, 4}) {
    for (int64_t begin = 0; begin < kSamples; begin += size) {
      const int64_t end = std::min(begin + size, kSamples);
      EXPECT_EQ(samples_of(run(begin, end), axis, 0, end - begin),
                samples_of(whole, axis, begin, end))
          << "samples " << begin << " to " << end;
    }
  }
}

TEST_P(SampleRowsTest, SamplesDrawDifferentlyUnlessTheTensorBelongsToNone) {
  const Case& c = GetParam();
  if (c.name == "weights") {
    GTEST_SKIP() << "a dropped weight is one for all samples";
  }
  const OnnxModel model = model_of(c.signature, c.initializers, c.body);
  BindOptions options = at_batch(kSamples);
  options.batch_axes = {{"x", c.axis}};
  options.fuse = c.fuse;
  const Graph graph = model.bind(options);
  Shape shape = graph.value(*graph.find_value("x")).type.shape;
  // Equal samples: all that differs is the draws.
  const Tensor x =
      Tensor::from(std::vector<float>(static_cast<size_t>(num_elements(shape)), 1.0f), shape);
  const Tensor y = evaluate(graph, {{"x", x}}, graph.outputs())[0];
  int different = 0;
  for (int64_t i = 1; i < kSamples; ++i) {
    different += samples_of(y, c.axis, i, i + 1) != samples_of(y, c.axis, 0, 1) ? 1 : 0;
  }
  EXPECT_GT(different, 0);
}

INSTANTIATE_TEST_SUITE_P(Models, SampleRowsTest, ::testing::ValuesIn(cases()), [](const auto& row) {
  return row.param.name;
});

TEST(SampleRowsReportTest, SamplesThatCannotBeFollowedAreReported) {
  const OnnxModel model =
      model_of("(float[batch, 8] x) => (float[4, 8] y)",
               "float half = {0.5}, bool on = {1}, int64[4] pick = {0, 0, 0, 0}",
               "g = Gather(x, pick)\n [drop] y = Dropout(g, half, on)");
  Graph graph = model.bind(at_batch(3));
  EXPECT_THAT(locate_samples(graph), ::testing::ElementsAre("drop"));
}

}  // namespace
}  // namespace trainrt
