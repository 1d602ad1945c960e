// Which sample is to blame for a step that failed.
#include "runtime/bad_values.h"

#include <gmock/gmock.h>

#include <limits>

namespace trainrt {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Two samples of two doubles, fed to an input of `dtype`.
std::string blamed(double last, DType dtype) {
  const DataArray array{.name = "a", .dtype = DType::kFloat64, .sample_shape = {2}};
  const auto data =
      make_memory_dataset("d.npz", {array}, {Tensor::from<double>({0, 1, 2, last}, {2, 2})}, {0});
  InputBinding binding{.input = "x", .array = 0, .dtype = dtype, .sample_shape = {2}};
  return find_bad_value(*data, {binding}, {0, 1});
}

TEST(BadValuesTest, WhatIsNoNumberIsNamed) {
  EXPECT_THAT(blamed(std::numeric_limits<double>::quiet_NaN(), DType::kFloat64),
              HasSubstr("sample 1 of array 'a' of d.npz holds nan"));
}

TEST(BadValuesTest, AWeightThatIsNoNumberIsNamed) {
  const auto read = [](const std::string& name) {
    const float last = name == "bad" ? std::numeric_limits<float>::quiet_NaN() : 1;
    return Tensor::from<float>({0, last}, {2});
  };
  EXPECT_EQ(find_bad_weight({"a", "b"}, read), "");
  EXPECT_THAT(find_bad_weight({"a", "bad"}, read), HasSubstr("weight 'bad' holds nan"));
}

TEST(BadValuesTest, ANumberTooLargeForItsInputIsNamed) {
  EXPECT_EQ(blamed(1e30, DType::kFloat32), "");
  EXPECT_EQ(blamed(1e300, DType::kFloat64), "");
  EXPECT_THAT(blamed(1e300, DType::kFloat32),
              AllOf(HasSubstr("sample 1 of array 'a'"),
                    HasSubstr("holds 1e+300, which is more than float32 of input 'x' can be")));
  EXPECT_THAT(blamed(1e30, DType::kFloat16), HasSubstr("more than float16"));
}

}  // namespace
}  // namespace trainrt
