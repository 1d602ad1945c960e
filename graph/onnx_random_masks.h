// Random masks in inference form.
//
// Dropout has a node of its own, but stochastic depth, and Dropout that an exporter took apart, are
// plain nodes around a source of random numbers:
//
//   mask = Cast(Less(RandomUniform, keep)), Floor(RandomUniform + keep) or Bernoulli(keep)
//   y    = x * (mask / keep)
//
// Nothing is dropped when such a mask is its mean, the number `keep`: then y is x, or, in a model
// that does not divide by the keep rate, x * keep.
#pragma once

#include <onnx/onnx_pb.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace trainrt {

// What a node's only output is in inference form.
struct SettledNode {
  int input = -1;                            // this input of the node, or, when negative,
  double value = 0;                          // this number, in every element,
  int data_type = onnx::TensorProto::FLOAT;  // of this type
};
using SettledNodes = std::unordered_map<const onnx::NodeProto*, SettledNode>;

// Nodes of one graph or function body, in topological order. `outputs` are the names that are read
// from outside, whose shapes must stay.
SettledNodes settle_random_masks(
    const google::protobuf::RepeatedPtrField<onnx::NodeProto>& nodes,
    const google::protobuf::RepeatedPtrField<onnx::TensorProto>& initializers,
    const std::vector<std::string>& outputs);
SettledNodes settle_random_masks(const onnx::GraphProto& graph);

bool draws_random_numbers(const onnx::NodeProto& node);

}  // namespace trainrt
