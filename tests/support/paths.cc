#include "tests/support/paths.h"

namespace trainrt::testing {

// SOURCE_DIR, BINARY_DIR and AUSTEN_TEXT come from tests/CMakeLists.txt.
std::string source_path(const std::string& relative) {
  return std::string(SOURCE_DIR) + "/" + relative;
}

std::string trainrt_binary() {
  return std::string(BINARY_DIR) + "/trainrt";
}

std::string austen_text() {
  return AUSTEN_TEXT;
}

std::string fashion_mnist() {
  return "/usr/share/datasets/fashion-mnist";
}

}  // namespace trainrt::testing
