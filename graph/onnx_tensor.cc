// A TensorProto keeps its elements as raw little-endian bytes, as a typed list (whose element type
// is wider than the tensor's for the small types: 16-bit floats are bit patterns in int32_data), or
// in another file. A sparse tensor is a list of values and of linear or coordinate indices.
#include "graph/onnx_tensor.h"

#include <algorithm>
#include <cstring>

#include "graph/onnx_detached_data.h"
#include "graph/onnx_external_data.h"

namespace trainrt {

using onnx::SparseTensorProto;
using onnx::TensorProto;

std::optional<DType> dtype_from_onnx(int data_type) {
  switch (data_type) {
    case TensorProto::FLOAT:
      return DType::kFloat32;
    case TensorProto::DOUBLE:
      return DType::kFloat64;
    case TensorProto::FLOAT16:
      return DType::kFloat16;
    case TensorProto::BFLOAT16:
      return DType::kBFloat16;
    case TensorProto::INT8:
      return DType::kInt8;
    case TensorProto::INT16:
      return DType::kInt16;
    case TensorProto::INT32:
      return DType::kInt32;
    case TensorProto::INT64:
      return DType::kInt64;
    case TensorProto::UINT8:
      return DType::kUInt8;
    case TensorProto::UINT16:
      return DType::kUInt16;
    case TensorProto::UINT32:
      return DType::kUInt32;
    case TensorProto::UINT64:
      return DType::kUInt64;
    case TensorProto::BOOL:
      return DType::kBool;
    default:
      return std::nullopt;
  }
}

int dtype_to_onnx(DType dtype) {
  for (int data_type = TensorProto::FLOAT; data_type <= TensorProto::BFLOAT16; ++data_type) {
    if (dtype_from_onnx(data_type) == dtype) {
      return data_type;
    }
  }
  TRAINRT_FAIL(kInternal, "no ONNX element type for ", dtype_name(dtype));
}

std::string onnx_dtype_name(int data_type) {
  const std::string name = TensorProto::DataType_IsValid(data_type)
                               ? TensorProto::DataType_Name(data_type)
                               : concat("type ", data_type);
  std::string lower = name;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) {
    return static_cast<char>(std::tolower(c));
  });
  return lower;
}

DType require_dtype(int data_type, const std::string& what) {
  const std::optional<DType> dtype = dtype_from_onnx(data_type);
  TRAINRT_REQUIRE(dtype.has_value(),
                  kUnsupported,
                  what,
                  " has element type ",
                  onnx_dtype_name(data_type),
                  "; wanted a float, double, float16, bfloat16, integer (8 to 64 bits) or bool");
  return *dtype;
}

namespace {

Shape checked_shape(const google::protobuf::RepeatedField<int64_t>& dims, const std::string& what) {
  Shape shape(dims.begin(), dims.end());
  for (const int64_t dim : shape) {
    TRAINRT_REQUIRE(dim >= 0,
                    kInvalidModel,
                    what,
                    " has shape ",
                    shape_string(shape),
                    "; a dim must not be negative");
  }
  num_elements(shape);  // throws on overflow
  return shape;
}

// The number of elements stored in the typed list that `dtype` uses.
int64_t typed_count(const TensorProto& proto, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return proto.float_data_size();
    case DType::kFloat64:
      return proto.double_data_size();
    case DType::kInt64:
      return proto.int64_data_size();
    case DType::kUInt32:
    case DType::kUInt64:
      return proto.uint64_data_size();
    default:
      return proto.int32_data_size();
  }
}

template <typename T, typename List>
void copy_list(const List& list, Tensor& tensor) {
  T* out = reinterpret_cast<T*>(tensor.raw());
  for (int i = 0; i < list.size(); ++i) {
    out[i] = static_cast<T>(list.Get(i));
  }
}

Tensor typed_tensor(const TensorProto& proto, const TensorType& type) {
  Tensor tensor(type.dtype, type.shape);
  switch (type.dtype) {
    case DType::kFloat32:
      copy_list<float>(proto.float_data(), tensor);
      break;
    case DType::kFloat64:
      copy_list<double>(proto.double_data(), tensor);
      break;
    case DType::kInt64:
      copy_list<int64_t>(proto.int64_data(), tensor);
      break;
    case DType::kUInt32:
      copy_list<uint32_t>(proto.uint64_data(), tensor);
      break;
    case DType::kUInt64:
      copy_list<uint64_t>(proto.uint64_data(), tensor);
      break;
    case DType::kInt32:
      copy_list<int32_t>(proto.int32_data(), tensor);
      break;
    case DType::kInt16:
      copy_list<int16_t>(proto.int32_data(), tensor);
      break;
    case DType::kInt8:
      copy_list<int8_t>(proto.int32_data(), tensor);
      break;
    case DType::kUInt8:
      copy_list<uint8_t>(proto.int32_data(), tensor);
      break;
    case DType::kBool:
      copy_list<bool>(proto.int32_data(), tensor);
      break;
    case DType::kUInt16:
    case DType::kFloat16:  // bit patterns
    case DType::kBFloat16:
      copy_list<uint16_t>(proto.int32_data(), tensor);
      break;
  }
  return tensor;
}

// The raw bytes where they lie when they are aligned, else a copy.
Tensor raw_tensor(const std::shared_ptr<const void>& owner,
                  const std::string& raw,
                  const TensorType& type) {
  auto* bytes = reinterpret_cast<std::byte*>(const_cast<char*>(raw.data()));
  const auto size = static_cast<uintptr_t>(dtype_bytes(type.dtype));
  if (type.dtype == DType::kBool) {  // any byte but 0 is true; in C++ only 1 is
    Tensor tensor(type.dtype, type.shape);
    std::transform(raw.begin(), raw.end(), tensor.data<bool>(), [](char c) { return c != 0; });
    return tensor;
  }
  if (reinterpret_cast<uintptr_t>(bytes) % size == 0) {
    return Tensor(type.dtype, type.shape, std::const_pointer_cast<void>(owner), bytes);
  }
  Tensor tensor(type.dtype, type.shape);
  std::memcpy(tensor.raw(), raw.data(), raw.size());
  return tensor;
}

}  // namespace

TensorType tensor_type(const TensorProto& proto, const std::string& what) {
  return {require_dtype(proto.data_type(), what), checked_shape(proto.dims(), what)};
}

TensorType tensor_type(const SparseTensorProto& proto, const std::string& what) {
  return {require_dtype(proto.values().data_type(), what), checked_shape(proto.dims(), what)};
}

bool has_external_data(const TensorProto& proto) {
  return proto.data_location() == TensorProto::EXTERNAL && !is_detached(proto);
}

void check_tensor_data(const TensorProto& proto) {
  const std::optional<DType> dtype = dtype_from_onnx(proto.data_type());
  if (!dtype || has_external_data(proto)) {
    return;
  }
  const std::string what = concat("tensor '", proto.name(), "'");
  const TensorType type = tensor_type(proto, what);
  if (is_detached(proto) || proto.has_raw_data()) {
    const int64_t bytes = is_detached(proto) ? location_entries(proto).length
                                             : static_cast<int64_t>(proto.raw_data().size());
    TRAINRT_REQUIRE(bytes == type.bytes(),
                    kInvalidModel,
                    what,
                    " (",
                    dtype_name(type.dtype),
                    shape_string(type.shape),
                    ") holds ",
                    bytes,
                    " bytes; wanted ",
                    type.bytes(),
                    ". The file is damaged or was written wrongly");
  } else {
    TRAINRT_REQUIRE(typed_count(proto, *dtype) == num_elements(type.shape),
                    kInvalidModel,
                    what,
                    " (",
                    dtype_name(type.dtype),
                    shape_string(type.shape),
                    ") holds ",
                    typed_count(proto, *dtype),
                    " elements; wanted ",
                    num_elements(type.shape),
                    ". The file is damaged or was written wrongly");
  }
}

TensorSource tensor_source(std::shared_ptr<const void> owner,
                           const TensorProto& proto,
                           const WeightFiles& files) {
  const TensorType type = tensor_type(proto, concat("tensor '", proto.name(), "'"));
  if (is_detached(proto)) {
    return {"inline", [owner = std::move(owner), &proto, type, file = files.model] {
              return detached_tensor(proto, type, file);
            }};
  }
  if (has_external_data(proto)) {
    ExternalLocation location = external_location(proto);
    std::string description = concat(location.file,
                                     " @",
                                     location.offset,
                                     "+",
                                     location.length < 0 ? type.bytes() : location.length);
    return {std::move(description), [location = std::move(location), type, folder = files.folder] {
              return read_external(folder, location, type);
            }};
  }
  return {"inline", [owner = std::move(owner), &proto, type] {
            check_tensor_data(proto);
            return proto.has_raw_data() ? raw_tensor(owner, proto.raw_data(), type)
                                        : typed_tensor(proto, type);
          }};
}

TensorPeek detached_peek(std::shared_ptr<const void> owner,
                         const TensorProto& proto,
                         const WeightFiles& files) {
  const TensorType type = tensor_type(proto, concat("tensor '", proto.name(), "'"));
  return
      [owner = std::move(owner), &proto, type, file = files.model](int64_t first, int64_t count) {
        return detached_elements(proto, type, file, first, count);
      };
}

TensorSource tensor_source(std::shared_ptr<const void> owner,
                           const SparseTensorProto& proto,
                           const WeightFiles& files) {
  const std::string what = concat("sparse tensor '", proto.values().name(), "'");
  const TensorType type = tensor_type(proto, what);
  return {"inline, sparse", [=, &proto] {
            const Tensor values = tensor_source(owner, proto.values(), files).load();
            const Tensor index_tensor = tensor_source(owner, proto.indices(), files).load();
            const std::vector<int64_t> indices = index_tensor.to_int64();
            const int64_t count = values.num_elements();
            const size_t ndim = type.shape.size();
            const bool linear = index_tensor.shape().size() == 1;
            TRAINRT_REQUIRE(static_cast<int64_t>(indices.size()) ==
                                count * (linear ? 1 : static_cast<int64_t>(ndim)),
                            kInvalidModel,
                            what,
                            ": ",
                            count,
                            " values, but ",
                            indices.size(),
                            " indices");
            Tensor dense(type.dtype, type.shape);
            const Shape strides = row_major_strides(type.shape);
            const int64_t size = dtype_bytes(type.dtype);
            for (int64_t i = 0; i < count; ++i) {
              int64_t at = linear ? indices[static_cast<size_t>(i)] : 0;
              for (size_t d = 0; !linear && d < ndim; ++d) {
                at += indices[static_cast<size_t>(i) * ndim + d] * strides[d];
              }
              TRAINRT_REQUIRE(at >= 0 && at < dense.num_elements(),
                              kInvalidModel,
                              what,
                              ": index ",
                              at,
                              " is outside of ",
                              shape_string(type.shape));
              std::memcpy(
                  dense.raw() + at * size, values.raw() + i * size, static_cast<size_t>(size));
            }
            return dense;
          }};
}

}  // namespace trainrt
