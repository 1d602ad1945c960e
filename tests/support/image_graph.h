// A graph written node by node over float64 parameters with fixed contents, and what it computes:
// for tests of passes, which must change neither values nor gradients.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "graph/graph_builder.h"

namespace trainrt::testing {

class ImageGraph {
 public:
  ImageGraph() = default;
  ImageGraph(const ImageGraph&) = delete;
  ImageGraph& operator=(const ImageGraph&) = delete;

  ValueId parameter(const std::string& name, const Shape& shape);
  // Convolution with a kernel of 3 x 3, padded, and a new weight.
  ValueId conv(ValueId x, int64_t channels, const std::string& name);
  // BatchNormalization in training, with new scale and bias.
  ValueId batch_norm(ValueId x, const std::string& name);

  // The contents of all outputs of a graph with these parameters.
  std::vector<Tensor> evaluate(const Graph& made) const;

  Graph graph;
  GraphBuilder builder{graph};

 private:
  std::map<std::string, Tensor> feeds_;
};

// The graph whose outputs are output 0 and the gradients of all parameters under a fixed upstream
// gradient.
Graph with_gradients(Graph graph);

int count_nodes(const Graph& graph, const std::string& op_type);

}  // namespace trainrt::testing
