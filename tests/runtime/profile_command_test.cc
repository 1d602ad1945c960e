// `trainrt profile`: a file that --cluster takes, with figures that hardware can have.
#include <gtest/gtest.h>

#include "parallel/cluster_file.h"
#include "tests/support/run_program.h"

namespace trainrt {
namespace {

using testing::ProgramResult;
using testing::run_trainrt;
using testing::TemporaryFolder;
using testing::write_model;

TEST(ProfileCommandTest, WritesAClusterOfThisMachine) {
  const TemporaryFolder folder;
  const std::string file = folder.file("here.yaml");
  for (const int n : {1, 2}) {
    const ProgramResult result = run_trainrt({"profile",
                                              "--devices",
                                              "cpu:" + std::to_string(n),
                                              "--threads",
                                              "1",
                                              "--seconds",
                                              "0.2",
                                              "-o",
                                              file});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const Topology topology = load_cluster(file);
    ASSERT_EQ(topology.num_devices(), n);
    const DeviceType& type = topology.type_of(0);
    EXPECT_TRUE(type.is_cpu());
    // Anything between an old laptop's core under load and a server's.
    EXPECT_GT(type.flops.at("fp32"), 1e8);
    EXPECT_LT(type.flops.at("fp32"), 1e13);
    EXPECT_GT(type.memory_bandwidth, 1e8);
    EXPECT_LT(type.memory_bandwidth, 1e12);
    EXPECT_GT(type.memory_bytes, int64_t{1} << 27);
    EXPECT_GT(topology.hosts[0].intra.bandwidth, 1e6);
    for (const char* kernel : {"MatMul", "Conv", "FusedAttentionGrad", "AdamW"}) {
      ASSERT_EQ(type.kernels.count(kernel), 1u) << kernel;
      for (const KernelSample& sample : type.kernels.at(kernel)) {
        EXPECT_GT(sample.bytes, 0) << kernel;
      }
    }
    EXPECT_GT(type.streams.size(), 3u);
    EXPECT_EQ(topology.hosts[0].intra.calls.count("all_reduce"), n == 1 ? 0u : 1u);
  }
}

TEST(ProfileCommandTest, PlansTakeTheFile) {
  const TemporaryFolder folder;
  ASSERT_EQ(
      run_trainrt({"profile", "--nproc", "2", "--seconds", "0.2", "-o", folder.file("here.yaml")})
          .exit_code,
      0);
  write_model("mlp --hidden 32", folder.file("m.onnx"));
  const ProgramResult plan =
      run_trainrt({"plan", folder.file("m.onnx"), "--cluster", folder.file("here.yaml")});
  EXPECT_EQ(plan.exit_code, 0) << plan.err;
}

}  // namespace
}  // namespace trainrt
