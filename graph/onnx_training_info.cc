// A model that brings its own training step (ONNX IR, "Training Related Information"): the step is
// the inference graph followed by the algorithm graph, read as one graph. Its Gradient node is
// where the micro-batch ends: what it and the loss need runs per micro-batch, what follows it is
// the update.
//
//   state       the initializers that are keys of the bindings; those in Gradient's xs are
//   parameters loss        Gradient's y, taken apart into sum and count where it is a mean
//   gradients   accumulated over micro-batches, so Gradient's outputs are those of the whole step
//   start       initialization's outputs, when there is an initialization graph
//   R, T        graph inputs that an optimizer reads as learning rate and update count are fed by
//               the runtime: --lr with its schedule, and the steps done so far
#include <algorithm>
#include <functional>
#include <set>
#include <utility>

#include "graph/autodiff.h"
#include "graph/evaluator.h"
#include "graph/onnx_bind.h"
#include "graph/onnx_dims.h"
#include "graph/onnx_model.h"
#include "graph/onnx_tensor.h"
#include "graph/onnx_translate.h"
#include "graph/training_parts.h"
#include "graph/whole_batch.h"

namespace trainrt {

namespace {

constexpr const char* kTrainingDomain = "ai.onnx.preview.training";

bool is_gradient(const onnx::NodeProto& node) {
  return node.op_type() == "Gradient" && canonical_domain(node.domain()) == kTrainingDomain;
}

// Inference graph and algorithm graph as one model.
std::unique_ptr<OnnxModel::Impl> merge(const OnnxModel::Impl& model) {
  auto proto = std::make_shared<onnx::ModelProto>(*model.proto);
  onnx::GraphProto& graph = *proto->mutable_graph();
  const onnx::GraphProto& algorithm = model.algorithm(0);
  graph.mutable_input()->MergeFrom(algorithm.input());
  graph.mutable_output()->MergeFrom(algorithm.output());
  graph.mutable_initializer()->MergeFrom(algorithm.initializer());
  graph.mutable_sparse_initializer()->MergeFrom(algorithm.sparse_initializer());
  graph.mutable_node()->MergeFrom(algorithm.node());
  graph.mutable_value_info()->MergeFrom(algorithm.value_info());
  auto merged = std::make_unique<OnnxModel::Impl>();
  merged->path = model.path;
  merged->files = model.files;
  merged->proto = std::move(proto);
  index_model(*merged);
  return merged;
}

// The outputs of the initialization graph, computed together when the first is asked for.
std::map<std::string, TensorSource> initial_values(const OnnxModel::Impl& model) {
  struct Initialization {
    Graph graph;
    std::vector<ValueId> ids;
    std::vector<Tensor> tensors;
  };
  const std::map<std::string, std::string> bindings = model.initialization_bindings(0);
  std::map<std::string, TensorSource> sources;
  if (bindings.empty()) {
    return sources;
  }
  auto shared = std::make_shared<Initialization>();
  OnnxTranslator translator(model, shared->graph, {});
  translator.add_initializers(model.initialization(0));
  translator.translate(model.initialization(0));
  require_supported(translator.unsupported());
  for (const auto& [target, output] : bindings) {
    const size_t index = shared->ids.size();
    shared->ids.push_back(translator.find(output).value());
    sources[target] = {"initialization graph", [shared, index] {
                         if (shared->tensors.empty()) {
                           shared->tensors = evaluate(shared->graph, {}, shared->ids);
                         }
                         return shared->tensors[index];
                       }};
  }
  return sources;
}

class TrainingInfoBuilder {
 public:
  TrainingInfoBuilder(const OnnxModel::Impl& model, bool accumulated)
      : owner_(merge(model)),
        merged_(*owner_),
        bindings_(merged_.update_bindings()),
        initial_(initial_values(model)),
        accumulated_(accumulated),
        translator_(merged_, graph_, {}) {}

  // `sums_samples`: see ScalarLoss.
  TrainingGraph build(const BindOptions& options, bool sums_samples) {
    translate(options,
              [this, sums_samples](const onnx::NodeProto& node) { gradient(node, sums_samples); });
    bind_updates();
    assign_regions();
    const ValueId norm = gradient_norm();
    return finish_training_graph(std::move(graph_), loss_, norm, std::move(parameters_));
  }

  // The graph without its backward, gradients being inputs, and the loss.
  std::pair<Graph, ValueId> build_open(const BindOptions& options) {
    ValueId loss = kNoValue;
    translate(options, [&](const onnx::NodeProto& node) {
      const Attributes attributes = translator_.attributes(node);
      loss = value_of(attributes.get_string("y"));
      const std::vector<std::string> xs = attributes.get_strings("xs", {});
      for (int i = 0; i < std::min(node.output_size(), static_cast<int>(xs.size())); ++i) {
        if (!node.output(i).empty()) {
          const TensorType type = graph_.value(value_of(xs[static_cast<size_t>(i)])).type;
          translator_.set_output(node, i, graph_.add_input(concat("gradient/", i), type));
        }
      }
    });
    return {std::move(graph_), loss};
  }

 private:
  // `differentiate` takes the place of the Gradient node.
  void translate(const BindOptions& options,
                 const std::function<void(const onnx::NodeProto&)>& differentiate) {
    bool found = false;
    define_runtime_inputs();
    define_inputs(merged_, options, translator_);
    define_state();
    translator_.add_initializers(merged_.graph());
    translator_.set_handler([&](OnnxTranslator&, const onnx::NodeProto& node) {
      if (!is_gradient(node)) {
        return false;
      }
      TRAINRT_REQUIRE(!found,
                      kUnsupported,
                      "node '",
                      translator_.node_name(node),
                      "': a second Gradient node; training_info with one is supported");
      found = true;
      differentiate(node);
      return true;
    });
    translator_.translate(merged_.graph());
    translator_.set_handler(nullptr);
    require_supported(translator_.unsupported());
    TRAINRT_REQUIRE(found,
                    kUnsupported,
                    "training_info has no Gradient node (",
                    kTrainingDomain,
                    "); nothing says what the loss is");
  }

  ValueId value_of(const std::string& name) {
    const std::optional<ValueId> found = translator_.find(name);
    if (!found) {  // made by what is not supported, or from what is
      require_supported(translator_.unsupported());
    }
    return found.value();
  }

  // Takes R and T of optimizers, where they are graph inputs, from the inputs that data feeds.
  void define_runtime_inputs() {
    for (const onnx::NodeProto& node : merged_.graph().node()) {
      if (canonical_domain(node.domain()) != kTrainingDomain || is_gradient(node)) {
        continue;
      }
      for (int i = 0; i < std::min(2, node.input_size()); ++i) {
        const auto input = std::find_if(
            merged_.inputs.begin(), merged_.inputs.end(), [&](const ModelInput& candidate) {
              return candidate.name == node.input(i);
            });
        if (input != merged_.inputs.end()) {
          translator_.define(input->name, fed_by_runtime(i == 0, input->dtype));
          merged_.inputs.erase(input);
        }
      }
    }
  }

  ValueId fed_by_runtime(bool learning_rate, DType dtype) {
    GraphBuilder builder(graph_);
    builder.set_region(Region::kUpdate);
    const TensorType type = {learning_rate ? DType::kFloat32 : DType::kInt64, {}};
    const char* name = learning_rate ? runtime_input::kLearningRate : runtime_input::kStep;
    const std::optional<ValueId> existing = graph_.find_value(name);
    const ValueId fed = existing ? *existing : graph_.add_input(name, type);
    // ONNX counts updates from 0, the runtime numbers steps from 1.
    return learning_rate ? builder.cast(fed, dtype)
                         : builder.sub(fed, builder.scalar(1, DType::kInt64));
  }

  // State stands before the translation, so that nothing takes its contents for a constant.
  void define_state() {
    std::set<std::string> differentiated;
    for (const onnx::NodeProto& node : merged_.graph().node()) {
      if (is_gradient(node)) {
        for (const std::string& name : translator_.attributes(node).get_strings("xs", {})) {
          differentiated.insert(name);
        }
      }
    }
    for (const onnx::TensorProto& tensor : merged_.graph().initializer()) {
      const std::string& name = tensor.name();
      if (bindings_.count(name) == 0) {
        TRAINRT_REQUIRE(differentiated.count(name) == 0,
                        kUnsupported,
                        "Gradient differentiates by '",
                        name,
                        "', which no update_binding changes");
        continue;
      }
      Value value;
      value.name = name;
      value.type = tensor_type(tensor, concat("initializer '", name, "'"));
      value.kind =
          differentiated.count(name) != 0 ? ValueKind::kParameter : ValueKind::kOptimizerState;
      value.why = "bound in training_info";
      const auto initial = initial_.find(name);
      value.source = initial != initial_.end()
                         ? initial->second
                         : tensor_source(merged_.proto, tensor, merged_.files);
      translator_.define(name, graph_.add_value(std::move(value)));
    }
  }

  void gradient(const onnx::NodeProto& node, bool sums_samples) {
    const Attributes attributes = translator_.attributes(node);
    const std::vector<std::string> xs = attributes.get_strings("xs", {});
    const std::vector<ValueId> inputs = translator_.inputs(node);
    std::vector<ValueId> wanted;
    for (size_t i = 0; i < xs.size(); ++i) {
      const ValueId x = value_of(xs[i]);
      TRAINRT_REQUIRE(i < inputs.size() && inputs[i] == x,
                      kUnsupported,
                      "node '",
                      translator_.node_name(node),
                      "' (Gradient): input ",
                      i,
                      " is not '",
                      xs[i],
                      "', after which it is named; differentiating at another point is not "
                      "supported");
      TRAINRT_REQUIRE(graph_.value(x).kind == ValueKind::kParameter,
                      kUnsupported,
                      "Gradient differentiates by '",
                      xs[i],
                      "', which is no initializer with an update_binding");
      wanted.push_back(x);
    }
    const ValueId y = value_of(attributes.get_string("y"));
    place_draws(merged_, graph_);
    loss_ = loss_of_scalar(graph_, y, sums_samples);
    const ValueId seed = graph_.add_input(runtime_input::kLossSeed, {DType::kFloat64, {}});
    const std::vector<std::vector<ValueId>> uses =
        differentiate_uses(graph_, {loss_.loss_sum}, {seed}, wanted);
    for (size_t i = 0; i < xs.size(); ++i) {
      TRAINRT_REQUIRE(!uses[i].empty(),
                      kInvalidModel,
                      "the loss '",
                      attributes.get_string("y"),
                      "' does not depend on '",
                      xs[i],
                      "', by which Gradient differentiates it");
      parameters_.push_back(xs[i]);
      const ValueId complete = complete_gradient(graph_, xs[i], uses[i], accumulated_);
      gradients_.push_back(complete);
      if (static_cast<int>(i) < node.output_size() && !node.output(static_cast<int>(i)).empty()) {
        translator_.set_output(node, static_cast<int>(i), complete);
      }
    }
  }

  void bind_updates() {
    std::vector<StateUpdate> updates;
    for (const StateUpdate& update : graph_.updates()) {
      // BatchNormalization names its statistics by itself; a binding says the same again.
      if (bindings_.count(graph_.value(update.target).name) == 0) {
        updates.push_back(update);
      }
    }
    for (const auto& [target, result] : bindings_) {
      updates.push_back({value_of(target), made_by_update(result)});
    }
    graph_.updates() = std::move(updates);
  }

  // The value bound by the name `result`. What no node of the update makes (another state's old
  // contents, a gradient) is copied by one: nodes have a place in a pipeline and a time in a step.
  ValueId made_by_update(const std::string& result) {
    const ValueId id = value_of(result);
    const bool is_gradient = std::count(gradients_.begin(), gradients_.end(), id) != 0;
    if (graph_.value(id).producer != kNoNode && !is_gradient) {
      return id;
    }
    GraphBuilder builder(graph_);
    builder.set_region(Region::kUpdate);
    return builder.op("Reshape", {id}, {{"shape", graph_.value(id).type.shape}}, result + "/copy");
  }

  bool is_data(const std::string& name) const {
    return std::any_of(merged_.inputs.begin(), merged_.inputs.end(), [&](const ModelInput& input) {
      return input.name == name;
    });
  }

  // Nodes that the loss or a gradient needs, or that read data, run per micro-batch, and so does
  // what these need; all that follows the gradients or depends on state alone runs once per step.
  void assign_regions() {
    const std::vector<bool> reads_data = nodes_that_read_data();
    std::set<NodeId> per_micro_batch;
    for (NodeId id = graph_.num_nodes(); id-- > 0;) {
      Node& node = graph_.node(id);
      const bool root = node.region == Region::kBackward || node.region == Region::kCount ||
                        id == graph_.value(loss_.loss_sum).producer ||
                        (node.region == Region::kForward && reads_data[static_cast<size_t>(id)]);
      if (!root && per_micro_batch.count(id) == 0) {
        node.region = Region::kUpdate;
        continue;
      }
      for (const ValueId input : node.inputs) {
        if (input != kNoValue && graph_.value(input).producer != kNoNode) {
          per_micro_batch.insert(graph_.value(input).producer);
        }
      }
    }
    check_update(std::set<ValueId>(gradients_.begin(), gradients_.end()));
  }

  // By node: whether it depends on data otherwise than through gradients.
  std::vector<bool> nodes_that_read_data() const {
    const std::set<ValueId> gradients(gradients_.begin(), gradients_.end());
    std::vector<bool> from_data(static_cast<size_t>(graph_.num_values()), false);
    for (const ValueId id : graph_.values_of_kind(ValueKind::kInput)) {
      from_data[static_cast<size_t>(id)] = is_data(graph_.value(id).name);
    }
    std::vector<bool> result;
    for (const Node& node : graph_.nodes()) {
      result.push_back(std::any_of(node.inputs.begin(), node.inputs.end(), [&](ValueId input) {
        return input != kNoValue && from_data[static_cast<size_t>(input)];
      }));
      for (const ValueId output : node.outputs) {
        if (output != kNoValue) {
          // Gradients of the whole step are the update's inputs, not data any more.
          from_data[static_cast<size_t>(output)] = result.back() && gradients.count(output) == 0;
        }
      }
    }
    return result;
  }

  // State whose new value comes from data must do so through gradients, or be a forward statistic.
  void check_update(const std::set<ValueId>& gradients) {
    std::set<ValueId> allowed = gradients;
    for (const Node& node : graph_.nodes()) {
      const auto from_data = [&](ValueId input) {
        const NodeId producer = input == kNoValue ? kNoNode : graph_.value(input).producer;
        return producer != kNoNode && graph_.node(producer).region != Region::kUpdate &&
               allowed.count(input) == 0;
      };
      const bool of_step = node.region != Region::kBackward &&
                           std::any_of(node.inputs.begin(), node.inputs.end(), [&](ValueId input) {
                             return gradients.count(input) != 0;
                           });
      // In the forward, when what comes of it is combined with samples further on.
      const bool mixes =
          of_step && (node.region == Region::kForward ||
                      std::any_of(node.inputs.begin(), node.inputs.end(), from_data));
      TRAINRT_REQUIRE(!mixes,
                      kUnsupported,
                      "node '",
                      node.name,
                      "' (",
                      node.op_type,
                      ") of the training algorithm reads a gradient of the whole step, which it or "
                      "a node behind it combines with a value of one micro-batch; an update may "
                      "read gradients and state only");
    }
    // What a micro-batch reads or changes is whole on every rank that does.
    const std::vector<std::vector<NodeId>> consumers = graph_.consumers();
    for (const StateUpdate& update : graph_.updates()) {
      Value& target = graph_.value(update.target);
      const NodeId producer = graph_.value(update.new_value).producer;
      const std::vector<NodeId>& readers = consumers[static_cast<size_t>(update.target)];
      const auto in_micro_batch = [&](NodeId id) {
        return graph_.node(id).region != Region::kUpdate;
      };
      if (target.kind == ValueKind::kOptimizerState &&
          (in_micro_batch(producer) ||
           std::any_of(readers.begin(), readers.end(), in_micro_batch))) {
        target.kind = ValueKind::kState;
      }
    }
  }

  ValueId gradient_norm() {
    GraphBuilder builder(graph_);
    builder.set_region(Region::kUpdate);
    std::vector<ValueId> inputs = {builder.scalar(1, DType::kFloat32)};
    for (const ValueId gradient : gradients_) {
      inputs.push_back(builder.op("OrderedSum", {builder.op("RowSquareSums", {gradient})}));
    }
    return builder.cast(builder.op("GlobalNorm", inputs, {}, "trainrt.global_norm"),
                        DType::kFloat32);
  }

  std::unique_ptr<OnnxModel::Impl> owner_;
  OnnxModel::Impl& merged_;
  const std::map<std::string, std::string> bindings_;
  const std::map<std::string, TensorSource> initial_;
  const bool accumulated_;
  Graph graph_;
  OnnxTranslator translator_;
  LossValues loss_;
  std::vector<ValueId> gradients_;
  std::vector<std::string> parameters_;
};

const OnnxModel::Impl& with_training_info(const OnnxModel& model) {
  const OnnxModel::Impl& impl = model.impl();
  TRAINRT_REQUIRE(
      impl.num_training_infos() > 0, kInvalidArgument, "'", impl.path, "' has no training_info");
  TRAINRT_REQUIRE(impl.num_training_infos() == 1,
                  kUnsupported,
                  "'",
                  impl.path,
                  "' has ",
                  impl.num_training_infos(),
                  " training_info entries, to be run in turns; one is supported");
  return impl;
}

}  // namespace

ScalarLoss loss_of_training_info(const OnnxModel& model, BindOptions options) {
  const OnnxModel::Impl& impl = with_training_info(model);
  options.batch = std::max<int64_t>(2, options.batch);
  const auto [graph, loss] = TrainingInfoBuilder(impl, false).build_open(options);
  options.batch *= 2;
  const auto [doubled, unused] = TrainingInfoBuilder(impl, false).build_open(options);
  return describe_scalar_loss(graph, loss, &doubled);
}

TrainingGraph build_from_training_info(const OnnxModel& model,
                                       const BindOptions& options,
                                       bool accumulate,
                                       bool sums_samples) {
  const OnnxModel::Impl& impl = with_training_info(model);
  const auto build = [&](const BindOptions& bind) {
    return TrainingInfoBuilder(impl, accumulate).build(bind, sums_samples);
  };
  TrainingGraph training = build(options);
  // The number of samples stands in the graph as a constant, so it shows by another.
  BindOptions twice = options;
  twice.batch *= 2;
  mark_sample_counts(training.graph, build(twice).graph);
  return training;
}

}  // namespace trainrt
