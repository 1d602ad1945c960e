// Which file may include what. The folders form layers (graph <- ops, graph <- models,
// graph <- parallel <- planner <- runtime), and a few third parties are kept behind the files that
// wrap them. CMake's targets cannot enforce this: all headers are found from the repository's root.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "tests/support/paths.h"

namespace trainrt {
namespace {

namespace fs = std::filesystem;

using Folders = std::set<std::string>;

// What the files of a folder may include. `ops` is linked whole and reached through the registry,
// so not even a test includes it.
const std::map<std::string, Folders> kMayInclude = {
    {"graph", {"graph"}},
    {"ops", {"graph", "ops"}},
    {"models", {"graph", "models"}},
    {"parallel", {"graph", "parallel"}},
    {"planner", {"graph", "parallel", "planner"}},
    {"runtime", {"graph", "models", "parallel", "planner", "runtime"}},
    {"tests", {"graph", "models", "parallel", "planner", "runtime", "tests"}},
};

// Third parties that only some folders use; tests may use all.
struct ThirdParty {
  std::regex header;
  Folders folders;
};
const std::vector<ThirdParty> kThirdParties = {
    {std::regex("(oneapi/)?dnnl.*"), {"ops", "runtime"}},
    {std::regex("gloo/.*"), {"parallel"}},
    {std::regex("CLI/.*"), {"runtime"}},
    {std::regex("(Eigen|unsupported/Eigen)/.*"), {"ops"}},
    // Threads of a rank are set where ranks start (runtime) and where oneDNN is called (ops).
    {std::regex("omp\\.h"), {"ops", "runtime"}},
};
const std::regex kOnnxHeader("(onnx|google/protobuf)/.*");
const std::regex kCudaHeader(
    "(cuda|cublas|cudnn|curand|cufft|cusolver|cusparse|nccl|nvml|nvrtc|nvtx|nvJitLink).*|"
    "(cub|cute|cutlass|cccl|thrust|nvtx3|cooperative_groups)[/.].*|mma\\.h|vector_types\\.h");

std::string folder_of(const std::string& path) {
  return path.substr(0, path.find('/'));
}

// CUDA sources, which form the module that is opened only where a driver is present.
bool is_cuda_file(const std::string& path) {
  const std::string name = fs::path(path).filename();
  const std::string extension = fs::path(path).extension();
  return extension == ".cu" || extension == ".cuh" || name.starts_with("cuda_") ||
         name.starts_with("nccl_");
}

// Why `file` may not include `header` ("" if it may). Both are relative to the root; `quoted` tells
// "header" from <header>.
std::string objection(const std::string& file, const std::string& header, bool quoted) {
  const std::string folder = folder_of(file);
  const bool is_test = folder == "tests";
  if (quoted) {
    if (!kMayInclude.contains(folder_of(header))) {
      return "includes are written from the root, and third parties in <>";
    }
    if (!kMayInclude.at(folder).contains(folder_of(header))) {
      return folder + "/ may not include " + folder_of(header) + "/";
    }
    if (is_cuda_file(header) && !is_cuda_file(file)) {
      return "a header of a CUDA source may be included by CUDA sources only";
    }
    return "";
  }
  if (kMayInclude.contains(folder_of(header)) && header.find('/') != std::string::npos &&
      fs::exists(testing::source_path(header))) {
    return "own headers are included in quotes";
  }
  if (std::regex_match(header, kCudaHeader) && !is_cuda_file(file)) {
    return "CUDA headers belong in .cu, .cuh, cuda_* and nccl_* files";
  }
  if (std::regex_match(header, kOnnxHeader) && !is_test && !file.starts_with("graph/onnx_")) {
    return "ONNX and protobuf headers belong in graph/onnx_* files";
  }
  for (const ThirdParty& third_party : kThirdParties) {
    if (std::regex_match(header, third_party.header) && !is_test &&
        !third_party.folders.contains(folder)) {
      return "this third party is not used in " + folder + "/";
    }
  }
  return "";
}

std::vector<std::string> source_files() {
  static const Folders kExtensions = {".h", ".cc", ".cu", ".cuh"};
  std::vector<std::string> files;
  const fs::path root = testing::source_path("");
  for (const auto& [folder, unused] : kMayInclude) {
    if (!fs::exists(root / folder)) {
      continue;
    }
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      if (entry.is_regular_file() && kExtensions.contains(entry.path().extension())) {
        files.push_back(fs::relative(entry.path(), root));
      }
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

TEST(LayeringTest, EveryIncludeFollowsTheLayers) {
  const std::regex include("^\\s*#\\s*include\\s*([<\"])([^>\"]+)[>\"].*");
  const std::vector<std::string> files = source_files();
  ASSERT_FALSE(files.empty());
  for (const std::string& file : files) {
    std::ifstream stream(testing::source_path(file));
    std::string line;
    for (int number = 1; std::getline(stream, line); ++number) {
      std::smatch match;
      // Most lines are no includes, and matching every one takes seconds.
      if (line.find("include") == std::string::npos || !std::regex_match(line, match, include)) {
        continue;
      }
      const std::string reason = objection(file, match[2], match[1] == "\"");
      EXPECT_EQ(reason, "") << file << ":" << number << ": " << line;
    }
  }
}

TEST(LayeringTest, FileNamesNameAConcept) {
  const std::regex vague("(util|helper|manager|common)");
  const std::regex snake_case("[a-z0-9_]+\\.(h|cc|cu|cuh)");
  for (const std::string& file : source_files()) {
    const std::string name = fs::path(file).filename();
    EXPECT_FALSE(std::regex_search(name, vague)) << file << ": name the concept the file holds";
    EXPECT_TRUE(std::regex_match(name, snake_case)) << file << ": file names are snake_case";
  }
}

TEST(LayeringTest, RulesCatchWhatTheyAreFor) {
  const std::vector<std::tuple<std::string, std::string, bool>> allowed = {
      {"planner/simulator.cc", "parallel/program.h", true},
      {"runtime/trainer.cc", "models/resnet.h", true},
      {"ops/softmax.cu", "ops/reduce.cuh", true},
      {"ops/softmax.cu", "cub/cub.cuh", false},
      {"graph/base/cuda_check.h", "cuda_runtime.h", false},
      {"parallel/nccl_communicator.cc", "nccl.h", false},
      {"graph/onnx_import.cc", "onnx/checker.h", false},
      {"graph/shape.cc", "vector", false},
      {"runtime/main.cc", "CLI/CLI.hpp", false},
  };
  for (const auto& [file, header, quoted] : allowed) {
    EXPECT_EQ(objection(file, header, quoted), "") << file << " includes " << header;
  }
  const std::vector<std::tuple<std::string, std::string, bool>> refused = {
      {"graph/graph.h", "parallel/plan.h", true},
      {"parallel/partition.cc", "planner/cost_model.h", true},
      {"planner/profile.cc", "runtime/profiler.h", true},
      {"runtime/executor.cc", "ops/elementwise.h", true},
      {"tests/ops/softmax_test.cc", "ops/elementwise.h", true},
      {"ops/softmax.cc", "parallel/topology.h", true},
      {"graph/graph.cc", "graph.h", true},
      {"runtime/device.cc", "runtime/cuda_device.h", true},
      {"runtime/device.cc", "cuda_runtime.h", false},
      {"ops/softmax.cc", "cub/cub.cuh", false},
      {"graph/autodiff.cc", "onnx/onnx_pb.h", false},
      {"runtime/trainer.cc", "google/protobuf/message.h", false},
      {"parallel/schedule.cc", "oneapi/dnnl/dnnl.hpp", false},
  };
  for (const auto& [file, header, quoted] : refused) {
    EXPECT_NE(objection(file, header, quoted), "") << file << " includes " << header;
  }
}

}  // namespace
}  // namespace trainrt
