// The three operators of a convolution in float64, where oneDNN has none.
#pragma once

#include "graph/op_def.h"

namespace trainrt {

int64_t conv_f64_workspace(const OpContext& op);
void conv_f64(KernelContext& op);

}  // namespace trainrt
