// The header is padded with blanks to a multiple of 64 bytes, so that tensors start aligned.
#include "runtime/safetensors.h"

#include <zlib.h>

#include <array>
#include <fstream>

#include "graph/base/json.h"
#include "runtime/file_bytes.h"

namespace trainrt {

namespace {

struct FormatName {
  DType dtype;
  const char* name;
};

constexpr std::array<FormatName, 13> kFormatNames = {{{DType::kFloat32, "F32"},
                                                      {DType::kFloat64, "F64"},
                                                      {DType::kFloat16, "F16"},
                                                      {DType::kBFloat16, "BF16"},
                                                      {DType::kInt8, "I8"},
                                                      {DType::kInt16, "I16"},
                                                      {DType::kInt32, "I32"},
                                                      {DType::kInt64, "I64"},
                                                      {DType::kUInt8, "U8"},
                                                      {DType::kUInt16, "U16"},
                                                      {DType::kUInt32, "U32"},
                                                      {DType::kUInt64, "U64"},
                                                      {DType::kBool, "BOOL"}}};

const char* format_name(DType dtype) {
  for (const FormatName& format : kFormatNames) {
    if (format.dtype == dtype) {
      return format.name;
    }
  }
  return "";
}

DType dtype_of_format(const std::string& name, const std::string& path) {
  for (const FormatName& format : kFormatNames) {
    if (format.name == name) {
      return format.dtype;
    }
  }
  TRAINRT_FAIL(kIo, "'", path, "' holds elements of the unknown kind '", name, "'");
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

std::map<std::string, SafetensorsItem> read_safetensors_header(const std::string& path) {
  std::ifstream stream(path, std::ios::binary | std::ios::ate);
  const int64_t size = stream.tellg();
  uint64_t length = 0;
  stream.seekg(0);
  stream.read(reinterpret_cast<char*>(&length), sizeof(length));
  TRAINRT_REQUIRE(stream.good() && length <= static_cast<uint64_t>(size) - sizeof(length),
                  kIo,
                  "'",
                  path,
                  "' is no safetensors file, or cut");
  std::string text(length, ' ');
  stream.read(text.data(), static_cast<std::streamsize>(length));
  TRAINRT_REQUIRE(stream.good(), kIo, "cannot read '", path, "'");
  const int64_t data_at = static_cast<int64_t>(sizeof(length) + length);
  std::map<std::string, SafetensorsItem> items;
  try {
    const nlohmann::ordered_json header =
        parse_json(text, concat("the header of '", path, "'"), ErrorCode::kIo);
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__") {
        continue;
      }
      SafetensorsItem item;
      item.dtype = dtype_of_format(entry.at("dtype").get<std::string>(), path);
      item.shape = entry.at("shape").get<Shape>();
      const auto [begin, end] = entry.at("data_offsets").get<std::pair<int64_t, int64_t>>();
      TRAINRT_REQUIRE(begin >= 0 && end >= begin && end <= size - data_at &&
                          (end - begin) % dtype_bytes(item.dtype) == 0 &&
                          num_elements(item.shape) == (end - begin) / dtype_bytes(item.dtype),
                      kIo,
                      "'",
                      path,
                      "' is damaged: '",
                      name,
                      "' ",
                      shape_string(item.shape),
                      " at bytes ",
                      begin,
                      " to ",
                      end,
                      " of ",
                      size - data_at);
      item.begin = data_at + begin;
      items[name] = item;
    }
  } catch (const nlohmann::json::exception&) {
    TRAINRT_FAIL(kIo,
                 "'",
                 path,
                 "' has a damaged header: wanted 'dtype', 'shape' and 'data_offsets' of each "
                 "tensor, as names and whole numbers");
  }
  return items;
}

}  // namespace trainrt
