// Is this a valid model? ONNX's checker, and what it leaves out.
#pragma once

#include <onnx/onnx_pb.h>

#include <string>

namespace trainrt {

// Brings the nodes of the graph, its subgraphs and of every function into a topological order that
// keeps the present one where it can. Returns whether something had to move. Throws kInvalidModel
// naming the nodes of a cycle.
bool sort_nodes(onnx::ModelProto& model);

// By what a node is known, also one without a name: random streams hang on it.
std::string node_name(const onnx::NodeProto& node);

// ONNX lets several nodes have one name; from here on each has its own.
void name_nodes_apart(onnx::ModelProto& model);

// Throws kInvalidModel (kUnsupported for versions we do not read, and reserved names) with node or
// tensor and reason: versions, single assignment, dangling names, duplicate initializers, sizes of
// inline data, training_info and its bindings, and what ONNX's checker finds. Never opens another
// file.
void validate_model(const onnx::ModelProto& model);

}  // namespace trainrt
