// An input is fed by the array that --input names for it, else by the array of its own name; the
// labels by the array that holds them; a single input that is left by the single array that is
// left.
#include "runtime/data_choice.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "graph/label_place.h"
#include "graph/printer.h"
#include "runtime/synthetic_dataset.h"
#include "runtime/text_alphabet.h"

namespace trainrt {

namespace fs = std::filesystem;

namespace {

// Length of the windows that a text is cut into: the last dim of the integer input.
int64_t sequence_length(const Graph& forward, const std::string& path) {
  for (const ValueId id : forward.values_of_kind(ValueKind::kInput)) {
    const Value& value = forward.value(id);
    if (is_integer(value.type.dtype) && value.type.shape.size() == 2) {
      return value.type.shape[value.batch_axis == 1 ? 0 : 1];
    }
  }
  TRAINRT_FAIL(kInvalidArgument,
               "'",
               path,
               "' holds tokens, but the model has no integer input [batch, sequence]");
}

bool is_text(const std::string& spec) {
  return spec.rfind("tokens:", 0) == 0 || spec.rfind("text:", 0) == 0;
}

std::shared_ptr<const Dataset> open_text(const std::string& spec,
                                         const Graph& forward,
                                         const std::string& alphabet) {
  if (spec.rfind("tokens:", 0) == 0) {
    return open_token_file(spec.substr(7), sequence_length(forward, spec.substr(7)));
  }
  std::shared_ptr<const Dataset> text =
      open_text_file(spec.substr(5), sequence_length(forward, spec.substr(5)), alphabet);
  const auto characters = static_cast<int64_t>(code_points(text->alphabet()).size());
  for (const ValueId id : forward.values_of_kind(ValueKind::kInput)) {
    const int64_t rows = index_sizes_of(forward, id).smallest;
    TRAINRT_REQUIRE(rows == 0 || characters <= rows,
                    kInvalidArgument,
                    text->description(),
                    " has ",
                    characters,
                    " different characters, but the model's input '",
                    forward.value(id).name,
                    "' tells only ",
                    rows,
                    " apart; take a model of a larger vocabulary, or a text of fewer characters");
  }
  return text;
}

std::map<std::string, std::string> input_arrays(const Options& options) {
  std::map<std::string, std::string> arrays;
  for (const auto& [input, array] : parse_pairs(options.input, "--input")) {
    arrays[input] = array;
  }
  return arrays;
}

std::vector<std::string> array_names(const Dataset& dataset) {
  std::vector<std::string> names;
  for (const DataArray& array : dataset.arrays()) {
    names.push_back(array.name);
  }
  return names;
}

int require_array(const Dataset& dataset, const std::string& name, const std::string& where) {
  const std::optional<int> array = dataset.find_array(name);
  TRAINRT_REQUIRE(array.has_value(),
                  kInvalidArgument,
                  where,
                  ": ",
                  dataset.description(),
                  " has no array '",
                  name,
                  "'",
                  did_you_mean(name, array_names(dataset)));
  return *array;
}

const std::set<std::string> kLabelNames = {"labels", "label", "y", "target", "targets"};

// Unless an input is named like the array.
bool may_be_labels(const Options& options, const DataArray& array) {
  return array.is_labels || array.name == options.labels || kLabelNames.count(array.name) != 0;
}

// Names of the arrays that are read if they are there. Others may be, one that is left for the one
// input that is left.
std::set<std::string> arrays_in_use(const Options& options, const OnnxModel& model) {
  const auto mapping = input_arrays(options);
  std::set<std::string> names;
  for (const auto& [input, array] : mapping) {
    names.insert(array);
  }
  for (const ModelInput& input : model.inputs()) {
    if (mapping.count(input.name) == 0) {
      names.insert(input.name);
    }
  }
  if (options.labels.empty()) {
    names.insert(kLabelNames.begin(), kLabelNames.end());
  } else if (mapping.count(options.labels) == 0) {
    names.insert(options.labels);
  }
  if (options.max_tokens > 0) {
    names.insert({"lengths", "length", "attention_mask", "mask"});
  }
  return names;
}

std::optional<int> find_labels(const Options& options, const Graph& forward, const Dataset& data) {
  const auto mapping = input_arrays(options);
  if (!options.labels.empty()) {
    const auto mapped = mapping.find(options.labels);
    if (mapped != mapping.end()) {
      return require_array(data, mapped->second, "--input");
    }
    return require_array(data, options.labels, "--labels");
  }
  for (size_t i = 0; i < data.arrays().size(); ++i) {
    const DataArray& array = data.arrays()[i];
    const std::optional<ValueId> input = forward.find_value(array.name);
    const bool feeds_model = input && forward.value(*input).kind == ValueKind::kInput &&
                             !forward.consumers()[static_cast<size_t>(*input)].empty();
    const bool mapped = std::any_of(mapping.begin(), mapping.end(), [&](const auto& item) {
      return item.second == array.name;
    });
    if (!feeds_model && !mapped && may_be_labels(options, array)) {
      return static_cast<int>(i);
    }
  }
  return std::nullopt;
}

// The number of classes that the labels tell apart in `output`.
int64_t num_classes(const Shape& output, const LossSpec& loss) {
  const int axis = class_axis(output, loss);
  return axis < 0 ? 2 : output[static_cast<size_t>(axis)];
}

// One sample of the labels as the loss wants them.
Shape sample_of_labels(const Shape& output, const LossSpec& loss) {
  ItemsShape items{output, loss.place};
  const bool classes = loss.kind == "softmax_cross_entropy" || loss.kind == "nll";
  if (const int axis = class_axis(output, loss); classes && axis >= 0) {
    items = without_classes(output, loss.place, axis);
  }
  const size_t batch_axis = static_cast<size_t>(loss.labels_batch_axis);
  return sample_of(split_samples(items.shape, items.place, loss.labels_shape.at(batch_axis)));
}

// An integer input that a loss inside the model reads as labels, and its number of classes.
std::optional<std::pair<std::string, int64_t>> inner_labels(const Graph& forward) {
  for (const Node& node : forward.nodes()) {
    const bool is_loss =
        node.op_type == "SoftmaxCrossEntropyLoss" || node.op_type == "NegativeLogLikelihoodLoss";
    if (is_loss && node.inputs.size() > 1 &&
        forward.value(node.inputs[1]).kind == ValueKind::kInput) {
      return std::make_pair(forward.value(node.inputs[1]).name,
                            forward.value(node.inputs[0]).type.shape.at(1));
    }
  }
  return std::nullopt;
}

Shape without_batch(const Shape& shape, int batch_axis) {
  Shape sample = shape;
  if (batch_axis >= 0 && batch_axis < static_cast<int>(sample.size())) {
    sample.erase(sample.begin() + batch_axis);
  }
  return sample;
}

DataChoice choose_synthetic(const Options& options,
                            const Graph& forward,
                            const LossSpec& wanted,
                            const GraphAtBatch& at_batch) {
  DataChoice choice;
  choice.loss = resolve_loss(forward, wanted, nullptr, at_batch);
  std::optional<SyntheticLabels> labels;
  std::string labels_input = choice.loss.labels;
  if (choice.loss.kind == "output" || choice.loss.next_token) {
    labels_input.clear();
    if (const auto inner = inner_labels(forward)) {
      labels_input = inner->first;
      const Value& input = forward.value(*forward.find_value(labels_input));
      labels = SyntheticLabels{without_batch(input.type.shape, input.batch_axis), inner->second};
    }
  } else {
    const Shape& output = forward.value(*forward.find_value(choice.loss.output)).type.shape;
    labels = SyntheticLabels{
        without_batch(choice.loss.labels_shape, choice.loss.labels_batch_axis),
        is_integer(choice.loss.labels_dtype) ? num_classes(output, choice.loss) : 0};
  }
  std::vector<SyntheticInput> inputs;
  for (const ValueId id : forward.values_of_kind(ValueKind::kInput)) {
    const Value& value = forward.value(id);
    if (value.name != labels_input) {
      inputs.push_back({value.name,
                        value.type.dtype,
                        without_batch(value.type.shape, value.batch_axis),
                        index_sizes_of(forward, id).smallest});
    }
  }
  const size_t num_inputs = inputs.size();
  choice.dataset =
      make_synthetic_dataset(static_cast<uint64_t>(options.seed), std::move(inputs), labels);
  if (labels) {
    choice.label_array = static_cast<int>(num_inputs);
    choice.loss.labels = labels_input;
  }
  return choice;
}

std::string list_arrays(const Dataset& data) {
  std::string text;
  for (const DataArray& array : data.arrays()) {
    text += concat(text.empty() ? "'" : ", '",
                   array.name,
                   "' ",
                   type_string({array.dtype, array.sample_shape}),
                   " per sample");
  }
  return text;
}

// Labels against what the loss reads, in the words of the data.
void check_labels(const Graph& forward,
                  const DataChoice& choice,
                  const DataArray& array,
                  bool chosen_by_user) {
  const LossSpec& loss = choice.loss;
  const std::optional<ValueId> id = forward.find_value(loss.output);
  if (loss.kind == "output" || !id) {
    return;
  }
  const Shape& output = forward.value(*id).type.shape;
  const bool classes = loss.kind == "softmax_cross_entropy" || loss.kind == "nll";
  const std::string found = concat("array '",
                                   array.name,
                                   "' of ",
                                   choice.dataset->description(),
                                   " holds ",
                                   type_string({array.dtype, array.sample_shape}),
                                   " per sample");
  const bool has_classes = output.size() > 1 && num_classes(output, loss) > 1;
  TRAINRT_REQUIRE(!classes || chosen_by_user || has_classes,
                  kInvalidArgument,
                  found,
                  ", integer labels, but output '",
                  loss.output,
                  "' ",
                  shape_string(output),
                  " has one number for them and not one per class; --loss bce_with_logits or "
                  "--loss mse compare them with it");
  TRAINRT_REQUIRE(classes || num_elements(loss.labels_shape) == num_elements(output),
                  kInvalidArgument,
                  found,
                  ", but loss ",
                  loss.kind,
                  " compares labels with every element of output '",
                  loss.output,
                  "' ",
                  shape_string(output),
                  is_integer(array.dtype) ? "; class labels want --loss softmax_cross_entropy" : "",
                  "; --labels names another array");
  const Shape wanted = sample_of_labels(output, loss);
  TRAINRT_REQUIRE(!is_permuted(array.sample_shape, wanted),
                  kInvalidArgument,
                  found,
                  ", but loss ",
                  loss.kind,
                  " on output '",
                  loss.output,
                  "' ",
                  shape_string(output),
                  " wants ",
                  shape_string(wanted),
                  ", the same dims in another order; transpose the array");
}

std::string list_inputs(const Graph& graph, const std::vector<ValueId>& inputs) {
  std::string text;
  for (const ValueId id : inputs) {
    text += concat(
        text.empty() ? "'" : ", '", graph.value(id).name, "' ", type_string(graph.value(id).type));
  }
  return text;
}

}  // namespace

std::map<std::string, SampleShape> samples_of_inputs(const OnnxModel& model,
                                                     const Options& options,
                                                     const Dataset& arrays) {
  const auto mapping = input_arrays(options);
  std::map<std::string, SampleShape> samples;
  std::set<int> used;
  std::vector<std::string> left;
  const auto feed = [&](const std::string& input, int array) {
    const DataArray& source = arrays.arrays()[static_cast<size_t>(array)];
    samples[input] = {source.sample_shape, source.name};
    used.insert(array);
  };
  for (const ModelInput& input : model.inputs()) {
    const auto mapped = mapping.find(input.name);
    if (const auto array =
            arrays.find_array(mapped == mapping.end() ? input.name : mapped->second)) {
      feed(input.name, *array);
    } else {
      left.push_back(input.name);
    }
  }
  std::vector<int> others;
  for (int i = 0; i < static_cast<int>(arrays.arrays().size()); ++i) {
    if (used.count(i) == 0 && !may_be_labels(options, arrays.arrays()[static_cast<size_t>(i)])) {
      others.push_back(i);
    }
  }
  if (left.size() == 1 && others.size() == 1) {
    feed(left[0], others[0]);
  }
  return samples;
}

std::shared_ptr<const Dataset> open_arrays(const Options& options,
                                           const OnnxModel& model,
                                           bool evaluate,
                                           const std::map<std::string, int>& array_axes,
                                           const std::map<std::string, InputLayout>& inputs) {
  const std::string& spec = options.data;
  if (spec == "synthetic") {
    return nullptr;
  }
  std::error_code error;
  TRAINRT_REQUIRE(
      fs::exists(is_text(spec) ? spec.substr(spec.find(':') + 1) : spec, error),
      kInvalidArgument,
      "--data '",
      spec,
      "' does not exist; wanted synthetic, F.npz, a folder of IDX files, tokens:F.bin or "
      "text:F.txt");
  if (is_text(spec)) {
    return nullptr;  // cut to the model's sequence length, which is not known yet
  }
  if (fs::is_directory(spec, error)) {
    return open_idx_folder(spec, evaluate ? "t10k" : "train");
  }
  TRAINRT_REQUIRE(
      spec.ends_with(".npz"),
      kInvalidArgument,
      "--data '",
      spec,
      "' is a file of unknown kind; wanted F.npz, a folder of IDX files, tokens:F.bin or "
      "text:F.txt");
  // By the names of the arrays that --input maps to them.
  const auto mapping = input_arrays(options);
  std::map<std::string, InputLayout> layouts;
  for (const auto& [input, layout] : inputs) {
    const auto mapped = mapping.find(input);
    layouts[mapped == mapping.end() ? input : mapped->second] = layout;
  }
  return open_npz(spec, array_axes, layouts, arrays_in_use(options, model));
}

DataChoice choose_data(const Options& options,
                       const Graph& forward,
                       std::shared_ptr<const Dataset> arrays,
                       const std::string& alphabet,
                       const GraphAtBatch& at_batch) {
  LossSpec wanted;
  wanted.kind = options.loss;
  wanted.output = options.output;
  const std::optional<ValueId> named = forward.find_value(options.labels);
  if (named && forward.value(*named).kind == ValueKind::kInput) {
    wanted.labels = options.labels;
  }
  if (options.data == "synthetic") {
    return choose_synthetic(options, forward, wanted, at_batch);
  }
  DataChoice choice;
  choice.dataset =
      arrays != nullptr ? std::move(arrays) : open_text(options.data, forward, alphabet);
  choice.label_array = find_labels(options, forward, *choice.dataset);
  if (!choice.label_array) {
    choice.loss = resolve_loss(forward, wanted, nullptr, at_batch);
    TRAINRT_REQUIRE(choice.loss.kind == "output" || choice.loss.next_token ||
                        forward.find_value(choice.loss.labels).has_value(),
                    kInvalidArgument,
                    choice.dataset->description(),
                    " has no labels for loss ",
                    choice.loss.kind,
                    "; name the array that holds them with --labels (it has ",
                    list_arrays(*choice.dataset),
                    ")");
    return choice;
  }
  const DataArray& array = choice.dataset->arrays()[static_cast<size_t>(*choice.label_array)];
  TensorType labels{DType::kInt64, array.sample_shape};
  if (is_floating(array.dtype)) {
    // Targets are compared in the precision of the model's output.
    labels.dtype = forward.outputs().empty() ? DType::kFloat32
                                             : forward.value(forward.outputs()[0]).type.dtype;
  }
  const std::vector<ValueId> inputs = forward.values_of_kind(ValueKind::kInput);
  int64_t batch = 1;
  for (const ValueId id : inputs) {
    const Value& input = forward.value(id);
    if (input.batch_axis >= 0) {
      batch = input.type.shape.at(static_cast<size_t>(input.batch_axis));
    }
  }
  labels.shape.insert(labels.shape.begin(), batch);
  choice.loss = resolve_loss(forward, wanted, &labels, at_batch);
  check_labels(forward, choice, array, options.loss != "auto");
  return choice;
}

std::vector<InputBinding> bind_inputs(const Options& options,
                                      const Graph& training,
                                      const DataChoice& choice) {
  const auto mapping = input_arrays(options);
  const Dataset& data = *choice.dataset;
  std::vector<InputBinding> bindings;
  std::vector<ValueId> open;
  std::set<int> used;
  std::vector<std::string> input_names;
  for (const ValueId id : training.values_of_kind(ValueKind::kInput)) {
    const Value& value = training.value(id);
    if (value.name.rfind("trainrt.", 0) == 0) {
      continue;  // the runtime's own
    }
    input_names.push_back(value.name);
    std::optional<int> array = data.find_array(value.name);
    if (const auto mapped = mapping.find(value.name); mapped != mapping.end()) {
      array = require_array(data, mapped->second, "--input " + value.name);
    } else if (choice.label_array && value.name == choice.loss.labels) {
      array = choice.label_array;
    }
    if (!array) {
      open.push_back(id);
      continue;
    }
    used.insert(*array);
    bindings.push_back(bind_input(value, data, *array));
  }
  for (const auto& [input, array] : mapping) {
    TRAINRT_REQUIRE(std::find(input_names.begin(), input_names.end(), input) != input_names.end(),
                    kInvalidArgument,
                    "--input ",
                    input,
                    "=",
                    array,
                    ": the model has no input '",
                    input,
                    "'",
                    did_you_mean(input, input_names));
  }
  std::vector<int> left;
  for (int i = 0; i < static_cast<int>(data.arrays().size()); ++i) {
    if (used.count(i) == 0 && i != choice.label_array.value_or(-1)) {
      left.push_back(i);
    }
  }
  if (open.size() == 1 && left.size() == 1) {
    bindings.push_back(bind_input(training.value(open[0]), data, left[0]));
    open.clear();
  }
  if (choice.loss.kind == "output" && !options.labels.empty() && choice.label_array &&
      used.count(*choice.label_array) == 0) {
    const std::string& array = data.arrays()[static_cast<size_t>(*choice.label_array)].name;
    TRAINRT_FAIL(kInvalidArgument,
                 "--labels ",
                 options.labels,
                 " has no effect: the loss is the model's own output '",
                 choice.loss.output,
                 "', which reads nothing but the model's inputs; use --input NAME=",
                 array,
                 " for the input that holds the labels, or --loss with --output for a loss of "
                 "another output");
  }
  TRAINRT_REQUIRE(open.empty(),
                  kInvalidArgument,
                  "no data for input ",
                  list_inputs(training, open),
                  ": ",
                  data.description(),
                  " has ",
                  list_arrays(data),
                  "; map it with --input NAME=ARRAY");
  return bindings;
}

void find_ranges(const Graph& forward,
                 const DataChoice& choice,
                 std::vector<InputBinding>& bindings) {
  const bool classes = choice.loss.kind == "softmax_cross_entropy" || choice.loss.kind == "nll";
  const auto inner = inner_labels(forward);
  for (InputBinding& binding : bindings) {
    const std::optional<ValueId> input = forward.find_value(binding.input);
    const std::optional<ValueId> output = forward.find_value(choice.loss.output);
    if (classes && !choice.loss.next_token && binding.input == choice.loss.labels && output) {
      const Shape& scores = forward.value(*output).type.shape;
      binding.range = ValueRange{0, num_classes(scores, choice.loss), choice.loss.ignore_index};
    } else if (choice.loss.kind == "bce_with_logits" && binding.input == choice.loss.labels) {
      binding.probabilities = true;
    } else if (inner && inner->first == binding.input) {
      binding.range = ValueRange{0, inner->second, choice.loss.ignore_index};
    } else if (const int64_t rows = input ? index_sizes_of(forward, *input).largest : 0; rows > 0) {
      binding.range = ValueRange{-rows, rows};
    }
  }
}

}  // namespace trainrt
