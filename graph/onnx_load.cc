// A file becomes an OnnxModel: read, told apart (binary or text), parsed, sorted, validated.
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl.h>
#include <onnx/defs/parser.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "graph/base/log.h"
#include "graph/onnx_merged_weights.h"
#include "graph/onnx_model.h"
#include "graph/onnx_validate.h"

namespace trainrt {

namespace fs = std::filesystem;

namespace {

// The text syntax starts with "<ir_version: ...", perhaps after blanks and comments; a binary model
// starts with a field tag, which is never one of these.
bool is_text(std::istream& in) {
  const std::streampos start = in.tellg();
  in >> std::ws;
  while (in.peek() == '#') {
    in.ignore(INT_MAX, '\n');
    in >> std::ws;
  }
  const bool text = in.peek() == '<';
  in.clear();
  in.seekg(start);
  return text;
}

std::ifstream open_file(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  TRAINRT_REQUIRE(fs::exists(status), kInvalidModel, "there is no model file '", path, "'");
  TRAINRT_REQUIRE(
      !fs::is_directory(status), kInvalidModel, "'", path, "' is a folder; wanted an .onnx file");
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  TRAINRT_REQUIRE(in.good(), kIo, "cannot open '", path, "': ", std::strerror(errno));
  const std::streamoff size = in.tellg();
  TRAINRT_REQUIRE(size != 0, kInvalidModel, "'", path, "' is empty; wanted an ONNX model");
  TRAINRT_REQUIRE(size <= INT_MAX,
                  kInvalidModel,
                  "'",
                  path,
                  "' has ",
                  size,
                  " bytes; an ONNX file cannot exceed 2 GiB. Save the model with external data");
  in.seekg(0);
  return in;
}

void parse_binary(std::istream& in, onnx::ModelProto& model) {
  google::protobuf::io::IstreamInputStream bytes(&in, 1 << 20);
  google::protobuf::io::CodedInputStream stream(&bytes);
  stream.SetTotalBytesLimit(INT_MAX);
  const bool parsed = model.ParseFromCodedStream(&stream) && stream.ConsumedEntireMessage();
  TRAINRT_REQUIRE(!in.bad(), kIo, "reading the file failed");
  TRAINRT_REQUIRE(
      parsed,
      kInvalidModel,
      "this is not an ONNX model, or it is truncated or damaged (it does not parse as a "
      "ModelProto)");
}

// Parses a file of large weights without them. False when there are none, or it is no model.
bool parse_detached(const std::string& path, onnx::ModelProto& model, WeightFiles* files) {
  std::shared_ptr<const MappedFile> file = path.empty() ? nullptr : MappedFile::open(path);
  const std::optional<std::string> stripped =
      file == nullptr ? std::nullopt : detach_weights(file->bytes());
  if (!stripped.has_value() || !model.ParseFromString(*stripped)) {
    model.Clear();
    return false;
  }
  files->model = std::move(file);
  return true;
}

void parse_text_syntax(std::istream& in, onnx::ModelProto& model) {
  const std::string text(std::istreambuf_iterator<char>(in), {});
  onnx::Common::Status status;
  try {
    status = onnx::OnnxParser::Parse(model, text.c_str());
  } catch (const std::exception& error) {
    TRAINRT_FAIL(kInvalidModel, "not valid ONNX text: ", error.what());
  }
  TRAINRT_REQUIRE(status.IsOK(), kInvalidModel, "not valid ONNX text: ", status.ErrorMessage());
}

std::unique_ptr<OnnxModel::Impl> build(std::istream& in,
                                       const std::string& path,
                                       WeightFiles files) {
  auto proto = std::make_shared<onnx::ModelProto>();
  if (is_text(in)) {
    parse_text_syntax(in, *proto);
  } else if (!parse_detached(path, *proto, &files)) {
    parse_binary(in, *proto);
  }
  if (proto->has_graph() && sort_nodes(*proto)) {
    log_warning(path.empty() ? "the model" : "'" + path + "'",
                ": nodes do not stand in topological order; they are sorted");
  }
  validate_model(*proto);
  name_nodes_apart(*proto);
  auto model = std::make_unique<OnnxModel::Impl>();
  model->path = path;
  if (proto->training_info_size() == 0) {  // else the bindings say what is one
    model->weight_notes =
        split_merged_weights(*proto->mutable_graph(), files, proto->producer_name() == "pytorch");
  }
  model->files = std::move(files);
  model->proto = std::move(proto);
  index_model(*model);
  return model;
}

}  // namespace

OnnxModel OnnxModel::load(const std::string& path) {
  std::ifstream in = open_file(path);
  try {
    return OnnxModel(build(in, path, {fs::path(path).parent_path().string(), nullptr}));
  } catch (Error& error) {
    error.add_context(concat("while loading '", path, "'"));
    throw;
  }
}

OnnxModel OnnxModel::parse_text(const std::string& text, const std::string& folder) {
  std::istringstream in(text);
  return OnnxModel(build(in, "", {folder, nullptr}));
}

}  // namespace trainrt
