// Convolutions of 3 x 3 with stride 1 by Winograd's minimal filtering F(2x2, 3x3): 16 products per
// four outputs where the definition takes 36 (Lavin & Gray, "Fast Algorithms for Convolutional
// Neural Networks", arXiv 1509.09308, section 4.1). All three operators of ops/conv.cc, float32,
// channels-last. The transforms are sums and halves, so rounding stays near the direct form's.
#pragma once

#include "graph/op_def.h"

namespace trainrt {

bool winograd_applies(const OpContext& op);
int64_t winograd_workspace(const OpContext& op, const DeviceSpec& spec);
void winograd_convolution(KernelContext& op);

}  // namespace trainrt
