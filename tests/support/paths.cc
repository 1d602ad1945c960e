#include "tests/support/paths.h"

#include <filesystem>

namespace trainrt::testing {

// The macros come from tests/CMakeLists.txt.
std::string source_path(const std::string& relative) {
  return std::string(SOURCE_DIR) + "/" + relative;
}

// Tests lie in a folder beside it, also where a finished build has been carried to.
std::string trainrt_binary() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path() / "trainrt";
}

std::string austen_text() {
  return AUSTEN_TEXT;
}

std::string onnxruntime_folder() {
  return ONNXRUNTIME_DIR;
}

std::string fashion_mnist() {
  return "/usr/share/datasets/fashion-mnist";
}

}  // namespace trainrt::testing
