// Dims become numbers: the batch axis of each input from the options, other symbols from --bind.
// Then the nodes are translated, and each weight gets its role.
#include "graph/onnx_dims.h"

#include <algorithm>

#include "graph/onnx_parameters.h"
#include "graph/onnx_tensor.h"
#include "graph/onnx_translate.h"
#include "graph/passes/pass.h"

namespace trainrt {

namespace {

int batch_axis(const ModelInput& input, const BindOptions& options) {
  const auto it = options.batch_axes.find(input.name);
  if (it == options.batch_axes.end()) {
    return input.batch_axis;
  }
  const int ndim = static_cast<int>(input.dims.size());
  TRAINRT_REQUIRE(it->second >= -1 && it->second < ndim,
                  kInvalidArgument,
                  "--batch-axis ",
                  input.name,
                  "=",
                  it->second,
                  ": the input has ",
                  ndim,
                  " dims");
  return it->second;
}

// The concrete shape of every input. All unbound dims are reported at once.
std::map<std::string, Shape> input_shapes(const OnnxModel::Impl& model,
                                          const BindOptions& options) {
  std::map<std::string, int64_t> sizes = options.dims;
  for (const ModelInput& input : model.inputs) {
    const int axis = batch_axis(input, options);
    if (axis >= 0 && input.dims[static_cast<size_t>(axis)].size < 0) {
      sizes[input.dims[static_cast<size_t>(axis)].symbol] = options.batch;
    }
  }
  std::map<std::string, Shape> shapes;
  std::string unbound, without_batch;
  for (const ModelInput& input : model.inputs) {
    Shape& shape = shapes[input.name];
    const int batch = batch_axis(input, options);
    for (size_t axis = 0; axis < input.dims.size(); ++axis) {
      const Dim& dim = input.dims[axis];
      if (static_cast<int>(axis) == batch) {
        shape.push_back(options.batch);
      } else if (dim.size >= 0) {
        shape.push_back(dim.size);
      } else if (const auto it = sizes.find(dim.symbol); it != sizes.end()) {
        shape.push_back(it->second);
      } else {
        unbound += concat(unbound.empty() ? "" : ", ",
                          "'",
                          dim.symbol,
                          "' (axis ",
                          axis,
                          " of '",
                          input.name,
                          "')");
        if (batch < 0 && options.batch_axes.count(input.name) != 0) {
          without_batch = concat("; --batch-axis ",
                                 input.name,
                                 "=-1 says that no axis of it enumerates samples (axes count from "
                                 "0, the first)");
        }
        shape.push_back(1);
      }
    }
  }
  TRAINRT_REQUIRE(unbound.empty(),
                  kInvalidArgument,
                  "these dims have no size: ",
                  unbound,
                  "; give each with --bind DIM=N",
                  without_batch);
  return shapes;
}

void add_inputs(const OnnxModel::Impl& model,
                const BindOptions& options,
                const std::map<std::string, Shape>& shapes,
                OnnxTranslator& translator) {
  std::map<std::string, const onnx::ValueInfoProto*> infos;
  for (const onnx::ValueInfoProto& info : model.graph().input()) {
    infos[info.name()] = &info;
  }
  for (const ModelInput& input : model.inputs) {
    const onnx::TypeProto& type = infos.at(input.name)->type();
    const std::optional<DType> dtype = dtype_from_onnx(type.tensor_type().elem_type());
    if (!dtype) {
      translator.define_unsupported(
          input.name,
          type.has_tensor_type()
              ? concat("element type ", onnx_dtype_name(type.tensor_type().elem_type()))
              : std::string("a sequence, map, optional or sparse tensor"));
      continue;
    }
    translator.define(input.name,
                      translator.graph().add_input(
                          input.name, {*dtype, shapes.at(input.name)}, batch_axis(input, options)));
  }
}

// Roles of all candidates. With an unsupported operator in the way nothing can be said of what
// stands before it.
std::vector<TensorReport> report_tensors(const OnnxModel::Impl& model,
                                         const BindOptions& options,
                                         const OnnxTranslator& translator,
                                         const Binding& binding,
                                         const std::vector<ValueId>& live_ids,
                                         Graph& live) {
  const bool complete = binding.unsupported.empty();
  std::vector<TensorReport> reports;
  std::vector<WeightCandidate> candidates;
  for (WeightCandidate candidate : translator.candidates()) {
    const Value& value = binding.graph.value(candidate.value);
    candidate.value = live_ids[static_cast<size_t>(candidate.value)];
    if (const auto note = model.weight_notes.find(value.name); note != model.weight_notes.end()) {
      candidate.note = note->second;
    }
    if (!complete) {
      reports.push_back(
          {value.name, value.type, "unknown", "the model has operators that are not supported"});
    } else if (candidate.value != kNoValue) {
      candidates.push_back(candidate);
    } else if (translator.was_read(value.name)) {
      reports.push_back({value.name,
                         value.type,
                         "constant",
                         "an operand that became an attribute when the model was imported"});
    } else {
      reports.push_back(
          {value.name, value.type, "unused", "no node on the way to an output reads it"});
    }
  }
  if (complete) {
    const std::vector<TensorReport> roles =
        assign_roles(live, candidates, model.signature, options);
    reports.insert(reports.end(), roles.begin(), roles.end());
  }
  for (const onnx::TensorProto& tensor : model.graph().initializer()) {
    if (translator.is_unread(tensor.name()) && dtype_from_onnx(tensor.data_type())) {
      reports.push_back({tensor.name(),
                         tensor_type(tensor, tensor.name()),
                         complete ? "unused" : "unknown",
                         "no node that is supported reads it"});
    }
  }
  return reports;
}

}  // namespace

void check_options(const OnnxModel::Impl& model, const BindOptions& options) {
  TRAINRT_REQUIRE(
      options.batch > 0, kInvalidArgument, "batch size ", options.batch, "; wanted at least 1");
  std::vector<std::string> inputs;
  std::vector<std::string> symbols;
  for (const ModelInput& input : model.inputs) {
    inputs.push_back(input.name);
    for (const Dim& dim : input.dims) {
      if (dim.size < 0) {
        symbols.push_back(dim.symbol);
      }
    }
  }
  for (const auto& [name, axis] : options.batch_axes) {
    TRAINRT_REQUIRE(std::count(inputs.begin(), inputs.end(), name) != 0,
                    kInvalidArgument,
                    "--batch-axis: there is no input '",
                    name,
                    "'",
                    did_you_mean(name, inputs));
  }
  for (const auto& [symbol, size] : options.dims) {
    TRAINRT_REQUIRE(std::count(symbols.begin(), symbols.end(), symbol) != 0,
                    kInvalidArgument,
                    "--bind: no input has a dim named '",
                    symbol,
                    "'",
                    did_you_mean(symbol, symbols));
    TRAINRT_REQUIRE(
        size > 0, kInvalidArgument, "--bind ", symbol, "=", size, "; wanted at least 1");
  }
}

// The batch size that the dims of the inputs are fixed to, if any.
std::optional<int64_t> fixed_batch(const OnnxModel::Impl& model, const BindOptions& options) {
  for (const ModelInput& input : model.inputs) {
    const int axis = batch_axis(input, options);
    if (axis >= 0 && input.dims[static_cast<size_t>(axis)].size > 0) {
      return input.dims[static_cast<size_t>(axis)].size;
    }
  }
  return std::nullopt;
}

void define_inputs(const OnnxModel::Impl& model,
                   const BindOptions& options,
                   OnnxTranslator& translator) {
  check_options(model, options);
  add_inputs(model, options, input_shapes(model, options), translator);
}

Binding translate_model(const OnnxModel::Impl& model,
                        const BindOptions& options,
                        BatchRewriter::Record* record,
                        BatchRewriter* rewriter) {
  Binding binding;
  TranslateOptions translate_options;
  translate_options.training = options.training;
  translate_options.record = record;
  translate_options.rewriter = rewriter;
  OnnxTranslator translator(model, binding.graph, translate_options);
  add_inputs(model, options, input_shapes(model, options), translator);
  translator.add_initializers(model.graph());
  translator.translate(model.graph());
  translator.set_outputs(model.outputs);
  binding.unsupported = translator.unsupported();
  // Dead nodes go before roles are given: what only they read is unused.
  std::vector<ValueId> map;
  Graph live = binding.graph.subgraph(live_nodes(binding.graph), &map);
  binding.tensors = report_tensors(model, options, translator, binding, map, live);
  binding.graph = std::move(live);
  return binding;
}

}  // namespace trainrt
