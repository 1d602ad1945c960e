#include "tests/support/idx_file.h"

#include <bit>
#include <filesystem>

#include "tests/support/run_program.h"

namespace trainrt::testing {

std::string big_endian(uint32_t value) {
  return {static_cast<char>(value >> 24),
          static_cast<char>(value >> 16),
          static_cast<char>(value >> 8),
          static_cast<char>(value)};
}

std::string idx_bytes(char type, const std::vector<uint32_t>& dims, const std::string& data) {
  std::string bytes = {0, 0, type, static_cast<char>(dims.size())};
  for (const uint32_t dim : dims) {
    bytes += big_endian(dim);
  }
  return bytes + data;
}

void write_idx_folder(const std::string& folder,
                      const std::string& split,
                      const std::vector<std::vector<float>>& images,
                      const std::vector<int32_t>& labels) {
  std::filesystem::create_directories(folder);
  std::string pixels, classes;
  for (const std::vector<float>& image : images) {
    for (const float pixel : image) {
      pixels += big_endian(std::bit_cast<uint32_t>(pixel));
    }
  }
  for (const int32_t label : labels) {
    classes += big_endian(static_cast<uint32_t>(label));
  }
  const auto count = [](size_t n) { return static_cast<uint32_t>(n); };
  write_text(folder + "/" + split + "-images-idx2-float",
             idx_bytes(0x0D, {count(images.size()), count(images.at(0).size())}, pixels));
  write_text(folder + "/" + split + "-labels-idx1-int",
             idx_bytes(0x0C, {count(labels.size())}, classes));
}

}  // namespace trainrt::testing
