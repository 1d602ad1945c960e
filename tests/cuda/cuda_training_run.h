// Whole runs of the program's own commands, in the test's process, which has the double.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "graph/base/log.h"
#include "runtime/commands/command.h"
#include "tests/cuda_double/cuda_double.h"
#include "tests/support/run_program.h"

namespace trainrt::testing {

inline const Command& command_of(const std::vector<std::string>& arguments) {
  const std::vector<Command>& all = commands();
  const auto at = std::find_if(all.begin(), all.end(), [&](const Command& command) {
    return command.name == arguments.at(0);
  });
  TRAINRT_CHECK(at != all.end(), "no command ", arguments[0]);
  return *at;
}

inline Options options_of(const std::vector<std::string>& arguments) {
  const Command& command = command_of(arguments);
  Options options =
      parse_options(command.name, command.groups, {arguments.begin() + 1, arguments.end()});
  options.gpus_in_threads = true;  // the double is of one process
  return options;
}

// Runs a command of trainrt in this process, which has the double. Throws what it throws.
inline void run_here(const std::vector<std::string>& arguments) {
  ASSERT_EQ(command_of(arguments).run(options_of(arguments)), 0);
}

inline const std::vector<std::string> kCpu = {"--devices", "cpu"};
inline const std::vector<std::string> kGpu = {"--devices", "cuda:0"};

// Words of a rank's communicators, and of what watches for bad values.
inline constexpr int64_t kBytesBesideArena = 512;

struct Course {
  std::vector<double> losses, norms;
};

class CudaTrainingTest : public ::testing::Test {
 protected:
  void SetUp() override {
    cuda_double::reset();
    set_log_level(LogLevel::kSilent);
  }
  void TearDown() override {
    EXPECT_EQ(cuda_double::alive(), "");
    EXPECT_EQ(cuda_double::misuses(), "");
  }

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
               const std::vector<std::string>& more = {}) {
    run_here(run_arguments(model, devices, more));
    return course();
  }

  std::vector<std::string> run_arguments(const std::string& model,
                                         const std::vector<std::string>& devices,
                                         const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {
        "run", model, "--metrics", folder_.file("m.jsonl"), "--precision", "fp32"};
    if (devices.at(1) != kCpu[1]) {
      arguments.insert(arguments.end(), {"--algorithm-cache", folder_.file("algorithms")});
    }
    arguments.insert(arguments.end(), devices.begin(), devices.end());
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  // Of the last run.
  Course course() {
    Course course;
    std::istringstream lines(file_text(folder_.file("m.jsonl")));
    for (std::string line; std::getline(lines, line);) {
      const nlohmann::json step = nlohmann::json::parse(line);
      course.losses.push_back(step.at("loss"));
      course.norms.push_back(step.at("grad_norm"));
    }
    return course;
  }

  // What the metrics say of the last run's last step.
  nlohmann::json last_step() {
    std::istringstream lines(file_text(folder_.file("m.jsonl")));
    std::string last;
    for (std::string line; std::getline(lines, line);) {
      last = line;
    }
    return nlohmann::json::parse(last);
  }

  TemporaryFolder folder_;
};

inline void expect_near(const Course& actual, const Course& expected, double tolerance) {
  ASSERT_EQ(actual.losses.size(), expected.losses.size());
  for (size_t i = 0; i < actual.losses.size(); ++i) {
    EXPECT_NEAR(actual.losses[i], expected.losses[i], tolerance * std::fabs(expected.losses[i]))
        << "step " << i + 1;
    EXPECT_NEAR(actual.norms[i], expected.norms[i], 10 * tolerance * expected.norms[i])
        << "step " << i + 1;
  }
}

inline const std::vector<std::string> kTinyGpt = {
    "--layers", "1", "--hidden", "16", "--heads", "2", "--vocab", "40", "--seq", "8"};

inline void expect_equal_in_orders(const std::function<Course()>& run, uint64_t orders) {
  cuda_double::reset({.num_devices = 4});
  const Course first = run();
  for (uint64_t seed = 1; seed <= orders; ++seed) {
    cuda_double::reset({.num_devices = 4, .seed = seed});
    const Course course = run();
    ASSERT_EQ(course.losses, first.losses) << "seed " << seed;
    ASSERT_EQ(course.norms, first.norms) << "seed " << seed;
  }
}

// Makes the calls number first, first + stride, ... fail, each in a run of its own.
inline void expect_clean_failures(const std::function<void()>& run, int64_t first, int64_t stride) {
  cuda_double::reset({.num_devices = 4});
  run();
  const int64_t calls = cuda_double::num_calls();
  ASSERT_GT(calls, 100);
  for (int64_t call = first; call <= calls; call += stride) {
    cuda_double::reset({.num_devices = 4});
    cuda_double::fail_call(call);
    std::string message;
    ErrorCode code = ErrorCode::kInternal;
    try {
      run();
    } catch (const Error& error) {
      message = error.what();
      code = error.code();
    }
    const std::string failed = cuda_double::failed_call();
    // Asked when all is done, or by a thread that watches what ends well, or of one of several
    // engines or algorithms, after which the next is asked.
    const bool matters = failed != "cudaSetDevice" && failed != "ncclCommFinalize" &&
                         failed != "ncclCommGetAsyncError" && failed != "cudaEventQuery" &&
                         failed.rfind("cudnnBackend", 0) != 0 &&
                         failed.rfind("cublasLtMatmul", 0) != 0;
    if (failed.empty() || (message.empty() && !matters)) {
      ASSERT_EQ(cuda_double::alive(), "") << "call " << call << ", " << failed;
      continue;  // the run had fewer calls this time, or went well all the same
    }
    EXPECT_EQ(exit_code(code), 5) << failed << ": " << message;
    EXPECT_THAT(message,
                ::testing::AnyOf(::testing::HasSubstr(
                                     (failed == "kernel launch" ? "launch" : failed) + " failed"),
                                 ::testing::HasSubstr("NCCL"),
                                 ::testing::HasSubstr("driver")))
        << "call " << call << ", " << failed;
    ASSERT_EQ(cuda_double::alive(), "") << "call " << call << ", " << failed;
  }
}

}  // namespace trainrt::testing
