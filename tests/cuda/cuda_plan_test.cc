// How many plans of cuDNN a run makes: the real library may compile kernels for each.
#include <gtest/gtest.h>

#include "graph/op_def.h"
#include "tests/cuda/cuda_double_device.h"
#include "tests/support/device_case.h"
#include "tests/support/run_program.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {
namespace {

void run_convolution(const std::string& type, Device& device) {
  const NodeCase test_case = make_case(get_op(type), get_op(type).examples.at(0));
  EXPECT_TRUE(tensors_near(run_on_device(test_case, device).at(0),
                           run_case(test_case).at(0),
                           kernel_tolerance(DType::kFloat32)));
}

TEST(CudaPlanTest, NodesOfOneProblemShareOnePlan) {
  DeviceOptions options;
  options.tf32 = true;
  const DoubleDevice device(options);
  run_convolution("Conv", *device);
  EXPECT_EQ(cuda_double::num_plans(), 2);  // of which the faster one stays
  const int64_t runs = cuda_double::num_graphs("conv_forward");
  run_convolution("Conv", *device);
  EXPECT_EQ(cuda_double::num_plans(), 2);
  EXPECT_EQ(cuda_double::num_graphs("conv_forward"), runs + 1);
}

TEST(CudaPlanTest, LaterRunsMakeOnePlanPerProblem) {
  const TemporaryFolder folder;
  for (const bool deterministic : {false, true}) {
    DeviceOptions options;
    options.tf32 = true;
    options.deterministic = deterministic;
    options.algorithm_cache = folder.file("algorithms");
    for (const bool warm : {false, true}) {
      const DoubleDevice device(options);
      // The first engine that may be taken where runs must repeat does not run.
      cuda_double::set_fault(
          "A1", deterministic ? cuda_double::Fault::kFails : cuda_double::Fault::kNone);
      run_convolution("Conv", *device);
      run_convolution("ConvWeightGrad", *device);
      EXPECT_EQ(cuda_double::num_plans(), warm ? 2 : 4);
    }
  }
}

TEST(CudaPlanTest, AHandleThatCannotBeMadeIsNoRefusal) {
  const NodeCase test_case = make_case(get_op("Conv"), get_op("Conv").examples.at(0));
  for (const std::string call : {"cudnnCreate", "cudnnSetStream"}) {
    std::string message;
    for (int64_t i = 1; i < 1000; ++i) {
      const DoubleDevice device;
      cuda_double::fail_call(i);
      try {
        message.clear();
        run_on_device(test_case, *device);
      } catch (const Error& error) {
        message = error.message();
      }
      if (cuda_double::failed_call() == call) {
        break;
      }
    }
    EXPECT_NE(message.find(call + " failed"), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace trainrt::testing
