// A model may come from anywhere, so the file it names must not lead out of the model's folder: no
// absolute path, no "..", and after symbolic links are resolved the file must still lie inside. The
// check is on the resolved path of what is then opened.
#include "graph/onnx_external_data.h"

#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace trainrt {

namespace fs = std::filesystem;

namespace {

int64_t parse_number(const std::string& tensor, const std::string& key, const std::string& text) {
  int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  TRAINRT_REQUIRE(error == std::errc() && end == text.data() + text.size() && value >= 0,
                  kInvalidModel,
                  "tensor '",
                  tensor,
                  "': external data has ",
                  key,
                  " '",
                  text,
                  "'; wanted a number >= 0");
  return value;
}

void check_inside(const ExternalLocation& location, const fs::path& root, const fs::path& file) {
  const fs::path relative = file.lexically_relative(root);
  TRAINRT_REQUIRE(!relative.empty() && *relative.begin() != "..",
                  kInvalidModel,
                  "tensor '",
                  location.tensor,
                  "': external data '",
                  location.file,
                  "' lies outside of '",
                  root.string(),
                  "'; weights must stand in the folder of the model");
}

}  // namespace

ExternalLocation location_entries(const onnx::TensorProto& proto) {
  ExternalLocation location;
  location.tensor = proto.name();
  for (const onnx::StringStringEntryProto& entry : proto.external_data()) {
    if (entry.key() == "location") {
      location.file = entry.value();
    } else if (entry.key() == "offset") {
      location.offset = parse_number(proto.name(), "offset", entry.value());
    } else if (entry.key() == "length") {
      location.length = parse_number(proto.name(), "length", entry.value());
    }
  }
  return location;
}

ExternalLocation external_location(const onnx::TensorProto& proto) {
  ExternalLocation location = location_entries(proto);
  const fs::path path(location.file);
  TRAINRT_REQUIRE(!location.file.empty(),
                  kInvalidModel,
                  "tensor '",
                  proto.name(),
                  "' is marked external, but names no location");
  bool escapes = path.is_absolute() || location.file.find('\0') != std::string::npos;
  for (const fs::path& part : path) {
    escapes = escapes || part == "..";
  }
  TRAINRT_REQUIRE(!escapes,
                  kInvalidModel,
                  "tensor '",
                  proto.name(),
                  "': external data '",
                  location.file,
                  "' is not a path inside the model's folder");
  return location;
}

Tensor read_external(const std::string& folder,
                     const ExternalLocation& location,
                     const TensorType& type) {
  const int64_t wanted = type.bytes();
  TRAINRT_REQUIRE(location.length < 0 || location.length == wanted,
                  kInvalidModel,
                  "tensor '",
                  location.tensor,
                  "': external data has length ",
                  location.length,
                  "; ",
                  dtype_name(type.dtype),
                  shape_string(type.shape),
                  " wants ",
                  wanted);
  std::error_code error;
  const fs::path root = fs::canonical(folder.empty() ? "." : folder, error);
  const fs::path file = fs::canonical(root / location.file, error);
  const std::string named = concat("tensor '",
                                   location.tensor,
                                   "': its weights file '",
                                   (fs::path(folder) / location.file).string(),
                                   "'");
  TRAINRT_REQUIRE(!error,
                  kInvalidModel,
                  named,
                  " does not exist; put it beside the model (plan and inspect do without it)");
  TRAINRT_REQUIRE(fs::is_regular_file(file, error),
                  kInvalidModel,
                  named,
                  fs::is_directory(file, error) ? " is a folder" : " is no regular file",
                  "; wanted the file of weights that belongs to the model");
  check_inside(location, root, file);
  std::ifstream in(file, std::ios::binary);
  const auto size = static_cast<int64_t>(fs::file_size(file, error));
  TRAINRT_REQUIRE(in.good() && !error,
                  kIo,
                  "cannot open the weights file '",
                  file.string(),
                  "': ",
                  std::strerror(errno));
  TRAINRT_REQUIRE(location.offset <= size && wanted <= size - location.offset,
                  kInvalidModel,
                  "tensor '",
                  location.tensor,
                  "' takes ",
                  wanted,
                  " bytes from byte ",
                  location.offset,
                  " of '",
                  file.string(),
                  "', which has only ",
                  size,
                  ": the file is truncated or belongs to another model");
  Tensor tensor(type.dtype, type.shape);
  in.seekg(location.offset);
  in.read(reinterpret_cast<char*>(tensor.raw()), wanted);
  TRAINRT_REQUIRE(
      in.gcount() == wanted, kIo, "reading ", wanted, " bytes of '", file.string(), "' failed");
  return tensor;
}

}  // namespace trainrt
