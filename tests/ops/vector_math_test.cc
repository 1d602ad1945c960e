// The vectorised functions behind the fast float32 kernels against the C library in double, over
// their whole range, reached as users reach them: through operators.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "graph/op_def.h"
#include "tests/support/op_example.h"

namespace trainrt::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<float> fast_values(const char* op_type, const std::vector<float>& x) {
  const Shape shape = {static_cast<int64_t>(x.size())};
  OpExample example;
  example.name = "points";
  example.inputs = {{DType::kFloat32, shape}};
  example.values = {Tensor::from(x, shape)};
  const Tensor y = run_case(make_case(get_op(op_type), example), {.reference = false})[0];
  return {y.data<float>(), y.data<float>() + x.size()};
}

void expect_close(const char* op_type, double (*exact)(double), double low, double high) {
  constexpr int kPoints = 200000;
  std::vector<float> x;
  for (int i = 0; i <= kPoints; ++i) {
    x.push_back(static_cast<float>(low + (high - low) * i / kPoints));
  }
  const std::vector<float> y = fast_values(op_type, x);
  double largest = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = exact(static_cast<double>(x[i]));
    const double error = std::abs(static_cast<double>(y[i]) - expected);
    largest = std::max(largest, error / std::max(std::abs(expected), 1e-37));
  }
  EXPECT_LT(largest, 3e-7) << op_type << " on [" << low << ", " << high << "]";
}

double softplus(double x) {
  return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
}
double elu(double x) {
  return x < 0 ? std::expm1(x) : x;
}

TEST(VectorMathTest, FloatFunctionsAreGoodToThreeInTenMillion) {
  expect_close("Exp", std::exp, -85, 88);
  expect_close("Elu", elu, -20, 1);
  expect_close("Elu", elu, -1e-3, 1e-3);
  expect_close("Log", std::log, 1e-30, 1e-20);
  expect_close("Log", std::log, 0.5, 2);
  expect_close("Log", std::log, 1, 1e9);
  expect_close("Softplus", softplus, -20, 20);
  expect_close("Tanh", std::tanh, -10, 10);
  expect_close("Tanh", std::tanh, -1e-3, 1e-3);
  expect_close("Erf", std::erf, -6, 6);
  expect_close("Erf", std::erf, -1e-3, 1e-3);
}

TEST(VectorMathTest, LimitsFollowTheCLibrary) {
  EXPECT_EQ(fast_values("Exp", {kInfinity, -kInfinity, 0}), (std::vector<float>{kInfinity, 0, 1}));
  EXPECT_EQ(fast_values("Log", {0, kInfinity, 1}), (std::vector<float>{-kInfinity, kInfinity, 0}));
  EXPECT_TRUE(std::isnan(fast_values("Log", {-1})[0]));
  EXPECT_NEAR(fast_values("Log", {1e-40f})[0], std::log(1e-40f), 1e-4);
  EXPECT_EQ(fast_values("Tanh", {kInfinity, -kInfinity}), (std::vector<float>{1, -1}));
  EXPECT_EQ(fast_values("Erf", {kInfinity, -kInfinity}), (std::vector<float>{1, -1}));
  EXPECT_EQ(fast_values("Softplus", {1000})[0], 1000);
  EXPECT_EQ(fast_values("Sigmoid", {-1000})[0], 0);
}

TEST(VectorMathTest, NaNStaysNaN) {
  for (const char* op_type :
       {"Exp", "Elu", "Log", "Softplus", "Tanh", "Erf", "Sigmoid", "Relu", "Sqrt"}) {
    EXPECT_TRUE(std::isnan(fast_values(op_type, {kNaN})[0])) << op_type;
  }
}

}  // namespace
}  // namespace trainrt::testing
