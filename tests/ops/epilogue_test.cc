// MatMulAdd has the bits of MatMul and Add: a program may join them or not.
#include <gtest/gtest.h>

#include "graph/evaluator.h"
#include "graph/graph_builder.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {
namespace {

Tensor draw(Shape shape, int salt) {
  std::vector<float> data(static_cast<size_t>(num_elements(shape)));
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<float>((i * 7919 + static_cast<size_t>(salt) * 131) % 1009) / 504.5f - 1;
  }
  return Tensor::from(data, shape);
}

TEST(EpilogueTest, HasTheBitsOfProductAndAdditions) {
  for (const Shape& size : {Shape{64, 96, 48}, Shape{128, 40, 300}, Shape{37, 128, 513}}) {
    Graph graph;
    GraphBuilder b(graph);
    const ValueId x = b.constant(draw({2, size[0], size[2]}, 1)),
                  w = b.constant(draw({size[2], size[1]}, 2)),
                  bias = b.constant(draw({size[1]}, 3)),
                  term = b.constant(draw({2, size[0], size[1]}, 4));
    const ValueId apart = b.add(b.add(b.matmul(x, w), bias), term);
    const ValueId joined = b.op("MatMulAdd", {x, w, bias, term});
    for (const bool reference : {true, false}) {
      const std::vector<Tensor> results =
          evaluate(graph, {}, {apart, joined}, {.reference_kernels = reference, .step = {}});
      EXPECT_TRUE(tensors_identical(results[1], results[0])) << shape_string(size);
    }
  }
}

}  // namespace
}  // namespace trainrt::testing
