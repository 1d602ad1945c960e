// Exporters merge weights that merely have equal values: fresh norms and biases, and all of a layer
// that was cloned. Trained as one they would be tied. Here they are made separate again, in the
// file's own form, so that nothing behind it knows that they were not. And the other way round: a
// tied weight of which an exporter has folded the transpose is one again.
//
// What the file says of the weights before the merge:
//   * TorchScript's exporter leaves an Identity named like the lost weight. It shares what the
//     module shares before it looks at values, so such an Identity is never a true tie; but a
//     weight that was folded with others has a made-up name, and then the module that reads it
//     decides, named in the path of the node.
//   * torch.export's exporter leaves nothing in the graph, but notes on each node which of the
//     program's parameters it takes, and on a folded weight what it was folded from.
// In a file of any other tool an Identity is a true tie.
#pragma once

#include <onnx/onnx_pb.h>

#include <map>
#include <string>

#include "graph/onnx_detached_data.h"

namespace trainrt {

// Returns a note for `inspect` by the name of each weight that was split off. Warns of weights that
// several modules read and of which the file does not say whether they were one.
std::map<std::string, std::string> split_merged_weights(onnx::GraphProto& graph,
                                                        const WeightFiles& files,
                                                        bool of_pytorch);

// Names that exporters make up: "onnx::Mul_12", "/layer/Constant_output_0", "val_3", "42"; not
// "dense/bias", "interval_scale" or "constant".
bool is_made_up(const std::string& name);

}  // namespace trainrt
