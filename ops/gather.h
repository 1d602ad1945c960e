// What Gather and GatherElements have in common.
#pragma once

#include <string>
#include <utility>

#include "graph/op_def.h"

namespace trainrt {

inline void require_index_dtype(const OpContext& op, int input) {
  const DType dtype = op.input_dtype(input);
  TRAINRT_REQUIRE(dtype == DType::kInt64 || dtype == DType::kInt32,
                  kInvalidModel,
                  "indices must be int32 or int64, got ",
                  dtype_name(dtype));
}

inline OpExample gather_example(std::string name, Shape data, Tensor indices, int64_t axis) {
  OpExample example;
  example.name = std::move(name);
  example.attributes = {{"axis", axis}};
  example.inputs = {{DType::kFloat32, std::move(data)}, {indices.dtype(), indices.shape()}};
  example.values = {{}, std::move(indices)};
  return example;
}

}  // namespace trainrt
