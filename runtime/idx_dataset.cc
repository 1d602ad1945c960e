// IDX, the format of MNIST and its relatives: two zero bytes, a type code, the number of dims, the
// dims as big-endian 32-bit numbers, the data.
#include <filesystem>
#include <set>

#include "graph/base/error.h"
#include "runtime/claimed_bytes.h"
#include "runtime/dataset.h"
#include "runtime/file_bytes.h"

namespace trainrt {

namespace fs = std::filesystem;

namespace {

DType idx_dtype(int code, const std::string& path) {
  switch (code) {
    case 0x08:
      return DType::kUInt8;
    case 0x09:
      return DType::kInt8;
    case 0x0B:
      return DType::kInt16;
    case 0x0C:
      return DType::kInt32;
    case 0x0D:
      return DType::kFloat32;
    case 0x0E:
      return DType::kFloat64;
    default:
      TRAINRT_FAIL(kInvalidArgument,
                   "'",
                   path,
                   "' has IDX type code ",
                   code,
                   "; wanted 8, 9, 11, 12, 13 or 14");
  }
}

Tensor read_idx(const std::string& path) {
  const std::vector<std::byte> bytes = read_maybe_gzip(path);
  const auto byte_at = [&](size_t i) { return static_cast<uint32_t>(bytes[i]); };
  TRAINRT_REQUIRE(bytes.size() >= 4 && byte_at(0) == 0 && byte_at(1) == 0 && byte_at(3) > 0,
                  kInvalidArgument,
                  "'",
                  path,
                  "' is no IDX file");
  const DType dtype = idx_dtype(static_cast<int>(byte_at(2)), path);
  const size_t ndim = byte_at(3);
  const size_t header_bytes = 4 + 4 * ndim;
  TRAINRT_REQUIRE(bytes.size() >= header_bytes, kInvalidArgument, "'", path, "' is cut");
  Shape shape;
  for (size_t d = 0; d < ndim; ++d) {
    const size_t at = 4 + 4 * d;
    shape.push_back(static_cast<int64_t>(byte_at(at) << 24 | byte_at(at + 1) << 16 |
                                         byte_at(at + 2) << 8 | byte_at(at + 3)));
  }
  const size_t item = static_cast<size_t>(dtype_bytes(dtype));
  const int64_t wanted = claimed_bytes(shape, dtype);
  TRAINRT_REQUIRE(static_cast<int64_t>(bytes.size() - header_bytes) == wanted,
                  kInvalidArgument,
                  "'",
                  path,
                  "' has ",
                  bytes.size() - header_bytes,
                  " bytes of data, its dims ",
                  shape_string(shape),
                  " want ",
                  wanted);
  Tensor tensor(dtype, shape);
  for (size_t i = 0; i < static_cast<size_t>(wanted); ++i) {
    // Items are big-endian.
    tensor.raw()[i / item * item + (item - 1 - i % item)] = bytes[header_bytes + i];
  }
  return tensor;
}

// The file `<prefix>-<what>-idx<n>-ubyte[.gz]` of the folder, a dot allowed before idx.
std::string find_file(const std::string& folder,
                      const std::string& prefix,
                      const std::string& what) {
  std::set<std::string> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename();
    if (name.rfind(prefix + "-" + what, 0) == 0 && name.find("idx") != std::string::npos) {
      found.insert(entry.path());
    }
  }
  TRAINRT_REQUIRE(!error, kIo, "cannot read folder '", folder, "': ", error.message());
  TRAINRT_REQUIRE(!found.empty(),
                  kInvalidArgument,
                  "folder '",
                  folder,
                  "' has no file '",
                  prefix,
                  "-",
                  what,
                  "-idx*-ubyte' (plain or .gz)");
  return *found.begin();  // the plain one before .gz
}

}  // namespace

std::unique_ptr<Dataset> open_idx_folder(const std::string& folder, const std::string& prefix) {
  DataArray images;
  images.name = "images";
  DataArray labels;
  labels.name = "labels";
  labels.is_labels = true;
  std::vector<Tensor> tensors = {read_idx(find_file(folder, prefix, "images")),
                                 read_idx(find_file(folder, prefix, "labels"))};
  return make_memory_dataset(folder, {images, labels}, std::move(tensors), {0, 0});
}

}  // namespace trainrt
