// The header is padded with blanks to a multiple of 64 bytes, so that tensors start aligned.
#include "runtime/safetensors.h"

#include <zlib.h>

#include <nlohmann/json.hpp>

#include "runtime/file_bytes.h"

namespace trainrt {

namespace {

const char* format_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "F32";
    case DType::kFloat64:
      return "F64";
    case DType::kFloat16:
      return "F16";
    case DType::kBFloat16:
      return "BF16";
    case DType::kInt8:
      return "I8";
    case DType::kInt16:
      return "I16";
    case DType::kInt32:
      return "I32";
    case DType::kInt64:
      return "I64";
    case DType::kUInt8:
      return "U8";
    case DType::kUInt16:
      return "U16";
    case DType::kUInt32:
      return "U32";
    case DType::kUInt64:
      return "U64";
    case DType::kBool:
      return "BOOL";
  }
  return "";
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(std::string path) : path_(std::move(path)) {}

void SafetensorsWriter::add(const std::string& name, const Tensor& tensor) {
  items_.push_back({name, tensor});
}

SafetensorsWriter::Summary SafetensorsWriter::finish() {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  int64_t offset = 0;
  for (const Item& item : items_) {
    const int64_t end = offset + item.tensor.bytes();
    header[item.name] = {{"dtype", format_name(item.tensor.dtype())},
                         {"shape", item.tensor.shape()},
                         {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((8 + text.size() + 63) / 64 * 64 - 8, ' ');
  Summary summary;
  uLong crc = ::crc32(0, nullptr, 0);
  write_file_atomically(path_, [&](std::ostream& out) {
    const auto put = [&](const void* data, size_t bytes) {
      out.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
      for (size_t at = 0; at < bytes; at += 1 << 30) {  // zlib counts in 32 bits
        crc = ::crc32(crc,
                      static_cast<const Bytef*>(data) + at,
                      static_cast<uInt>(std::min<size_t>(bytes - at, 1 << 30)));
      }
      summary.bytes += static_cast<int64_t>(bytes);
    };
    const uint64_t length = text.size();
    put(&length, sizeof(length));
    put(text.data(), text.size());
    for (const Item& item : items_) {
      summary.begins.push_back(summary.bytes);
      put(item.tensor.raw(), static_cast<size_t>(item.tensor.bytes()));
    }
  });
  summary.crc32 = static_cast<uint32_t>(crc);
  return summary;
}

}  // namespace trainrt
