// A trained and exported model of every family is valid ONNX by the project's own checker, and
// another runtime computes from it what we compute.
#include <gtest/gtest.h>
#include <onnx/checker.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "graph/evaluator.h"
#include "graph/onnx_import.h"
#include "tests/support/paths.h"
#include "tests/support/run_program.h"

namespace trainrt {
namespace {

using testing::ProgramResult;
using testing::run_trainrt;
using testing::TemporaryFolder;

constexpr int64_t kBatch = 3;
constexpr int64_t kVocabulary = 40;

struct Family {
  std::string name;
  std::vector<std::string> sizes;
};

std::ostream& operator<<(std::ostream& out, const Family& family) {
  return out << family.name;
}

std::vector<Family> families() {
  const std::vector<std::string> text = {"--layers",
                                         "2",
                                         "--hidden",
                                         "32",
                                         "--heads",
                                         "4",
                                         "--ffn",
                                         "64",
                                         "--vocab",
                                         std::to_string(kVocabulary),
                                         "--seq",
                                         "16"};
  return {
      {"mlp", {"--hidden", "32"}},
      {"lenet", {}},
      {"cnn", {"--hidden", "8"}},
      {"resnet", {"--layers", "18", "--image", "32", "--classes", "10"}},
      {"densenet", {"--image", "32", "--classes", "10"}},
      {"mobilenet", {"--image", "32", "--classes", "10"}},
      {"vit", {"--layers", "2", "--hidden", "32", "--heads", "4", "--ffn", "64", "--image", "32"}},
      {"bert", text},
      {"gpt2", text},
      {"llama", text},
      {"t5", text},
      {"unet", {"--hidden", "8", "--image", "32"}},
      {"lstm",
       {"--layers", "2", "--hidden", "32", "--vocab", std::to_string(kVocabulary), "--seq", "16"}}};
}

// Numbers that differ from element to element and fit the input: features, tokens, sentence types.
Tensor input_of(const std::string& name, const TensorType& type) {
  const int64_t kinds = name == "token_type_ids" ? 2 : kVocabulary;
  std::vector<double> values(static_cast<size_t>(num_elements(type.shape)));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = is_floating(type.dtype)
                    ? std::sin(0.37 * static_cast<double>(i))
                    : static_cast<double>(static_cast<int64_t>(i) * 7919 % kinds);
  }
  return Tensor::from(values, type.shape).cast(type.dtype);
}

nlohmann::json write_array(const std::string& folder,
                           const std::string& file,
                           const std::string& name,
                           const Tensor& tensor) {
  std::ofstream(folder + "/" + file, std::ios::binary)
      .write(reinterpret_cast<const char*>(tensor.raw()), tensor.bytes());
  return {{"name", name},
          {"file", file},
          {"dtype", dtype_name(tensor.dtype())},
          {"shape", tensor.shape()}};
}

class ExportOutputsTest : public ::testing::TestWithParam<Family> {
 protected:
  void run(const std::vector<std::string>& arguments) {
    const ProgramResult result = run_trainrt(arguments);
    ASSERT_EQ(result.exit_code, 0) << result.err;
  }

  TemporaryFolder folder_;
};

TEST_P(ExportOutputsTest, AnotherRuntimeComputesWhatWeCompute) {
  if (!std::filesystem::is_directory(testing::onnxruntime_folder())) {
    GTEST_SKIP() << "ONNX Runtime is not there: scripts/deps --tests";
  }
  const std::string initial = folder_.file("initial.onnx"), trained = folder_.file("model.onnx");
  std::vector<std::string> arguments = {"model", GetParam().name, "-o", initial};
  arguments.insert(arguments.end(), GetParam().sizes.begin(), GetParam().sizes.end());
  run(arguments);
  run({"run", initial, "--steps", "2", "--batch-size", "4", "--threads", "1", "--export", trained});
  if (HasFatalFailure()) {
    return;
  }
  EXPECT_NO_THROW(onnx::checker::check_model(trained, /*full_check=*/true));

  const OnnxModel model = OnnxModel::load(trained);
  BindOptions options;
  options.batch = kBatch;
  options.training = false;
  const Graph graph = model.bind(options);
  std::map<std::string, Tensor> feeds;
  nlohmann::json inputs = nlohmann::json::array(), outputs = nlohmann::json::array();
  for (const ValueId id : graph.values_of_kind(ValueKind::kInput)) {
    const Value& value = graph.value(id);
    feeds[value.name] = input_of(value.name, value.type);
    inputs.push_back(write_array(
        folder_.path(), concat("input_", inputs.size()), value.name, feeds[value.name]));
  }
  EvaluateOptions fast;
  fast.reference_kernels = false;
  const std::vector<Tensor> results = evaluate(graph, feeds, graph.outputs(), fast);
  for (size_t i = 0; i < results.size(); ++i) {
    outputs.push_back(
        write_array(folder_.path(), concat("output_", i), model.outputs().at(i), results[i]));
  }
  testing::write_text(folder_.file("arrays.json"),
                      nlohmann::json{{"inputs", inputs}, {"outputs", outputs}}.dump());
  const std::string log = folder_.file("log");
  const int status =
      std::system(concat("PYTHONPATH='",
                         testing::onnxruntime_folder(),
                         "' /usr/bin/python3 '",
                         testing::source_path("tests/runtime/onnxruntime_outputs.py"),
                         "' '",
                         folder_.path(),
                         "' > '",
                         log,
                         "' 2>&1")
                      .c_str());
  EXPECT_EQ(status, 0) << testing::file_text(log);
}

INSTANTIATE_TEST_SUITE_P(Families,
                         ExportOutputsTest,
                         ::testing::ValuesIn(families()),
                         [](const auto& row) { return row.param.name; });

}  // namespace
}  // namespace trainrt
