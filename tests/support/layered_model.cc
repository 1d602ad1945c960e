#include "tests/support/layered_model.h"

#include "graph/graph_builder.h"

namespace trainrt::testing {

namespace {

ValueId weight(Graph* graph, const std::string& name, Shape shape) {
  Value value;
  value.name = name;
  value.type = {DType::kFloat32, std::move(shape)};
  value.kind = ValueKind::kParameter;
  return graph->add_value(std::move(value));
}

}  // namespace

TrainingGraph layered_model(
    int64_t batch, int layers, int64_t seq, int64_t hidden, int64_t ffn, int64_t classes) {
  return layered_model(
      batch, seq, hidden, std::vector<int64_t>(static_cast<size_t>(layers), ffn), classes);
}

TrainingGraph layered_model(
    int64_t batch, int64_t seq, int64_t hidden, const std::vector<int64_t>& ffn, int64_t classes) {
  Graph graph;
  GraphBuilder b(graph);
  ValueId x = graph.add_input("x", {DType::kFloat32, {batch, seq, hidden}}, 0);
  int source = 0;
  const auto op = [&](const std::string& type, const std::vector<ValueId>& inputs) {
    b.set_source_index(source++);
    return b.op(type, inputs);
  };
  for (size_t i = 0; i < ffn.size(); ++i) {
    const std::string name = "layer" + std::to_string(i);
    const ValueId up = weight(&graph, name + ".up", {hidden, ffn[i]});
    const ValueId down = weight(&graph, name + ".down", {ffn[i], hidden});
    const ValueId y = op("MatMul", {op("Relu", {op("MatMul", {x, up})}), down});
    x = op("Add", {x, y});
  }
  const ValueId logits = op("MatMul", {x, weight(&graph, "head", {hidden, classes})});
  graph.rename_value(logits, "logits");
  graph.outputs().push_back(logits);
  TrainingSpec spec;
  spec.loss.kind = "mse";
  spec.loss.output = "logits";
  spec.loss.labels = "labels";
  spec.loss.labels_dtype = DType::kFloat32;
  spec.loss.labels_shape = {batch, seq, classes};
  return build_training_graph(std::move(graph), spec);
}

}  // namespace trainrt::testing
