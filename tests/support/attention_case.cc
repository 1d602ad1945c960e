#include "tests/support/attention_case.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "graph/op_def.h"
#include "tests/support/device_case.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {

namespace {

constexpr float kScale = 0.35f;

OpExample example_of(const AttentionCase& c) {
  const auto type = [](const Shape& shape) { return TensorType{DType::kFloat32, shape}; };
  OpExample example;
  example.name = c.name;
  example.attributes = {{"scale", static_cast<double>(kScale)},
                        {"causal", int64_t{c.causal}},
                        {"sequence_major", c.sequence_major}};
  example.inputs = {type(c.q), type(c.k), type(c.v)};
  if (c.mask) {
    example.inputs.push_back(type(*c.mask));
  }
  if (c.hides_sample) {
    std::vector<float> mask(static_cast<size_t>(num_elements(*c.mask)), 0.0f);
    std::fill(mask.begin() + c.mask->back(), mask.end(), std::numeric_limits<float>::lowest());
    example.values = {{}, {}, {}, Tensor::from(mask, *c.mask)};
  }
  return example;
}

// The same in float32 by the CPU's reference, of the rounded inputs.
NodeCase widened(NodeCase narrow) {
  for (size_t i = 0; i < narrow.inputs.size(); ++i) {
    if (narrow.present[i]) {
      narrow.inputs[i] = narrow.inputs[i].cast(DType::kFloat32);
      narrow.input_types[i].dtype = DType::kFloat32;
    }
  }
  for (TensorType& type : narrow.output_types) {
    type.dtype = DType::kFloat32;
  }
  return narrow;
}

// What was drawn, with another first element in each row. One element alone is large: what its
// rounding costs cancels in none of the gradients but its own.
Tensor with_first(float value, const Tensor& drawn) {
  Tensor rows = drawn.cast(DType::kFloat32);
  for (int64_t i = 0; i < rows.num_elements(); i += rows.shape().back()) {
    rows.data<float>()[i] = value;
  }
  return rows.cast(drawn.dtype());
}

}  // namespace

NodeCase forward_case(const AttentionCase& c) {
  NodeCase forward = make_case(get_op("FusedAttention"), example_of(c), c.dtype);
  if (c.opposed) {
    const float value = std::sqrt(100 / kScale);
    forward.inputs[0] = with_first(value, forward.inputs[0]);
    forward.inputs[1] = with_first(-value, forward.inputs[1]);
  }
  return forward;
}

NodeCase backward_case(const AttentionCase& c,
                       const NodeCase& forward,
                       const std::vector<Tensor>& results) {
  OpExample more = example_of(c);
  more.inputs.resize(3);
  more.values.clear();
  if (c.mask) {
    more.inputs.push_back({DType::kFloat32, *c.mask});
  } else {
    more.inputs.emplace_back();
    more.absent = {3};
  }
  const TensorType y{DType::kFloat32, results[0].shape()};
  more.inputs.insert(more.inputs.end(), {y, {DType::kFloat32, results[1].shape()}, y});
  NodeCase backward = make_case(get_op("FusedAttentionGrad"), more, c.dtype);
  for (size_t i = 0; i < forward.inputs.size(); ++i) {
    backward.inputs[i] = forward.inputs[i];
  }
  backward.inputs[4] = results[0];
  backward.inputs[5] = results[1];
  backward.input_types[5].dtype = results[1].dtype();
  return backward;
}

std::vector<Tensor> expect_results_of_cpu(const NodeCase& test_case,
                                          const AttentionCase& c,
                                          Device& device) {
  const std::vector<Tensor> actual = run_on_device(test_case, device, c.workspace_cap);
  const std::vector<Tensor> expected = run_case(widened(test_case));
  EXPECT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size() && i < expected.size(); ++i) {
    EXPECT_TRUE(
        tensors_near(actual[i].cast(DType::kFloat32), expected[i], kernel_tolerance(c.dtype)))
        << test_case.node.op_type << " " << c.name << ": output " << i;
  }
  return actual;
}

}  // namespace trainrt::testing
