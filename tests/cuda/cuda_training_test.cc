// Training on one GPU: what trains on the CPU trains alike on CUDA, in every order that streams may
// run in, and every failure of a library ends in one error.
#include <cublasLt.h>

#include "parallel/device_catalogue.h"
#include "tests/cuda/cuda_training_run.h"

namespace trainrt::testing {
namespace {

using ::testing::HasSubstr;

struct Family {
  std::string name;
  std::vector<std::string> sizes;
  // Deep networks with BatchNorm over few values magnify float32's rounding without bound.
  std::string precision = "fp32";
};

class CudaFamilyTest : public CudaTrainingTest, public ::testing::WithParamInterface<Family> {};

TEST_P(CudaFamilyTest, TrainsAsOnTheCpu) {
  const std::string path = model(GetParam().name, GetParam().sizes);
  const std::vector<std::string> steps = {
      "--steps", "2", "--batch-size", "4", "--precision", GetParam().precision};
  const Course expected = train(path, kCpu, steps);
  const Course actual = train(path, kGpu, steps);
  ASSERT_EQ(expected.losses.size(), 2u);
  expect_near(actual, expected, 1e-5);
}

INSTANTIATE_TEST_SUITE_P(
    Families,
    CudaFamilyTest,
    ::testing::Values(
        Family{"mlp", {}},
        Family{"lenet", {}},
        Family{"cnn", {"--image", "16"}},
        Family{"resnet", {"--layers", "18", "--image", "32", "--classes", "10"}, "fp64"},
        Family{"mobilenet", {"--image", "32", "--classes", "10"}, "fp64"},
        Family{"vit", {"--layers", "1", "--hidden", "32", "--heads", "2", "--image", "32"}},
        Family{"bert", kTinyGpt},
        Family{"gpt2", kTinyGpt},
        Family{"llama", kTinyGpt},
        Family{"t5", kTinyGpt},
        Family{"unet", {"--image", "16", "--hidden", "8"}},
        Family{"lstm", {"--hidden", "8", "--vocab", "20", "--seq", "5"}}),
    [](const auto& family) { return family.param.name; });

// Accumulation over micro-batches, clipping, dropout and recompute on one GPU.
TEST_F(CudaTrainingTest, MicroBatchesClippingAndRecomputeAreThoseOfTheCpu) {
  const std::string path = model("gpt2", kTinyGpt);
  const std::vector<std::string> more = {"--steps",
                                         "3",
                                         "--batch-size",
                                         "6",
                                         "--micro-batch-size",
                                         "2",
                                         "--clip-norm",
                                         "0.5",
                                         "--recompute",
                                         "full"};
  expect_near(train(path, kGpu, more), train(path, kCpu, more), 1e-5);
}

// The second time that kernels run with the same addresses they are recorded, from then on
// replayed: nothing of it shows.
TEST_F(CudaTrainingTest, ReplayedGraphsGiveTheBitsOfKernelsAskedForOneByOne) {
  const std::string path = model("gpt2", kTinyGpt);
  std::vector<std::string> more = {
      "--steps", "4", "--batch-size", "6", "--micro-batch-size", "2", "--clip-norm", "0.5"};
  const Course replayed = train(path, kGpu, more);
  EXPECT_GT(cuda_double::num_replays(), 8);
  const int64_t launches = cuda_double::num_launches();
  cuda_double::reset();
  more.insert(more.end(), {"--cuda-graphs", "off"});
  const Course asked_for = train(path, kGpu, more);
  EXPECT_EQ(cuda_double::num_replays(), 0);
  EXPECT_EQ(cuda_double::num_launches(), launches);
  EXPECT_EQ(replayed.losses, asked_for.losses);
  EXPECT_EQ(replayed.norms, asked_for.norms);
}

// Activations are computed with the product before them, and their gradients with the one after; a
// bias's gradient is summed with the product of its weight's.
TEST_F(CudaTrainingTest, NeighboursJoinTheirProducts) {
  train(model("mlp", {"--hidden", "16"}), kGpu, {"--steps", "1", "--batch-size", "4"});
  EXPECT_EQ(cuda_double::num_products(CUBLASLT_EPILOGUE_RELU_BIAS), 2);
  EXPECT_EQ(cuda_double::num_products(CUBLASLT_EPILOGUE_DRELU), 2);
  EXPECT_EQ(cuda_double::num_products(CUBLASLT_EPILOGUE_BGRADA) +
                cuda_double::num_products(CUBLASLT_EPILOGUE_BGRADB),
            3);
  cuda_double::reset();
  train(model("gpt2", kTinyGpt), kGpu, {"--steps", "1", "--batch-size", "4"});
  EXPECT_GT(cuda_double::num_products(CUBLASLT_EPILOGUE_BIAS), 0);
  EXPECT_GT(cuda_double::num_products(CUBLASLT_EPILOGUE_GELU_AUX_BIAS), 0);
  EXPECT_GT(cuda_double::num_products(CUBLASLT_EPILOGUE_DGELU), 0);
  EXPECT_GT(cuda_double::num_additions(), 0);  // residuals
  EXPECT_GT(cuda_double::num_products(CUBLASLT_EPILOGUE_BGRADA), 0);
  // A weight's gradient is cast and squared between product and activation.
  cuda_double::reset();
  train(model("gpt2", kTinyGpt),
        kGpu,
        {"--steps", "1", "--batch-size", "4", "--precision", "bf16", "--clip-norm", "1"});
  EXPECT_GT(cuda_double::num_products(CUBLASLT_EPILOGUE_DGELU), 0);
}

// With products that ask for workspace, and activations that are made again: the memory plan leaves
// what runs as one apart.
TEST_F(CudaTrainingTest, EveryLayersGeluRunsWithItsProducts) {
  const std::string path = model(
      "gpt2", {"--layers", "2", "--hidden", "64", "--heads", "2", "--vocab", "40", "--seq", "16"});
  for (const char* precision : {"fp32", "bf16"}) {
    SCOPED_TRACE(precision);
    cuda_double::reset();
    train(path, kGpu, {"--steps", "1", "--batch-size", "18", "--precision", precision});
    EXPECT_EQ(cuda_double::num_products(CUBLASLT_EPILOGUE_GELU_AUX_BIAS), 2);
    EXPECT_EQ(cuda_double::num_products(CUBLASLT_EPILOGUE_DGELU), 2);
  }
}

// Scores never reach memory in bfloat16: cuDNN's fused engines take the attention of Transformers.
TEST_F(CudaTrainingTest, AttentionIsFusedInBfloat16) {
  const std::vector<std::string> steps = {
      "--steps", "2", "--batch-size", "4", "--precision", "bf16"};
  for (const char* family : {"gpt2", "llama"}) {
    SCOPED_TRACE(family);
    const std::string path = model(family, kTinyGpt);
    expect_near(train(path, kGpu, steps), train(path, kCpu, steps), 2e-3);
    EXPECT_GT(cuda_double::num_graphs("log"), 0);
    EXPECT_GT(cuda_double::num_graphs("identity"), 0);
    cuda_double::reset();
  }
}

// What cuDNN's engines take is measured in the first run and read from the file in the next.
TEST_F(CudaTrainingTest, AlgorithmsAreMeasuredOncePerShape) {
  const std::string path = model("lenet", {});
  const std::vector<std::string> steps = {
      "--steps", "1", "--batch-size", "2", "--precision", "bf16"};
  const Course first = train(path, kGpu, steps);
  const int64_t calls = cuda_double::num_calls();
  const std::string kept = file_text(folder_.file("algorithms"));
  EXPECT_THAT(kept, HasSubstr("double 0|cuDNN"));
  EXPECT_THAT(kept, HasSubstr("|ConvWeightGrad bfloat16"));
  cuda_double::reset();
  const Course second = train(path, kGpu, steps);
  EXPECT_LT(cuda_double::num_calls(), calls);
  EXPECT_EQ(file_text(folder_.file("algorithms")), kept);
  EXPECT_EQ(second.losses, first.losses);
}

TEST_F(CudaTrainingTest, AllDeviceMemoryIsTheArena) {
  const std::string path = model("gpt2", kTinyGpt);
  train(path, kGpu, {"--steps", "1", "--batch-size", "2"});
  const int64_t arena = last_step().at("peak_bytes").at(0);
  EXPECT_GT(arena, 0);
  EXPECT_LE(cuda_double::most_bytes_in_use(0), arena + kBytesBesideArena);
}

// A GPU of the catalogue is planned for: what would not fit at once is cut into micro-batches, and
// what fits in no way is told before anything is allocated.
TEST_F(CudaTrainingTest, AKnownGpuIsPlannedFor) {
  const std::string path = model("gpt2", kTinyGpt);
  const std::vector<std::string> steps = {"--steps", "1", "--batch-size", "64"};
  const Course whole = train(path, kGpu, steps);
  const int64_t arena = last_step().at("peak_bytes").at(0);
  const int64_t reserved = find_device("H100-SXM5-80GB").device.reserved_bytes;
  const auto h100_of = [&](int64_t bytes) {
    cuda_double::reset(
        {.memory_bytes = static_cast<size_t>(bytes), .device_name = "NVIDIA H100 80GB HBM3"});
  };
  h100_of(reserved + arena * 3 / 4);
  const Course cut = train(path, kGpu, steps);
  expect_near(cut, whole, 1e-5);
  EXPECT_LT(last_step().at("peak_bytes").at(0), arena);
  h100_of(reserved + arena / 50);
  try {
    train(path, kGpu, steps);
    ADD_FAILURE() << "it fitted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInfeasiblePlan);
    EXPECT_THAT(error.what(), HasSubstr("lacks"));
  }
}

// It is read into memory that the GPU fetches it from: no copy of the host's stands in between.
TEST_F(CudaTrainingTest, AnInputOfAnySizeIsOneCopy) {
  const auto copies_of_a_step = [&](const std::string& image) {
    const std::string path = model("mlp", {"--image", image, "--hidden", "2"});
    int64_t copies[2];
    for (const int64_t steps : {3, 4}) {
      cuda_double::reset();
      train(path, kGpu, {"--steps", std::to_string(steps), "--batch-size", "4"});
      copies[steps - 3] = cuda_double::num_copies();
    }
    return copies[1] - copies[0];
  };
  const int64_t copies = copies_of_a_step("8");
  EXPECT_GT(copies, 0);
  EXPECT_EQ(copies_of_a_step("600"), copies);  // 5.8 MB
}

// Samples come from several threads there: 24 of 480 kB.
TEST_F(CudaTrainingTest, SamplesReadByThreadsAreThoseOfTheCpu) {
  const std::string path = model("mlp", {"--image", "200", "--channels", "3", "--hidden", "2"});
  const std::vector<std::string> more = {
      "--steps", "3", "--batch-size", "24", "--micro-batch-size", "4", "--threads", "3"};
  expect_near(train(path, kGpu, more), train(path, kCpu, more), 1e-5);
}

TEST_F(CudaTrainingTest, EveryOrderOfStreamsGivesEqualBits) {
  const std::string path = model("gpt2", kTinyGpt);
  const std::vector<std::string> steps = {"--steps", "2", "--batch-size", "4"};
  expect_equal_in_orders([&] { return train(path, kGpu, steps); }, 20);
}

TEST_F(CudaTrainingTest, AFailureOfAnyCallEndsInOneErrorWithoutALeak) {
  const std::string path = model("lenet", {});
  const std::vector<std::string> steps = {"--steps", "1", "--batch-size", "2"};
  expect_clean_failures([&] { train(path, kGpu, steps); }, 1, 37);
}

TEST_F(CudaTrainingTest, AFailureOfAnyCallOfFusedAttentionEndsInOneError) {
  const std::string path = model("gpt2", kTinyGpt);
  const std::vector<std::string> steps = {
      "--steps", "1", "--batch-size", "2", "--precision", "bf16"};
  expect_clean_failures([&] { train(path, kGpu, steps); }, 3, 97);
}

TEST_F(CudaTrainingTest, ImpossibleDevicesAreRefusedWithTheReason) {
  const std::string path = model("mlp", {});
  const auto message_of = [&](const std::string& devices) -> std::string {
    try {
      train(path, {"--devices", devices}, {"--steps", "1"});
    } catch (const Error& error) {
      EXPECT_EQ(exit_code(error.code()), 5) << error.what();
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(message_of("cuda:7"), HasSubstr("there is no cuda:7"));
  cuda_double::reset({.num_devices = 0});
  EXPECT_THAT(message_of("cuda"), HasSubstr("no GPU"));
  cuda_double::reset({.driver_version = 12040});
  EXPECT_THAT(message_of("cuda"), HasSubstr("install a newer driver"));
  cuda_double::reset({.compute_major = 7, .compute_minor = 5});
  EXPECT_THAT(message_of("cuda:0"), HasSubstr("sm_75"));
  cuda_double::reset({.memory_bytes = 1 << 20});
  const std::string no_room = message_of("cuda:0");
  EXPECT_THAT(no_room, HasSubstr("are free, short by"));
  EXPECT_THAT(no_room, HasSubstr("--micro-batch-size"));
}

class LongCudaTest : public CudaTrainingTest {};

TEST_F(LongCudaTest, EveryCallsFailureEndsInOneErrorWithoutALeak) {
  const std::string path = model("lenet", {});
  const std::vector<std::string> steps = {"--steps", "1", "--batch-size", "2"};
  expect_clean_failures([&] { train(path, kGpu, steps); }, 1, 1);
}

TEST_F(LongCudaTest, EveryCallsFailureWithFusedAttentionEndsInOneError) {
  const std::string path = model("gpt2", kTinyGpt);
  const std::vector<std::string> steps = {
      "--steps", "1", "--batch-size", "2", "--precision", "bf16"};
  expect_clean_failures([&] { train(path, kGpu, steps); }, 1, 1);
}

}  // namespace
}  // namespace trainrt::testing
