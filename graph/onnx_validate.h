// Is this a valid model? ONNX's checker, and what it leaves out.
#pragma once

#include <onnx/onnx_pb.h>

#include <string>

namespace trainrt {

// Brings the nodes of the graph, its subgraphs and of every function into a topological order that
// keeps the present one where it can. Returns whether something had to move. Throws kInvalidModel
// naming the nodes of a cycle.
bool sort_nodes(onnx::ModelProto& model);

// Throws kInvalidModel (kUnsupported for versions we do not read) with node or tensor and reason:
// versions, single assignment, dangling names, duplicate initializers, sizes of inline data,
// training_info and its bindings, and what ONNX's checker finds. Never opens another file.
void validate_model(const onnx::ModelProto& model);

}  // namespace trainrt
