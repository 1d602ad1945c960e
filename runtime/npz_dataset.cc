// NumPy's .npz: a zip archive (stored or deflated entries, with or without the 64-bit extension) of
// .npy files. The archive is read through its central directory at the end, as numpy.load does.
#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>

#include "graph/base/error.h"
#include "graph/base/log.h"
#include "runtime/claimed_bytes.h"
#include "runtime/dataset.h"
#include "runtime/file_bytes.h"

namespace trainrt {

namespace {

// Little-endian reads with bounds.
class ByteReader {
 public:
  ByteReader(const std::vector<std::byte>& bytes, const std::string& path)
      : bytes_(bytes), path_(path) {}

  template <typename T>
  T read(uint64_t at) const {
    T value;
    std::memcpy(&value, span(at, sizeof(T)), sizeof(T));
    return value;
  }
  const std::byte* span(uint64_t at, uint64_t size) const {
    TRAINRT_REQUIRE(at <= bytes_.size() && size <= bytes_.size() - at,
                    kInvalidArgument,
                    "'",
                    path_,
                    "' is damaged or cut: it refers to byte ",
                    at,
                    " + ",
                    size,
                    " of ",
                    bytes_.size());
    return bytes_.data() + at;
  }
  uint64_t size() const { return bytes_.size(); }

 private:
  const std::vector<std::byte>& bytes_;
  const std::string& path_;
};

struct ZipEntry {
  std::string name;
  uint16_t method = 0;  // 0 stored, 8 deflated
  uint32_t crc32 = 0;
  uint64_t packed_bytes = 0;
  uint64_t bytes = 0;
  uint64_t header_at = 0;
};

// The 64-bit extension (field 1) holds, in order, those of the three that are 0xffffffff.
void read_zip64(const ByteReader& reader, uint64_t at, uint64_t end, ZipEntry& entry) {
  while (at + 4 <= end) {
    const auto id = reader.read<uint16_t>(at);
    const auto size = reader.read<uint16_t>(at + 2);
    at += 4;
    if (id == 1) {
      for (uint64_t* field : {&entry.bytes, &entry.packed_bytes, &entry.header_at}) {
        if (*field == 0xffffffffu) {
          *field = reader.read<uint64_t>(at);
          at += 8;
        }
      }
      return;
    }
    at += size;
  }
}

std::vector<ZipEntry> read_directory(const ByteReader& reader, const std::string& path) {
  constexpr uint32_t kEnd = 0x06054b50, kEnd64 = 0x06064b50, kLocator64 = 0x07064b50,
                     kFile = 0x02014b50;
  TRAINRT_REQUIRE(reader.size() >= 22, kInvalidArgument, "'", path, "' is no .npz file");
  uint64_t end = reader.size() - 22;
  const uint64_t stop = end > 65535 ? end - 65535 : 0;  // a comment may follow the record
  while (reader.read<uint32_t>(end) != kEnd) {
    TRAINRT_REQUIRE(end > stop,
                    kInvalidArgument,
                    "'",
                    path,
                    "' is no .npz file, or cut: it has no zip directory");
    --end;
  }
  uint64_t count = reader.read<uint16_t>(end + 10);
  uint64_t at = reader.read<uint32_t>(end + 16);
  if (end >= 20 && reader.read<uint32_t>(end - 20) == kLocator64) {
    const auto end64 = reader.read<uint64_t>(end - 20 + 8);
    TRAINRT_REQUIRE(reader.read<uint32_t>(end64) == kEnd64,
                    kInvalidArgument,
                    "'",
                    path,
                    "' has a damaged zip directory");
    count = reader.read<uint64_t>(end64 + 32);
    at = reader.read<uint64_t>(end64 + 48);
  }
  std::vector<ZipEntry> entries;
  for (uint64_t i = 0; i < count; ++i) {
    TRAINRT_REQUIRE(reader.read<uint32_t>(at) == kFile,
                    kInvalidArgument,
                    "'",
                    path,
                    "' has a damaged zip directory");
    ZipEntry entry;
    entry.method = reader.read<uint16_t>(at + 10);
    entry.crc32 = reader.read<uint32_t>(at + 16);
    entry.packed_bytes = reader.read<uint32_t>(at + 20);
    entry.bytes = reader.read<uint32_t>(at + 24);
    const auto name_bytes = reader.read<uint16_t>(at + 28);
    const auto extra_bytes = reader.read<uint16_t>(at + 30);
    const auto comment_bytes = reader.read<uint16_t>(at + 32);
    entry.header_at = reader.read<uint32_t>(at + 42);
    entry.name.assign(reinterpret_cast<const char*>(reader.span(at + 46, name_bytes)), name_bytes);
    read_zip64(reader, at + 46 + name_bytes, at + 46 + name_bytes + extra_bytes, entry);
    entries.push_back(std::move(entry));
    at += uint64_t{46} + name_bytes + extra_bytes + comment_bytes;
  }
  return entries;
}

std::vector<std::byte> unpack_entry(const ByteReader& reader,
                                    const ZipEntry& entry,
                                    const std::string& what) {
  const uint64_t data_at = entry.header_at + 30 + reader.read<uint16_t>(entry.header_at + 26) +
                           reader.read<uint16_t>(entry.header_at + 28);
  const std::byte* data = reader.span(data_at, entry.packed_bytes);
  if (entry.method == 0) {
    TRAINRT_REQUIRE(entry.bytes == entry.packed_bytes, kInvalidArgument, what, " is damaged");
    return std::vector<std::byte>(data, data + entry.bytes);
  }
  TRAINRT_REQUIRE(entry.method == 8,
                  kInvalidArgument,
                  what,
                  " is packed by zip method ",
                  entry.method,
                  "; wanted stored or deflated, as numpy.savez writes");
  // Deflate packs at most 1032:1; a larger claim is damage, and not worth the memory.
  TRAINRT_REQUIRE(entry.bytes / 1040 <= entry.packed_bytes, kInvalidArgument, what, " is damaged");
  return inflate_raw(data, entry.packed_bytes, entry.bytes, what);
}

std::vector<std::byte> read_entry(const ByteReader& reader,
                                  const ZipEntry& entry,
                                  const std::string& what) {
  std::vector<std::byte> bytes = unpack_entry(reader, entry, what);
  const uLong crc = ::crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size());
  TRAINRT_REQUIRE(crc == entry.crc32, kInvalidArgument, what, " is damaged (check sum)");
  return bytes;
}

DType npy_dtype(const std::string& descr, const std::string& what) {
  static const std::map<std::string, DType> kTypes = {{"f4", DType::kFloat32},
                                                      {"f8", DType::kFloat64},
                                                      {"f2", DType::kFloat16},
                                                      {"i1", DType::kInt8},
                                                      {"i2", DType::kInt16},
                                                      {"i4", DType::kInt32},
                                                      {"i8", DType::kInt64},
                                                      {"u1", DType::kUInt8},
                                                      {"u2", DType::kUInt16},
                                                      {"u4", DType::kUInt32},
                                                      {"u8", DType::kUInt64},
                                                      {"b1", DType::kBool}};
  const auto at = descr.size() < 2 ? kTypes.end() : kTypes.find(descr.substr(1));
  TRAINRT_REQUIRE(at != kTypes.end() && (descr[0] != '>' || descr.back() == '1'),
                  kUnsupported,
                  what,
                  " has dtype '",
                  descr,
                  "'; wanted little-endian float, integer or bool (array.astype(...))");
  return at->second;
}

// Rewrites column-major data as row-major.
Tensor from_fortran_order(const Tensor& columns) {
  Tensor rows(columns.dtype(), columns.shape());
  const Shape& shape = columns.shape();
  Shape strides(shape.size(), 1);
  for (size_t d = 1; d < shape.size(); ++d) {
    strides[d] = strides[d - 1] * shape[d - 1];
  }
  const int64_t item = dtype_bytes(columns.dtype());
  Shape index(shape.size(), 0);
  for (int64_t i = 0; i < rows.num_elements(); ++i) {
    const int64_t from =
        std::inner_product(index.begin(), index.end(), strides.begin(), int64_t{0});
    std::memcpy(rows.raw() + i * item, columns.raw() + from * item, static_cast<size_t>(item));
    for (size_t d = shape.size(); d-- > 0 && ++index[d] == shape[d];) {
      index[d] = 0;
    }
  }
  return rows;
}

// The text after `key` in the header's Python dictionary.
std::string after_key(const std::string& header, const std::string& key, const std::string& what) {
  const size_t at = header.find("'" + key + "':");
  TRAINRT_REQUIRE(
      at != std::string::npos, kInvalidArgument, what, " has a header without '", key, "'");
  const size_t value = header.find_first_not_of(' ', at + key.size() + 3);
  return value == std::string::npos ? "" : header.substr(value);
}

// Throws kUnsupported for an array of elements that no input could take, kInvalidArgument for
// damage.
Tensor parse_npy(const std::vector<std::byte>& bytes, const std::string& what) {
  const ByteReader reader(bytes, what);
  TRAINRT_REQUIRE(bytes.size() >= 10 && std::memcmp(bytes.data(), "\x93NUMPY", 6) == 0,
                  kInvalidArgument,
                  what,
                  " is no .npy array");
  const bool long_header = reader.read<uint8_t>(6) >= 2;
  const uint64_t header_bytes =
      long_header ? reader.read<uint32_t>(8) : uint64_t{reader.read<uint16_t>(8)};
  const uint64_t header_at = long_header ? 12 : 10;
  const std::string header(reinterpret_cast<const char*>(reader.span(header_at, header_bytes)),
                           header_bytes);
  const std::string descr = after_key(header, "descr", what);
  TRAINRT_REQUIRE(descr.size() > 1 && descr[0] == '\'',
                  kUnsupported,
                  what,
                  " is a structured array; wanted a plain one");
  const DType dtype = npy_dtype(descr.substr(1, descr.find('\'', 1) - 1), what);
  const std::string dims = after_key(header, "shape", what);
  Shape shape;
  for (size_t i = 1; i < dims.size() && dims[i] != ')';) {
    if (dims[i] >= '0' && dims[i] <= '9') {
      TRAINRT_REQUIRE(shape.size() < 64, kInvalidArgument, what, " has too many dims");
      size_t digits = 0;
      try {
        shape.push_back(std::stoll(dims.substr(i, 20), &digits));
      } catch (const std::exception&) {
        TRAINRT_FAIL(kInvalidArgument, what, " has a damaged shape");
      }
      i += digits;
    } else {  // "(6, 4)", or "(6L, 4L)" of Python 2
      TRAINRT_REQUIRE(dims[i] == ',' || dims[i] == ' ' || dims[i] == 'L',
                      kInvalidArgument,
                      what,
                      " has a damaged shape");
      ++i;
    }
  }
  const uint64_t data_at = header_at + header_bytes;
  const int64_t wanted = claimed_bytes(shape, dtype);
  TRAINRT_REQUIRE(static_cast<int64_t>(bytes.size() - data_at) == wanted,
                  kInvalidArgument,
                  what,
                  " has ",
                  bytes.size() - data_at,
                  " bytes of data, its shape ",
                  shape_string(shape),
                  " wants ",
                  wanted);
  Tensor tensor(dtype, shape);
  std::memcpy(tensor.raw(), bytes.data() + data_at, static_cast<size_t>(wanted));
  const bool fortran = after_key(header, "fortran_order", what).rfind("True", 0) == 0;
  return fortran && shape.size() > 1 ? from_fortran_order(tensor) : tensor;
}

// Whether an array of `shape`, its samples along `axis`, can be what the input takes.
bool fits(const Shape& shape, int axis, const InputLayout& input, std::optional<int64_t> samples) {
  if (axis >= static_cast<int>(shape.size()) ||
      (samples && shape[static_cast<size_t>(axis)] != *samples)) {
    return false;
  }
  Shape sample = shape;
  sample.erase(sample.begin() + axis);
  return sample.size() == input.sample_shape.size() &&
         std::equal(sample.begin(),
                    sample.end(),
                    input.sample_shape.begin(),
                    [](int64_t have, int64_t want) { return want < 0 || have == want; });
}

std::optional<size_t> first_in_use(const std::vector<DataArray>& arrays,
                                   const std::set<std::string>& in_use) {
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (in_use.count(arrays[i].name) != 0) {
      return i;
    }
  }
  return std::nullopt;
}

// Keras' test arrays beside its training arrays, weights of classes: what is not read may have
// another number of samples.
void leave_out_others(const std::string& path,
                      const std::set<std::string>& in_use,
                      std::vector<DataArray>& arrays,
                      std::vector<Tensor>& tensors,
                      std::vector<int>& axes) {
  const std::optional<size_t> first = first_in_use(arrays, in_use);
  const auto samples_of = [&](size_t i) {
    const size_t axis = static_cast<size_t>(axes[i]);
    return axis < tensors[i].shape().size() ? tensors[i].shape()[axis] : int64_t{-1};
  };
  if (!first || samples_of(*first) < 0) {
    return;
  }
  const int64_t wanted = samples_of(*first);
  const std::string name = arrays[*first].name;
  bool agree = true;  // or else only those that do not are left, to be told of
  for (size_t i = 0; i < arrays.size(); ++i) {
    agree = agree && (in_use.count(arrays[i].name) == 0 || samples_of(i) == wanted);
  }
  std::string names;
  for (size_t i = arrays.size(); i-- > 0;) {
    if ((samples_of(i) != wanted || !agree) && in_use.count(arrays[i].name) == 0) {
      names = concat("'", arrays[i].name, names.empty() ? "'" : "', ", names);
      const auto at = static_cast<std::ptrdiff_t>(i);
      arrays.erase(arrays.begin() + at);
      tensors.erase(tensors.begin() + at);
      axes.erase(axes.begin() + at);
    }
  }
  if (agree && !names.empty()) {
    log_warning("'",
                path,
                "': left out, with another number of samples than the ",
                wanted,
                " of array '",
                name,
                "': ",
                names);
  }
}

std::vector<int> sample_axes(const std::vector<DataArray>& arrays,
                             const std::vector<Tensor>& tensors,
                             const std::map<std::string, int>& batch_axes,
                             const std::map<std::string, InputLayout>& inputs,
                             const std::set<std::string>& in_use) {
  std::vector<int> axes;
  std::optional<int64_t> samples;  // of an array whose axis is beyond doubt
  const bool any_in_use = first_in_use(arrays, in_use).has_value();
  for (size_t i = 0; i < arrays.size(); ++i) {
    const auto named = batch_axes.find(arrays[i].name);
    axes.push_back(named == batch_axes.end() ? 0 : named->second);
    const size_t axis = static_cast<size_t>(axes.back());
    const bool tells = !any_in_use || in_use.count(arrays[i].name) != 0;
    if (tells && inputs.count(arrays[i].name) == 0 && axis < tensors[i].shape().size()) {
      samples = tensors[i].shape()[axis];
    }
  }
  for (size_t i = 0; i < arrays.size(); ++i) {
    const auto input = inputs.find(arrays[i].name);
    const Shape& shape = tensors[i].shape();
    if (input != inputs.end() && (fits(shape, input->second.batch_axis, input->second, samples) ||
                                  !fits(shape, 0, input->second, samples))) {
      axes[i] = input->second.batch_axis;
    }
  }
  return axes;
}

}  // namespace

std::unique_ptr<Dataset> open_npz(const std::string& path,
                                  const std::map<std::string, int>& batch_axes,
                                  const std::map<std::string, InputLayout>& inputs,
                                  const std::set<std::string>& in_use) {
  const std::vector<std::byte> bytes = read_file(path);
  const ByteReader reader(bytes, path);
  std::vector<DataArray> arrays;
  std::vector<Tensor> tensors;
  std::vector<std::string> left_out;
  for (const ZipEntry& entry : read_directory(reader, path)) {
    if (!entry.name.ends_with(".npy")) {
      continue;
    }
    DataArray array;
    array.name = entry.name.substr(0, entry.name.size() - 4);
    const std::string what = concat("array '", array.name, "' of '", path, "'");
    const bool is_new = std::none_of(arrays.begin(), arrays.end(), [&](const DataArray& other) {
      return other.name == array.name;
    });
    TRAINRT_REQUIRE(is_new, kInvalidArgument, what, " is there twice");
    try {
      tensors.push_back(parse_npy(read_entry(reader, entry, what), what));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) {
        throw;
      }
      left_out.push_back(error.message());  // texts, say, that nothing reads
      continue;
    }
    if (tensors.back().shape().empty()) {
      tensors.pop_back();
      left_out.push_back(what + " is a single number and no samples");
      continue;
    }
    arrays.push_back(std::move(array));
  }
  TRAINRT_REQUIRE(!arrays.empty() || left_out.empty(), kInvalidArgument, left_out.front());
  for (const std::string& reason : left_out) {
    log_warning(reason, "; it is left out");
  }
  std::vector<int> axes = sample_axes(arrays, tensors, batch_axes, inputs, in_use);
  leave_out_others(path, in_use, arrays, tensors, axes);
  return make_memory_dataset(path, std::move(arrays), std::move(tensors), std::move(axes));
}

}  // namespace trainrt
