// Descriptors of the double's cuDNN, and what it makes of a graph of operations.
//
// A graph is accepted when it is, operation by operation, one that the back end builds (see
// kPatterns in the source); its operations are then computed one after the other in double, each
// result rounded to the type that its tensor declares.
#pragma once

#include <cudnn.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cuda_double::dnn {

struct Attribute {
  cudnnBackendAttributeType_t type{};
  std::vector<std::byte> bytes;
};

// Descriptors that others refer to are shared, as the real library allows their deletion.
struct Node {
  cudnnBackendDescriptorType_t type{};
  bool finalized = false;
  std::string engine;  // its name
  std::map<int, Attribute> attributes;
  std::map<int, std::vector<std::shared_ptr<Node>>> children;

  template <typename T>
  std::vector<T> get(int name) const {
    const auto at = attributes.find(name);
    if (at == attributes.end()) {
      return {};
    }
    std::vector<T> values(at->second.bytes.size() / sizeof(T));
    for (size_t i = 0; i < values.size(); ++i) {
      T value;
      std::memcpy(&value, at->second.bytes.data() + i * sizeof(T), sizeof(T));
      values[i] = value;
    }
    return values;
  }
  template <typename T>
  T one(int name, T fallback) const {
    const std::vector<T> values = get<T>(name);
    return values.empty() ? fallback : values[0];
  }
  const Node* child(int name) const {
    const auto at = children.find(name);
    return at == children.end() ? nullptr : at->second.at(0).get();
  }
};

struct Tensor {
  cudnnDataType_t type{};
  std::vector<int64_t> dims, strides;
  int64_t uid = 0, alignment = 0;
  bool is_virtual = false, by_value = false;

  int64_t num_elements() const;
  size_t extent() const;  // bytes from the first to the last element
};

Tensor tensor_of(const Node& node);
bool is_valid(const Tensor& tensor);

// Elements in row-major order.
using Values = std::vector<double>;
Values load(const Tensor& tensor, const void* data);
void store(const Tensor& tensor, const Values& values, void* data);
// As the tensor's type holds them.
Values rounded(const Tensor& tensor, Values values);

struct Operation {
  std::string name;
  std::vector<Tensor> inputs;
  Tensor output;
  using Compute = std::function<Values(const std::vector<const Values*>& inputs)>;
  Compute compute;
  Compute narrow = nullptr;  // by an engine that rounds to 16 bits after each addition; null: none
};

// Nothing for what is invalid or not offered here.
std::optional<Operation> operation_of(const Node& node);
std::optional<Operation> convolution_of(const Node& node);

struct Graph {
  std::vector<Operation> operations;
  bool adds_in_any_order = false;  // by atomics: no engine gives equal bits every time

  std::vector<Tensor> in_memory() const;  // each once, scalars too
  // Whether its fast engine adds in 16 bits.
  bool has_narrow() const;
  // `data` by uid; scalars are in `scalars`.
  void run(const std::map<int64_t, void*>& data,
           const std::map<int64_t, double>& scalars,
           bool narrow) const;
};

// Nothing for a graph that is not offered.
std::optional<Graph> graph_of(const Node& operation_graph);

}  // namespace cuda_double::dnn
