// Reading model files: every way in which one can be wrong ends in a clear message.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "graph/onnx_import.h"
#include "graph/onnx_model.h"

namespace trainrt {
namespace {

using ::testing::HasSubstr;

namespace fs = std::filesystem;

const char* const kMlp = R"(
<ir_version: 8, opset_import: ["" : 17]>
mlp (float[batch, 4] x) => (float[batch, 4] y)
  <float[4] scale = {1, 2, 3, 4}, float[4] shift = {0, 1, 0, 1}>
{
  [scale] scaled = Mul(x, scale)
  [shift] shifted = Add(scaled, shift)
  [act] y = Relu(shifted)
}
)";

// What loading `text` throws; empty when it loads.
std::string load_error(const std::string& text, ErrorCode code = ErrorCode::kInvalidModel) {
  try {
    OnnxModel::parse_text(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "";
}

std::string with_body(const std::string& body,
                      const std::string& initializers = "float[4] w = {1, 2, 3, 4}") {
  return "<ir_version: 8, opset_import: [\"\" : 17]>\ng (float[N, 4] x) => (float[N, 4] y) <" +
         initializers + "> {\n" + body + "\n}\n";
}

class OnnxLoadTest : public ::testing::Test {
 protected:
  OnnxLoadTest() {
    folder_ = fs::temp_directory_path() /
              ("onnx_load_" + std::to_string(::getpid()) + "_" +
               ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(folder_);
  }
  ~OnnxLoadTest() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& bytes) {
    const fs::path path = folder_ / name;
    std::ofstream(path, std::ios::binary) << bytes;
    return path.string();
  }

  static std::string file_error(const std::string& path) {
    try {
      OnnxModel::load(path);
    } catch (const Error& error) {
      EXPECT_EQ(exit_code(error.code()), 3) << error.what();
      return error.what();
    }
    return "";
  }

  static std::string binary_mlp() {
    return OnnxModel::parse_text(kMlp).impl().proto->SerializeAsString();
  }

  fs::path folder_;
};

TEST_F(OnnxLoadTest, TextAndBinaryGiveTheSameModel) {
  const OnnxModel text = OnnxModel::load(write("m.txt", std::string("# a comment\n") + kMlp));
  const OnnxModel binary = OnnxModel::load(write("m.onnx", binary_mlp()));
  EXPECT_EQ(text.hash(), binary.hash());
  EXPECT_EQ(binary.opset(), 17);
  EXPECT_EQ(binary.ir_version(), 8);
  ASSERT_EQ(binary.inputs().size(), 1u);
  EXPECT_EQ(binary.inputs()[0].batch_axis, 0);
  EXPECT_EQ(binary.symbols(), std::vector<std::string>{"batch"});
  EXPECT_EQ(binary.outputs(), std::vector<std::string>{"y"});
}

TEST_F(OnnxLoadTest, TheHashIsOfStructureAndNotOfWeights) {
  const std::string base = OnnxModel::parse_text(with_body("y = Mul(x, w)")).hash();
  EXPECT_EQ(base,
            OnnxModel::parse_text(with_body("y = Mul(x, w)", "float[4] w = {9, 9, 9, 9}")).hash());
  EXPECT_NE(base, OnnxModel::parse_text(with_body("y = Add(x, w)")).hash());
  EXPECT_NE(base, OnnxModel::parse_text(with_body("y = Mul(w, x)")).hash());
}

TEST_F(OnnxLoadTest, AMissingFileIsNamed) {
  EXPECT_THAT(file_error((folder_ / "none.onnx").string()), HasSubstr("there is no model file"));
}

TEST_F(OnnxLoadTest, AFolderAnEmptyFileAndNoiseAreRefused) {
  EXPECT_THAT(file_error(folder_.string()), HasSubstr("is a folder"));
  EXPECT_THAT(file_error(write("empty.onnx", "")), HasSubstr("is empty"));
  EXPECT_THAT(file_error(write("noise.onnx", "\x89PNG\r\n\x1a\n and so on")),
              HasSubstr("not an ONNX model"));
  EXPECT_THAT(file_error(write("text.onnx", "hello world, this is no model")),
              HasSubstr("not an ONNX model"));
  EXPECT_THAT(file_error(write("bad.txt", "<ir_version: 8, opset_import")),
              HasSubstr("not valid ONNX text"));
}

TEST_F(OnnxLoadTest, EveryTruncationIsRefused) {
  const std::string bytes = binary_mlp();
  for (size_t size = 1; size < bytes.size(); ++size) {
    // A cut in the trailing opset_import leaves a message that parses, but imports no operator set.
    EXPECT_NE(file_error(write("cut.onnx", bytes.substr(0, size))), "") << size << " bytes";
  }
}

TEST_F(OnnxLoadTest, NoBitFlipCrashes) {
  const std::string bytes = binary_mlp();
  int refused = 0;
  for (size_t at = 0; at < bytes.size(); ++at) {
    std::string flipped = bytes;
    flipped[at] = static_cast<char>(flipped[at] ^ (1 << (at % 8)));
    try {
      OnnxModel::load(write("flip.onnx", flipped)).bind({});
    } catch (const Error& error) {
      EXPECT_NE(error.code(), ErrorCode::kInternal) << error.what() << " at byte " << at;
      ++refused;
    }
  }
  EXPECT_GT(refused, 0);
}

TEST_F(OnnxLoadTest, VersionsOutsideOfTheRangeAreRefused) {
  EXPECT_THAT(
      load_error("<ir_version: 99, opset_import: [\"\" : 17]> g (float[1] x) => (float[1] y) "
                 "{ y = Relu(x) }",
                 ErrorCode::kUnsupported),
      HasSubstr("IR version 99"));
  EXPECT_THAT(
      load_error("<ir_version: 8, opset_import: [\"\" : 99]> g (float[1] x) => (float[1] y) "
                 "{ y = Relu(x) }",
                 ErrorCode::kUnsupported),
      HasSubstr("opset 99"));
}

TEST_F(OnnxLoadTest, NodesOutOfOrderAreSorted) {
  const OnnxModel model = OnnxModel::parse_text(with_body("[b] y = Relu(h)\n[a] h = Mul(x, w)"));
  EXPECT_EQ(model.impl().graph().node(0).name(), "a");
  EXPECT_EQ(model.impl().graph().node(1).name(), "b");
}

TEST_F(OnnxLoadTest, ACycleIsNamed) {
  EXPECT_THAT(load_error(with_body("[a] h = Mul(x, y)\n[b] y = Relu(h)")),
              testing::AllOf(HasSubstr("cycle"), HasSubstr("'a'"), HasSubstr("'b'")));
}

TEST_F(OnnxLoadTest, DanglingAndDoubleNamesAreRefused) {
  EXPECT_THAT(load_error(with_body("[a] y = Mul(x, v)")),
              testing::AllOf(HasSubstr("'v'"), HasSubstr("nothing defines"), HasSubstr("'a'")));
  EXPECT_THAT(load_error(with_body("h = Relu(x)\n[again] h = Neg(x)\ny = Relu(h)")),
              testing::AllOf(HasSubstr("'h' is defined twice"), HasSubstr("'again'")));
  EXPECT_THAT(load_error(with_body("z = Relu(x)")), HasSubstr("nothing defines output 'y'"));
  EXPECT_THAT(load_error(with_body("y = Mul(x, w)",
                                   "float[4] w = {1, 2, 3, 4}, float[4] w = {1, 2, 3, 4}")),
              HasSubstr("two initializers are named 'w'"));
}

TEST_F(OnnxLoadTest, TheCheckersFindingsAreReported) {
  EXPECT_THAT(load_error(with_body("y = Mul(x)")), HasSubstr("ONNX's checker"));
}

TEST_F(OnnxLoadTest, ATensorOfTheWrongSizeIsNamed) {
  onnx::ModelProto proto = *OnnxModel::parse_text(kMlp).impl().proto;
  proto.mutable_graph()->mutable_initializer(1)->add_float_data(5);
  EXPECT_THAT(file_error(write("size.onnx", proto.SerializeAsString())),
              testing::AllOf(HasSubstr("'shift'"), HasSubstr("5 elements; wanted 4")));
}

}  // namespace
}  // namespace trainrt
