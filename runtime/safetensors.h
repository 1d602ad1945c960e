// Safetensors files: the length of a JSON header, the header, the tensors' bytes.
#pragma once

#include <cstdint>
#include <fstream>
#include <map>
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

// Where a tensor lies in a safetensors file.
struct SafetensorsItem {
  DType dtype = DType::kFloat32;
  Shape shape;
  int64_t begin = 0;  // of its bytes, from the file's beginning
};

// The tensors of a file by name; their bytes lie within it. Throws kIo for a damaged header.
std::map<std::string, SafetensorsItem> read_safetensors_header(const std::string& path);

}  // namespace trainrt
