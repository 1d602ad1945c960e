// What every translation of a model ends with.
#pragma once

#include <vector>

#include "graph/onnx_import.h"
#include "graph/onnx_model.h"

namespace trainrt {

// Throws kUnsupported listing all of `ops`, unless there are none.
void require_supported(const std::vector<UnsupportedOp>& ops);

// locate_samples(), with a warning, once per model, where that fails.
void place_draws(const OnnxModel::Impl& model, Graph& graph);

}  // namespace trainrt
