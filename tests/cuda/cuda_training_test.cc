// Whole runs of the program's own commands on the double: what trains on the CPU trains alike on
// CUDA, in every order that streams may run in, and every failure of a library ends in one error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "graph/base/log.h"
#include "runtime/commands/command.h"
#include "tests/cuda_double/cuda_double.h"
#include "tests/support/run_program.h"

namespace trainrt::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

// Runs a command of trainrt in this process, which has the double. Throws what it throws.
void run_here(const std::vector<std::string>& arguments) {
  for (const Command& command : commands()) {
    if (command.name == arguments.at(0)) {
      const Options options =
          parse_options(command.name, command.groups, {arguments.begin() + 1, arguments.end()});
      ASSERT_EQ(command.run(options), 0);
      return;
    }
  }
  FAIL() << "no command " << arguments[0];
}

struct Course {
  std::vector<double> losses, norms;
};

class CudaTrainingTest : public ::testing::Test {
 protected:
  void SetUp() override {
    cuda_double::reset();
    set_log_level(LogLevel::kSilent);
  }
  void TearDown() override { EXPECT_EQ(cuda_double::alive(), ""); }

  std::string model(const std::string& family, std::vector<std::string> sizes) {
    const std::string path = folder_.file(family + ".onnx");
    std::vector<std::string> arguments = {"model", family, "-o", path};
    arguments.insert(arguments.end(), sizes.begin(), sizes.end());
    run_here(arguments);
    return path;
  }

  // In fp32 unless `more` says otherwise.
  Course train(const std::string& model,
               const std::vector<std::string>& devices,
               std::vector<std::string> more = {}) {
    const std::string metrics = folder_.file("m.jsonl");
    std::vector<std::string> arguments = {
        "run", model, "--metrics", metrics, "--precision", "fp32"};
    arguments.insert(arguments.end(), devices.begin(), devices.end());
    arguments.insert(arguments.end(), more.begin(), more.end());
    run_here(arguments);
    Course course;
    std::istringstream lines(file_text(metrics));
    for (std::string line; std::getline(lines, line);) {
      const nlohmann::json step = nlohmann::json::parse(line);
      course.losses.push_back(step.at("loss"));
      course.norms.push_back(step.at("grad_norm"));
    }
    return course;
  }

  TemporaryFolder folder_;
};

void expect_near(const Course& actual, const Course& expected, double tolerance) {
  ASSERT_EQ(actual.losses.size(), expected.losses.size());
  for (size_t i = 0; i < actual.losses.size(); ++i) {
    EXPECT_NEAR(actual.losses[i], expected.losses[i], tolerance * std::fabs(expected.losses[i]))
        << "step " << i + 1;
    EXPECT_NEAR(actual.norms[i], expected.norms[i], 10 * tolerance * expected.norms[i])
        << "step " << i + 1;
  }
}

const std::vector<std::string> kCpu = {"--devices", "cpu"};
const std::vector<std::string> kGpu = {"--devices", "cuda:0"};
const std::vector<std::string> kTinyGpt = {
    "--layers", "1", "--hidden", "16", "--heads", "2", "--vocab", "40", "--seq", "8"};

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

TEST_F(CudaTrainingTest, PeakBytesAreTheArena) {
  const std::string path = model("gpt2", kTinyGpt);
  train(path, kGpu, {"--steps", "1", "--batch-size", "2"});
  const nlohmann::json step = nlohmann::json::parse(file_text(folder_.file("m.jsonl")));
  EXPECT_GT(step.at("peak_bytes").at(0).get<int64_t>(), 0);
}

std::string two_gpus(const TemporaryFolder& folder) {
  const std::string path = folder.file("cluster.yaml");
  write_text(path,
             "hosts: [{count: 1, devices: [{count: 2, type: my-card}], intra: nvlink3}]\n"
             "devices: {my-card: {memory: 1GiB, flops: {fp32: 1e13, bf16: 1e14}, "
             "memory_bandwidth: 1e12}}\n");
  return path;
}

std::vector<std::string> gpus(const TemporaryFolder& folder, std::vector<std::string> pins) {
  std::vector<std::string> arguments = {"--devices", "cuda:0,1", "--cluster", two_gpus(folder)};
  arguments.insert(arguments.end(), pins.begin(), pins.end());
  return arguments;
}

void expect_equal_in_orders(const std::function<Course()>& run, uint64_t orders) {
  cuda_double::reset({.seed = 0});
  const Course first = run();
  for (uint64_t seed = 1; seed <= orders; ++seed) {
    cuda_double::reset({.seed = seed});
    const Course course = run();
    ASSERT_EQ(course.losses, first.losses) << "seed " << seed;
    ASSERT_EQ(course.norms, first.norms) << "seed " << seed;
  }
}

TEST_F(CudaTrainingTest, EveryOrderOfStreamsGivesEqualBits) {
  const std::string path = model("gpt2", kTinyGpt);
  const std::vector<std::string> steps = {"--steps", "2", "--batch-size", "4"};
  expect_equal_in_orders([&] { return train(path, kGpu, steps); }, 20);
}

// Makes the calls number first, first + stride, ... fail, each in a run of its own.
void expect_clean_failures(const std::function<void()>& run, int64_t first, int64_t stride) {
  cuda_double::reset();
  run();
  const int64_t calls = cuda_double::num_calls();
  ASSERT_GT(calls, 100);
  for (int64_t call = first; call <= calls; call += stride) {
    cuda_double::reset();
    cuda_double::fail_call(call);
    std::string message;
    ErrorCode code = ErrorCode::kInternal;
    try {
      run();
    } catch (const Error& error) {
      message = error.what();
      code = error.code();
    }
    if (cuda_double::failed_call().empty()) {
      continue;  // the run had fewer calls this time
    }
    EXPECT_EQ(exit_code(code), 5) << cuda_double::failed_call() << ": " << message;
    EXPECT_THAT(message, AnyOf(HasSubstr("failed"), HasSubstr("NCCL"), HasSubstr("driver")))
        << "call " << call << ", " << cuda_double::failed_call();
    ASSERT_EQ(cuda_double::alive(), "") << "call " << call << ", " << cuda_double::failed_call();
  }
}

TEST_F(CudaTrainingTest, AFailureOfAnyCallEndsInOneErrorWithoutALeak) {
  const std::string path = model("lenet", {});
  const std::vector<std::string> steps = {"--steps", "1", "--batch-size", "2"};
  expect_clean_failures([&] { train(path, kGpu, steps); }, 1, 37);
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

// Several GPUs at once: a rank that fails may leave its peers waiting in the double.
class LongCudaTest : public CudaTrainingTest {};

TEST_F(LongCudaTest, TwoGpusTrainAsOneCpu) {
  const std::string path = model("gpt2", kTinyGpt);
  const std::vector<std::string> steps = {"--steps", "3", "--batch-size", "4"};
  const Course expected = train(path, kCpu, steps);
  for (const std::vector<std::string>& pins :
       {std::vector<std::string>{"--dp", "2"}, {"--dp", "2", "--zero", "2"}, {"--tp", "2"}}) {
    SCOPED_TRACE(pins[0] + " " + pins.back());
    expect_near(train(path, gpus(folder_, pins), steps), expected, 1e-5);
  }
}

// A wait that is left out must show: in a wrong loss, or one that is not a number.
TEST_F(LongCudaTest, AMissingWaitIsNoticed) {
  const std::string path = model("gpt2", kTinyGpt);
  const std::vector<std::string> steps = {"--steps", "1", "--batch-size", "4"};
  const std::vector<std::string> devices = gpus(folder_, {"--tp", "2"});
  cuda_double::reset();
  const Course right = train(path, devices, steps);
  const int64_t waits = cuda_double::num_waits();
  ASSERT_GT(waits, 4);
  int noticed = 0, tried = 0;
  for (int64_t wait = 1; wait <= waits; wait += std::max<int64_t>(1, waits / 8)) {
    bool differs = false;
    for (uint64_t seed = 0; seed < 6 && !differs; ++seed) {
      cuda_double::reset({.seed = seed, .drop_wait = wait});
      try {
        const Course course = train(path, devices, steps);
        differs = course.losses != right.losses || course.norms != right.norms;
      } catch (const Error&) {
        differs = true;
      }
    }
    noticed += differs;
    ++tried;
  }
  EXPECT_GT(noticed, tried / 2) << "of " << tried << " waits left out";
}

TEST_F(LongCudaTest, AThousandOrdersOfStreamsGiveEqualBits) {
  const std::string path = model("gpt2", kTinyGpt);
  const std::vector<std::string> steps = {"--steps", "2", "--batch-size", "4"};
  expect_equal_in_orders([&] { return train(path, gpus(folder_, {"--dp", "2"}), steps); }, 500);
  expect_equal_in_orders([&] { return train(path, gpus(folder_, {"--tp", "2"}), steps); }, 500);
}

TEST_F(LongCudaTest, EveryCallsFailureEndsInOneErrorWithoutALeak) {
  const std::string path = model("lenet", {});
  const std::vector<std::string> steps = {"--steps", "1", "--batch-size", "2"};
  expect_clean_failures([&] { train(path, kGpu, steps); }, 1, 1);
}

}  // namespace
}  // namespace trainrt::testing
