// Reading ONNX: a file becomes an OnnxModel (parsed, sorted, validated, functions inlined, dims
// still symbolic), and an OnnxModel bound to sizes becomes a Graph (concrete, upgraded, folded).
//
// Loading never touches the weights: initializers become TensorSources, read when a parameter store
// is filled. Several shape buckets or micro-batch sizes bind the same OnnxModel several times;
// values and nodes then keep their names, so parameters are the same across them.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "graph/graph.h"

namespace trainrt {

struct Dim {
  int64_t size = -1;   // -1: symbolic
  std::string symbol;  // its name; "" for an anonymous unknown dim (given a name like "input.0")
};

struct ModelInput {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<Dim> dims;
  int batch_axis = -1;  // the axis that enumerates samples; -1: the input has none
};

struct BindOptions {
  // Samples per micro-batch: bound to the batch axis of every input that has one.
  int64_t batch = 1;
  std::map<std::string, int64_t> dims;    // --bind: symbol -> size
  std::map<std::string, int> batch_axes;  // --batch-axis: input -> axis (-1: none)
  std::vector<std::string> trainable;     // globs; empty: every candidate
  std::vector<std::string> freeze;        // globs
  // Rewrite a batch size that the exporter baked into Reshape, Expand ... constants (with a warning
  // that names the nodes). Off: such a model is an error.
  bool rewrite_baked_batch = true;
  bool training = true;  // false: BatchNorm and Dropout in inference form (eval)
  bool fuse = true;      // run the fusions registered by operators
};

// One of the model's candidate tensors and what became of it, for `inspect`.
struct TensorReport {
  std::string name;
  TensorType type;
  std::string role;  // "parameter", "state", "constant", "unused", "frozen"
  std::string why;
  std::string equal_to =
      "";  // a tensor before it that has the same elements: a tie that may be lost
};

struct UnsupportedOp {
  std::string op_type;
  int opset = 0;
  std::vector<std::string> nodes;
  std::string why;
};

class OnnxModel {
 public:
  // Binary or ONNX text syntax (told apart by content). Throws kIo when the file cannot be read,
  // kInvalidModel when it is not a valid model (also beyond what ONNX's checker tests:
  // training_info bindings, dangling names, cycles, duplicate names).
  static OnnxModel load(const std::string& path);
  static OnnxModel parse_text(const std::string& text, const std::string& folder = ".");
  OnnxModel(const OnnxModel&) = delete;
  OnnxModel& operator=(const OnnxModel&) = delete;
  OnnxModel(OnnxModel&&) noexcept;
  OnnxModel& operator=(OnnxModel&&) noexcept;
  ~OnnxModel();

  const std::string& path() const;
  const std::vector<ModelInput>& inputs() const;
  const std::vector<std::string>& outputs() const;
  int64_t opset() const;
  int64_t ir_version() const;
  std::string producer() const;
  bool has_training_info() const;
  // The entry of the model's metadata; "" when there is none.
  std::string metadata(const std::string& key) const;
  // Symbols of all input dims, batch symbols first.
  std::vector<std::string> symbols() const;
  // Stable 64-bit hash (hex) of structure and types, not of weights: Plan::model_hash.
  std::string hash() const;

  // The forward graph at concrete sizes: upgraded, folded, fused, verified. Throws kUnsupported
  // listing every unsupported operator at once, kInvalidArgument when a dim is left unbound.
  Graph bind(const BindOptions& options) const;

  // The same, but collects instead of throwing: for `inspect`.
  std::vector<UnsupportedOp> unsupported(const BindOptions& options) const;
  std::vector<TensorReport> tensors(const BindOptions& options) const;

  struct Impl;  // holds the ModelProto; defined in graph/onnx_model.h for graph/onnx_* alone
  const Impl& impl() const { return *impl_; }

 private:
  explicit OnnxModel(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace trainrt
