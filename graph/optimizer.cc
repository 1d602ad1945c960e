// One node per parameter does the whole update in place: it reads parameter, gradient and moments
// once and writes them once. The scale on gradients (loss scale, clipping) is a scalar input, so no
// scaled gradient is ever stored. LAMB needs the norms of whole tensors between its two halves and
// is therefore three operators (arXiv 1904.00962, algorithm 2).
#include "graph/optimizer.h"

#include <algorithm>

#include "graph/graph_builder.h"

namespace trainrt {

namespace {

// The scalars that every update reads.
struct UpdateInputs {
  ValueId learning_rate;
  ValueId grad_scale;
  ValueId step;
};

ValueId runtime_scalar(Graph& graph, const char* name, DType dtype) {
  if (const std::optional<ValueId> existing = graph.find_value(name)) {
    return *existing;
  }
  return graph.add_input(name, {dtype, {}});
}

class UpdateBuilder : public GraphBuilder {
 public:
  UpdateBuilder(Graph& graph, const OptimizerSpec& spec) : GraphBuilder(graph), spec_(spec) {
    set_region(Region::kUpdate);
  }

  ValueId square_sum(ValueId x, const std::string& name) {
    return op("OrderedSum",
              {op("RowSquareSums", {x}, {}, name + "/row_square_sums")},
              {},
              name + "/square_sum");
  }

  void emit(const ParameterGradient& item, const UpdateInputs& inputs) {
    const std::string name = graph_.value(item.parameter).name;
    if (spec_.name == "sgd") {
      fused("Sgd", item, {}, {{"weight_decay", spec_.weight_decay}}, inputs);
    } else if (spec_.name == "momentum") {
      fused("Momentum",
            item,
            {"momentum"},
            {{"weight_decay", spec_.weight_decay},
             {"momentum", spec_.momentum},
             {"nesterov", int64_t{spec_.nesterov}}},
            inputs);
    } else if (spec_.name == "adagrad") {
      fused("Adagrad",
            item,
            {"sum"},
            {{"weight_decay", spec_.weight_decay}, {"eps", spec_.eps}},
            inputs);
    } else if (spec_.name == "lamb") {
      emit_lamb(item, inputs);
    } else {
      fused(spec_.name == "adam" ? "Adam" : "AdamW",
            item,
            {"exp_avg", "exp_avg_sq"},
            adam_attributes(),
            inputs);
    }
  }

 private:
  Attributes adam_attributes() const {
    return {{"weight_decay", spec_.weight_decay},
            {"beta1", spec_.beta1},
            {"beta2", spec_.beta2},
            {"eps", spec_.eps}};
  }

  ValueId state(ValueId parameter, const std::string& suffix) {
    Value value;
    value.name = graph_.unique_value_name(graph_.value(parameter).name + "." + suffix);
    value.type = type(parameter);
    value.kind = ValueKind::kOptimizerState;
    value.why = spec_.name + "'s " + suffix + " of '" + graph_.value(parameter).name + "'";
    return graph_.add_value(std::move(value));
  }

  // The node `op_type`(param, grad, states..., lr, scale, step) and what it updates.
  void fused(const std::string& op_type,
             const ParameterGradient& item,
             const std::vector<std::string>& state_names,
             Attributes attributes,
             const UpdateInputs& inputs) {
    const std::string name = graph_.value(item.parameter).name;
    std::vector<ValueId> targets = {item.parameter};
    std::vector<ValueId> operands = {item.parameter, item.gradient};
    for (const std::string& suffix : state_names) {
      targets.push_back(state(item.parameter, suffix));
      operands.push_back(targets.back());
    }
    operands.insert(operands.end(), {inputs.learning_rate, inputs.grad_scale, inputs.step});
    const std::vector<ValueId> results =
        node(op_type, operands, std::move(attributes), name + "/update");
    for (size_t i = 0; i < targets.size(); ++i) {
      graph_.updates().push_back({targets[i], results[i]});
    }
  }

  void emit_lamb(const ParameterGradient& item, const UpdateInputs& inputs) {
    const std::string name = graph_.value(item.parameter).name;
    const ValueId first = state(item.parameter, "exp_avg");
    const ValueId second = state(item.parameter, "exp_avg_sq");
    const std::vector<ValueId> moments =
        node("LambDirection",
             {item.parameter, item.gradient, first, second, inputs.grad_scale, inputs.step},
             adam_attributes(),
             name + "/direction");
    const ValueId updated = op("LambApply",
                               {item.parameter,
                                moments[0],
                                square_sum(item.parameter, name + "/parameter"),
                                square_sum(moments[0], name + "/direction"),
                                inputs.learning_rate,
                                inputs.grad_scale},
                               {},
                               name + "/update");
    graph_.updates().push_back({item.parameter, updated});
    graph_.updates().push_back({first, moments[1]});
    graph_.updates().push_back({second, moments[2]});
  }

  const OptimizerSpec& spec_;
};

}  // namespace

void check_optimizer(const OptimizerSpec& spec) {
  const std::vector<std::string> names = {"sgd", "momentum", "adam", "adamw", "adagrad", "lamb"};
  TRAINRT_REQUIRE(std::find(names.begin(), names.end(), spec.name) != names.end(),
                  kInvalidArgument,
                  "unknown optimizer '",
                  spec.name,
                  "'",
                  did_you_mean(spec.name, names),
                  "; wanted sgd, momentum, adam, adamw, adagrad or lamb");
  TRAINRT_REQUIRE(spec.weight_decay >= 0,
                  kInvalidArgument,
                  "weight decay is ",
                  spec.weight_decay,
                  ", wanted 0 or more");
  for (const double beta : {spec.beta1, spec.beta2}) {
    TRAINRT_REQUIRE(
        beta >= 0 && beta < 1, kInvalidArgument, "beta is ", beta, ", wanted 0 <= beta < 1");
  }
  TRAINRT_REQUIRE(
      spec.momentum >= 0, kInvalidArgument, "momentum is ", spec.momentum, ", wanted 0 or more");
  TRAINRT_REQUIRE(!spec.nesterov || spec.momentum > 0,
                  kInvalidArgument,
                  "Nesterov's form needs a momentum above 0");
  TRAINRT_REQUIRE(spec.eps >= 0, kInvalidArgument, "eps is ", spec.eps, ", wanted 0 or more");
  TRAINRT_REQUIRE(spec.clip_norm >= 0,
                  kInvalidArgument,
                  "clip norm is ",
                  spec.clip_norm,
                  ", wanted a positive norm, or 0 for none");
}

ValueId build_update(Graph& graph,
                     const std::vector<ParameterGradient>& parameters,
                     const OptimizerSpec& spec) {
  check_optimizer(spec);
  UpdateBuilder builder(graph, spec);
  UpdateInputs inputs{};
  inputs.learning_rate = runtime_scalar(graph, runtime_input::kLearningRate, DType::kFloat32);
  inputs.grad_scale = runtime_scalar(graph, runtime_input::kGradScale, DType::kFloat32);
  inputs.step = runtime_scalar(graph, runtime_input::kStep, DType::kInt64);
  std::vector<ValueId> norm_inputs = {inputs.grad_scale};
  for (const ParameterGradient& item : parameters) {
    norm_inputs.push_back(
        builder.square_sum(item.gradient, graph.value(item.parameter).name + "/grad"));
  }
  const ValueId norm = builder.op("GlobalNorm", norm_inputs, {}, "trainrt.global_norm");
  const ValueId reported = builder.op(
      "Cast", {norm}, {{"to", std::string("float32")}}, "trainrt.grad_norm", "trainrt.grad_norm");
  inputs.grad_scale = builder.op("ClipScale",
                                 {norm, inputs.grad_scale},
                                 {{"clip_norm", spec.clip_norm}},
                                 "trainrt.clip_scale");
  for (const ParameterGradient& item : parameters) {
    builder.emit(item, inputs);
  }
  return reported;
}

}  // namespace trainrt
