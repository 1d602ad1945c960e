// Tensors whose bytes lie in another file beside the model (ONNX's "external data").
#pragma once

#include <onnx/onnx_pb.h>

#include <cstdint>
#include <string>

#include "graph/graph.h"

namespace trainrt {

struct ExternalLocation {
  std::string tensor;  // for messages
  std::string file;    // relative to the model's folder
  int64_t offset = 0;
  int64_t length = -1;  // -1: what the type needs
};

// The tensor's external_data entries as they stand. Throws kInvalidModel for malformed numbers.
ExternalLocation location_entries(const onnx::TensorProto& proto);

// Reads the tensor's external_data entries; opens nothing. Throws kInvalidModel for a missing,
// absolute or escaping location and for malformed numbers.
ExternalLocation external_location(const onnx::TensorProto& proto);

// Reads the bytes. The file must lie inside `folder`, symbolic links resolved. Throws kInvalidModel
// when it is missing, outside or too short, kIo when reading fails.
Tensor read_external(const std::string& folder,
                     const ExternalLocation& location,
                     const TensorType& type);

}  // namespace trainrt
