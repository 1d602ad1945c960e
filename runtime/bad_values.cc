#include "runtime/bad_values.h"

#include <cmath>
#include <optional>

#include "graph/base/error.h"

namespace trainrt {

namespace {

// Of one sample; `where` tells which.
std::optional<std::string> bad_value_of(const Tensor& values,
                                        const InputBinding& binding,
                                        const std::string& where) {
  const bool floating = is_floating(values.dtype());
  if (!floating && !binding.range) {
    return std::nullopt;
  }
  for (const double value : values.to_double()) {
    if (floating && !std::isfinite(value)) {
      return concat(where, " holds ", value);
    }
    if (!floating) {
      const ValueRange& range = *binding.range;
      const auto number = static_cast<int64_t>(value);
      if ((number < range.low || number >= range.high) && number != range.also) {
        return concat(where, " holds ", number, "; wanted ", range.low, " to ", range.high - 1);
      }
    }
  }
  return std::nullopt;
}

}  // namespace

std::string find_bad_value(const Dataset& data,
                           const std::vector<InputBinding>& bindings,
                           const std::vector<int64_t>& samples) {
  for (const InputBinding& binding : bindings) {
    const DataArray& array = data.arrays()[static_cast<size_t>(binding.array)];
    Tensor values(array.dtype, array.sample_shape);
    for (const int64_t sample : samples) {
      data.read(binding.array, sample, values.raw());
      const std::string where =
          concat("sample ", sample, " of array '", array.name, "' of ", data.description());
      if (const auto bad = bad_value_of(values, binding, where)) {
        return *bad;
      }
    }
  }
  return "";
}

}  // namespace trainrt
