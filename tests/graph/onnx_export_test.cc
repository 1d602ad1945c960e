// Written models: valid for ONNX's checker, and read back as what was written.
#include "graph/onnx_export.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <onnx/checker.h>
#include <onnx/shape_inference/implementation.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "graph/evaluator.h"
#include "models/model.h"

namespace trainrt {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

// A folder of its own for each test, removed with it.
class ExportTest : public ::testing::Test {
 protected:
  ExportTest() {
    folder_ = fs::path(::testing::TempDir()) /
              concat("trainrt_export_",
                     ::testing::UnitTest::GetInstance()->current_test_info()->name(),
                     "_",
                     ::getpid());
    fs::create_directories(folder_);
  }
  ~ExportTest() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  fs::path folder_;
};

onnx::ModelProto parse(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  onnx::ModelProto model;
  EXPECT_TRUE(model.ParseFromIstream(&in)) << path;
  return model;
}

// By path, so that external data is looked at too.
void expect_valid(const std::string& path) {
  EXPECT_NO_THROW(onnx::checker::check_model(path, /*full_check=*/true)) << path;
}

ModelSpec small(const std::string& family) {
  ModelSpec spec = named_model(family);
  const bool convolutional = family == "cnn" || family == "lenet" || family == "resnet" ||
                             family == "densenet" || family == "mobilenet" || family == "unet";
  if (!convolutional) {
    spec.layers = 2;
    spec.hidden = 16;
    spec.heads = 4;
    spec.ffn = 32;
    spec.vocab = 37;
    spec.seq = 8;
    spec.kv_heads = family == "llama" ? 2 : 0;
  }
  spec.classes = 10;
  spec.image = family == "vit" || family == "unet" ? 32 : 0;
  return spec;
}

TEST_F(ExportTest, EveryFamilyIsValidAndReadsBack) {
  int num_read = 0;
  for (const std::string& family : model_families()) {
    SCOPED_TRACE(family);
    const Graph graph = build_model(small(family));
    const std::string file = path(family + ".onnx");
    write_onnx(graph, file, {});
    expect_valid(file);
    const OnnxModel model = OnnxModel::load(file);
    // The batch is a symbol: the file serves any.
    BindOptions options;
    options.batch = 3;
    if (!model.unsupported(options).empty()) {
      continue;  // a valid file with operators that are not trained here
    }
    ++num_read;
    const Graph bound = model.bind(options);
    for (const ValueId id : bound.values_of_kind(ValueKind::kInput)) {
      EXPECT_EQ(bound.value(id).type.shape.at(0), 3);
      EXPECT_EQ(bound.value(id).batch_axis, 0);
    }
    EXPECT_EQ(bound.value(bound.outputs().at(0)).type.shape.at(0), 3);
    // Every weight is a parameter again, with the same contents, and nothing else is.
    EXPECT_EQ(bound.values_of_kind(ValueKind::kParameter).size(),
              graph.values_of_kind(ValueKind::kParameter).size());
    for (const ValueId id : graph.values_of_kind(ValueKind::kParameter)) {
      const Value& written = graph.value(id);
      const std::optional<ValueId> read = bound.find_value(written.name);
      ASSERT_TRUE(read.has_value()) << written.name;
      EXPECT_EQ(bound.value(*read).kind, ValueKind::kParameter) << written.name;
      EXPECT_TRUE(identical(initial_value(bound.value(*read)), initial_value(written)))
          << written.name;
    }
  }
  EXPECT_GE(num_read, 12);
}

TEST_F(ExportTest, ExternalWeightsReadBack) {
  const Graph graph = build_model(small("mlp"));
  ExportOptions options;
  options.external_weights = true;
  write_onnx(graph, path("m.onnx"), options);
  expect_valid(path("m.onnx"));
  EXPECT_LT(fs::file_size(path("m.onnx")), 8192u);
  const Graph bound = OnnxModel::load(path("m.onnx")).bind({});
  for (const ValueId id : graph.values_of_kind(ValueKind::kParameter)) {
    const Value& value = graph.value(id);
    EXPECT_TRUE(
        identical(initial_value(bound.value(*bound.find_value(value.name))), initial_value(value)))
        << value.name;
  }
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    files.push_back(entry.path().filename().string());
  }
  EXPECT_THAT(files, UnorderedElementsAre("m.onnx", "m.onnx.weights"));
}

TEST_F(ExportTest, ModelWithoutItsWeightsIsPlannedButNotRead) {
  ExportOptions options;
  options.external_weights = true;
  options.write_weights = false;
  write_onnx(build_model(named_model("gpt3-175b")), path("big.onnx"), options);
  EXPECT_FALSE(fs::exists(path("big.onnx.weights")));
  EXPECT_LT(fs::file_size(path("big.onnx")), 2u << 20);
  const OnnxModel model = OnnxModel::load(path("big.onnx"));
  BindOptions bind;
  bind.fuse = false;
  const Graph graph = model.bind(bind);
  const ValueId first = graph.values_of_kind(ValueKind::kParameter).at(0);
  EXPECT_THROW(initial_value(graph.value(first)), Error);
}

TEST_F(ExportTest, FailureLeavesNothingBehind) {
  const Graph graph = build_model(small("mlp"));
  try {
    write_onnx(graph, path("no/such/folder.onnx"), {});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_THAT(error.what(), HasSubstr("folder.onnx"));
  }
  EXPECT_TRUE(fs::is_empty(folder_));
}

// ---- export_trained

constexpr const char* kTrainingModel = R"(
<ir_version: 8, opset_import: ["" : 17]>
net (float[batch, 2, 2] x) => (float[batch, 2, 2] y, float[2] mean_out)
<float[2] scale = {1, 2}, float[2] bias = {0, 1}, float[2] mean = {0.5, -0.5},
 float[2] var = {1, 4}, float ratio = {0.5}, bool training = {1}>
{
  [bn] n, mean_out, var_out = BatchNormalization <training_mode = 1> (x, scale, bias, mean, var)
  [drop] y, mask = Dropout (n, ratio, training)
}
)";

Tensor nothing(const std::string&) {
  return {};
}

TEST_F(ExportTest, TrainedModelIsInInferenceForm) {
  const OnnxModel model = OnnxModel::parse_text(kTrainingModel);
  const std::map<std::string, Tensor> trained = {{"scale", Tensor::from<float>({3, 5}, {2})},
                                                 {"var", Tensor::from<float>({9, 25}, {2})}};
  export_trained(
      model,
      [&](const std::string& name) {
        const auto it = trained.find(name);
        return it == trained.end() ? Tensor() : it->second;
      },
      {{"key", "value"}},
      path("trained.onnx"));
  expect_valid(path("trained.onnx"));
  const onnx::ModelProto proto = parse(path("trained.onnx"));
  EXPECT_EQ(OnnxModel::load(path("trained.onnx")).metadata("key"), "value");
  ASSERT_EQ(proto.graph().output_size(), 1);
  EXPECT_EQ(proto.graph().output(0).name(), "y");
  ASSERT_EQ(proto.graph().node_size(), 2);
  EXPECT_EQ(proto.graph().node(0).name(), "bn");
  EXPECT_EQ(proto.graph().node(0).output_size(), 1);
  EXPECT_EQ(proto.graph().node(1).output_size(), 1);
  std::vector<std::string> initializers;
  for (const onnx::TensorProto& tensor : proto.graph().initializer()) {
    initializers.push_back(tensor.name());
  }
  EXPECT_THAT(initializers, UnorderedElementsAre("scale", "bias", "mean", "var", "ratio"));
  // y = scale (x - mean) / sqrt(var + eps) + bias
  BindOptions options;
  options.training = false;
  const Graph graph = OnnxModel::load(path("trained.onnx")).bind(options);
  const Tensor y = evaluate(graph,
                            {{"x", Tensor::from<float>({0.5f, 3.5f, -0.5f, 4.5f}, {1, 2, 2})}},
                            graph.outputs())[0];
  const std::vector<double> values = y.to_double();
  const std::vector<double> wanted = {0, 3, 1, 6};
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_NEAR(values[i], wanted[i], 1e-4);
  }
}

TEST_F(ExportTest, WeightsOutsideInitializersAreFound) {
  // A Constant node as a weight, and an Identity that stands for a second, merged weight.
  const OnnxModel model = OnnxModel::parse_text(R"(
<ir_version: 8, opset_import: ["" : 17], producer_name: "pytorch">
net (float[batch, 2] x) => (float[batch, 2] y)
<float[2] "layers.0.bias" = {0, 0}>
{
  weight = Constant <value = float[2, 2] {1, 2, 3, 4}> ()
  "layers.1.bias" = Identity ("layers.0.bias")
  a = MatMul (x, weight)
  b = Add (a, "layers.0.bias")
  y = Add (b, "layers.1.bias")
}
)");
  const std::map<std::string, Tensor> trained = {
      {"weight", Tensor::from<float>({5, 6, 7, 8}, {2, 2})},
      {"layers.0.bias", Tensor::from<float>({10, 20}, {2})},
      {"layers.1.bias", Tensor::from<float>({100, 200}, {2})}};
  export_trained(
      model, [&](const std::string& name) { return trained.at(name); }, {}, path("t.onnx"));
  expect_valid(path("t.onnx"));
  const Graph graph = OnnxModel::load(path("t.onnx")).bind({});
  const Tensor y =
      evaluate(graph, {{"x", Tensor::from<float>({1, 1}, {1, 2})}}, graph.outputs())[0];
  EXPECT_THAT(y.to_double(), ElementsAre(122, 234));
}

TEST_F(ExportTest, TrainingInfoAndExternalDataDoNotSurvive) {
  const Graph graph = build_model(small("mlp"));
  ExportOptions options;
  options.external_weights = true;
  write_onnx(graph, path("in.onnx"), options);
  const OnnxModel model = OnnxModel::load(path("in.onnx"));
  export_trained(model, nothing, {}, path("out.onnx"));
  fs::remove(path("in.onnx.weights"));
  expect_valid(path("out.onnx"));
  const Graph bound = OnnxModel::load(path("out.onnx")).bind({});
  for (const ValueId id : graph.values_of_kind(ValueKind::kParameter)) {
    const Value& value = graph.value(id);
    EXPECT_TRUE(
        identical(initial_value(bound.value(*bound.find_value(value.name))), initial_value(value)));
  }
}

}  // namespace
}  // namespace trainrt
