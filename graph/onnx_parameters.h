// Which tensors of the file are trained, which are state, which are constants: the question that no
// inference importer has to answer.
//
//   parameter  a float initializer on a differentiable path to a float output that the exporter
//              lists as one (see onnx_signature.h), or where there is no list; or a Constant node's
//              tensor in the place of a weight (models whose exporter writes no initializers)
//   state      what an operator updates besides (BatchNormalization's running statistics), by
//              position
//   frozen     would be a parameter, but --trainable or --freeze say otherwise
//   constant   integers, single numbers the exporter invented, masks, what the exporter does not
//              list as a parameter, and what no gradient reaches
//   unused     no node that matters reads it
#pragma once

#include <string>
#include <vector>

#include "graph/onnx_import.h"
#include "graph/onnx_signature.h"
#include "graph/onnx_translate.h"

namespace trainrt {

// Gives each candidate its kind and reason, drops unused ones, and reports on all of them. Throws
// kInvalidArgument for a glob that matches nothing.
std::vector<TensorReport> assign_roles(Graph& graph,
                                       const std::vector<WeightCandidate>& candidates,
                                       const ExportSignature& signature,
                                       const BindOptions& options);

}  // namespace trainrt
