// OnnxModel::bind: translation, if need be twice (see onnx_baked_batch.h), then folding, the places
// of random draws, and fusions.
#include "graph/onnx_bind.h"

#include <algorithm>
#include <set>

#include "graph/base/log.h"
#include "graph/onnx_dims.h"
#include "graph/onnx_tensor.h"
#include "graph/op_def.h"
#include "graph/passes/constant_folding.h"
#include "graph/passes/fusion.h"
#include "graph/passes/layout.h"
#include "graph/passes/sample_rows.h"
#include "graph/verifier.h"

namespace trainrt {

namespace {

// Example batches that a model with symbolic dims may have been traced at: leading sizes in
// constant operands of Reshape and Expand, most frequent first, and 1.
std::vector<int64_t> likely_batches(const OnnxModel::Impl& model) {
  std::set<std::string> shape_operands;
  for (const onnx::NodeProto& node : model.graph().node()) {
    if ((node.op_type() == "Reshape" || node.op_type() == "Expand") && node.input_size() > 1) {
      shape_operands.insert(node.input(1));
    }
  }
  std::map<int64_t, int> counts = {{1, 1}};
  const auto count = [&](const std::string& name, const onnx::TensorProto& tensor) {
    if (shape_operands.count(name) == 0 || tensor.data_type() != onnx::TensorProto::INT64 ||
        has_external_data(tensor)) {
      return;
    }
    const std::vector<int64_t> shape = tensor_source(model.proto, tensor, {}).load().to_int64();
    for (const int64_t dim : shape) {
      counts[dim] += dim > 0 ? 1 : 0;
    }
  };
  for (const onnx::TensorProto& tensor : model.graph().initializer()) {
    count(tensor.name(), tensor);
  }
  for (const onnx::NodeProto& node : model.graph().node()) {
    if (node.op_type() == "Constant" && node.attribute_size() > 0 && node.attribute(0).has_t()) {
      count(node.output(0), node.attribute(0).t());
    }
  }
  std::vector<int64_t> sizes;
  for (const auto& [size, times] : counts) {
    if (times > 0) {
      sizes.push_back(size);
    }
  }
  std::stable_sort(
      sizes.begin(), sizes.end(), [&](int64_t a, int64_t b) { return counts[a] > counts[b]; });
  constexpr size_t kMaxTries = 6;
  sizes.resize(std::min(sizes.size(), kMaxTries));
  return sizes;
}

// Message and context, for a place inside another sentence.
std::string in_one_line(const Error& error) {
  std::string text = error.what();
  for (size_t at = text.find('\n'); at != std::string::npos; at = text.find('\n', at)) {
    text.replace(at, text.find_first_not_of("\n ", at) - at, ", ");
  }
  return text;
}

std::string baked_message(const Binding& binding) {
  std::string names;
  for (size_t i = 0; i < std::min<size_t>(binding.rewritten.size(), 5); ++i) {
    names += concat(i == 0 ? "'" : ", '", binding.rewritten[i], "'");
  }
  if (binding.rewritten.size() > 5) {
    names += concat(" and ", binding.rewritten.size() - 5, " more");
  }
  return concat("the exporter baked batch size ", binding.example_batch, " into ", names);
}

// Warns of rewritten nodes, once per model, or refuses them.
Binding accept_rewritten(const OnnxModel::Impl& model,
                         const BindOptions& options,
                         Binding binding) {
  if (!binding.rewritten.empty()) {
    TRAINRT_REQUIRE(options.rewrite_baked_batch,
                    kInvalidModel,
                    baked_message(binding),
                    "; export with a dynamic batch");
    if (!model.warned_of_baked_batch.exchange(true)) {
      log_warning(baked_message(binding), "; these nodes are rewritten to follow the batch");
    }
  }
  return binding;
}

bool outputs_scale(const Graph& example, const Graph& now, int64_t from, int64_t to) {
  if (example.outputs().size() != now.outputs().size()) {
    return false;  // what one size supports the other may not
  }
  for (size_t i = 0; i < now.outputs().size(); ++i) {
    if (!scales_with_batch(example.value(example.outputs()[i]).type.shape,
                           now.value(now.outputs()[i]).type.shape,
                           from,
                           to)) {
      return false;
    }
  }
  return true;
}

// The model made for `example` samples, translated for options.batch; nothing when it cannot be,
// and then `why`, if given, says what stands in the way.
std::optional<Binding> translate_rewritten(const OnnxModel::Impl& model,
                                           const BindOptions& options,
                                           int64_t example,
                                           std::string* why = nullptr) {
  const auto note = [&](const std::string& text) {
    if (why != nullptr && why->empty()) {
      *why = text;
    }
  };
  BindOptions example_options = options;
  example_options.batch = example;
  BatchRewriter::Record record;
  record.batch = example;
  using Extent = BatchRewriter::Extent;
  try {
    const Binding original = translate_model(model, example_options, &record);
    for (const Extent extent : {Extent::kReshape, Extent::kAll}) {
      BatchRewriter rewriter(record, options.batch, extent);
      try {
        Binding binding = translate_model(model, options, nullptr, &rewriter);
        if (outputs_scale(original.graph, binding.graph, example, options.batch)) {
          binding.rewritten = rewriter.rewritten();
          binding.example_batch = example;
          return binding;
        }
        note("the outputs do not follow the batch");
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kInvalidModel) {
          throw;
        }
        note(in_one_line(error));
      }
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidModel) {
      throw;
    }
    note(in_one_line(error));
  }
  return std::nullopt;
}

// A size of a dim other than the batch that the exporter baked into the model as well: one of the
// numbers in its shape operands with which it can be translated.
void refuse_baked_dim(const OnnxModel::Impl& model,
                      const BindOptions& options,
                      const std::string& why) {
  for (const auto& [symbol, size] : options.dims) {
    for (const int64_t example : likely_batches(model)) {
      BindOptions as_exported = options;
      as_exported.dims[symbol] = example;
      bool fits = false;
      try {
        translate_model(model, as_exported);
        fits = true;
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kInvalidModel) {
          throw;
        }
      }
      TRAINRT_REQUIRE(!fits || example == size,
                      kInvalidModel,
                      "the exporter baked ",
                      symbol,
                      "=",
                      example,
                      " into the model, so it cannot run with ",
                      symbol,
                      "=",
                      size,
                      " (",
                      why,
                      "); use --bind ",
                      symbol,
                      "=",
                      example,
                      " with data of that size, or export with a dynamic '",
                      symbol,
                      "'");
    }
  }
}

Binding bind_model(const OnnxModel::Impl& model, const BindOptions& options) {
  check_options(model, options);
  const std::optional<int64_t> fixed = fixed_batch(model, options);
  if (fixed && *fixed != options.batch) {
    std::string why;
    std::optional<Binding> binding = translate_rewritten(model, options, *fixed, &why);
    TRAINRT_REQUIRE(binding.has_value(),
                    kInvalidModel,
                    "the model is made for batches of ",
                    *fixed,
                    " and cannot be rewritten to ",
                    options.batch,
                    " (",
                    why,
                    "); use --micro-batch-size ",
                    *fixed,
                    ", with a --batch-size and a number of samples that are multiples of ",
                    *fixed,
                    ", or export with a dynamic batch");
    return accept_rewritten(model, options, std::move(*binding));
  }
  try {
    return translate_model(model, options);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidModel || fixed) {
      throw;
    }
    for (const int64_t example : likely_batches(model)) {
      if (std::optional<Binding> binding = translate_rewritten(model, options, example)) {
        return accept_rewritten(model, options, std::move(*binding));
      }
    }
    refuse_baked_dim(model, options, in_one_line(error));
    throw;
  }
}

// A bias of zeros leaves no trace in a file of torch.export's exporter, a BatchNormalization folded
// into a convolution not one of its own.
void warn_of_lost_parameters(const OnnxModel::Impl& model) {
  const ExportSignature& signature = model.signature;
  std::vector<std::string> lost;
  for (const auto& [input, parameter] : signature.parameters) {
    if (signature.held.count(parameter) == 0) {
      lost.push_back(parameter);
    }
  }
  if (!lost.empty() && !model.warned_of_lost_parameters.exchange(true)) {
    log_warning("the exporter left out ",
                lost.size(),
                " of the ",
                signature.parameters.size(),
                " parameters that it lists, '",
                lost[0],
                lost.size() > 1 ? "' ... " : "' ",
                "(a bias of zeros, or folded into another weight): the file has nothing to train "
                "in their place");
  }
}

void warn_of_lost_ties(const OnnxModel::Impl& model, const std::vector<TensorReport>& tensors) {
  for (const TensorReport& tensor : tensors) {
    if (tensor.role == "parameter" && !tensor.equal_to.empty() &&
        !model.warned_of_lost_ties.exchange(true)) {
      log_warning("parameters '",
                  tensor.equal_to,
                  "' and '",
                  tensor.name,
                  "' have the same elements and are trained apart: if they were tied, the exporter "
                  "has untied them (an export in training mode keeps ties)");
    }
  }
}

// PyTorch's initializers are its parameters and buffers. Other exporters put the numbers of a
// formula among them, which nothing tells from a temperature that is to be trained.
void warn_of_trained_numbers(const OnnxModel::Impl& model,
                             const std::vector<TensorReport>& tensors) {
  const std::string& producer = model.proto->producer_name();
  if (producer == "pytorch" || producer == "trainrt") {
    return;
  }
  constexpr size_t kMostNamed = 5;
  std::vector<std::string> numbers;
  for (const TensorReport& tensor : tensors) {
    if (tensor.role == "parameter" && num_elements(tensor.type.shape) == 1) {
      numbers.push_back(tensor.name);
    }
  }
  if (numbers.empty() || model.warned_of_numbers.exchange(true)) {
    return;
  }
  std::string list;
  for (size_t i = 0; i < std::min(numbers.size(), kMostNamed); ++i) {
    list += concat(i == 0 ? "'" : ", '", numbers[i], "'");
  }
  log_warning(
      "single numbers are trained: ",
      list,
      numbers.size() > kMostNamed ? concat(" and ", numbers.size() - kMostNamed, " more") : "",
      "; those that are constants of a formula (an epsilon, a divisor) want --freeze");
}

void warn_of_random_inference(const OnnxModel::Impl& model, const Graph& graph) {
  for (const Node& node : graph.nodes()) {
    if (find_op(node.op_type)->random && !model.warned_of_inference.exchange(true)) {
      log_warning("node '",
                  node.name,
                  "' (",
                  node.op_type,
                  ") draws random numbers in evaluation too: nothing in the file says how it is "
                  "switched off");
    }
  }
}

std::string unsupported_message(const std::vector<UnsupportedOp>& ops) {
  std::string message = "the model has operators that cannot be trained here:";
  for (const UnsupportedOp& op : ops) {
    message += concat("\n  ",
                      op.op_type,
                      " (opset ",
                      op.opset,
                      "), ",
                      op.nodes.size(),
                      op.nodes.size() == 1 ? " node: " : " nodes: ");
    for (size_t i = 0; i < std::min<size_t>(op.nodes.size(), 5); ++i) {
      message += concat(i == 0 ? "" : ", ", "'", op.nodes[i], "'");
    }
    message += concat(op.nodes.size() > 5 ? " ..." : "", ": ", op.why);
  }
  return message + "\n'trainrt ops' lists what is supported";
}

}  // namespace

void place_draws(const OnnxModel::Impl& model, Graph& graph) {
  const std::vector<std::string> lost = locate_samples(graph);
  if (!lost.empty() && !model.warned_of_draws.exchange(true)) {
    log_warning("node '",
                lost[0],
                "'",
                lost.size() > 1 ? concat(" and ", lost.size() - 1, " more") : std::string(),
                " draws random numbers for a tensor whose samples cannot be told apart: its "
                "draws depend on the micro-batch size");
  }
}

// Of a model made for `example` samples and bound to others.
void require_samples_apart(const OnnxModel::Impl& model, int64_t example, const Graph& graph) {
  const SampleCourse course = follow_samples(graph);
  TRAINRT_REQUIRE(course.mixed.empty(),
                  kInvalidModel,
                  "the model is made for batches of ",
                  example,
                  ", and with others its node '",
                  course.mixed,
                  "' would bring different samples together; use --micro-batch-size ",
                  example,
                  ", or export with a dynamic batch");
  if (!course.lost.empty() && !model.warned_of_lost_samples.exchange(true)) {
    log_warning("the model is made for batches of ",
                example,
                ", and its samples cannot be followed through node '",
                course.lost,
                "': if it holds numbers of that batch, they are wrong for others; "
                "--micro-batch-size ",
                example,
                " or an export with a dynamic batch is safe");
  }
}

void require_supported(const std::vector<UnsupportedOp>& ops) {
  TRAINRT_REQUIRE(ops.empty(), kUnsupported, unsupported_message(ops));
}

Graph OnnxModel::bind(const BindOptions& options) const {
  Binding binding = bind_model(*impl_, options);
  require_supported(binding.unsupported);
  Graph graph = fold_constants(binding.graph);
  verify(graph, "import");
  if (binding.example_batch > 0 && binding.example_batch != options.batch) {
    require_samples_apart(*impl_, binding.example_batch, graph);
  }
  place_draws(*impl_, graph);
  if (options.training) {
    warn_of_lost_parameters(*impl_);
    warn_of_lost_ties(*impl_, binding.tensors);
    warn_of_trained_numbers(*impl_, binding.tensors);
  } else {
    warn_of_random_inference(*impl_, graph);
  }
  if (options.fuse) {
    run_fusions(graph);
    verify(graph, "fusion");
    graph = turn_images(graph);
    verify(graph, "layout");
  }
  return graph;
}

std::vector<UnsupportedOp> OnnxModel::unsupported(const BindOptions& options) const {
  return bind_model(*impl_, options).unsupported;
}

std::vector<TensorReport> OnnxModel::tensors(const BindOptions& options) const {
  return bind_model(*impl_, options).tensors;
}

}  // namespace trainrt
