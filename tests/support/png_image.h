// Reads the pictures that a browser takes of a page.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace trainrt::testing {

struct PngImage {
  int width = 0, height = 0;
  std::vector<std::array<uint8_t, 3>> pixels;  // row by row

  const std::array<uint8_t, 3>& at(int x, int y) const {
    return pixels[static_cast<size_t>(y) * static_cast<size_t>(width) + static_cast<size_t>(x)];
  }
};

// 8 bits per channel, RGB or RGBA, not interlaced. Throws for anything else.
PngImage read_png(const std::string& path);

}  // namespace trainrt::testing
