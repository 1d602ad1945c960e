#include "tests/support/channels_last.h"

#include <cstring>

#include "graph/op_def.h"

namespace trainrt::testing {

Tensor channels_last(const Tensor& tensor) {
  const Shape& from = tensor.shape();
  if (from.size() != 4) {
    return tensor;
  }
  Tensor turned(tensor.dtype(), {from[0], from[2], from[3], from[1]});
  const int64_t plane = from[2] * from[3], bytes = dtype_bytes(tensor.dtype());
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    const int64_t n = i / (plane * from[1]), c = i / plane % from[1], p = i % plane;
    std::memcpy(turned.raw() + ((n * plane + p) * from[1] + c) * bytes,
                tensor.raw() + i * bytes,
                static_cast<size_t>(bytes));
  }
  return turned;
}

NodeCase channels_last(NodeCase test_case) {
  test_case.node.attributes.set("layout", std::string("nhwc"));
  for (size_t i = 0; i < test_case.inputs.size(); ++i) {
    if (test_case.present[i]) {
      test_case.inputs[i] = channels_last(test_case.inputs[i]);
      test_case.input_types[i].shape = test_case.inputs[i].shape();
    }
  }
  test_case.output_types = get_op(test_case.node.op_type).infer_types(test_case.context());
  return test_case;
}

}  // namespace trainrt::testing
