// What stands where the CUDA back end should: whatever it is, one message says what to do. A
// library of the system goes for the driver.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "tests/support/paths.h"
#include "tests/support/run_program.h"

namespace trainrt {
namespace {

using ::testing::HasSubstr;

namespace fs = std::filesystem;

class CudaModuleTest : public ::testing::Test {
 protected:
  CudaModuleTest() {
    double (*const of_library)(double) = ::lgamma;
    Dl_info info{};
    EXPECT_NE(::dladdr(reinterpret_cast<void*>(of_library), &info), 0);
    library_ = fs::canonical(info.dli_fname);
    fs::create_directory(folder_.file("bin"));
    fs::copy_file(testing::trainrt_binary(), folder_.file("bin/trainrt"));
    fs::copy_file(library_, folder_.file("libcuda.so.1"));
    testing::write_text(folder_.file("m.onnx"),
                        "<ir_version: 8, opset_import: [\"\" : 17]>\n"
                        "g (float[N, 2] x) => (float[N, 2] y)\n"
                        "<float[2, 2] w = {1, 2, 3, 4}>\n{\n  y = MatMul(x, w)\n}\n");
  }

  // What a run on GPUs says on its way out.
  std::string answer() const {
    const std::string err = folder_.file("err");
    const std::string command = "LD_LIBRARY_PATH=" + folder_.path() + " " +
                                folder_.file("bin/trainrt") + " run " + folder_.file("m.onnx") +
                                " --devices cuda > /dev/null 2> " + err;
    const int status = std::system(command.c_str());
    EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 5);
    return testing::file_text(err);
  }

  testing::TemporaryFolder folder_;
  fs::path library_;
};

TEST_F(CudaModuleTest, AForeignLibraryIsNotCalled) {
  fs::copy_file(library_, folder_.file("bin/trainrt_cuda.so"));
  const std::string err = answer();
  EXPECT_THAT(err, HasSubstr("is no CUDA back end of trainrt"));
  EXPECT_THAT(err, HasSubstr("built together with this program"));
}

TEST_F(CudaModuleTest, ADamagedFileIsNotALackingLibrary) {
  testing::write_text(folder_.file("bin/trainrt_cuda.so"),
                      testing::file_text(library_.string()).substr(0, 100));
  const std::string err = answer();
  EXPECT_THAT(err, HasSubstr("cannot be loaded"));
  EXPECT_THAT(err, HasSubstr("damaged or of another build"));
}

TEST_F(CudaModuleTest, TheOneBesideTheProgramComesFirst) {
  fs::copy_file(library_, folder_.file("trainrt_cuda.so"));
  EXPECT_THAT(answer(), HasSubstr(folder_.file("trainrt_cuda.so")));
  fs::copy_file(library_, folder_.file("bin/trainrt_cuda.so"));
  EXPECT_THAT(answer(), HasSubstr(folder_.file("bin/trainrt_cuda.so")));
}

}  // namespace
}  // namespace trainrt
