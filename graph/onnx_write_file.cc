#include "graph/onnx_write_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "graph/onnx_tensor.h"

namespace trainrt {

namespace {

namespace fs = std::filesystem;

}  // namespace

PendingFile::PendingFile(const std::string& path)
    : PendingFile(resolve_output(path, concat("'", path, "'"))) {}

PendingFile::PendingFile(const OutputPath& place)
    : path_(place.path),
      temporary_(place.is_stream ? path_ : concat(path_, ".tmp.", ::getpid())),
      out_(temporary_, std::ios::binary | std::ios::trunc) {
  TRAINRT_REQUIRE(out_.good(), kIo, "cannot write '", path_, "': ", std::strerror(errno));
}

PendingFile::~PendingFile() {
  if (!committed_ && temporary_ != path_) {
    out_.close();
    std::remove(temporary_.c_str());
  }
}

void PendingFile::write(const void* data, int64_t bytes) {
  out_.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  TRAINRT_REQUIRE(out_.good(), kIo, "writing '", path_, "' failed: ", std::strerror(errno));
}

void PendingFile::close() {
  if (out_.is_open()) {
    out_.close();
    TRAINRT_REQUIRE(!out_.fail(), kIo, "writing '", path_, "' failed: ", std::strerror(errno));
  }
}

void PendingFile::commit() {
  close();
  TRAINRT_REQUIRE(temporary_ == path_ || std::rename(temporary_.c_str(), path_.c_str()) == 0,
                  kIo,
                  "cannot rename '",
                  temporary_,
                  "' to '",
                  path_,
                  "': ",
                  std::strerror(errno));
  committed_ = true;
}

void fill_tensor(onnx::TensorProto& proto, const Tensor& tensor) {
  const std::string name = proto.name();
  proto.Clear();
  if (!name.empty()) {
    proto.set_name(name);
  }
  proto.set_data_type(dtype_to_onnx(tensor.dtype()));
  for (const int64_t dim : tensor.shape()) {
    proto.add_dims(dim);
  }
  proto.set_raw_data(tensor.raw(), static_cast<size_t>(tensor.bytes()));
}

void mark_external(onnx::TensorProto& proto,
                   const std::string& file,
                   int64_t offset,
                   int64_t bytes) {
  proto.clear_raw_data();
  proto.clear_external_data();
  proto.set_data_location(onnx::TensorProto::EXTERNAL);
  const auto entry = [&](const char* key, const std::string& value) {
    onnx::StringStringEntryProto* item = proto.add_external_data();
    item->set_key(key);
    item->set_value(value);
  };
  entry("location", file);
  entry("offset", std::to_string(offset));
  entry("length", std::to_string(bytes));
}

WeightFile::WeightFile(const std::string& model_path, bool write)
    : file_(fs::path(model_path).filename().string() + ".weights") {
  if (write) {
    out_ = std::make_unique<PendingFile>(model_path + ".weights");
  }
}

void WeightFile::add(onnx::TensorProto& proto, int64_t bytes, const std::function<Tensor()>& load) {
  const int64_t start = (offset_ + kWeightAlignment - 1) / kWeightAlignment * kWeightAlignment;
  if (out_ != nullptr) {
    const std::string padding(static_cast<size_t>(start - offset_), '\0');
    out_->write(padding.data(), start - offset_);
    const Tensor tensor = load();
    TRAINRT_CHECK(tensor.bytes() == bytes,
                  "'",
                  proto.name(),
                  "' has ",
                  tensor.bytes(),
                  " bytes, its type ",
                  bytes);
    out_->write(tensor.raw(), bytes);
  }
  mark_external(proto, file_, start, bytes);
  offset_ = start + bytes;
}

void WeightFile::commit() {
  if (out_ != nullptr) {
    out_->commit();
  }
}

void set_metadata(onnx::ModelProto& model, const std::map<std::string, std::string>& entries) {
  auto& metadata = *model.mutable_metadata_props();
  for (int i = metadata.size(); i-- > 0;) {
    if (entries.count(metadata[i].key()) != 0) {
      metadata.DeleteSubrange(i, 1);
    }
  }
  for (const auto& [key, value] : entries) {
    onnx::StringStringEntryProto& entry = *metadata.Add();
    entry.set_key(key);
    entry.set_value(value);
  }
}

void write_model_file(const onnx::ModelProto& model, const std::string& path, WeightFile* weights) {
  const size_t bytes = model.ByteSizeLong();
  TRAINRT_REQUIRE(bytes < (size_t{1} << 31),
                  kInvalidArgument,
                  "the model for '",
                  path,
                  "' has ",
                  bytes,
                  " bytes, an ONNX file at most 2 GiB; write its weights to another file");
  std::string text;
  TRAINRT_CHECK(model.SerializeToString(&text), "'", path, "' does not serialize");
  PendingFile file(path);
  file.write(text.data(), static_cast<int64_t>(text.size()));
  file.close();
  if (weights != nullptr) {
    weights->commit();
  }
  file.commit();
}

}  // namespace trainrt
