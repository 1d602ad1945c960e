// Images in the other layout.
#pragma once

#include "graph/dtype.h"
#include "tests/support/op_example.h"

namespace trainrt::testing {

// [n, c, h, w] as [n, h, w, c]; tensors of other dims as they are.
Tensor channels_last(const Tensor& tensor);

// A case of layout "nchw" with its images, tensors of four dims, turned.
NodeCase channels_last(NodeCase test_case);

}  // namespace trainrt::testing
