#include "runtime/bad_values.h"

#include <cmath>
#include <optional>

#include "graph/base/error.h"

namespace trainrt {

namespace {

// Of one sample; `where` tells which. A float that is finite may be infinite where it is fed.
std::optional<std::string> bad_value_of(const Tensor& values,
                                        const InputBinding& binding,
                                        const std::string& where) {
  const bool floating = is_floating(values.dtype());
  if (!floating && !binding.range) {
    return std::nullopt;
  }
  const std::vector<double> held = values.to_double();
  const bool cast = floating && is_floating(binding.dtype);
  const std::vector<double> fed = cast ? values.cast(binding.dtype).to_double() : held;
  for (size_t i = 0; i < held.size(); ++i) {
    const double value = held[i];
    if (floating && !std::isfinite(value)) {
      return concat(where, " holds ", value);
    }
    if (floating && !std::isfinite(fed[i])) {
      return concat(where,
                    " holds ",
                    value,
                    ", which is more than ",
                    dtype_name(binding.dtype),
                    " of input '",
                    binding.input,
                    "' can be");
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

std::string find_bad_weight(const std::vector<std::string>& names,
                            const std::function<Tensor(const std::string&)>& read) {
  for (const std::string& name : names) {
    const Tensor weight = read(name);
    if (!is_floating(weight.dtype())) {
      continue;
    }
    for (const double value : weight.to_double()) {
      if (!std::isfinite(value)) {
        return concat("weight '", name, "' holds ", value, " before the step");
      }
    }
  }
  return "";
}

void require_finite(double value, const std::string& what, int64_t step, bool trains) {
  TRAINRT_REQUIRE(
      std::isfinite(value),
      kNonFinite,
      trains ? "step " : "batch ",
      step + 1,
      ": ",
      what,
      std::isnan(value) ? " is not a number" : " is infinite",
      trains ? ", so training stops before it is made use of. Look for bad values in "
               "the data and the weights, or try a smaller --lr, --warmup-steps or --clip-norm"
             : ", and so would that of all data be. Look for bad values in the data or "
               "in the model's weights, or evaluate in a wider --precision");
}

}  // namespace trainrt
