// The vectorised functions against the C library in double, over their whole range.
#include "ops/vector_math.h"

#include <gtest/gtest.h>

#include <cmath>

namespace trainrt::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <typename Fast, typename Exact>
double largest_relative_error(Fast fast, Exact exact, double low, double high) {
  constexpr int kPoints = 200000;
  double largest = 0;
  for (int i = 0; i <= kPoints; ++i) {
    const float x = static_cast<float>(low + (high - low) * i / kPoints);
    const double expected = exact(static_cast<double>(x));
    const double error = std::abs(static_cast<double>(fast(x)) - expected);
    largest = std::max(largest, error / std::max(std::abs(expected), 1e-37));
  }
  return largest;
}

#define TRAINRT_EXPECT_CLOSE(function, low, high)                              \
  EXPECT_LT(largest_relative_error([](float x) { return vmath::function(x); }, \
                                   [](double x) { return std::function(x); },  \
                                   low,                                        \
                                   high),                                      \
            3e-7)                                                              \
      << #function << " on [" << low << ", " << high << "]"

TEST(VectorMathTest, FloatFunctionsAreGoodToThreeInTenMillion) {
  TRAINRT_EXPECT_CLOSE(exp, -85, 88);
  TRAINRT_EXPECT_CLOSE(expm1, -20, 20);
  TRAINRT_EXPECT_CLOSE(expm1, -1e-3, 1e-3);
  TRAINRT_EXPECT_CLOSE(log, 1e-30, 1e-20);
  TRAINRT_EXPECT_CLOSE(log, 0.5, 2);
  TRAINRT_EXPECT_CLOSE(log, 1, 1e9);
  TRAINRT_EXPECT_CLOSE(log1p, 0, 1);
  TRAINRT_EXPECT_CLOSE(tanh, -10, 10);
  TRAINRT_EXPECT_CLOSE(tanh, -1e-3, 1e-3);
  TRAINRT_EXPECT_CLOSE(erf, -6, 6);
  TRAINRT_EXPECT_CLOSE(erf, -1e-3, 1e-3);
}

TEST(VectorMathTest, LimitsAndNaNFollowTheCLibrary) {
  EXPECT_EQ(vmath::exp(kInfinity), kInfinity);
  EXPECT_EQ(vmath::exp(-kInfinity), 0.0f);
  EXPECT_EQ(vmath::exp(0.0f), 1.0f);
  EXPECT_EQ(vmath::log(0.0f), -kInfinity);
  EXPECT_EQ(vmath::log(kInfinity), kInfinity);
  EXPECT_TRUE(std::isnan(vmath::log(-1.0f)));
  EXPECT_NEAR(vmath::log(1e-40f), std::log(1e-40f), 1e-4);
  EXPECT_EQ(vmath::tanh(kInfinity), 1.0f);
  EXPECT_EQ(vmath::tanh(-kInfinity), -1.0f);
  EXPECT_EQ(vmath::erf(kInfinity), 1.0f);
  EXPECT_EQ(vmath::softplus(1000.0f), 1000.0f);
  EXPECT_EQ(vmath::sigmoid(-1000.0f), 0.0f);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float y : {vmath::exp(nan),
                        vmath::expm1(nan),
                        vmath::log(nan),
                        vmath::log1p(nan),
                        vmath::tanh(nan),
                        vmath::erf(nan)}) {
    EXPECT_TRUE(std::isnan(y));
  }
}

}  // namespace
}  // namespace trainrt::testing
