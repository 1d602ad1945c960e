#pragma once

#include <string>

namespace trainrt {

// Of this build: "0.1.0".
std::string version();

}  // namespace trainrt
