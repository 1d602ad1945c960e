#include "tests/cuda_double/cuda_dnn_graph.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "graph/dtype.h"
#include "tests/cuda_double/cuda_double.h"

namespace cuda_double::dnn {

namespace {

size_t bytes_of(cudnnDataType_t type) {
  switch (type) {
    case CUDNN_DATA_FLOAT:
    case CUDNN_DATA_INT32:
      return 4;
    case CUDNN_DATA_HALF:
    case CUDNN_DATA_BFLOAT16:
      return 2;
    case CUDNN_DATA_BOOLEAN:
    case CUDNN_DATA_INT8:
      return 1;
    default:
      return 0;
  }
}

double read(const void* data, cudnnDataType_t type, int64_t i) {
  switch (type) {
    case CUDNN_DATA_FLOAT:
      return static_cast<double>(static_cast<const float*>(data)[i]);
    case CUDNN_DATA_HALF:
      return static_cast<double>(static_cast<float>(static_cast<const trainrt::Float16*>(data)[i]));
    case CUDNN_DATA_BFLOAT16:
      return static_cast<double>(
          static_cast<float>(static_cast<const trainrt::BFloat16*>(data)[i]));
    default:
      return static_cast<double>(static_cast<const int8_t*>(data)[i]);
  }
}

void write(void* data, cudnnDataType_t type, int64_t i, double value) {
  const float narrow = static_cast<float>(value);
  switch (type) {
    case CUDNN_DATA_FLOAT:
      static_cast<float*>(data)[i] = narrow;
      return;
    case CUDNN_DATA_HALF:
      static_cast<trainrt::Float16*>(data)[i] = trainrt::Float16(narrow);
      return;
    case CUDNN_DATA_BFLOAT16:
      static_cast<trainrt::BFloat16*>(data)[i] = trainrt::BFloat16(narrow);
      return;
    default:
      static_cast<int8_t*>(data)[i] = static_cast<int8_t>(value);
  }
}

// Calls fn(i, offset) for the elements in row-major order.
template <typename Fn>
void for_each_element(const Tensor& tensor, const Fn& fn) {
  const int64_t n = tensor.num_elements();
  for (int64_t i = 0; i < n; ++i) {
    int64_t rest = i, offset = 0;
    for (size_t d = tensor.dims.size(); d-- > 0;) {
      offset += rest % tensor.dims[d] * tensor.strides[d];
      rest /= tensor.dims[d];
    }
    fn(i, offset);
  }
}

// The graphs that the back end builds, by the names of their operations in order.
const std::set<std::string>& patterns() {
  static const std::set<std::string> all = [] {
    std::set<std::string> made = {"conv_forward", "conv_data", "conv_filter"};
    for (const std::string hides : {"", " gen_index gen_index cmp_ge select"}) {
      made.insert("matmul mul" + hides + " max sub exp sum log add div matmul");
      for (const std::string per_group : {"", " sum"}) {
        made.insert("mul sum mul matmul mul sub" + hides + " exp reshape matmul" + per_group +
                    " matmul sub mul mul reshape matmul" + per_group + " reshape matmul identity");
      }
    }
    return made;
  }();
  return all;
}

// What NVIDIA documents of fused attention: heads of a multiple of 8, rows without gaps, 16-bit
// operands, statistics in float32, scores in float32 but for the operands of further products.
bool is_attention_supported(const Graph& graph) {
  for (const Operation& operation : graph.operations) {
    if (operation.name != "matmul") {
      continue;
    }
    for (const Tensor& tensor : operation.inputs) {
      const bool half = tensor.type == CUDNN_DATA_HALF || tensor.type == CUDNN_DATA_BFLOAT16;
      const bool dq = tensor.is_virtual && tensor.type == CUDNN_DATA_FLOAT;  // of dq = ds k
      if (tensor.dims.size() != 4 || !(half || dq)) {
        return false;
      }
      if (tensor.is_virtual) {
        continue;
      }
      const bool transposed = tensor.strides[2] == 1 && tensor.dims[2] != 1;
      const size_t width = transposed ? 2 : 3;
      if (tensor.strides[width] != 1 || tensor.dims[width] % 8 != 0 || tensor.dims[width] > 128) {
        return false;
      }
    }
  }
  return true;
}

// Every tensor within the graph is made before it is used, once, and is used.
bool is_connected(const Graph& graph) {
  std::set<int64_t> made, used;
  for (const Operation& operation : graph.operations) {
    for (const Tensor& input : operation.inputs) {
      if (input.is_virtual && made.count(input.uid) == 0) {
        return false;
      }
      used.insert(input.uid);
    }
    if (!made.insert(operation.output.uid).second || operation.output.by_value) {
      return false;
    }
  }
  return std::all_of(
      graph.operations.begin(), graph.operations.end(), [&](const Operation& operation) {
        return !operation.output.is_virtual || used.count(operation.output.uid) > 0;
      });
}

}  // namespace

int64_t Tensor::num_elements() const {
  int64_t n = 1;
  for (const int64_t dim : dims) {
    n *= dim;
  }
  return n;
}

size_t Tensor::extent() const {
  int64_t last = 1;
  for (size_t d = 0; d < dims.size(); ++d) {
    last += (dims[d] - 1) * strides[d];
  }
  return static_cast<size_t>(last) * bytes_of(type);
}

Tensor tensor_of(const Node& node) {
  return {node.one<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_DATA_DOUBLE),
          node.get<int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS),
          node.get<int64_t>(CUDNN_ATTR_TENSOR_STRIDES),
          node.one<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID, 0),
          node.one<int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 0),
          node.one<bool>(CUDNN_ATTR_TENSOR_IS_VIRTUAL, false),
          node.one<bool>(CUDNN_ATTR_TENSOR_IS_BY_VALUE, false)};
}

bool is_valid(const Tensor& t) {
  bool good = t.dims.size() >= 3 && t.dims.size() <= 5 && t.strides.size() == t.dims.size() &&
              bytes_of(t.type) > 0 && t.uid > 0 && t.alignment > 0 &&
              !(t.by_value && (t.is_virtual || t.num_elements() != 1));
  for (size_t d = 0; good && d < t.dims.size(); ++d) {
    good = t.dims[d] > 0 && t.strides[d] > 0;
  }
  return good;
}

Values load(const Tensor& tensor, const void* data) {
  Values values(static_cast<size_t>(tensor.num_elements()));
  for_each_element(tensor, [&](int64_t i, int64_t offset) {
    values[static_cast<size_t>(i)] = read(data, tensor.type, offset);
  });
  return values;
}

void store(const Tensor& tensor, const Values& values, void* data) {
  for_each_element(tensor, [&](int64_t i, int64_t offset) {
    write(data, tensor.type, offset, values[static_cast<size_t>(i)]);
  });
}

Values rounded(const Tensor& tensor, Values values) {
  if (tensor.type == CUDNN_DATA_INT32) {
    return values;
  }
  double kept = 0;
  for (double& value : values) {
    write(&kept, tensor.type, 0, value);
    value = read(&kept, tensor.type, 0);
  }
  return values;
}

std::vector<Tensor> Graph::in_memory() const {
  std::map<int64_t, Tensor> found;
  for (const Operation& operation : operations) {
    for (const Tensor& input : operation.inputs) {
      if (!input.is_virtual) {
        found[input.uid] = input;
      }
    }
    if (!operation.output.is_virtual) {
      found[operation.output.uid] = operation.output;
    }
  }
  std::vector<Tensor> list;
  std::transform(found.begin(), found.end(), std::back_inserter(list), [](const auto& entry) {
    return entry.second;
  });
  return list;
}

bool Graph::has_narrow() const {
  return std::any_of(operations.begin(), operations.end(), [](const Operation& operation) {
    return operation.narrow != nullptr;
  });
}

void Graph::run(const std::map<int64_t, void*>& data,
                const std::map<int64_t, double>& scalars,
                bool narrow) const {
  std::map<int64_t, Values> known;
  std::set<std::string> names;
  for (const Operation& operation : operations) {
    names.insert(operation.name);
  }
  std::for_each(names.begin(), names.end(), count_graph);
  for (const auto& [uid, value] : scalars) {
    known[uid] = {value};
  }
  for (const Operation& operation : operations) {
    std::vector<Values> read;
    std::vector<const Values*> inputs;
    read.reserve(operation.inputs.size());
    for (const Tensor& input : operation.inputs) {
      const auto at = known.find(input.uid);
      if (at != known.end()) {
        inputs.push_back(&at->second);
        continue;
      }
      read.push_back(load(input, data.at(input.uid)));
      inputs.push_back(&read.back());
    }
    const bool rounds = narrow && operation.narrow != nullptr;
    Values result =
        rounded(operation.output, rounds ? operation.narrow(inputs) : operation.compute(inputs));
    if (operation.output.is_virtual) {
      known[operation.output.uid] = std::move(result);
    } else {
      store(operation.output, result, data.at(operation.output.uid));
    }
  }
}

std::optional<Graph> graph_of(const Node& operation_graph) {
  const auto at = operation_graph.children.find(CUDNN_ATTR_OPERATIONGRAPH_OPS);
  if (at == operation_graph.children.end()) {
    return std::nullopt;
  }
  Graph graph;
  std::string names;
  for (const std::shared_ptr<Node>& node : at->second) {
    std::optional<Operation> operation = operation_of(*node);
    if (!operation) {
      return std::nullopt;
    }
    names += (names.empty() ? "" : " ") + operation->name;
    graph.operations.push_back(std::move(*operation));
  }
  graph.adds_in_any_order = names.size() > 8 && names.substr(names.size() - 8) == "identity";
  const bool is_attention = names.find("matmul") != std::string::npos;
  if (patterns().count(names) == 0 || !is_connected(graph) ||
      (is_attention && !is_attention_supported(graph))) {
    return std::nullopt;
  }
  return graph;
}

}  // namespace cuda_double::dnn
