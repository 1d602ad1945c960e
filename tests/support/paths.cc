#include "tests/support/paths.h"

namespace trainrt::testing {

// The macros come from tests/CMakeLists.txt.
std::string source_path(const std::string& relative) {
  return std::string(SOURCE_DIR) + "/" + relative;
}

std::string trainrt_binary() {
  return std::string(BINARY_DIR) + "/trainrt";
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
