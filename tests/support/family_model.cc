#include "tests/support/family_model.h"

#include <algorithm>
#include <memory>

#include "graph/onnx_export.h"
#include "graph/onnx_import.h"
#include "graph/passes/precision.h"
#include "graph/random.h"
#include "tests/support/run_program.h"

namespace trainrt::testing {

namespace {

constexpr int64_t kIgnored = -100;

double uniform(uint64_t key, int64_t i) {
  const RandomBlock block = philox(key, static_cast<uint64_t>(i), 0);
  return uniform_double(block[0], block[1]);
}

Tensor draw(const TensorType& type, int64_t below, uint64_t key) {
  Tensor tensor(is_integer(type.dtype) ? DType::kInt64 : DType::kFloat64, type.shape);
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    if (is_integer(type.dtype)) {
      tensor.data<int64_t>()[i] =
          static_cast<int64_t>(uniform(key, i) * static_cast<double>(below));
    } else {
      tensor.data<double>()[i] = 2 * uniform(key, i) - 1;
    }
  }
  return tensor.cast(type.dtype);
}

// Sample s of n ignores each of its labels with probability (1 - s / n) / 3; the last sample's
// labels all count.
Tensor draw_labels(const Shape& shape, int64_t classes, uint64_t key) {
  Tensor labels = draw({DType::kInt64, shape}, classes, key);
  const int64_t n = shape.at(0), per_sample = num_elements(shape) / n;
  for (int64_t i = 0; i < labels.num_elements(); ++i) {
    const double share = 1 - static_cast<double>(i / per_sample + 1) / static_cast<double>(n);
    if (uniform(key + 1, i) < share / 3) {
      labels.data<int64_t>()[i] = kIgnored;
    }
  }
  return labels;
}

}  // namespace

ModelSpec small_family(const std::string& family) {
  ModelSpec spec;
  spec.family = family;
  spec.classes = 7;
  spec.dropout = 0.1;
  spec.layers = 2;
  if (family == "cnn" || family == "unet" || family == "mobilenet") {
    spec.hidden = family == "unet" ? 8 : 6;  // in 8 groups
    spec.ffn = 20;
    spec.image = family == "mobilenet" ? 32 : 8;
    spec.channels = 3;
  } else if (family == "lstm") {
    spec.hidden = 14;
    spec.vocab = 53;
    spec.seq = 5;
  } else if (family == "mlp") {
    spec.layers = 3;
    spec.hidden = 15;
    spec.image = 3;
    spec.channels = 3;
  } else {
    spec.hidden = 28;
    spec.heads = 7;
    spec.ffn = 54;
    spec.vocab = 53;
    spec.seq = 5;
    spec.image = 32;
    spec.channels = 1;
    if (family == "llama") {
      spec.heads = 14;
      spec.kv_heads = 7;
    }
  }
  return spec;
}

FamilyModel family_model(const ModelSpec& spec,
                         int64_t batch,
                         const std::string& precision,
                         const OptimizerSpec& optimizer) {
  const TemporaryFolder folder;
  write_onnx(build_model(spec), folder.file("model.onnx"), {});
  // The weights are read from the file when they are wanted: they are taken along.
  const auto model = std::make_shared<const OnnxModel>(OnnxModel::load(folder.file("model.onnx")));
  const auto forward = [model, precision](int64_t size) {
    BindOptions bind;
    bind.batch = size;
    Graph graph = apply_precision(model->bind(bind), precision);
    return graph;
  };
  const Graph probe = forward(batch);
  auto weights = std::make_shared<std::map<std::string, Tensor>>();
  FamilyModel result;
  result.name = spec.family;
  for (const Value& value : probe.values()) {
    if (value.producer == kNoNode && value.kind != ValueKind::kInput && value.source.load) {
      (*weights)[value.name] = value.source.load();
    }
  }
  for (const Node& node : probe.nodes()) {
    result.num_nodes = std::max(result.num_nodes, node.source_index + 1);
    result.has_batch_norm = result.has_batch_norm || node.op_type == "BatchNormMoments";
  }
  const Value& logits = probe.value(probe.outputs().at(0));
  const size_t class_axis = spec.family == "unet" ? 1 : logits.type.shape.size() - 1;
  const int64_t classes = logits.type.shape[class_axis];
  Shape labels = logits.type.shape;
  labels.erase(labels.begin() + static_cast<std::ptrdiff_t>(class_axis));
  result.forward = forward;
  result.train = [=](Graph graph, int64_t size, bool accumulate) {
    for (ValueId id = 0; id < graph.num_values(); ++id) {
      const auto known = weights->find(graph.value(id).name);
      if (known != weights->end()) {
        graph.value(id).source.load = [tensor = known->second] { return tensor; };
      }
    }
    TrainingSpec training;
    training.loss.kind = "softmax_cross_entropy";
    training.loss.output = graph.value(graph.outputs().at(0)).name;
    training.loss.labels = "labels";
    training.loss.labels_shape = labels;
    training.loss.labels_shape[0] = size;
    training.optimizer = optimizer;
    training.accumulate = accumulate;
    return build_training_graph(std::move(graph), training);
  };
  result.factory = [forward, train = result.train](int64_t size, bool accumulate) {
    return train(forward(size), size, accumulate);
  };
  std::map<std::string, TensorType> inputs;
  for (const ValueId id : probe.values_of_kind(ValueKind::kInput)) {
    inputs[probe.value(id).name] = probe.value(id).type;
  }
  const int64_t vocab = spec.vocab;
  result.feeds = [=](int step) {
    std::map<std::string, Tensor> feeds;
    for (const auto& [name, type] : inputs) {
      const uint64_t key = hash_name(name) + static_cast<uint64_t>(step);
      feeds[name] = draw(type, name == "token_type_ids" ? 2 : vocab, key);
    }
    feeds["labels"] = draw_labels(labels, classes, 1000 + 2 * static_cast<uint64_t>(step));
    return feeds;
  };
  return result;
}

}  // namespace trainrt::testing
