// Writes a safetensors file: the length of a JSON header, the header, the tensors' bytes.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "graph/tensor.h"

namespace trainrt {

class SafetensorsWriter {
 public:
  struct Summary {
    int64_t bytes = 0;
    uint32_t crc32 = 0;           // of the whole file
    std::vector<int64_t> begins;  // where each tensor's bytes begin in the file
  };

  explicit SafetensorsWriter(std::string path);
  void add(const std::string& name, const Tensor& tensor);
  // Writes and syncs the file. Throws kIo (disk full ...).
  Summary finish();

 private:
  struct Item {
    std::string name;
    Tensor tensor;
  };
  std::string path_;
  std::vector<Item> items_;
};

}  // namespace trainrt
