#include "runtime/token_lengths.h"

#include <algorithm>
#include <optional>
#include <set>

namespace trainrt {

namespace {

// The symbol of the inputs' dims that enumerate tokens, and their size.
TokenLengths sequence_of(const OnnxModel& model, const Graph& forward) {
  TokenLengths lengths;
  std::set<std::string> symbols;
  int64_t fixed = 0;
  for (const ModelInput& input : model.inputs()) {
    const std::optional<ValueId> id = forward.find_value(input.name);
    if (!id || forward.value(*id).kind != ValueKind::kInput) {
      continue;
    }
    const Value& value = forward.value(*id);
    for (size_t axis = 0; axis < input.dims.size(); ++axis) {
      if (static_cast<int>(axis) != value.batch_axis && input.dims[axis].size < 0) {
        symbols.insert(input.dims[axis].symbol);
        lengths.symbol = input.dims[axis].symbol;
        lengths.width = value.type.shape[axis];
      }
    }
    if (is_integer(value.type.dtype) && value.type.shape.size() == 2 && value.batch_axis >= 0) {
      fixed = value.type.shape[value.batch_axis == 0 ? 1 : 0];
    }
  }
  TRAINRT_REQUIRE(symbols.size() <= 1,
                  kUnsupported,
                  "--max-tokens: the model has sequences of more than one kind ('",
                  symbols.empty() ? "" : *symbols.begin(),
                  "' and '",
                  symbols.empty() ? "" : *symbols.rbegin(),
                  "'), and samples are sorted by one length only");
  lengths.width = symbols.empty() ? fixed : lengths.width;
  TRAINRT_REQUIRE(lengths.width > 0,
                  kInvalidArgument,
                  "--max-tokens counts tokens, but the model has neither an integer input [batch, "
                  "sequence] nor an input with a symbolic dim beside the batch; use --batch-size");
  return lengths;
}

// Sample `index` of an array as integers; floats count by being 0 or not.
std::vector<int64_t> read_integers(const Dataset& data, int array, int64_t index) {
  const DataArray& source = data.arrays()[static_cast<size_t>(array)];
  Tensor tensor(source.dtype, source.sample_shape);
  data.read(array, index, tensor.raw());
  return tensor.cast(DType::kInt64).to_int64();
}

std::optional<int> find_first(const Dataset& data, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (const std::optional<int> array = data.find_array(name)) {
      return array;
    }
  }
  return std::nullopt;
}

int64_t elements_of(const Dataset& data, int array) {
  return num_elements(data.arrays()[static_cast<size_t>(array)].sample_shape);
}

std::string array_text(const Dataset& data, int array) {
  return concat("array '", data.arrays()[static_cast<size_t>(array)].name, "'");
}

// Fills in `of_sample`, if anything says it.
void read_lengths(const DataChoice& choice, TokenLengths& lengths) {
  const Dataset& data = *choice.dataset;
  const int64_t width = lengths.width;
  const auto fill = [&](int array, const std::string& from, const auto& length_of) {
    lengths.from = from;
    for (int64_t i = 0; i < data.num_samples(); ++i) {
      const int64_t length = length_of(read_integers(data, array, i));
      TRAINRT_REQUIRE(length >= 0 && length <= width,
                      kInvalidArgument,
                      data.description(),
                      ": ",
                      from,
                      " gives sample ",
                      i,
                      " ",
                      length,
                      " tokens; wanted 0 to ",
                      width);
      lengths.of_sample.push_back(static_cast<int32_t>(std::max<int64_t>(1, length)));
    }
  };
  // One after the last element that is not `padding`.
  const auto used = [](const std::vector<int64_t>& values, int64_t padding) {
    const auto last =
        std::find_if(values.rbegin(), values.rend(), [&](int64_t v) { return v != padding; });
    return static_cast<int64_t>(values.rend() - last);
  };
  if (const auto array = find_first(data, {"lengths", "length"});
      array && elements_of(data, *array) == 1 &&
      is_integer(data.arrays()[static_cast<size_t>(*array)].dtype)) {
    fill(*array, array_text(data, *array), [](const std::vector<int64_t>& v) { return v[0]; });
  } else if (const auto mask = find_first(data, {"attention_mask", "mask"});
             mask && elements_of(data, *mask) == width) {
    fill(*mask, array_text(data, *mask), [&](const auto& v) { return used(v, 0); });
  } else if (choice.label_array && elements_of(data, *choice.label_array) == width &&
             is_integer(data.arrays()[static_cast<size_t>(*choice.label_array)].dtype)) {
    fill(*choice.label_array,
         concat("the ignored labels of ", array_text(data, *choice.label_array)),
         [&](const auto& v) { return used(v, choice.loss.ignore_index); });
  }
}

bool counts_classes(const LossSpec& loss) {
  return loss.kind == "softmax_cross_entropy" || loss.kind == "nll";
}

// Padding that is cut off must not have counted in the loss.
void require_loss_without_padding(const TokenLengths& lengths, const DataChoice& choice) {
  const LossSpec& loss = choice.loss;
  const bool per_token =
      choice.label_array && elements_of(*choice.dataset, *choice.label_array) >= lengths.width;
  const bool from_labels = lengths.from.rfind("the ignored", 0) == 0;
  const bool fits = loss.next_token        ? false
                    : counts_classes(loss) ? true
                                           : from_labels || (choice.label_array && !per_token);
  TRAINRT_REQUIRE(
      fits,
      kInvalidArgument,
      "--max-tokens cuts off the padding that ",
      lengths.from,
      " tells of, but loss ",
      loss.next_token ? "over the next token, which has no labels of its own, " : loss.kind,
      loss.next_token ? "" : " ",
      "counts it; give integer labels, which are ignored where they are ",
      loss.ignore_index);
}

}  // namespace

TokenLengths find_token_lengths(const OnnxModel& model,
                                const Graph& forward,
                                const DataChoice& choice) {
  TokenLengths lengths = sequence_of(model, forward);
  if (choice.dataset->num_samples() != kEndlessSamples) {
    read_lengths(choice, lengths);
  }
  const bool all_whole = std::all_of(lengths.of_sample.begin(),
                                     lengths.of_sample.end(),
                                     [&](int32_t length) { return length == lengths.width; });
  if (all_whole) {
    lengths.of_sample.clear();
    lengths.symbol.clear();
    lengths.from = "no padding";
    return lengths;
  }
  TRAINRT_REQUIRE(!lengths.symbol.empty(),
                  kInvalidArgument,
                  "--max-tokens: ",
                  lengths.from,
                  " tells of samples shorter than ",
                  lengths.width,
                  " tokens, but the model is made for exactly ",
                  lengths.width,
                  "; export it with a dynamic sequence dim");
  require_loss_without_padding(lengths, choice);
  return lengths;
}

int token_axis(const TokenLengths& lengths, const OnnxModel& model, const InputBinding& binding) {
  if (lengths.symbol.empty()) {
    return -1;
  }
  for (const ModelInput& input : model.inputs()) {
    if (input.name != binding.input) {
      continue;
    }
    for (size_t axis = 0; axis < input.dims.size(); ++axis) {
      if (static_cast<int>(axis) != binding.batch_axis &&
          input.dims[axis].symbol == lengths.symbol) {
        return static_cast<int>(axis) - (binding.batch_axis < static_cast<int>(axis) ? 1 : 0);
      }
    }
    return -1;
  }
  // Labels that the loss has brought along.
  const auto at =
      std::find(binding.sample_shape.begin(), binding.sample_shape.end(), lengths.width);
  return at == binding.sample_shape.end() ? -1
                                          : static_cast<int>(at - binding.sample_shape.begin());
}

}  // namespace trainrt
