// Weights that stay in the model file while it is loaded. Parsing copies what it reads, and a model
// may be a gigabyte of weights that `plan` and `inspect` never look at: large ones are left out of
// the parsed message, which says where in the file they lie.
#pragma once

#include <onnx/onnx_pb.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "graph/graph.h"

namespace trainrt {

// A file's bytes, mapped for reading.
class MappedFile {
 public:
  // Null when it cannot be mapped.
  static std::shared_ptr<const MappedFile> open(const std::string& path);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::string_view bytes() const { return {data_, size_}; }

 private:
  MappedFile(const char* data, size_t size) : data_(data), size_(size) {}
  const char* data_;
  size_t size_;
};

// Where a model's tensors have their bytes when they are not in its message.
struct WeightFiles {
  std::string folder;                       // of external data
  std::shared_ptr<const MappedFile> model;  // of detached data; null: nothing is detached
};

// The serialized model without its large float initializers' raw data, each of which is replaced by
// external data without a location: offset and length in these very bytes. Nothing when none is
// large, or when the bytes are not what a model's are, which is for the parser to say.
std::optional<std::string> detach_weights(std::string_view model);

bool is_detached(const onnx::TensorProto& proto);

// Throws kInvalidModel when the bytes named do not lie in the file.
Tensor detached_tensor(const onnx::TensorProto& proto,
                       const TensorType& type,
                       const std::shared_ptr<const MappedFile>& file);

// Some of its elements, as a vector; nothing else is read.
Tensor detached_elements(const onnx::TensorProto& proto,
                         const TensorType& type,
                         const std::shared_ptr<const MappedFile>& file,
                         int64_t first,
                         int64_t count);

// Puts the bytes back, for a model that is written.
void attach_weights(onnx::GraphProto& graph, const std::shared_ptr<const MappedFile>& file);

}  // namespace trainrt
