#include "tests/support/image_graph.h"

#include <algorithm>
#include <cmath>

#include "graph/autodiff.h"
#include "graph/evaluator.h"

namespace trainrt::testing {

ValueId ImageGraph::parameter(const std::string& name, const Shape& shape) {
  Value value;
  value.name = name;
  value.type = {DType::kFloat64, shape};
  value.kind = ValueKind::kParameter;
  std::vector<double> data(static_cast<size_t>(num_elements(shape)));
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<double>((i * 7919 + feeds_.size() * 37) % 101) / 50.0 - 1.0;
  }
  feeds_[name] = Tensor::from(data, shape);
  return graph.add_value(value);
}

ValueId ImageGraph::conv(ValueId x, int64_t channels, const std::string& name) {
  const ValueId w = parameter(name + ".weight", {channels, builder.shape(x)[1], 3, 3});
  return builder.op(
      "Conv", {x, w}, {{"kernel_shape", Shape{3, 3}}, {"pads", Shape{1, 1, 1, 1}}}, name);
}

ValueId ImageGraph::batch_norm(ValueId x, const std::string& name) {
  const Shape shape = builder.shape(x);
  const Attributes attributes = {{"epsilon", 1e-5}, {"count", num_elements(shape) / shape[1]}};
  const ValueId scale = parameter(name + ".scale", {shape[1]});
  const ValueId bias = parameter(name + ".bias", {shape[1]});
  const ValueId moments = builder.op("BatchNormMoments", {x});
  return builder.op("BatchNormApply", {x, moments, scale, bias}, attributes, name);
}

Graph with_gradients(Graph graph) {
  const ValueId y = graph.outputs().at(0);
  const TensorType type = graph.value(y).type;
  std::vector<double> seed(static_cast<size_t>(num_elements(type.shape)));
  for (size_t i = 0; i < seed.size(); ++i) {
    seed[i] = std::cos(static_cast<double>(i));
  }
  const ValueId upstream = graph.add_constant("upstream", Tensor::from(seed, type.shape));
  for (const ValueId gradient :
       differentiate(graph, {y}, {upstream}, graph.values_of_kind(ValueKind::kParameter))) {
    graph.outputs().push_back(gradient);
  }
  return graph;
}

std::vector<Tensor> ImageGraph::evaluate(const Graph& made) const {
  return trainrt::evaluate(made, feeds_, made.outputs(), {.reference_kernels = true, .step = {}});
}

int count_nodes(const Graph& graph, const std::string& op_type) {
  return static_cast<int>(std::count_if(graph.nodes().begin(),
                                        graph.nodes().end(),
                                        [&](const Node& node) { return node.op_type == op_type; }));
}

}  // namespace trainrt::testing
