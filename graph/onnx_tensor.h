// ONNX's TensorProto and our Tensor: element types, and every storage form (raw, typed, sparse,
// external file). Nothing here reads a file before TensorSource::load is called.
#pragma once

#include <onnx/onnx_pb.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "graph/graph.h"
#include "graph/onnx_detached_data.h"
#include "graph/tensor.h"

namespace trainrt {

std::optional<DType> dtype_from_onnx(
    int data_type);                          // nothing for string, complex, float8, int4 ...
int dtype_to_onnx(DType dtype);              // TensorProto::DataType
std::string onnx_dtype_name(int data_type);  // "float", "int4", "string", ...

// Throws kUnsupported, naming `what`, when we have no such element type.
DType require_dtype(int data_type, const std::string& what);

// The type a TensorProto or SparseTensorProto declares; `what` names it in errors.
TensorType tensor_type(const onnx::TensorProto& proto, const std::string& what);
TensorType tensor_type(const onnx::SparseTensorProto& proto, const std::string& what);

bool has_external_data(const onnx::TensorProto& proto);

// Where the data is. `owner` keeps `proto` alive: raw bytes are used where they lie, not copied.
TensorSource tensor_source(std::shared_ptr<const void> owner,
                           const onnx::TensorProto& proto,
                           const WeightFiles& files);
TensorSource tensor_source(std::shared_ptr<const void> owner,
                           const onnx::SparseTensorProto& proto,
                           const WeightFiles& files);

// Elements [first, first + count) of a tensor, as a vector.
using TensorPeek = std::function<Tensor(int64_t first, int64_t count)>;
TensorPeek detached_peek(std::shared_ptr<const void> owner,
                         const onnx::TensorProto& proto,
                         const WeightFiles& files);

// Throws kInvalidModel when the amount of inline data disagrees with type and dims, so that a bad
// tensor is found when the model is loaded.
void check_tensor_data(const onnx::TensorProto& proto);

}  // namespace trainrt
