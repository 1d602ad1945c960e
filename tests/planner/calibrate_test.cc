// A fit finds the constants that rows were made with, says what it is worth on unseen rows, and
// writes a cluster file that plan reads.
#include "planner/calibrate.h"

#include <gtest/gtest.h>

#include "graph/base/error.h"
#include "parallel/cluster_file.h"

namespace trainrt {
namespace {

MeasuredRow row_of(int64_t layers, int64_t hidden, int devices) {
  MeasuredRow row;
  row.id = std::to_string(layers) + "x" + std::to_string(hidden);
  row.model = "transformer";
  row.shape.layers = layers;
  row.shape.hidden = hidden;
  row.shape.heads = row.shape.kv_heads = hidden / 128;
  row.shape.ffn = 4 * hidden;
  row.shape.vocab = 51200;
  row.shape.seq = 2048;
  row.device = "A100-SXM4-80GB";
  row.num_devices = row.data = devices;
  row.micro_batch = 4;
  row.global_batch = 16 * devices;
  row.virtual_stages = 1;
  row.recompute = RecomputeMode::kFull;
  return row;
}

// Rows as a device with these figures would have measured them.
std::vector<MeasuredRow> rows_of(const std::map<std::string, double>& efficiency) {
  std::vector<MeasuredRow> rows;
  for (const int64_t layers : {4, 8, 16}) {
    for (const int64_t hidden : {2048, 4096}) {
      for (const int devices : {1, 8}) {
        MeasuredRow row = row_of(layers, hidden, devices);
        row.seconds =
            predict_row(row, find_engine("megatron"), nullptr, efficiency).predicted_seconds;
        rows.push_back(row);
      }
    }
  }
  return rows;
}

TEST(CalibrateTest, FindsASlowDevice) {
  const Calibration fitted =
      calibrate(rows_of({{"matmul", 0.6}, {"memory", 0.7}}), find_engine("megatron"), nullptr);
  EXPECT_EQ(fitted.rows, 12);
  EXPECT_GT(fitted.error_before, 0.15);
  EXPECT_LT(fitted.error, 0.02);
  EXPECT_NEAR(fitted.efficiency.at("matmul"), 0.6, 0.06);
  ASSERT_EQ(fitted.held_out.size(), 3u);  // depth, width, devices
  for (const HeldOut& held : fitted.held_out) {
    EXPECT_GT(held.error_before, 0.15) << held.by;
    EXPECT_LT(held.error, 0.05) << held.by;
  }
}

TEST(CalibrateTest, LeavesAnExactDeviceAlone) {
  const Calibration fitted = calibrate(rows_of({}), find_engine("megatron"), nullptr);
  EXPECT_LT(fitted.error_before, 1e-12);
  EXPECT_TRUE(fitted.efficiency.empty());
}

TEST(CalibrateTest, FittedConstantsStayWhereHardwareCanBe) {
  std::vector<MeasuredRow> rows = rows_of({});
  for (MeasuredRow& row : rows) {
    row.seconds *= 10;
  }
  const Calibration fitted = calibrate(rows, find_engine("megatron"), nullptr);
  for (const NamedConstant& constant : named_constants()) {
    const auto found = fitted.efficiency.find(constant.name);
    if (found != fitted.efficiency.end()) {
      EXPECT_GE(found->second, constant.low) << constant.name;
      EXPECT_LE(found->second, constant.high) << constant.name;
    }
  }
}

TEST(CalibrateTest, TheFileIsAClusterWithTheFittedDevice) {
  const Calibration fitted =
      calibrate(rows_of({{"matmul", 0.6}}), find_engine("megatron"), nullptr);
  const Topology topology = parse_cluster(calibrated_cluster(fitted), "fitted.yaml");
  ASSERT_EQ(topology.num_devices(), 8);
  EXPECT_EQ(topology.types[0].name, "a100-sxm4-80gb-calibrated");
  EXPECT_NEAR(
      constants_for(topology.types[0]).matmul_efficiency, fitted.efficiency.at("matmul"), 1e-3);
}

TEST(CalibrateTest, RefusesTwoKindsOfDevicesAndTooFewRows) {
  std::vector<MeasuredRow> rows = rows_of({});
  rows.back().device = "H100-SXM5-80GB";
  try {
    calibrate(rows, find_engine("megatron"), nullptr);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("H100-SXM5-80GB"), std::string::npos);
  }
  rows.resize(3);
  EXPECT_THROW(calibrate(rows, find_engine("megatron"), nullptr), Error);
}

}  // namespace
}  // namespace trainrt
