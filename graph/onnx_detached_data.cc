// Walks the wire format (a field is a tag and, for messages and bytes, a length) down the one path
// ModelProto.graph.initializer and copies all but raw_data. Whatever looks unusual (a group, a
// field that ends past its message, a tensor with two sources of data) is left to the parser.
#include "graph/onnx_detached_data.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "graph/onnx_external_data.h"
#include "graph/onnx_tensor.h"

namespace trainrt {

namespace {

constexpr size_t kLarge = 64 << 10;  // bytes

// Field numbers of onnx.proto3.
constexpr uint32_t kModelGraph = 7;
constexpr uint32_t kGraphInitializer = 5;
constexpr uint32_t kTensorDataType = 2, kTensorRawData = 9, kTensorExternalData = 13,
                   kTensorDataLocation = 14;
constexpr uint32_t kEntryKey = 1, kEntryValue = 2;

enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

struct Field {
  uint32_t number = 0;
  uint32_t type = 0;
  uint64_t value = 0;         // of a varint
  std::string_view contents;  // of kBytes
  std::string_view whole;     // tag and all
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  bool at_end() const { return rest_.empty(); }

  // False when what follows is no field.
  bool next(Field* field) {
    const std::string_view start = rest_;
    uint64_t tag = 0;
    if (!varint(&tag)) {
      return false;
    }
    field->number = static_cast<uint32_t>(tag >> 3);
    field->type = static_cast<uint32_t>(tag & 7);
    uint64_t size = 0;
    switch (field->type) {
      case kVarint:
        if (!varint(&field->value)) {
          return false;
        }
        break;
      case kFixed64:
        size = 8;
        break;
      case kFixed32:
        size = 4;
        break;
      case kBytes:
        if (!varint(&size)) {
          return false;
        }
        break;
      default:
        return false;
    }
    if (size > rest_.size()) {
      return false;
    }
    field->contents = rest_.substr(0, size);
    rest_.remove_prefix(size);
    field->whole = start.substr(0, start.size() - rest_.size());
    return true;
  }

 private:
  bool varint(uint64_t* value) {
    *value = 0;
    for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      *value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if ((byte & 0x80) == 0) {
        return true;
      }
    }
    return false;
  }

  std::string_view rest_;
};

void put_varint(uint64_t value, std::string* out) {
  for (; value >= 0x80; value >>= 7) {
    out->push_back(static_cast<char>(value | 0x80));
  }
  out->push_back(static_cast<char>(value));
}

void put_bytes(uint32_t number, std::string_view bytes, std::string* out) {
  put_varint(number << 3 | kBytes, out);
  put_varint(bytes.size(), out);
  out->append(bytes);
}

bool is_float(uint64_t data_type) {
  return data_type == onnx::TensorProto::FLOAT || data_type == onnx::TensorProto::DOUBLE ||
         data_type == onnx::TensorProto::FLOAT16 || data_type == onnx::TensorProto::BFLOAT16;
}

class Detacher {
 public:
  explicit Detacher(std::string_view model) : model_(model) {}

  std::optional<std::string> run() {
    std::string stripped;
    if (!copy(model_, kModelGraph, &Detacher::graph, &stripped) || !any_) {
      return std::nullopt;
    }
    return stripped;
  }

 private:
  using Part = bool (Detacher::*)(std::string_view, std::string*);

  // Copies a message, its fields `number` as `part` says.
  bool copy(std::string_view message, uint32_t number, Part part, std::string* out) {
    Reader reader(message);
    Field field;
    while (!reader.at_end()) {
      if (!reader.next(&field)) {
        return false;
      }
      if (field.number == number && field.type == kBytes) {
        std::string inner;
        if (!(this->*part)(field.contents, &inner)) {
          return false;
        }
        put_bytes(number, inner, out);
      } else {
        out->append(field.whole);
      }
    }
    return true;
  }

  bool graph(std::string_view message, std::string* out) {
    return copy(message, kGraphInitializer, &Detacher::tensor, out);
  }

  bool tensor(std::string_view message, std::string* out) {
    Reader reader(message);
    Field field;
    std::string_view data;
    uint64_t data_type = 0;
    int sources = 0;
    std::string rest;
    while (!reader.at_end()) {
      if (!reader.next(&field)) {
        return false;
      }
      if (field.number == kTensorRawData && field.type == kBytes) {
        data = field.contents;
        ++sources;
        continue;
      }
      sources += field.number == kTensorExternalData || field.number == kTensorDataLocation ? 1 : 0;
      data_type = field.number == kTensorDataType ? field.value : data_type;
      rest.append(field.whole);
    }
    if (sources != 1 || data.size() < kLarge || !is_float(data_type)) {
      out->append(message);
      return true;
    }
    any_ = true;
    *out = std::move(rest);
    put_varint(kTensorDataLocation << 3 | kVarint, out);
    put_varint(onnx::TensorProto::EXTERNAL, out);
    const auto entry = [&](const char* key, const std::string& value) {
      std::string pair;
      put_bytes(kEntryKey, key, &pair);
      put_bytes(kEntryValue, value, &pair);
      put_bytes(kTensorExternalData, pair, out);
    };
    entry("location", "");
    entry("offset", std::to_string(data.data() - model_.data()));
    entry("length", std::to_string(data.size()));
    return true;
  }

  std::string_view model_;
  bool any_ = false;
};

}  // namespace

std::shared_ptr<const MappedFile> MappedFile::open(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) {
    return nullptr;
  }
  struct stat status = {};
  void* data = MAP_FAILED;
  if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_size > 0) {
    data = mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, file, 0);
  }
  close(file);
  if (data == MAP_FAILED) {
    return nullptr;
  }
  return std::shared_ptr<const MappedFile>(
      new MappedFile(static_cast<const char*>(data), static_cast<size_t>(status.st_size)));
}

MappedFile::~MappedFile() {
  munmap(const_cast<char*>(data_), size_);
}

std::optional<std::string> detach_weights(std::string_view model) {
  return Detacher(model).run();
}

bool is_detached(const onnx::TensorProto& proto) {
  if (proto.data_location() != onnx::TensorProto::EXTERNAL || proto.external_data_size() != 3) {
    return false;
  }
  const onnx::StringStringEntryProto& first = proto.external_data(0);
  return first.key() == "location" && first.value().empty();
}

namespace {

// The first of the tensor's bytes.
const char* detached_bytes(const onnx::TensorProto& proto,
                           const TensorType& type,
                           const std::shared_ptr<const MappedFile>& file) {
  const ExternalLocation location = location_entries(proto);
  const int64_t size = file == nullptr ? 0 : static_cast<int64_t>(file->bytes().size());
  TRAINRT_REQUIRE(location.length == type.bytes() && location.offset <= size &&
                      location.length <= size - location.offset,
                  kInvalidModel,
                  "tensor '",
                  proto.name(),
                  "' (",
                  dtype_name(type.dtype),
                  shape_string(type.shape),
                  ") holds ",
                  location.length,
                  " bytes; wanted ",
                  type.bytes(),
                  ". The file is damaged or was written wrongly");
  return file->bytes().data() + location.offset;
}

}  // namespace

Tensor detached_tensor(const onnx::TensorProto& proto,
                       const TensorType& type,
                       const std::shared_ptr<const MappedFile>& file) {
  const char* data = detached_bytes(proto, type, file);
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(dtype_bytes(type.dtype)) == 0) {
    return Tensor(type.dtype,
                  type.shape,
                  std::const_pointer_cast<MappedFile>(file),
                  reinterpret_cast<std::byte*>(const_cast<char*>(data)));
  }
  Tensor tensor(type.dtype, type.shape);
  std::memcpy(tensor.raw(), data, static_cast<size_t>(type.bytes()));
  return tensor;
}

Tensor detached_elements(const onnx::TensorProto& proto,
                         const TensorType& type,
                         const std::shared_ptr<const MappedFile>& file,
                         int64_t first,
                         int64_t count) {
  const int64_t size = dtype_bytes(type.dtype);
  TRAINRT_CHECK(first >= 0 && count >= 0 && (first + count) * size <= type.bytes());
  Tensor tensor(type.dtype, {count});
  std::memcpy(tensor.raw(),
              detached_bytes(proto, type, file) + first * size,
              static_cast<size_t>(count * size));
  return tensor;
}

void attach_weights(onnx::GraphProto& graph, const std::shared_ptr<const MappedFile>& file) {
  for (onnx::TensorProto& tensor : *graph.mutable_initializer()) {
    if (is_detached(tensor)) {
      const Tensor data = detached_tensor(tensor, tensor_type(tensor, tensor.name()), file);
      tensor.clear_external_data();
      tensor.clear_data_location();
      tensor.set_raw_data(data.raw(), static_cast<size_t>(data.bytes()));
    }
  }
}

}  // namespace trainrt
