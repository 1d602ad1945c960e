#include "graph/onnx_symbols.h"

#include <set>

namespace trainrt {

namespace {

int batch_axis(const ModelInput& input, const BindOptions& options) {
  const auto it = options.batch_axes.find(input.name);
  return it == options.batch_axes.end() ? input.batch_axis : it->second;
}

std::set<std::string> open_symbols(const OnnxModel& model, const BindOptions& options) {
  std::set<std::string> open;
  std::set<std::string> batches;
  for (const ModelInput& input : model.inputs()) {
    for (size_t axis = 0; axis < input.dims.size(); ++axis) {
      const Dim& dim = input.dims[axis];
      if (dim.size < 0) {
        (static_cast<int>(axis) == batch_axis(input, options) ? batches : open).insert(dim.symbol);
      }
    }
  }
  for (const std::string& symbol : batches) {
    open.erase(symbol);
  }
  for (const auto& [symbol, size] : options.dims) {
    open.erase(symbol);
  }
  return open;
}

}  // namespace

std::map<std::string, int64_t> dims_of_samples(const OnnxModel& model,
                                               const BindOptions& options,
                                               const std::map<std::string, SampleShape>& inputs) {
  const std::set<std::string> open = open_symbols(model, options);
  std::map<std::string, int64_t> sizes;
  std::map<std::string, std::string> sources;
  for (const ModelInput& input : model.inputs()) {
    const auto fed = inputs.find(input.name);
    const int batch = batch_axis(input, options);
    if (fed == inputs.end() ||
        fed->second.shape.size() + (batch >= 0 ? 1 : 0) != input.dims.size()) {
      continue;
    }
    size_t sample_axis = 0;
    for (size_t axis = 0; axis < input.dims.size(); ++axis) {
      if (static_cast<int>(axis) == batch) {
        continue;
      }
      const int64_t size = fed->second.shape[sample_axis++];
      const std::string& symbol = input.dims[axis].symbol;
      if (input.dims[axis].size >= 0 || open.count(symbol) == 0) {
        continue;
      }
      const std::string source =
          concat("axis ", axis, " of '", input.name, "' from array '", fed->second.source, "'");
      const auto [known, fresh] = sizes.emplace(symbol, size);
      TRAINRT_REQUIRE(fresh || known->second == size,
                      kInvalidArgument,
                      "the data disagree on the size of dim '",
                      symbol,
                      "': ",
                      known->second,
                      " (",
                      sources[symbol],
                      ") and ",
                      size,
                      " (",
                      source,
                      "); wanted one size");
      sources.emplace(symbol, source);
    }
  }
  return sizes;
}

std::map<std::string, int64_t> dims_to_describe(const OnnxModel& model,
                                                const BindOptions& options) {
  // Lengths of texts and sides of images; the first does for most models.
  constexpr int64_t kSizes[] = {32, 64, 224, 16, 8, 4, 1};
  const std::set<std::string> open = open_symbols(model, options);
  if (open.empty()) {
    return {};
  }
  for (const int64_t size : kSizes) {
    std::map<std::string, int64_t> sizes;
    BindOptions guess = options;
    for (const std::string& symbol : open) {
      guess.dims[symbol] = sizes[symbol] = size;
    }
    try {
      model.unsupported(guess);
      return sizes;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kInvalidModel) {
        throw;
      }
    }
  }
  return {};
}

}  // namespace trainrt
