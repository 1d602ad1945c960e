// On a real GPU: every operator against its reference kernel, and whole runs against the CPU.
#include <gmock/gmock.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "graph/op_def.h"
#include "runtime/load_cuda.h"
#include "tests/support/device_case.h"
#include "tests/support/run_program.h"

namespace trainrt::testing {
namespace {

class GpuOperatorTest : public ::testing::TestWithParam<std::string> {};

TEST_P(GpuOperatorTest, EqualsTheReferenceKernel) {
  const std::unique_ptr<Device> device = cuda_module().make_device(0, {});
  const OpDef& op = get_op(GetParam());
  if (is_communication_op(op)) {
    return;
  }
  ASSERT_TRUE(has_kernel(op.name, Backend::kCuda));
  expect_reference_results(op, *device);
}

struct Family {
  std::string name;
  std::vector<std::string> sizes;
};

class GpuFamilyTest : public ::testing::TestWithParam<Family> {
 protected:
  std::vector<nlohmann::json> train(const std::string& device) {
    const std::string model = folder_.file("model.onnx"), metrics = folder_.file("m.jsonl");
    std::vector<std::string> write = {"model", GetParam().name, "-o", model};
    write.insert(write.end(), GetParam().sizes.begin(), GetParam().sizes.end());
    EXPECT_EQ(run_trainrt(write).exit_code, 0);
    const ProgramResult result = run_trainrt({"run",
                                              model,
                                              "--devices",
                                              device,
                                              "--precision",
                                              "fp32",
                                              "--steps",
                                              "5",
                                              "--batch-size",
                                              "8",
                                              "--metrics",
                                              metrics});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::vector<nlohmann::json> steps;
    std::istringstream lines(file_text(metrics));
    for (std::string line; std::getline(lines, line);) {
      steps.push_back(nlohmann::json::parse(line));
    }
    return steps;
  }
  TemporaryFolder folder_;
};

TEST_P(GpuFamilyTest, TrainsAsOnTheCpuAndTwiceAlike) {
  const std::vector<nlohmann::json> cpu = train("cpu"), gpu = train("cuda:0"),
                                    again = train("cuda:0");
  ASSERT_EQ(cpu.size(), 5u);
  ASSERT_EQ(gpu.size(), 5u);
  for (size_t i = 0; i < cpu.size(); ++i) {
    const double expected = cpu[i].at("loss");
    EXPECT_NEAR(gpu[i].at("loss").get<double>(), expected, 1e-4 * std::fabs(expected)) << i;
    EXPECT_NEAR(again[i].at("loss").get<double>(), gpu[i].at("loss").get<double>(), 1e-5) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Families,
    GpuFamilyTest,
    ::testing::Values(Family{"mlp", {}},
                      Family{"cnn", {}},
                      Family{"resnet", {"--layers", "18", "--image", "64", "--classes", "10"}},
                      Family{"vit", {"--layers", "2", "--hidden", "64", "--heads", "4"}},
                      Family{"gpt2", {"--layers", "2", "--hidden", "64", "--heads", "4"}},
                      Family{"llama", {"--layers", "2", "--hidden", "64", "--heads", "4"}},
                      Family{"lstm", {"--hidden", "32"}}),
    [](const auto& family) { return family.param.name; });

INSTANTIATE_TEST_SUITE_P(Registry,
                         GpuOperatorTest,
                         ::testing::ValuesIn(op_names()),
                         [](const auto& row) { return test_name(row.param); });

}  // namespace
}  // namespace trainrt::testing
