// The file side of writing ONNX: tensors into TensorProtos or into a file of weights beside the
// model, and files that appear whole or not at all. For graph/onnx_* alone.
#pragma once

#include <onnx/onnx_pb.h>

#include <cstdint>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "graph/output_path.h"
#include "graph/tensor.h"

namespace trainrt {

// A protobuf message cannot exceed 2 GiB; models with more weights keep them in another file.
inline constexpr int64_t kMostInlineBytes = int64_t{1900} << 20;

// A file written under a temporary name, given its own by commit(), removed if never committed. A
// link stays a link: what it points to is replaced. A device or a pipe, which cannot be replaced,
// is written as it is.
class PendingFile {
 public:
  explicit PendingFile(const std::string& path);  // throws kIo
  ~PendingFile();
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;

  void write(const void* data, int64_t bytes);  // throws kIo
  void close();                                 // all is written; throws kIo
  void commit();                                // throws kIo

 private:
  explicit PendingFile(const OutputPath& place);

  std::string path_;
  std::string temporary_;  // path_ itself: a device or a pipe
  std::ofstream out_;
  bool committed_ = false;
};

// Dtype, dims and inline data; the name is left alone.
void fill_tensor(onnx::TensorProto& proto, const Tensor& tensor);

// Marks `proto` (dtype and dims set) as lying in `file` beside the model.
void mark_external(onnx::TensorProto& proto,
                   const std::string& file,
                   int64_t offset,
                   int64_t bytes);

// The file of external weights: each tensor starts at a multiple of kWeightAlignment.
inline constexpr int64_t kWeightAlignment = 64;
class WeightFile {
 public:
  // `write` false: only the offsets are worked out, no file is made.
  WeightFile(const std::string& model_path, bool write);

  // Sets the proto's location; `load` is called when the bytes are to be written.
  void add(onnx::TensorProto& proto, int64_t bytes, const std::function<Tensor()>& load);
  void commit();

 private:
  std::string file_;  // relative to the model
  std::unique_ptr<PendingFile> out_;
  int64_t offset_ = 0;
};

// Entries of the model's metadata; those of the same keys are replaced.
void set_metadata(onnx::ModelProto& model, const std::map<std::string, std::string>& entries);

// `weights` (may be null) get their name when the model is written too, and so do both or none.
void write_model_file(const onnx::ModelProto& model,
                      const std::string& path,
                      WeightFile* weights = nullptr);

}  // namespace trainrt
