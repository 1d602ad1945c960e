// Archives written by numpy itself, with the system's python3 (a test dependency).
#include <gmock/gmock.h>

#include <cstdlib>

#include "graph/base/error.h"
#include "runtime/dataset.h"
#include "tests/support/run_program.h"

namespace trainrt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

void numpy(const std::string& code) {
  const std::string command = "/usr/bin/python3 -c \"import numpy as np\n" + code + "\"";
  ASSERT_EQ(std::system(command.c_str()), 0) << code;
}

std::vector<float> read_floats(const Dataset& data, int64_t index) {
  const int at = *data.find_array("x");
  std::vector<float> values(4);
  data.read(at, index, reinterpret_cast<std::byte*>(values.data()));
  return values;
}

TEST(NpzDatasetTest, StoredDeflatedAndFortranArraysReadAlike) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("d.npz");
  for (const char* save : {"np.savez('", "np.savez_compressed('"}) {
    for (const char* order : {"C", "F"}) {
      numpy(std::string("x = np.arange(12, dtype='f4').reshape(3, 2, 2)\n") + save + path +
            "', x=np.asarray(x, order='" + order + "'), y=np.array([1, 2, 3]))");
      const auto data = open_npz(path, {});
      EXPECT_EQ(data->num_samples(), 3);
      EXPECT_THAT(read_floats(*data, 1), ElementsAre(4, 5, 6, 7));
      EXPECT_EQ(data->arrays()[1].dtype, DType::kInt64);
    }
  }
}

TEST(NpzDatasetTest, AnotherAxisCanEnumerateSamples) {
  const testing::TemporaryFolder folder;
  numpy("np.savez('" + folder.file("d.npz") +
        "', x=np.arange(12, dtype='f4').reshape(4, 3), y=np.zeros(3))");
  const auto data = open_npz(folder.file("d.npz"), {{"x", 1}});
  EXPECT_THAT(read_floats(*data, 2), ElementsAre(2, 5, 8, 11));
}

// Which sample 2 of x is, for an input x of 4 steps by batch.
TEST(NpzDatasetTest, AnArrayLiesAsItsInputUnlessOnlyAxisZeroFits) {
  const testing::TemporaryFolder folder;
  const auto sample = [&](const std::string& arrays, int64_t steps) {
    numpy("np.savez('" + folder.file("d.npz") + "', " + arrays + ")");
    const auto data = open_npz(folder.file("d.npz"), {}, {{"x", {1, {steps}}}});
    return read_floats(*data, 2);
  };
  const std::string numbers = "x=np.arange(12, dtype='f4')";
  const auto time_first = ElementsAre(2, 5, 8, 11), samples_first = ElementsAre(8, 9, 10, 11);
  EXPECT_THAT(sample(numbers + ".reshape(4, 3), y=np.zeros(3)", -1), time_first);
  EXPECT_THAT(sample(numbers + ".reshape(3, 4), y=np.zeros(3)", -1), samples_first);
  EXPECT_THAT(sample(numbers + ".reshape(4, 3)", 4), time_first);
  EXPECT_THAT(sample(numbers + ".reshape(3, 4)", 4), samples_first);
  EXPECT_THAT(sample("x=np.arange(16, dtype='f4').reshape(4, 4), y=np.zeros(4)", 4),
              ElementsAre(2, 6, 10, 14));
}

TEST(NpzDatasetTest, ADifferenceNamesAnAxisWithAsManySamples) {
  const testing::TemporaryFolder folder;
  const auto message = [&](const std::string& arrays) -> std::string {
    numpy("np.savez('" + folder.file("d.npz") + "', " + arrays + ")");
    try {
      open_npz(folder.file("d.npz"), {});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(message("x=np.zeros((6, 5)), t=np.zeros((4, 6))"), HasSubstr("--batch-axis t=1"));
  EXPECT_THAT(message("t=np.zeros((4, 6)), x=np.zeros((6, 5))"), HasSubstr("--batch-axis t=1"));
  const std::string neither = message("x=np.zeros((6, 5)), t=np.zeros((4, 3))");
  EXPECT_THAT(neither, HasSubstr("array 'x' has 6 samples, array 't' has 4"));
  EXPECT_THAT(neither, Not(HasSubstr("--batch-axis")));
}

TEST(NpzDatasetTest, ASingleNumberIsLeftOut) {
  const testing::TemporaryFolder folder;
  numpy("np.savez('" + folder.file("d.npz") + "', x=np.zeros((3, 4), 'f4'), scale=np.float32(2))");
  const auto data = open_npz(folder.file("d.npz"), {});
  EXPECT_EQ(data->num_samples(), 3);
  EXPECT_FALSE(data->find_array("scale").has_value());
}

TEST(NpzDatasetTest, DamageIsAnErrorThatNamesTheFile) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("d.npz");
  numpy("np.savez_compressed('" + path +
        "', x=np.random.RandomState(0).rand(50, 4), y=np.zeros(50))");
  const std::string whole = testing::file_text(path);
  for (size_t size = 0; size < whole.size(); size += 97) {
    testing::write_text(path, whole.substr(0, size));
    EXPECT_THROW(open_npz(path, {}), Error) << size;
  }
  int refused = 0;
  for (size_t at = 0; at < whole.size(); at += 13) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x55);
    testing::write_text(path, damaged);
    try {
      open_npz(path, {});  // a change in a time stamp, say, does no harm
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 10);
  numpy("np.savez('" + path + "', x=np.zeros(2, dtype='>f4'))");
  try {
    open_npz(path, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("little-endian"));
  }
}

TEST(NpzDatasetTest, AShapeOrANameThatCannotBeIsRefused) {
  const testing::TemporaryFolder folder;
  const auto message = [&](const std::string& shape, const std::string& second) {
    numpy(
        "import zipfile, io\n"
        "f = io.BytesIO()\nnp.save(f, np.zeros((6, 4), 'f4'))\n"
        "x = f.getvalue().replace(b'(6, 4), ', b'" +
        shape + "')\nz = zipfile.ZipFile('" + folder.file("d.npz") +
        "', 'w')\nz.writestr('x.npy', x)\nz.writestr('" + second + ".npy', x)\nz.close()");
    try {
      open_npz(folder.file("d.npz"), {});
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message("(6, 4), ", "y"), "");
  EXPECT_THAT(message("(-6, 4),", "y"), HasSubstr("array 'x'"));
  EXPECT_THAT(message("(6, 4), ", "x"),
              HasSubstr("'x' of '" + folder.file("d.npz") + "' is there"));
}

TEST(NpzDatasetTest, AFlippedByteOfThePayloadIsSeen) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("d.npz");
  numpy("np.savez('" + path + "', x=np.full((50, 4), 7, 'u1'))");
  std::string bytes = testing::file_text(path);
  const size_t at = bytes.find("\x07\x07\x07\x07");
  ASSERT_NE(at, std::string::npos);
  bytes[at + 20] = 8;
  testing::write_text(path, bytes);
  try {
    open_npz(path, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("array 'x'"));
    EXPECT_THAT(error.what(), HasSubstr("check sum"));
  }
}

TEST(NpzDatasetTest, AnArrayOfTextsIsLeftOut) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("d.npz");
  numpy("np.savez('" + path + "', names=np.array(['a', 'bc']), x=np.zeros((2, 4), 'f4'))");
  const auto data = open_npz(path, {});
  ASSERT_EQ(data->arrays().size(), 1u);
  EXPECT_EQ(data->arrays()[0].name, "x");
}

}  // namespace
}  // namespace trainrt
