// The cost model's constants stay where hardware can be, and its shapes behave as tiles do.
#include "planner/cost_model.h"

#include <gtest/gtest.h>

#include "graph/base/error.h"
#include "parallel/device_catalogue.h"

namespace trainrt {
namespace {

CostModel model_of(const std::string& device, const std::string& precision = "fp16") {
  return CostModel(find_device(device).device, precision);
}

TEST(CostModelTest, ConstantsStayInPhysicalRanges) {
  struct Range {
    const char* architecture;
    double low, high;  // matmul_efficiency
  };
  for (const Range& range : {Range{"ampere", 0.70, 0.90},
                             Range{"hopper", 0.62, 0.80},
                             Range{"blackwell", 0.45, 0.70},
                             Range{"volta", 0.70, 0.85},
                             Range{"turing", 0.40, 0.70},
                             Range{"cpu", 0.70, 0.95}}) {
    const DeviceConstants c = constants_for(range.architecture);
    EXPECT_GE(c.matmul_efficiency, range.low) << range.architecture;
    EXPECT_LE(c.matmul_efficiency, range.high) << range.architecture;
    EXPECT_GE(c.memory_efficiency, 0.65) << range.architecture;
    EXPECT_LE(c.memory_efficiency, 0.93) << range.architecture;
    EXPECT_GE(c.attention_efficiency, 0.2) << range.architecture;
    EXPECT_LE(c.attention_efficiency, 0.75) << range.architecture;
    EXPECT_GE(c.overlap_slowdown, 1.1) << range.architecture;
    EXPECT_LE(c.overlap_slowdown, 1.3) << range.architecture;
    EXPECT_LE(c.launch_seconds, 10e-6) << range.architecture;
  }
}

TEST(CostModelTest, EveryNamedConstantHasItsNameAndLiesInItsRange) {
  std::vector<std::string> names;
  for (const NamedConstant& constant : named_constants()) {
    names.push_back(constant.name);
    for (const char* architecture :
         {"volta", "turing", "ampere", "hopper", "blackwell", "generic"}) {
      EXPECT_GE(constants_for(architecture).*constant.field, constant.low) << constant.name;
      EXPECT_LE(constants_for(architecture).*constant.field, constant.high) << constant.name;
    }
  }
  EXPECT_EQ(names, efficiency_names());
}

TEST(CostModelTest, FiguresOfADeviceReplaceItsArchitectures) {
  DeviceType device = find_device("A100").device;
  device.efficiency["matmul"] = 0.5;
  EXPECT_EQ(constants_for(device).matmul_efficiency, 0.5);
  EXPECT_EQ(constants_for(device).memory_efficiency, constants_for("ampere").memory_efficiency);
  const MatmulDims dims{1, 8192, 8192, 8192};
  EXPECT_GT(CostModel(device, "fp16").matmul_seconds(dims),
            1.5 * model_of("A100").matmul_seconds(dims));
  device.efficiency["matmul"] = 5;
  EXPECT_THROW(constants_for(device), Error);
}

TEST(CostModelTest, NeverBeatsThePeak) {
  for (const CatalogueEntry& entry : device_catalogue()) {
    const CostModel model(entry.device, "fp16");
    for (const int64_t n : {64, 100, 256, 1000, 4096, 16384}) {
      const MatmulDims dims{1, n, n, n};
      EXPECT_GE(model.matmul_seconds(dims), dims.flops() / entry.device.peak_flops("fp16"))
          << entry.device.name << " " << n;
    }
  }
}

TEST(CostModelTest, LargeProductsComeNearTheSustainedRate) {
  const CostModel model = model_of("A100");
  const MatmulDims dims{1, 8192, 8192, 8192};
  const double rate = dims.flops() / model.matmul_seconds(dims);
  EXPECT_GT(rate, 220e12);
  EXPECT_LT(rate, 280e12);
}

// One column more than the tiles of a wave hold starts a new wave, or at least a wider padding.
TEST(CostModelTest, DimsJustAboveATileCostMore) {
  const CostModel model = model_of("A100");
  const double whole = model.matmul_seconds({1, 4096, 13824, 4096});
  const double above = model.matmul_seconds({1, 4096, 13832, 4096});
  EXPECT_GT(above, 1.02 * whole);
}

TEST(CostModelTest, UnalignedRowsCostMore) {
  const CostModel model = model_of("A100");
  EXPECT_GT(model.matmul_seconds({1, 4096, 4096, 4095}),
            1.2 * model.matmul_seconds({1, 4096, 4096, 4096}));
}

// 16 bytes are eight numbers of 16 bits and four of TF32; without Tensor Cores no row is odd.
TEST(CostModelTest, RowsAreWholePiecesInTheirOwnType) {
  const auto slowdown = [](const char* precision, int64_t n) {
    const CostModel model = model_of("A100", precision);
    const int64_t whole = (n + 63) / 64 * 64;
    return model.matmul_seconds({1, 4096, 4096, n}) / model.matmul_seconds({1, 4096, 4096, whole});
  };
  EXPECT_GT(slowdown("bf16", 4092), 1.5);
  EXPECT_NEAR(slowdown("tf32", 4092), 1.15, 0.02);
  EXPECT_NEAR(slowdown("tf32", 4064), 1, 0.02);
  EXPECT_NEAR(slowdown("bf16", 4064), 1.15, 0.02);
  EXPECT_GT(slowdown("tf32", 4095), 1.5);
  EXPECT_NEAR(slowdown("fp32", 4095), 1, 0.02);
  EXPECT_EQ(model_of("A100", "fp16").row_multiples(), (std::vector<int64_t>{8, 64}));
  EXPECT_EQ(model_of("A100", "tf32").row_multiples(), (std::vector<int64_t>{4, 32}));
  EXPECT_TRUE(model_of("A100", "fp32").row_multiples().empty());
}

TEST(CostModelTest, EveryKernelHasALaunch) {
  const CostModel model = model_of("H100", "bf16");
  EXPECT_GE(model.op_seconds({1, 8, {}}), model.constants().launch_seconds);
  EXPECT_EQ(model.op_seconds({}), 0);
}

TEST(CostModelTest, HalfSpeedTakesTwiceTheTime) {
  DeviceType slow = find_device("A100").device;
  slow.speed = 0.5;
  const CostModel fast = model_of("A100"), half(slow, "fp16");
  const MatmulDims dims{1, 4096, 4096, 4096};
  EXPECT_NEAR(
      half.matmul_seconds(dims), 2 * fast.matmul_seconds(dims), 1e-3 * fast.matmul_seconds(dims));
  EXPECT_NEAR(half.stream_seconds(1e9, 0), 2 * fast.stream_seconds(1e9, 0), 1e-9);
}

}  // namespace
}  // namespace trainrt
