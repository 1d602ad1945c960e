// Large weights of a model file are read where they lie; a file of any other form is the parser's.
#include "graph/onnx_detached_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "graph/onnx_annotation.h"
#include "graph/onnx_export.h"
#include "graph/onnx_model.h"
#include "graph/onnx_tensor.h"
#include "models/model.h"

namespace trainrt {
namespace {

namespace fs = std::filesystem;

class OnnxDetachedDataTest : public ::testing::Test {
 protected:
  OnnxDetachedDataTest()
      : folder_(fs::temp_directory_path() /
                ("onnx_detached_" + std::to_string(::getpid()) + "_" +
                 ::testing::UnitTest::GetInstance()->current_test_info()->name())) {
    fs::create_directories(folder_);
    write_onnx(build_model(named_model("mlp")), file("m.onnx"), {});
  }
  ~OnnxDetachedDataTest() override { fs::remove_all(folder_); }

  std::string file(const std::string& name) const { return (folder_ / name).string(); }

  std::string bytes(const std::string& name) const {
    std::ostringstream text;
    text << std::ifstream(file(name), std::ios::binary).rdbuf();
    return text.str();
  }

  fs::path folder_;
};

// Raw data of each initializer, as a plain parser sees it.
std::map<std::string, std::string> parsed_data(const std::string& bytes) {
  onnx::ModelProto proto;
  EXPECT_TRUE(proto.ParseFromString(bytes));
  std::map<std::string, std::string> data;
  for (const onnx::TensorProto& tensor : proto.graph().initializer()) {
    EXPECT_FALSE(is_detached(tensor));
    data[tensor.name()] = tensor.raw_data();
  }
  return data;
}

TEST_F(OnnxDetachedDataTest, WeightsAreThoseOfTheFile) {
  const std::map<std::string, std::string> data = parsed_data(bytes("m.onnx"));
  const OnnxModel model = OnnxModel::load(file("m.onnx"));
  const OnnxModel::Impl& impl = model.impl();
  ASSERT_NE(impl.files.model, nullptr);
  int num_detached = 0;
  for (const onnx::TensorProto& proto : impl.graph().initializer()) {
    num_detached += is_detached(proto) ? 1 : 0;
    EXPECT_EQ(is_detached(proto), data.at(proto.name()).size() >= (64u << 10)) << proto.name();
    EXPECT_FALSE(has_external_data(proto));
    const Tensor tensor = tensor_source(impl.proto, proto, impl.files).load();
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(tensor.raw()),
                          static_cast<size_t>(tensor.bytes())),
              data.at(proto.name()))
        << proto.name();
  }
  EXPECT_EQ(num_detached, 2);
}

TEST_F(OnnxDetachedDataTest, AWrittenModelHoldsThem) {
  const OnnxModel model = OnnxModel::load(file("m.onnx"));
  ASSERT_NE(model.impl().files.model, nullptr);
  write_annotated(model, {}, file("m.onnx"));  // over the file that is mapped
  const std::string written = bytes("m.onnx");
  EXPECT_EQ(parsed_data(written).size(), 6u);
  fs::remove(file("m.onnx"));
  write_onnx(build_model(named_model("mlp")), file("again.onnx"), {});
  EXPECT_EQ(parsed_data(written), parsed_data(bytes("again.onnx")));
}

TEST_F(OnnxDetachedDataTest, ADamagedFileIsLeftToTheParser) {
  const std::string whole = bytes("m.onnx");
  ASSERT_TRUE(detach_weights(whole).has_value());
  for (const size_t size : {whole.size() - 1, whole.size() / 2, size_t{100}}) {
    EXPECT_FALSE(detach_weights(std::string_view(whole).substr(0, size)).has_value());
    std::ofstream(file("cut.onnx"), std::ios::binary) << whole.substr(0, size);
    EXPECT_THROW(OnnxModel::load(file("cut.onnx")), Error);
  }
  EXPECT_FALSE(detach_weights("this is no model, but a text of some length").has_value());
  EXPECT_FALSE(detach_weights("").has_value());
}

// A tensor that claims to be detached, in a model that was not.
TEST_F(OnnxDetachedDataTest, AClaimIsCheckedAgainstTheFile) {
  onnx::TensorProto proto;
  proto.set_name("w");
  proto.set_data_type(onnx::TensorProto::FLOAT);
  proto.add_dims(2);
  proto.set_data_location(onnx::TensorProto::EXTERNAL);
  const std::vector<std::pair<const char*, const char*>> entries = {
      {"location", ""}, {"offset", "90"}, {"length", "8"}};
  for (const auto& [key, value] : entries) {
    onnx::StringStringEntryProto* entry = proto.add_external_data();
    entry->set_key(key);
    entry->set_value(value);
  }
  ASSERT_TRUE(is_detached(proto));
  EXPECT_THROW(tensor_source(nullptr, proto, {}).load(), Error);
  std::ofstream(file("short"), std::ios::binary) << std::string(95, 'x');
  EXPECT_THROW(tensor_source(nullptr, proto, {"", MappedFile::open(file("short"))}).load(), Error);
}

}  // namespace
}  // namespace trainrt
