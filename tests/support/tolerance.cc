#include "tests/support/tolerance.h"

#include <cmath>

#include "graph/graph.h"

namespace trainrt::testing {

namespace {

std::string type_string(const Tensor& tensor) {
  return concat(dtype_name(tensor.dtype()), shape_string(tensor.shape()));
}

bool same_number(double a, double b) {
  return a == b || (std::isnan(a) && std::isnan(b));
}

::testing::AssertionResult same_type(const Tensor& actual, const Tensor& expected) {
  if (actual.dtype() != expected.dtype() || actual.shape() != expected.shape()) {
    return ::testing::AssertionFailure()
           << "got " << type_string(actual) << ", wanted " << type_string(expected);
  }
  return ::testing::AssertionSuccess();
}

}  // namespace

double kernel_tolerance(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 1e-12;
    case DType::kFloat32:
      return 1e-5;
    case DType::kBFloat16:
      return 1e-2;
    case DType::kFloat16:
      return 2e-3;
    default:
      return 0;
  }
}

double relative_error(const Tensor& actual, const Tensor& expected) {
  const std::vector<double> a = actual.to_double(), b = expected.to_double();
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    if (same_number(a.at(i), b[i])) {
      norm += std::isfinite(b[i]) ? b[i] * b[i] : 0;
      continue;
    }
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  if (difference == 0) {
    return 0;
  }
  return norm > 0 ? std::sqrt(difference / norm) : INFINITY;
}

::testing::AssertionResult tensors_near(const Tensor& actual,
                                        const Tensor& expected,
                                        double tolerance) {
  const ::testing::AssertionResult types = same_type(actual, expected);
  if (!types) {
    return types;
  }
  if (!is_floating(expected.dtype())) {
    return tensors_identical(actual, expected);
  }
  const double error = relative_error(actual, expected);
  if (error <= tolerance) {  // false for NaN
    return ::testing::AssertionSuccess();
  }
  const std::vector<double> a = actual.to_double(), b = expected.to_double();
  size_t worst = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    if (std::abs(a[i] - b[i]) > std::abs(a[worst] - b[worst]) || std::isnan(a[i] - b[i])) {
      worst = i;
    }
  }
  return ::testing::AssertionFailure()
         << "relative error " << error << " > " << tolerance << " in " << type_string(expected)
         << "; worst at element " << worst << ": got " << a[worst] << ", wanted " << b[worst];
}

::testing::AssertionResult tensors_identical(const Tensor& actual, const Tensor& expected) {
  const ::testing::AssertionResult types = same_type(actual, expected);
  if (!types || identical(actual, expected)) {
    return types;
  }
  const std::vector<double> a = actual.to_double(), b = expected.to_double();
  for (size_t i = 0; i < b.size(); ++i) {
    if (!same_number(a[i], b[i])) {
      return ::testing::AssertionFailure() << "element " << i << " of " << type_string(expected)
                                           << ": got " << a[i] << ", wanted " << b[i];
    }
  }
  return ::testing::AssertionFailure() << "bits differ (signed zeros or kinds of NaN)";
}

}  // namespace trainrt::testing
