#include "tests/support/paths.h"

namespace trainrt::testing {

std::string source_path(const std::string& relative) {
  return std::string(TRAINRT_SOURCE_DIR) + "/" + relative;
}

std::string trainrt_binary() {
  return std::string(TRAINRT_BINARY_DIR) + "/trainrt";
}

}  // namespace trainrt::testing
