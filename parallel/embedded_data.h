// Data files of parallel/data that are built into the program (written by cmake/Embed.cmake).
#pragma once

#include <string_view>

namespace trainrt {

std::string_view embedded_devices_csv();

}  // namespace trainrt
