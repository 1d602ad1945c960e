// Weights in files beside the model: read late, and from inside the model's folder alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/graph/onnx_models.h"

namespace trainrt {
namespace {

using ::testing::AllOf;
using testing::at_batch;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::names_of_kind;

namespace fs = std::filesystem;

class OnnxExternalDataTest : public ::testing::Test {
 protected:
  OnnxExternalDataTest()
      : folder_(fs::temp_directory_path() /
                ("onnx_external_" + std::to_string(::getpid()) + "_" +
                 ::testing::UnitTest::GetInstance()->current_test_info()->name())) {
    fs::create_directories(folder_ / "model");
  }
  ~OnnxExternalDataTest() override { fs::remove_all(folder_); }

  // y = x * w + b, with w and b in the files and at the places that the entries say.
  OnnxModel model(const std::string& w_entries, const std::string& b_entries) {
    const std::string text =
        "<ir_version: 8, opset_import: [\"\" : 17]>\ng (float[N, 2] x) => (float[N, 2] y)\n"
        "<float[2] w = [" +
        w_entries + "], float[2] b = [" + b_entries + "]>\n{ h = Mul(x, w)\n y = Add(h, b) }\n";
    return OnnxModel::parse_text(text, (folder_ / "model").string());
  }

  void write(const std::string& name, const std::vector<float>& values) {
    std::ofstream out(folder_ / "model" / name, std::ios::binary);
    out.write(reinterpret_cast<const char*>(values.data()),
              static_cast<std::streamsize>(values.size() * sizeof(float)));
  }

  static Tensor read(const Graph& graph, const std::string& name) {
    return initial_value(graph.value(*graph.find_value(name)));
  }

  // What reading w throws.
  static std::string read_error(const OnnxModel& model, ErrorCode code = ErrorCode::kInvalidModel) {
    const Graph graph = model.bind(at_batch(1));
    return error_of(code, [&] { read(graph, "w"); });
  }

  fs::path folder_;
};

constexpr const char* kOther = "\"location\": \"other.bin\"";

TEST_F(OnnxExternalDataTest, SeveralFilesWithOffsetsAreRead) {
  write("w.bin", {0, 0, 0, 0, 3, 4});
  write("other.bin", {5, 6});
  const OnnxModel loaded = model(R"("location": "w.bin", "offset": "16", "length": "8")", kOther);
  const Graph graph = loaded.bind(at_batch(1));
  EXPECT_THAT(names_of_kind(graph, ValueKind::kParameter), ElementsAre("w", "b"));
  EXPECT_THAT(read(graph, "w").to_double(), ElementsAre(3, 4));
  EXPECT_THAT(read(graph, "b").to_double(), ElementsAre(5, 6));
  EXPECT_EQ(graph.value(*graph.find_value("w")).source.description, "w.bin @16+8");
}

TEST_F(OnnxExternalDataTest, WeightsThatAreNotThereAreMissedOnlyWhenTheyAreRead) {
  const OnnxModel loaded = model(R"("location": "nowhere/w.bin")", kOther);
  EXPECT_EQ(loaded.tensors(at_batch(1)).size(), 2u);
  EXPECT_THAT(read_error(loaded),
              AllOf(HasSubstr("'w'"), HasSubstr("nowhere/w.bin"), HasSubstr("does not exist")));
}

TEST_F(OnnxExternalDataTest, AFolderInPlaceOfWeightsIsNamed) {
  fs::create_directories(folder_ / "model" / "w.bin");
  EXPECT_THAT(read_error(model(R"("location": "w.bin")", kOther)),
              AllOf(HasSubstr("'w'"), HasSubstr("w.bin' is a folder")));
}

TEST_F(OnnxExternalDataTest, AFileThatIsTooShortIsNamed) {
  write("w.bin", {1, 2});
  EXPECT_THAT(read_error(model(R"("location": "w.bin", "offset": "4")", kOther)),
              AllOf(HasSubstr("'w'"), HasSubstr("8 bytes from byte 4"), HasSubstr("only 8")));
  EXPECT_THAT(read_error(model(R"("location": "w.bin", "offset": "9223372036854775807")", kOther)),
              HasSubstr("only 8"));
}

TEST_F(OnnxExternalDataTest, ALengthThatDisagreesWithTheTypeIsNamed) {
  write("w.bin", {1, 2, 3, 4});
  EXPECT_THAT(read_error(model(R"("location": "w.bin", "length": "16")", kOther)),
              AllOf(HasSubstr("length 16"), HasSubstr("wants 8")));
}

TEST_F(OnnxExternalDataTest, PathsThatLeaveTheFolderAreRefused) {
  std::ofstream(folder_ / "secret.bin") << "12345678";
  for (const std::string location : {"../secret.bin", "/etc/passwd", "a/../../secret.bin", ""}) {
    EXPECT_THAT(error_of(ErrorCode::kInvalidModel,
                         [&] { model("\"location\": \"" + location + "\"", kOther).bind({}); }),
                HasSubstr("'w'"))
        << location;
  }
  fs::create_symlink("../secret.bin", folder_ / "model" / "link.bin");
  EXPECT_THAT(read_error(model(R"("location": "link.bin")", kOther)), HasSubstr("lies outside"));
}

TEST_F(OnnxExternalDataTest, MalformedNumbersAreRefused) {
  for (const std::string offset : {"-4", "four", "4x", "99999999999999999999"}) {
    EXPECT_THAT(
        error_of(
            ErrorCode::kInvalidModel,
            [&] {
              model("\"location\": \"w.bin\", \"offset\": \"" + offset + "\"", kOther).bind({});
            }),
        AllOf(HasSubstr("offset"), HasSubstr(offset)));
  }
}

}  // namespace
}  // namespace trainrt
