// Resize against numbers of ONNX's reference evaluator, with which ONNX Runtime agrees.
#include <gmock/gmock.h>

#include "tests/graph/onnx_models.h"

namespace trainrt {
namespace {

using testing::at_batch;
using testing::model_of;

// A filter that reaches over the border reads the border's element again, unless exclude_outside.
TEST(OnnxResizeTest, AntialiasRepeatsTheBorderUnlessItIsExcluded) {
  struct Case {
    std::string mode, exclude_outside, scale;
    std::vector<double> expected;
  };
  const std::vector<Case> cases = {
      {"linear", "0", "0.5", {2.25, 4.875, 5.875, 5}},
      {"linear", "1", "0.5", {2.428571, 4.875, 5.875, 4.857143}},
      {"cubic", "0", "0.5", {2.009766, 5.080078, 6.115234, 4.830078}},
      {"cubic", "1", "0.5", {2.074844, 5.009597, 6.113244, 4.754678}},
      {"cubic", "0", "0.375", {2.529809, 5.977828, 5.122207}},
      {"cubic",
       "0",
       "1.5",
       {0.7395841,
        2.6875,
        3.869214,
        1.818288,
        5.09375,
        8.055554,
        5.36111,
        6.09375,
        6.547453,
        3.348381,
        4.125,
        6.260416}},
      {"cubic",
       "1",
       "1.5",
       {0.6959468,
        2.542857,
        3.869214,
        1.818288,
        5.09375,
        8.055553,
        5.36111,
        6.09375,
        6.547453,
        3.348381,
        4.285714,
        6.304053}},
  };
  const Tensor x = Tensor::from<float>({1, 4, 2, 8, 5, 7, 3, 6}, {1, 8});
  for (const Case& c : cases) {
    SCOPED_TRACE(c.mode + " by " + c.scale + ", exclude_outside " + c.exclude_outside);
    const Graph graph =
        model_of("(float[1, 8] x) => (float[1, m] y)",
                 "float[2] s = {1, " + c.scale + "}",
                 "y = Resize <mode = \"" + c.mode +
                     "\", antialias = 1, exclude_outside = " + c.exclude_outside + "> (x, , s)",
                 18)
            .bind(at_batch(1));
    const std::vector<double> y =
        evaluate(graph, {{"x", x}}, {graph.outputs().at(0)}).at(0).to_double();
    EXPECT_THAT(y, ::testing::Pointwise(::testing::DoubleNear(2e-5), c.expected));
  }
}

}  // namespace
}  // namespace trainrt
