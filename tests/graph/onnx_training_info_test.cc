// Validation of training_info, which ONNX's checker does not look at.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "graph/onnx_model.h"
#include "tests/graph/onnx_models.h"

namespace trainrt {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::model_of;

// y = x * w; the algorithm subtracts y's sum from w, the initialization sets w to ones.
onnx::ModelProto training_model() {
  onnx::ModelProto proto =
      *model_of("(float[2] x) => (float[2] y)", "float[2] w = {1, 2}", "y = Mul(x, w)")
           .impl()
           .proto;
  const auto graph_of = [](const std::string& signature, const std::string& body) {
    return model_of(signature, "", body).impl().proto->graph();
  };
  onnx::TrainingInfoProto* info = proto.add_training_info();
  *info->mutable_algorithm() =
      graph_of("(float[2] y, float[2] w) => (float[2] w_new)", "w_new = Sub(w, y)");
  info->mutable_algorithm()->clear_input();
  *info->mutable_initialization() =
      graph_of("() => (float[2] ones)", "ones = Constant<value: tensor = float[2] {1, 1}>()");
  const auto bind = [](auto* bindings, const char* key, const char* value) {
    onnx::StringStringEntryProto* binding = bindings->Add();
    binding->set_key(key);
    binding->set_value(value);
  };
  bind(info->mutable_update_binding(), "w", "w_new");
  bind(info->mutable_initialization_binding(), "w", "ones");
  return proto;
}

OnnxModel load(const onnx::ModelProto& proto) {
  const std::filesystem::path path = std::filesystem::temp_directory_path() /
                                     ("onnx_training_" + std::to_string(::getpid()) + ".onnx");
  std::ofstream(path, std::ios::binary) << proto.SerializeAsString();
  OnnxModel model = OnnxModel::load(path.string());
  std::filesystem::remove(path);
  return model;
}

std::string error_after(const std::function<void(onnx::TrainingInfoProto&)>& change) {
  onnx::ModelProto proto = training_model();
  change(*proto.mutable_training_info(0));
  return error_of(ErrorCode::kInvalidModel, [&] { load(proto); });
}

TEST(OnnxTrainingInfoTest, AValidOneIsKept) {
  const OnnxModel model = load(training_model());
  EXPECT_TRUE(model.has_training_info());
  using Bindings = std::map<std::string, std::string>;
  EXPECT_EQ(model.impl().update_bindings(), (Bindings{{"w", "w_new"}}));
  EXPECT_EQ(model.impl().initialization_bindings(0), (Bindings{{"w", "ones"}}));
  EXPECT_EQ(model.impl().algorithm(0).node(0).op_type(), "Sub");
}

TEST(OnnxTrainingInfoTest, BindingsMustNameInitializersAndOutputs) {
  EXPECT_THAT(error_after([](auto& info) { info.mutable_update_binding(0)->set_key("v"); }),
              AllOf(HasSubstr("update_binding"), HasSubstr("'v'"), HasSubstr("no initializer")));
  EXPECT_THAT(error_after([](auto& info) { info.mutable_update_binding(0)->set_value("z"); }),
              AllOf(HasSubstr("'z'"), HasSubstr("no output of the algorithm")));
  EXPECT_THAT(
      error_after([](auto& info) { info.mutable_initialization_binding(0)->set_value("z"); }),
      AllOf(HasSubstr("'z'"), HasSubstr("no output of the initialization")));
}

TEST(OnnxTrainingInfoTest, ATensorIsAssignedOnce) {
  EXPECT_THAT(error_after([](auto& info) { *info.add_update_binding() = info.update_binding(0); }),
              HasSubstr("assigned already"));
  onnx::ModelProto twice = training_model();
  *twice.add_training_info() = twice.training_info(0);
  EXPECT_THAT(error_of(ErrorCode::kInvalidModel, [&] { load(twice); }),
              HasSubstr("assigned already"));
}

TEST(OnnxTrainingInfoTest, DanglingNamesAndInitializationInputsAreRefused) {
  EXPECT_THAT(error_after([](auto& info) {
                info.mutable_algorithm()->mutable_node(0)->set_input(0, "nothing");
              }),
              AllOf(HasSubstr("'nothing'"), HasSubstr("training_info 0, algorithm")));
  EXPECT_THAT(error_after([](auto& info) {
                info.mutable_algorithm()->mutable_node(0)->set_output(0, "x");
              }),
              HasSubstr("'x' is defined twice"));
  EXPECT_THAT(
      error_after([](auto& info) { info.mutable_initialization()->add_input()->set_name("seed"); }),
      HasSubstr("has inputs"));
}

TEST(OnnxTrainingInfoTest, TheHashSeesTheAlgorithm) {
  onnx::ModelProto other = training_model();
  other.mutable_training_info(0)->mutable_algorithm()->mutable_node(0)->set_op_type("Add");
  EXPECT_NE(load(training_model()).hash(), load(other).hash());
}

}  // namespace
}  // namespace trainrt
