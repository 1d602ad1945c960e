#include "runtime/dataset.h"

#include <gmock/gmock.h>
#include <zlib.h>

#include <cmath>
#include <cstring>
#include <set>

#include "graph/base/error.h"
#include "runtime/synthetic_dataset.h"
#include "runtime/text_alphabet.h"
#include "tests/support/idx_file.h"
#include "tests/support/run_program.h"

namespace trainrt {
namespace {

using ::testing::AllOf;
using testing::big_endian;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::idx_bytes;
using testing::TemporaryFolder;
using testing::write_text;

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

template <typename T>
std::vector<T> read(const Dataset& data, const std::string& array, int64_t index) {
  const int at = *data.find_array(array);
  std::vector<T> values(
      static_cast<size_t>(num_elements(data.arrays()[static_cast<size_t>(at)].sample_shape)));
  data.read(at, index, reinterpret_cast<std::byte*>(values.data()));
  return values;
}

void write_gzip(const std::string& path, const std::string& text) {
  const gzFile file = ::gzopen(path.c_str(), "wb");
  ::gzwrite(file, text.data(), static_cast<unsigned>(text.size()));
  ::gzclose(file);
}

TEST(IdxDatasetTest, PlainAndGzipFoldersReadAlike) {
  const TemporaryFolder plain, packed;
  const std::string images = idx_bytes(8, {2, 1, 3}, {1, 2, 3, 4, 5, static_cast<char>(255)});
  const std::string labels = idx_bytes(8, {2}, {7, 9});
  write_text(plain.file("train-images-idx3-ubyte"), images);
  write_text(plain.file("train-labels-idx1-ubyte"), labels);
  write_gzip(packed.file("train-images-idx3-ubyte.gz"), images);
  write_gzip(packed.file("train-labels-idx1-ubyte.gz"), labels);
  for (const std::string& folder : {plain.path(), packed.path()}) {
    const auto data = open_idx_folder(folder, "train");
    EXPECT_EQ(data->num_samples(), 2);
    EXPECT_THAT(read<uint8_t>(*data, "images", 1), ElementsAre(4, 5, 255));
    EXPECT_THAT(read<uint8_t>(*data, "labels", 0), ElementsAre(7));
  }
}

TEST(IdxDatasetTest, WideItemsAreBigEndian) {
  const TemporaryFolder folder;
  write_text(folder.file("t10k-images-idx1-ubyte"),
             idx_bytes(0x0C, {2}, big_endian(70000) + big_endian(3)));
  write_text(folder.file("t10k-labels-idx1-ubyte"), idx_bytes(8, {2}, {0, 1}));
  const auto data = open_idx_folder(folder.path(), "t10k");
  EXPECT_THAT(read<int32_t>(*data, "images", 0), ElementsAre(70000));
}

TEST(IdxDatasetTest, DamageNamesTheFile) {
  const TemporaryFolder folder;
  write_text(folder.file("train-labels-idx1-ubyte"), idx_bytes(8, {2}, {0, 1}));
  EXPECT_THAT(message_of([&] { open_idx_folder(folder.path(), "train"); }),
              HasSubstr("train-images"));
  write_text(folder.file("train-images-idx1-ubyte"), idx_bytes(8, {3}, {0, 1}));
  EXPECT_THAT(message_of([&] { open_idx_folder(folder.path(), "train"); }),
              HasSubstr("has 2 bytes of data, its dims [3] want 3"));
  // 2^61 doubles are 2^64 bytes, which 64 bits would count as none.
  write_text(folder.file("train-images-idx1-ubyte"), idx_bytes(0x0E, {1 << 30, 1 << 30, 2}, {}));
  EXPECT_THAT(message_of([&] { open_idx_folder(folder.path(), "train"); }),
              HasSubstr("has 0 bytes of data"));
  write_text(folder.file("train-images-idx1-ubyte"), idx_bytes(8, {3}, {0, 1, 2}));
  EXPECT_THAT(message_of([&] { open_idx_folder(folder.path(), "train"); }),
              HasSubstr("has 3 samples, array 'labels' has 2"));
  write_gzip(folder.file("full.gz"), std::string(1000, 'x'));
  write_text(folder.file("train-images-idx1-ubyte"),
             testing::file_text(folder.file("full.gz")).substr(0, 20));
  EXPECT_THAT(message_of([&] { open_idx_folder(folder.path(), "train"); }), HasSubstr("gzip"));
}

TEST(TokenDatasetTest, WindowsOverlapByTheLabelOnly) {
  const TemporaryFolder folder;
  std::vector<uint16_t> tokens = {0, 1, 2, 3, 4, 5, 6, 65535};
  write_text(folder.file("t.bin"), {reinterpret_cast<const char*>(tokens.data()), 16});
  const auto data = open_token_file(folder.file("t.bin"), 3);
  EXPECT_EQ(data->num_samples(), 2);
  EXPECT_THAT(read<int64_t>(*data, "tokens", 0), ElementsAre(0, 1, 2));
  EXPECT_THAT(read<int64_t>(*data, "labels", 0), ElementsAre(1, 2, 3));
  EXPECT_THAT(read<int64_t>(*data, "tokens", 1), ElementsAre(3, 4, 5));
  EXPECT_THAT(read<int64_t>(*data, "labels", 1), ElementsAre(4, 5, 6));
  EXPECT_THAT(message_of([&] { open_token_file(folder.file("t.bin"), 8); }),
              HasSubstr("fewer than one window"));
}

TEST(TokenDatasetTest, WiderTokensAreNotReadAsTwice) {
  const TemporaryFolder folder;
  const std::string file = folder.file("t.bin");
  std::string text;
  for (int i = 0; i < 100; ++i) {
    text += std::string({static_cast<char>(i), 1, 0, 0});  // little-endian, 32 bits
  }
  write_text(file, text);
  EXPECT_THAT(message_of([&] { open_token_file(file, 4); }), HasSubstr("32 or 64 bits"));
}

TEST(TokenDatasetTest, LlmcHeadersAreSkippedAndChecked) {
  const TemporaryFolder folder;
  for (const bool llama : {false, true}) {
    std::vector<int32_t> header(256, 0);
    header[0] = llama ? 20240801 : 20240520;
    header[1] = 1;
    header[2] = 5;
    std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
    for (uint32_t token = 10; token < 15; ++token) {
      bytes.append(reinterpret_cast<const char*>(&token), llama ? 4 : 2);
    }
    write_text(folder.file("t.bin"), bytes);
    const auto data = open_token_file(folder.file("t.bin"), 2);
    EXPECT_EQ(data->num_samples(), 2);
    EXPECT_THAT(read<int64_t>(*data, "labels", 1), ElementsAre(13, 14));
    write_text(folder.file("t.bin"), bytes.substr(0, bytes.size() - 4));
    EXPECT_THAT(message_of([&] { open_token_file(folder.file("t.bin"), 2); }),
                HasSubstr("its header says 5"));
  }
}

TEST(TextDatasetTest, CharactersAreNumberedInAscendingOrder) {
  const TemporaryFolder folder;
  write_text(folder.file("t.txt"),
             "b\xC3\xA4"
             "ab\n");  // b ä a b newline
  const auto data = open_text_file(folder.file("t.txt"), 4, "");
  EXPECT_THAT(read<int64_t>(*data, "tokens", 0), ElementsAre(2, 3, 1, 2));
  EXPECT_THAT(read<int64_t>(*data, "labels", 0), ElementsAre(3, 1, 2, 0));
  EXPECT_EQ(data->alphabet(), "\nab\xC3\xA4");
}

TEST(TextDatasetTest, AGivenAlphabetNumbersTheCharacters) {
  const TemporaryFolder folder;
  write_text(folder.file("t.txt"), "cabca");
  EXPECT_THAT(read<int64_t>(*open_text_file(folder.file("t.txt"), 4, "xcab"), "tokens", 0),
              ElementsAre(1, 2, 3, 1));
  EXPECT_THAT(message_of([&] { open_text_file(folder.file("t.txt"), 4, "xab"); }),
              AllOf(HasSubstr("has 'c' (code point 99) as character 0"),
                    HasSubstr("none of the 3 characters")));
  EXPECT_THAT(message_of([&] { open_text_file(folder.file("t.txt"), 4, "abca"); }),
              HasSubstr("holds 'a' twice"));
}

TEST(TextAlphabetTest, Utf8RoundTripsAndBadBytesStandForThemselves) {
  const std::string text = "a\xC3\xA4\xE2\x82\xAC\xF0\x9F\x98\x80";  // a ä € an emoji
  EXPECT_THAT(code_points(text), ElementsAre('a', 0xE4, 0x20AC, 0x1F600));
  EXPECT_EQ(TextAlphabet::parse(text).utf8(), text);
  // A lone tail, a surrogate, a number beyond Unicode, a sequence cut by the end.
  EXPECT_THAT(code_points("\x80"), ElementsAre(0x80));
  EXPECT_THAT(code_points("\xED\xA0\x80"), ElementsAre(0xED, 0xA0, 0x80));
  EXPECT_THAT(code_points("\xF4\x90\x80\x80"), ElementsAre(0xF4, 0x90, 0x80, 0x80));
  EXPECT_THAT(code_points("\xE2\x82"), ElementsAre(0xE2, 0x82));
}

TEST(SyntheticDatasetTest, SamplesDependOnSeedAndNumberOnly) {
  const SyntheticInput x{"x", DType::kFloat32, {6}, 0};
  const auto a = make_synthetic_dataset(1, {x}, SyntheticLabels{{}, 4});
  const auto b = make_synthetic_dataset(1, {x}, SyntheticLabels{{}, 4});
  const auto c = make_synthetic_dataset(2, {x}, SyntheticLabels{{}, 4});
  EXPECT_EQ(read<float>(*a, "x", 17), read<float>(*b, "x", 17));
  EXPECT_NE(read<float>(*a, "x", 17), read<float>(*a, "x", 18));
  EXPECT_NE(read<float>(*a, "x", 17), read<float>(*c, "x", 17));
}

TEST(SyntheticDatasetTest, InputsHaveTheMomentsOfTheNormalDistribution) {
  // 70 elements are no multiple of what is drawn at a time.
  const auto data = make_synthetic_dataset(5, {{"x", DType::kFloat32, {70}, 0}}, std::nullopt);
  double moments[5] = {};
  constexpr int64_t kSamples = 3000;
  for (int64_t s = 0; s < kSamples; ++s) {
    for (const float x : read<float>(*data, "x", s)) {
      double power = 1;
      for (double& moment : moments) {
        moment += power / (70 * kSamples);
        power *= x;
      }
    }
  }
  // Three standard deviations of the moments of 210,000 draws, and what 8,192 levels cut off.
  EXPECT_NEAR(moments[1], 0, 0.007);
  EXPECT_NEAR(moments[2], 1, 0.012);
  EXPECT_NEAR(moments[3], 0, 0.03);
  EXPECT_NEAR(moments[4], 3, 0.09);
}

// A label per element tells in which of equally likely intervals it lies.
TEST(SyntheticDatasetTest, LabelsOfElementsFollowFromTheElements) {
  const auto data =
      make_synthetic_dataset(5, {{"x", DType::kFloat32, {300}, 0}}, SyntheticLabels{{300}, 4});
  constexpr float kQuartile = 0.67449f;
  for (int64_t s = 0; s < 10; ++s) {
    const std::vector<float> x = read<float>(*data, "x", s);
    const std::vector<int64_t> labels = read<int64_t>(*data, "labels", s);
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(labels[i], x[i] < -kQuartile ? 0 : x[i] < 0 ? 1 : x[i] < kQuartile ? 2 : 3);
    }
  }
}

// A target is a sum of elements drawn one by one, which are to be those that are read.
TEST(SyntheticDatasetTest, TargetsAreSumsOfElements) {
  const auto data =
      make_synthetic_dataset(5, {{"x", DType::kFloat32, {1}, 0}}, SyntheticLabels{{1}, 0});
  // All eight terms are the one element, some of them with the other sign.
  const float ratio = read<float>(*data, "labels", 0)[0] / read<float>(*data, "x", 0)[0];
  EXPECT_NEAR(ratio * std::sqrt(8.0f), std::round(ratio * std::sqrt(8.0f)), 1e-4);
  for (int64_t s = 1; s < 20; ++s) {
    const float x = read<float>(*data, "x", s)[0];
    EXPECT_NEAR(read<float>(*data, "labels", s)[0], ratio * x, 1e-4);
  }
}

TEST(SyntheticDatasetTest, ClassesCanBeToldFromTheirMeans) {
  const auto data =
      make_synthetic_dataset(3, {{"x", DType::kFloat32, {16}, 0}}, SyntheticLabels{{}, 5});
  // Class means from the first half classify the second half.
  std::vector<std::vector<double>> means(5, std::vector<double>(16, 0));
  std::vector<int> counts(5, 0);
  for (int64_t s = 0; s < 500; ++s) {
    const auto y = static_cast<size_t>(read<int64_t>(*data, "labels", s)[0]);
    ++counts[y];
    const std::vector<float> x = read<float>(*data, "x", s);
    for (size_t i = 0; i < 16; ++i) {
      means[y][i] += x[i];
    }
  }
  int correct = 0;
  for (int64_t s = 500; s < 1000; ++s) {
    const std::vector<float> x = read<float>(*data, "x", s);
    size_t best = 0;
    double least = 1e30;
    for (size_t y = 0; y < 5; ++y) {
      double distance = 0;
      for (size_t i = 0; i < 16; ++i) {
        const double d = x[i] - means[y][i] / std::max(1, counts[y]);
        distance += d * d;
      }
      if (distance < least) {
        least = distance;
        best = y;
      }
    }
    correct += static_cast<int64_t>(best) == read<int64_t>(*data, "labels", s)[0] ? 1 : 0;
  }
  EXPECT_GT(correct, 450);
}

TEST(SyntheticDatasetTest, TokensStayInTheVocabularyAndFollowARule) {
  const auto data = make_synthetic_dataset(3, {{"ids", DType::kInt64, {64}, 11}}, std::nullopt);
  int follows = 0;
  for (int64_t s = 0; s < 20; ++s) {
    const std::vector<int64_t> ids = read<int64_t>(*data, "ids", s);
    for (size_t i = 0; i < ids.size(); ++i) {
      EXPECT_GE(ids[i], 0);
      EXPECT_LT(ids[i], 11);
      follows += i > 0 && ids[i] == (ids[i - 1] * 5 + 1) % 11 ? 1 : 0;
    }
  }
  EXPECT_GT(follows, 20 * 63 * 8 / 10);
}

}  // namespace
}  // namespace trainrt
