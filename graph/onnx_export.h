// Writing ONNX: a Graph built here (models/), or the imported model with trained values put back.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "graph/graph.h"
#include "graph/onnx_import.h"

namespace trainrt {

struct ExportOptions {
  // Mark float initializers EXTERNAL at <path>.weights: needed above 2 GB. When `write_weights` is
  // false that file is not written (models too large for the disk).
  bool external_weights = false;
  bool write_weights = true;
  int opset = 17;                      // that the graph's operators belong to
  std::string batch_symbol = "batch";  // written for the batch axis of inputs and outputs
  std::string sequence_symbol;         // and for their axis 1; empty: its size is
};

// Writes a Graph whose nodes are plain ONNX operators (models/ build such graphs) to
// `path`, by temporary name and rename. Throws kIo. Weights above 2 GB become external by
// themselves.
void write_onnx(const Graph& graph, const std::string& path, const ExportOptions& options);

// Writes an inference form of `model` with `current` values for parameters and state: BatchNorm and
// Dropout in inference form, dangling outputs dropped, names kept. The result passes ONNX's
// checker. `current` returns an undefined Tensor for a name it does not know: the file's own data
// stays. `metadata` joins or replaces the model's own.
void export_trained(const OnnxModel& model,
                    const std::function<Tensor(const std::string& name)>& current,
                    const std::map<std::string, std::string>& metadata,
                    const std::string& path);

}  // namespace trainrt
