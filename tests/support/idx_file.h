// Files in MNIST's IDX format, for data that a test makes up.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace trainrt::testing {

std::string big_endian(uint32_t value);

// `type`: 0x08 uint8, 0x0C int32, 0x0D float32; `data` big-endian.
std::string idx_bytes(char type, const std::vector<uint32_t>& dims, const std::string& data);

// Writes folder/<split>-images and -labels of the given samples.
void write_idx_folder(const std::string& folder,
                      const std::string& split,
                      const std::vector<std::vector<float>>& images,
                      const std::vector<int32_t>& labels);

}  // namespace trainrt::testing
