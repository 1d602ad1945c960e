#pragma once

#include <string>

namespace trainrt::testing {

// The root of the checkout under test, for files in tests/data.
std::string source_path(const std::string& relative);

// The program under test.
std::string trainrt_binary();

}  // namespace trainrt::testing
