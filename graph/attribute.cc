#include "graph/attribute.h"

#include <algorithm>
#include <charconv>

namespace trainrt {

namespace {

const AttributeValue& find(const std::map<std::string, AttributeValue>& values,
                           const std::string& name) {
  const auto it = values.find(name);
  TRAINRT_REQUIRE(it != values.end(), kInvalidModel, "attribute '", name, "' is missing");
  return it->second;
}

template <typename T>
const T& get_as(const AttributeValue& value, const std::string& name, const char* wanted) {
  const T* typed = std::get_if<T>(&value);
  TRAINRT_REQUIRE(typed != nullptr,
                  kInvalidModel,
                  "attribute '",
                  name,
                  "' is ",
                  attribute_string(value),
                  ", wanted ",
                  wanted);
  return *typed;
}

std::string number_string(double value) {
  char buffer[32];
  const auto result = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return {buffer, result.ptr};
}

template <typename T, typename Fn>
std::string list_string(const std::vector<T>& values, Fn&& print) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) {
    text += (i == 0 ? "" : ", ") + print(values[i]);
  }
  return text + "]";
}

}  // namespace

int64_t Attributes::get_int(const std::string& name) const {
  return get_as<int64_t>(find(values_, name), name, "an integer");
}

int64_t Attributes::get_int(const std::string& name, int64_t fallback) const {
  return has(name) ? get_int(name) : fallback;
}

double Attributes::get_float(const std::string& name) const {
  const AttributeValue& value = find(values_, name);
  if (const int64_t* integer = std::get_if<int64_t>(&value)) {
    return static_cast<double>(*integer);
  }
  return get_as<double>(value, name, "a float");
}

double Attributes::get_float(const std::string& name, double fallback) const {
  return has(name) ? get_float(name) : fallback;
}

const std::string& Attributes::get_string(const std::string& name) const {
  return get_as<std::string>(find(values_, name), name, "a string");
}

std::string Attributes::get_string(const std::string& name, const std::string& fallback) const {
  return has(name) ? get_string(name) : fallback;
}

const std::vector<int64_t>& Attributes::get_ints(const std::string& name) const {
  return get_as<std::vector<int64_t>>(find(values_, name), name, "a list of integers");
}

std::vector<int64_t> Attributes::get_ints(const std::string& name,
                                          std::vector<int64_t> fallback) const {
  return has(name) ? get_ints(name) : fallback;
}

std::vector<double> Attributes::get_floats(const std::string& name,
                                           std::vector<double> fallback) const {
  return has(name) ? get_as<std::vector<double>>(find(values_, name), name, "a list of floats")
                   : fallback;
}

std::vector<std::string> Attributes::get_strings(const std::string& name,
                                                 std::vector<std::string> fallback) const {
  return has(name)
             ? get_as<std::vector<std::string>>(find(values_, name), name, "a list of strings")
             : fallback;
}

const Tensor& Attributes::get_tensor(const std::string& name) const {
  return get_as<Tensor>(find(values_, name), name, "a tensor");
}

std::string attribute_string(const AttributeValue& value) {
  struct Printer {
    std::string operator()(int64_t v) const { return std::to_string(v); }
    std::string operator()(double v) const { return number_string(v); }
    std::string operator()(const std::string& v) const { return "\"" + v + "\""; }
    std::string operator()(const std::vector<int64_t>& v) const { return shape_string(v); }
    std::string operator()(const std::vector<double>& v) const {
      return list_string(v, number_string);
    }
    std::string operator()(const std::vector<std::string>& v) const {
      return list_string(v, [](const std::string& s) { return "\"" + s + "\""; });
    }
    std::string operator()(const Tensor& v) const {
      return concat("tensor ", dtype_name(v.dtype()), shape_string(v.shape()));
    }
  };
  return std::visit(Printer{}, value);
}

bool operator==(const Attributes& a, const Attributes& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    if (x.first != y.first || x.second.index() != y.second.index()) {
      return false;
    }
    if (const Tensor* tensor = std::get_if<Tensor>(&x.second)) {
      return identical(*tensor, std::get<Tensor>(y.second));
    }
    return std::visit(
        [&](const auto& v) -> bool {
          using T = std::decay_t<decltype(v)>;
          if constexpr (std::is_same_v<T, Tensor>) {
            return false;
          } else {
            return v == std::get<T>(y.second);
          }
        },
        x.second);
  });
}

}  // namespace trainrt
