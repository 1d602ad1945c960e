#include "tests/support/norm_case.h"

#include <gtest/gtest.h>

#include "graph/op_def.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {

namespace {

// dx, dscale (and dbias) from y's gradient and what `forward` has saved.
NodeCase backward_of(const std::string& op,
                     const OpExample& forward,
                     const std::vector<Tensor>& saved,
                     DType dtype) {
  OpExample example{.name = forward.name + "_grad", .attributes = forward.attributes};
  const TensorType x = forward.inputs[0];
  example.inputs = {x, x, forward.inputs[1]};
  for (size_t i = 1; i < saved.size(); ++i) {
    example.inputs.push_back({DType::kFloat32, saved[i].shape()});
  }
  const std::string name = op == "LayerNormalization" ? "LayerNormGrad"
                           : op == "GroupNorm"        ? "GroupNormGrad"
                                                      : "RMSNormGrad";
  NodeCase result = make_case(get_op(name), example, dtype);
  for (size_t i = 1; i < saved.size(); ++i) {
    result.inputs[2 + i] = saved[i];
  }
  return result;
}

}  // namespace

void expect_exact_statistics(const std::string& op, DType dtype, const CaseRunner& run, bool last) {
  SCOPED_TRACE(concat(op, ", ", dtype_name(dtype), last ? ", nhwc" : ""));
  const bool grouped = op == "GroupNorm";
  const Shape shape = last ? Shape{3, 5, 13, 8} : grouped ? Shape{3, 8, 5, 13} : Shape{24, 130};
  const TensorType parameter{DType::kFloat32, {grouped ? 8 : 130}};
  OpExample example{.name = "far",
                    .attributes = {{"epsilon", 1e-5}},
                    .inputs = {{DType::kFloat32, shape}, parameter},
                    .low = 20 - 1.7,
                    .high = 20 + 1.7};
  example.attributes.set(grouped ? "num_groups" : "axis", int64_t{grouped ? 2 : 1});
  if (last) {
    example.attributes.set("layout", std::string("nhwc"));
  }
  if (op != "RMSNormalization") {
    example.inputs.push_back(parameter);
  }
  const NodeCase narrow = make_case(get_op(op), example, dtype);
  NodeCase wide = make_case(get_op(op), example, DType::kFloat64);
  for (size_t i = 0; i < wide.inputs.size(); ++i) {
    wide.inputs[i] = narrow.inputs[i].cast(DType::kFloat64);
  }
  const std::vector<Tensor> saved = run(narrow), exact = run_case(wide);
  for (size_t i = 1; i < saved.size(); ++i) {
    EXPECT_EQ(saved[i].dtype(), DType::kFloat32);
    EXPECT_TRUE(tensors_near(saved[i].cast(DType::kFloat64), exact[i], 1e-6)) << "statistic " << i;
  }
  NodeCase narrow_grad = backward_of(op, example, saved, dtype);
  NodeCase wide_grad = backward_of(op, example, exact, DType::kFloat64);
  for (size_t i = 0; i < 3; ++i) {  // dy is drawn; x and scale are the forward operator's
    Tensor& input = narrow_grad.inputs[i];
    input = i == 0 ? input : narrow.inputs[i - 1];
    wide_grad.inputs[i] = input.cast(DType::kFloat64);
  }
  const std::vector<Tensor> grads = run(narrow_grad), wanted = run_case(wide_grad);
  const double rounding = dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(tensors_near(grads[i].cast(DType::kFloat64), wanted[i], rounding)) << "grad " << i;
  }
}

}  // namespace trainrt::testing
