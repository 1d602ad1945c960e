// Data files of planner/data that are built into the program (written by cmake/Embed.cmake).
#pragma once

#include <string_view>

namespace trainrt {

std::string_view embedded_nccl_constants_csv();
std::string_view embedded_error_bands_csv();

}  // namespace trainrt
