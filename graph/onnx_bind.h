// What every translation of a model ends with.
#pragma once

#include <vector>

#include "graph/onnx_import.h"

namespace trainrt {

// Throws kUnsupported listing all of `ops`, unless there are none.
void require_supported(const std::vector<UnsupportedOp>& ops);

}  // namespace trainrt
