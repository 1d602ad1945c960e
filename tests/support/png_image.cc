#include "tests/support/png_image.h"

#include <zlib.h>

#include <cstdlib>

#include "graph/base/error.h"
#include "tests/support/run_program.h"

namespace trainrt::testing {

namespace {

uint32_t big_endian(const std::string& data, size_t at) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) {
    value = value << 8 | static_cast<uint8_t>(data.at(at + i));
  }
  return value;
}

// The predictor of filter 4: of left, above and their corner, the nearest to left + above - corner.
int paeth(int left, int above, int corner) {
  const int p = left + above - corner;
  const int a = std::abs(p - left), b = std::abs(p - above), c = std::abs(p - corner);
  return a <= b && a <= c ? left : b <= c ? above : corner;
}

}  // namespace

PngImage read_png(const std::string& path) {
  const std::string data = file_text(path);
  TRAINRT_CHECK(data.substr(0, 8) == "\x89PNG\r\n\x1a\n", path, " is not a PNG file");
  PngImage image;
  std::string packed;
  size_t channels = 0;
  for (size_t at = 8; at + 8 <= data.size();) {
    const size_t length = big_endian(data, at);
    const std::string type = data.substr(at + 4, 4);
    if (type == "IHDR") {
      image.width = static_cast<int>(big_endian(data, at + 8));
      image.height = static_cast<int>(big_endian(data, at + 12));
      channels = data.at(at + 17) == 6 ? 4 : 3;
      TRAINRT_CHECK(data.at(at + 16) == 8 && (data.at(at + 17) == 2 || data.at(at + 17) == 6) &&
                        data.at(at + 20) == 0,
                    path,
                    ": a form of PNG that is not read");
    } else if (type == "IDAT") {
      packed += data.substr(at + 8, length);
    }
    at += length + 12;
  }
  const size_t row = static_cast<size_t>(image.width) * channels;
  const size_t rows = static_cast<size_t>(image.height);
  std::vector<uint8_t> raw((row + 1) * rows);
  uLongf size = static_cast<uLongf>(raw.size());
  const int status = uncompress(raw.data(),
                                &size,
                                reinterpret_cast<const Bytef*>(packed.data()),
                                static_cast<uLong>(packed.size()));
  TRAINRT_CHECK(status == Z_OK && size == raw.size(), path, ": broken image data");
  std::vector<uint8_t> above(row, 0), line(row, 0);
  for (size_t y = 0; y < rows; ++y) {
    const uint8_t* source = raw.data() + y * (row + 1);
    for (size_t x = 0; x < row; ++x) {
      const int left = x >= channels ? line[x - channels] : 0;
      const int up = above[x], corner = x >= channels ? above[x - channels] : 0;
      const int predicted[] = {0, left, up, (left + up) / 2, paeth(left, up, corner)};
      line[x] = static_cast<uint8_t>(source[x + 1] + predicted[source[0] % 5]);
    }
    for (size_t x = 0; x < row; x += channels) {
      image.pixels.push_back({line[x], line[x + 1], line[x + 2]});
    }
    above = line;
  }
  return image;
}

}  // namespace trainrt::testing
