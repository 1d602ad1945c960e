// Attributes of a node: name -> integer, float, string, list of those, or a tensor.
#pragma once

#include <map>
#include <string>
#include <variant>
#include <vector>

#include "graph/tensor.h"

namespace trainrt {

using AttributeValue = std::variant<int64_t,
                                    double,
                                    std::string,
                                    std::vector<int64_t>,
                                    std::vector<double>,
                                    std::vector<std::string>,
                                    Tensor>;

// Ordered by name, so that printing, hashing and comparing are stable.
class Attributes {
 public:
  Attributes() = default;
  Attributes(std::initializer_list<std::pair<const std::string, AttributeValue>> values)
      : values_(values) {}

  bool has(const std::string& name) const { return values_.count(name) != 0; }
  void set(const std::string& name, AttributeValue value) { values_[name] = std::move(value); }
  void erase(const std::string& name) { values_.erase(name); }

  // Each throws kInvalidModel when the attribute is missing or of another type; the forms with a
  // default return it when the attribute is missing. An integer is accepted where a float is asked.
  int64_t get_int(const std::string& name) const;
  int64_t get_int(const std::string& name, int64_t fallback) const;
  double get_float(const std::string& name) const;
  double get_float(const std::string& name, double fallback) const;
  const std::string& get_string(const std::string& name) const;
  std::string get_string(const std::string& name, const std::string& fallback) const;
  const std::vector<int64_t>& get_ints(const std::string& name) const;
  std::vector<int64_t> get_ints(const std::string& name, std::vector<int64_t> fallback) const;
  std::vector<double> get_floats(const std::string& name, std::vector<double> fallback) const;
  std::vector<std::string> get_strings(const std::string& name,
                                       std::vector<std::string> fallback) const;
  const Tensor& get_tensor(const std::string& name) const;

  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }
  bool empty() const { return values_.empty(); }

 private:
  std::map<std::string, AttributeValue> values_;
};

std::string attribute_string(const AttributeValue& value);
bool operator==(const Attributes& a, const Attributes& b);

}  // namespace trainrt
