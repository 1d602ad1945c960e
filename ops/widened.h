// Lets kernels made for float32 run on 16-bit floats: inputs are converted to float32 copies in the
// workspace, outputs are rounded once on their way out. For operators whose own arithmetic dwarfs
// the two copies (products, convolutions); element-wise and row-wise kernels read 16 bits directly.
#pragma once

#include "graph/op_def.h"

namespace trainrt {

// Wraps kernels and workspace of `op`, which are complete by then. `is_native` says of which nodes
// the fast kernel takes care itself; the reference kernel is always widened.
void widen_16_bit(OpDef& op, std::function<bool(const OpContext&)> is_native = {});

}  // namespace trainrt
