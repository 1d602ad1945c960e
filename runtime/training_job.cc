#include "runtime/training_job.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <set>

#include "graph/base/log.h"
#include "graph/label_place.h"
#include "graph/loss.h"
#include "graph/passes/precision.h"
#include "graph/scalar_loss.h"
#include "runtime/data_choice.h"
#include "runtime/frozen_norms.h"
#include "runtime/load_cuda.h"
#include "runtime/option_checks.h"
#include "runtime/sample_order.h"
#include "runtime/text_alphabet.h"

namespace trainrt {

namespace {

const std::string kOutputLoss = "output:";  // a prefix of --loss

constexpr int64_t kSyntheticSteps = 100;  // what one epoch of endless data means

int64_t parse_integer(const std::string& text, const std::string& where) {
  int64_t value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  TRAINRT_REQUIRE(status == std::errc() && end == text.data() + text.size(),
                  kInvalidArgument,
                  where,
                  " is '",
                  text,
                  "'; wanted an integer");
  return value;
}

OptimizerSpec optimizer_spec(const Options& options) {
  OptimizerSpec spec;
  spec.name = options.optimizer;
  const bool decays = spec.name == "adamw" || spec.name == "lamb";
  spec.weight_decay = options.weight_decay.value_or(decays ? 0.01 : 0.0);
  spec.momentum = options.momentum;
  spec.nesterov = options.nesterov;
  spec.beta1 = options.beta1;
  spec.beta2 = options.beta2;
  spec.eps = options.eps;
  spec.clip_norm = options.clip_norm;
  return spec;
}

// TF32 is a way to multiply float32 numbers (DeviceOptions::tf32), not a type of tensors.
std::string graph_precision(const std::string& precision) {
  return precision == "tf32" ? "fp32" : precision;
}

std::string resolve_precision(const Options& options) {
  const bool cuda = names_cuda(options.devices);
  TRAINRT_REQUIRE(options.precision != "tf32" || cuda,
                  kInvalidArgument,
                  "--precision tf32 needs --devices cuda; the CPU runs fp64, fp32, bf16 and fp16");
  if (options.precision == "auto") {
    return cuda ? "bf16" : "fp32";  // what the device is fastest in
  }
  return options.precision;
}

int64_t micro_batch_to_try(const Options& options) {
  return options.micro_batch_size > 0 ? std::min(options.micro_batch_size, options.batch_size)
                                      : options.batch_size;
}

void record_model_types(const Graph& forward, TrainingJob& job) {
  for (const Value& value : forward.values()) {
    if (value.kind == ValueKind::kParameter || value.kind == ValueKind::kState) {
      job.model_types[value.name] = value.type;
    }
  }
}

}  // namespace

void warn_of_no_influence(const std::vector<std::string>& names) {
  constexpr size_t kMostNamed = 5;
  std::string list;
  for (size_t i = 0; i < std::min(names.size(), kMostNamed); ++i) {
    list += concat(i == 0 ? "'" : ", '", names[i], "'");
  }
  if (names.size() == 1) {
    log_warning("parameter ", list, " gets no gradient from the loss; it stays as it is");
  } else if (!names.empty()) {
    log_warning(
        "parameters ",
        list,
        names.size() > kMostNamed ? concat(" and ", names.size() - kMostNamed, " more") : "",
        " get no gradient from the loss; they stay as they are");
  }
}

BindOptions bind_options(const Options& options, bool training) {
  BindOptions bind;
  for (const auto& [dim, size] : parse_pairs(options.bind, "--bind")) {
    bind.dims[dim] = parse_integer(size, "--bind " + dim);
    TRAINRT_REQUIRE(
        bind.dims[dim] > 0, kInvalidArgument, "--bind ", dim, " is ", size, "; wanted at least 1");
  }
  for (const auto& [name, axis] : parse_pairs(options.batch_axis, "--batch-axis")) {
    const int64_t number = parse_integer(axis, "--batch-axis " + name);
    TRAINRT_REQUIRE(number >= -1 && number <= std::numeric_limits<int>::max(),
                    kInvalidArgument,
                    "--batch-axis ",
                    name,
                    " is ",
                    number,
                    "; wanted an axis from 0 on, or -1 for none");
    bind.batch_axes[name] = static_cast<int>(number);
  }
  bind.trainable = options.trainable;
  bind.freeze = options.freeze;
  bind.training = training;
  return bind;
}

void check_bound_dims(const OnnxModel& model, const BindOptions& bind) {
  for (const ModelInput& input : model.inputs()) {
    const auto named = bind.batch_axes.find(input.name);
    const int axis = named == bind.batch_axes.end() ? input.batch_axis : named->second;
    if (axis < 0 || axis >= static_cast<int>(input.dims.size())) {
      continue;
    }
    const std::string& symbol = input.dims[static_cast<size_t>(axis)].symbol;
    const auto bound = bind.dims.find(symbol);
    TRAINRT_REQUIRE(bound == bind.dims.end(),
                    kInvalidArgument,
                    "--bind ",
                    symbol,
                    "=",
                    bound == bind.dims.end() ? 0 : bound->second,
                    " has no effect: '",
                    symbol,
                    "' enumerates the samples of input '",
                    input.name,
                    "', whose number --batch-size and --micro-batch-size set");
  }
}

namespace {

// The bindings of one kind of micro-batch.
BindOptions bound_to(const TrainingJob& job, const MicroBatchShape& shape) {
  BindOptions bound = job.bind;
  bound.batch = shape.num_samples;
  if (shape.length > 0) {
    bound.dims[job.token_batches->lengths().symbol] = shape.length;
  }
  return bound;
}

}  // namespace

Graph TrainingJob::forward(const MicroBatchShape& shape) const {
  Graph graph = apply_precision(model->bind(bound_to(*this, shape)), graph_precision(precision));
  for (ValueId id = 0; checkpoint && id < graph.num_values(); ++id) {
    Value& value = graph.value(id);
    if (value.kind == ValueKind::kConstant && value.source.load && checkpoint->has(value.name)) {
      value.source.load = [from = checkpoint, name = value.name, dtype = value.type.dtype] {
        return from->read(name).cast(dtype);
      };
    }
  }
  return graph;
}

TrainingGraph TrainingJob::build(const MicroBatchShape& shape, bool accumulate) const {
  const bool is_example = shape == MicroBatchShape{example_micro_batch, 0};
  if (example != nullptr && is_example && accumulate) {
    return *example;
  }
  if (from_training_info) {
    return build_from_training_info(
        *model, bound_to(*this, shape), accumulate, spec.loss.sums_samples.value_or(false));
  }
  return build_from(forward(shape), shape, accumulate);
}

TrainingGraph TrainingJob::build_from_full(const Graph& forward_graph,
                                           const MicroBatchShape& shape,
                                           bool accumulate) const {
  return build_from(apply_precision(forward_graph, graph_precision(precision)), shape, accumulate);
}

TrainingGraph TrainingJob::build_from(Graph forward_graph,
                                      const MicroBatchShape& shape,
                                      bool accumulate) const {
  TrainingSpec at_size = spec;
  at_size.accumulate = accumulate;
  if (Shape& labels = at_size.loss.labels_shape; !labels.empty()) {
    const int batch_axis = at_size.loss.labels_batch_axis;
    labels[static_cast<size_t>(batch_axis)] = shape.num_samples;
    if (shape.length > 0 && label_token_axis >= 0) {
      labels[static_cast<size_t>(label_token_axis + (label_token_axis >= batch_axis ? 1 : 0))] =
          shape.length;
    }
  }
  return evaluate ? build_eval_graph(std::move(forward_graph), at_size.loss)
                  : build_training_graph(std::move(forward_graph), at_size);
}

namespace {

// --max-tokens: lengths of the samples, what they make of a step, and where inputs are cut.
void count_tokens(const Options& options,
                  TokenLengths lengths,
                  const DataChoice& choice,
                  TrainingJob& job) {
  TRAINRT_REQUIRE(!options.is_given("micro-batch-size") || options.micro_batch_size == 0,
                  kInvalidArgument,
                  "--max-tokens and --micro-batch-size both say how much runs at once; give one");
  for (InputBinding& binding : job.bindings) {
    binding.token_axis = token_axis(lengths, *job.model, binding);
    const bool is_labels =
        binding.input == choice.loss.labels &&
        (choice.loss.kind == "softmax_cross_entropy" || choice.loss.kind == "nll");
    if (is_labels) {
      binding.past_end = choice.loss.ignore_index;
    }
    const bool of_model = std::any_of(
        job.model->inputs().begin(), job.model->inputs().end(), [&](const ModelInput& input) {
          return input.name == binding.input;
        });
    if (!of_model) {
      job.label_token_axis = binding.token_axis;
    }
  }
  job.token_batches = std::make_shared<const TokenBatches>(
      std::move(lengths), choice.dataset->num_samples(), options.max_tokens, options.batch_size);
}

}  // namespace

namespace {

// A name of --batch-axis is a graph input's or, failing that, a data array's.
void check_array_axes(const std::map<std::string, int>& array_axes,
                      const OnnxModel& model,
                      const Dataset& data) {
  for (const auto& [name, axis] : array_axes) {
    std::vector<std::string> known;
    for (const ModelInput& input : model.inputs()) {
      known.push_back(input.name);
    }
    for (const DataArray& array : data.arrays()) {
      known.push_back(array.name);
    }
    TRAINRT_REQUIRE(data.find_array(name).has_value(),
                    kInvalidArgument,
                    "--batch-axis ",
                    name,
                    "=",
                    axis,
                    ": neither the model nor the data have an input or array '",
                    name,
                    "'",
                    did_you_mean(name, known));
  }
}

}  // namespace

namespace {

std::map<std::string, InputLayout> inputs_not_batch_first(const OnnxModel& model,
                                                          const BindOptions& bind) {
  std::map<std::string, InputLayout> layouts;
  for (const ModelInput& input : model.inputs()) {
    const auto named = bind.batch_axes.find(input.name);
    const int axis = named == bind.batch_axes.end() ? input.batch_axis : named->second;
    if (axis <= 0 || axis >= static_cast<int>(input.dims.size())) {
      continue;
    }
    InputLayout& layout = layouts[input.name];
    layout.batch_axis = axis;
    for (int d = 0; d < static_cast<int>(input.dims.size()); ++d) {
      const Dim& dim = input.dims[static_cast<size_t>(d)];
      const auto bound = bind.dims.find(dim.symbol);
      if (d != axis) {
        layout.sample_shape.push_back(dim.size < 0 && bound != bind.dims.end() ? bound->second
                                                                               : dim.size);
      }
    }
  }
  return layouts;
}

// Of another size; a model whose batch is baked in has none.
std::optional<Graph> bind_to_batch(const TrainingJob& job, int64_t batch) {
  BindOptions bound = job.bind;
  bound.batch = batch;
  try {
    return apply_precision(job.model->bind(bound), graph_precision(job.precision));
  } catch (const Error&) {
    return std::nullopt;
  }
}

// The output that is the loss, where a batch of one does not tell: a loss of shape [1], which has
// one element at two samples as well. "" where the user names one, or the graph tells.
std::string loss_of_one_element(const TrainingJob& job,
                                const Graph& forward,
                                const Options& options) {
  if (options.loss != "auto" || !options.output.empty() || micro_batch_size(forward) != 1) {
    return "";
  }
  std::optional<Graph> two;
  for (size_t i = 0; i < forward.outputs().size(); ++i) {
    const Value& value = forward.value(forward.outputs()[i]);
    if (!is_floating(value.type.dtype) || value.type.shape.size() > 1 ||
        num_elements(value.type.shape) != 1) {
      continue;
    }
    if (value.type.shape.empty()) {
      return "";
    }
    two = two ? std::move(two) : bind_to_batch(job, 2);
    if (two && two->value(two->outputs().at(i)).type.shape == value.type.shape) {
      return value.name;
    }
  }
  return "";
}

// Labels of a model whose samples lie along another axis than the first, as many as there are
// indices along either of an array's two: it may lie as the model does.
void warn_of_label_axis(const DataChoice& choice, const std::map<std::string, int>& array_axes) {
  const int axis = choice.loss.labels_batch_axis;
  if (!choice.label_array || axis <= 0) {
    return;
  }
  const DataArray& array = choice.dataset->arrays()[static_cast<size_t>(*choice.label_array)];
  if (array_axes.count(array.name) == 0 && axis <= static_cast<int>(array.sample_shape.size()) &&
      array.sample_shape[static_cast<size_t>(axis - 1)] == choice.dataset->num_samples()) {
    log_warning("labels '",
                array.name,
                "' are read with their samples along axis 0, but the samples of output '",
                choice.loss.output,
                "' lie along axis ",
                axis,
                ", and the labels are as long there: if theirs lie there too, use --batch-axis ",
                array.name,
                "=",
                axis,
                " (",
                array.name,
                "=0 says that they do not)");
  }
}

// Classes along either of two axes: the sizes leave it open.
void warn_of_class_axis(const Graph& forward, const LossSpec& loss) {
  const bool classes = loss.kind == "softmax_cross_entropy" || loss.kind == "nll";
  const Shape& shape = forward.value(forward.find_value(loss.output).value()).type.shape;
  if (!classes || !class_axis_is_open(shape, loss)) {
    return;
  }
  log_warning("output '",
              loss.output,
              "' ",
              shape_string(shape),
              " is taken to have its classes along axis ",
              class_axis(shape, loss),
              "; the labels would fit with another axis as well: if the classes lie there, "
              "transpose the output in the model");
}

void take_scalar_loss(const ScalarLoss& scalar, LossSpec& loss) {
  loss.sums_samples = scalar.sums_samples;
  if (!scalar.warning.empty()) {
    log_warning(scalar.warning);
  }
}

// What a loss inside the model makes of its samples, told once for all sizes of micro-batches.
// `forward` of one sample does not tell.
void settle_scalar_loss(const TrainingJob& job, const Graph& forward, LossSpec& loss) {
  if (num_elements(forward.value(*forward.find_value(loss.output)).type.shape) != 1) {
    return;  // no scalar, and refused as such
  }
  const int64_t batch = micro_batch_size(forward);
  const std::optional<Graph> two = batch == 1 ? bind_to_batch(job, 2) : std::nullopt;
  const Graph& graph = two ? *two : forward;
  const std::optional<Graph> doubled = bind_to_batch(job, 2 * micro_batch_size(graph));
  take_scalar_loss(
      describe_scalar_loss(graph, *graph.find_value(loss.output), doubled ? &*doubled : nullptr),
      loss);
}

}  // namespace

TrainingJob make_training_job(const Options& options, JobUse use) {
  const bool evaluate = use == JobUse::kEvaluate;
  TrainingJob job;
  job.model = std::make_shared<const OnnxModel>(OnnxModel::load(options.arguments.at(0)));
  check_weight_files(options, *job.model);
  job.bind = bind_options(options, !evaluate);
  // Only names that the model knows: unknown ones belong to data arrays.
  std::map<std::string, int> array_axes;
  for (auto at = job.bind.batch_axes.begin(); at != job.bind.batch_axes.end();) {
    const std::string& name = at->first;
    const bool is_input = std::any_of(job.model->inputs().begin(),
                                      job.model->inputs().end(),
                                      [&](const ModelInput& input) { return input.name == name; });
    if (!is_input) {
      array_axes.insert(*at);
      at = job.bind.batch_axes.erase(at);
    } else {
      ++at;
    }
  }
  job.precision = resolve_precision(options);
  job.evaluate = evaluate;
  job.spec.optimizer = optimizer_spec(options);
  job.from_training_info = !evaluate && job.model->has_training_info() &&
                           !options.is_given("optimizer") && !options.is_given("loss");
  if (use == JobUse::kTrain) {
    check_loss_scaling(options, job.precision);
  } else if (evaluate) {
    check_eval_length(options);
  }
  check_bound_dims(*job.model, job.bind);
  std::shared_ptr<const Dataset> arrays = open_arrays(
      options, *job.model, evaluate, array_axes, inputs_not_batch_first(*job.model, job.bind));
  if (arrays != nullptr) {
    job.bind.dims.merge(
        dims_of_samples(*job.model, job.bind, samples_of_inputs(*job.model, options, *arrays)));
  }
  const int64_t micro_batch = micro_batch_to_try(options);
  BindOptions bound = job.bind;
  if (use == JobUse::kPlan && !job.from_training_info && micro_batch == 1 &&
      options.batch_size > 1 && !options.is_given("micro-batch-size")) {
    bound.batch = 2;
    job.forward_of_two =
        std::async(
            std::launch::async,
            [model = job.model, bound, precision = graph_precision(job.precision)] {
              return std::make_shared<const Graph>(apply_precision(model->bind(bound), precision));
            })
            .share();
  }
  bound.batch = micro_batch;
  const Graph plain = job.model->bind(bound);
  record_model_types(plain, job);
  job.num_forward_nodes = plain.num_nodes();
  job.frozen_norms = frozen_norms(plain);
  Graph forward = apply_precision(plain, graph_precision(job.precision));
  const std::string alphabet = job.model->metadata(kAlphabetKey);
  Options told = options;
  if (const std::string name = loss_of_one_element(job, forward, options); !name.empty()) {
    told.loss = kOutputLoss + name;
  }
  DataChoice choice = choose_data(told, forward, std::move(arrays), alphabet, [&](int64_t batch) {
    return bind_to_batch(job, batch);
  });
  if (evaluate && alphabet.empty() && !choice.dataset->alphabet().empty()) {
    log_warning("the model has no alphabet ('",
                kAlphabetKey,
                "', which --export writes): the characters of ",
                choice.dataset->description(),
                " are numbered in ascending order, as training on this very text would");
  }
  check_array_axes(array_axes, *job.model, *choice.dataset);
  warn_of_label_axis(choice, array_axes);
  if (job.from_training_info) {
    take_scalar_loss(loss_of_training_info(*job.model, bound), choice.loss);
  } else if (choice.loss.kind == "output") {
    settle_scalar_loss(job, forward, choice.loss);
  } else {
    warn_of_class_axis(forward, choice.loss);
  }
  job.dataset = choice.dataset;
  job.spec.loss = choice.loss;
  std::optional<TokenLengths> lengths;
  if (options.max_tokens > 0) {
    lengths = find_token_lengths(*job.model, forward, choice);
  }
  job.example_micro_batch = micro_batch;
  if (use == JobUse::kPlan && !job.from_training_info) {
    job.example_forward = std::make_shared<const Graph>(forward);
    job.evaluate = true;  // which reads what training reads
    const TrainingGraph read = job.build_from(std::move(forward), {micro_batch, 0}, true);
    job.evaluate = false;
    job.bindings = bind_inputs(options, read.graph, choice);
  } else {
    job.example = std::make_shared<const TrainingGraph>(
        job.from_training_info ? job.build({micro_batch, 0}, true)
                               : job.build_from(std::move(forward), {micro_batch, 0}, true));
    job.reads_learning_rate =
        job.example->graph.find_value(runtime_input::kLearningRate).has_value();
    if (job.from_training_info) {
      refuse_beside_training_info(options, job.reads_learning_rate);
    }
    warn_of_no_influence(job.example->without_influence);
    job.bindings = bind_inputs(options, job.example->graph, choice);
  }
  find_ranges(plain, choice, job.bindings);
  for (const InputBinding& binding : job.bindings) {
    job.input_names.push_back(binding.input);
  }
  if (lengths) {
    count_tokens(options, std::move(*lengths), choice, job);
  }
  return job;
}

// In closed form: an epoch of n samples is full batches and what is left, if anything; a run that
// begins within one begins at a multiple of the batch, or has changed its batch size.
StepRange step_range(const Options& options,
                     int64_t num_samples,
                     int64_t first_step,
                     int64_t start) {
  const bool endless = num_samples == kEndlessSamples;
  const int64_t batch = options.batch_size;
  StepRange range;
  range.first_step = first_step;
  range.total_steps = first_step;
  range.start = start;
  range.stop = start;
  std::set<int64_t, std::greater<>> sizes;
  int64_t steps = kEndlessSamples;  // that may still be taken
  if (endless || options.steps) {
    const int64_t last =
        options.steps ? *options.steps : options.epochs.value_or(1) * kSyntheticSteps;
    steps = std::max<int64_t>(0, last - first_step);
  }
  const auto take = [&](int64_t count, int64_t size) {
    const int64_t taken = std::min(count, steps);
    if (taken > 0) {
      sizes.insert(size);
      steps -= taken;
      range.total_steps += taken;
      range.stop += taken * size;
    }
  };
  if (endless) {
    take(steps, batch);
  } else {
    const int64_t end = options.steps ? kEndlessSamples : options.epochs.value_or(1) * num_samples;
    const auto take_rest_of_epoch = [&] {
      const int64_t left = num_samples - range.stop % num_samples;
      take(left / batch, batch);
      take(left % batch > 0 ? 1 : 0, left % batch);
    };
    // What is left of the first epoch, whole epochs at once, and what remains of the last.
    if (steps > 0 && range.stop < end) {
      take_rest_of_epoch();
    }
    const int64_t steps_of_epoch = (num_samples + batch - 1) / batch;
    const int64_t epochs = std::min(
        steps / steps_of_epoch,
        options.steps ? kEndlessSamples : std::max<int64_t>(0, end - range.stop) / num_samples);
    if (epochs > 0) {
      sizes.insert(std::min(batch, num_samples));
      if (num_samples % batch > 0) {
        sizes.insert(num_samples % batch);
      }
      steps -= epochs * steps_of_epoch;
      range.total_steps += epochs * steps_of_epoch;
      range.stop += epochs * num_samples;
    }
    if (steps > 0 && range.stop < end) {
      take_rest_of_epoch();
    }
  }
  range.sizes.assign(sizes.begin(), sizes.end());
  return range;
}

}  // namespace trainrt
