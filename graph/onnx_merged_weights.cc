#include "graph/onnx_merged_weights.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "graph/base/log.h"
#include "graph/onnx_model.h"
#include "graph/onnx_signature.h"
#include "graph/onnx_tensor.h"

namespace trainrt {

namespace {

// Largest tensor whose elements are compared.
constexpr int64_t kMaxCompared = 4 << 20;

using Notes = std::map<std::string, std::string>;

bool is_floating_tensor(const onnx::TensorProto& tensor) {
  const std::optional<DType> dtype = dtype_from_onnx(tensor.data_type());
  return dtype && is_floating(*dtype);
}

// Fresh norms and biases: all elements the same. Of data that is not in the file, vectors.
bool looks_fresh(const onnx::TensorProto& tensor, const WeightFiles& files) {
  const Shape shape = tensor_type(tensor, tensor.name()).shape;
  if (has_external_data(tensor) || num_elements(shape) > kMaxCompared) {
    return shape.size() <= 1;
  }
  const std::vector<double> data = tensor_source(nullptr, tensor, files).load().to_double();
  return std::all_of(data.begin(), data.end(), [&](double x) { return x == data[0]; });
}

// Training exports share storage alone: what is merged there was one tensor.
bool may_have_merged(const onnx::GraphProto& graph) {
  return std::none_of(graph.node().begin(), graph.node().end(), [](const onnx::NodeProto& node) {
    return (node.op_type() == "BatchNormalization" && node.output_size() > 1) ||
           (node.op_type() == "Dropout" && node.input_size() > 2);
  });
}

// The module that a node stands in, by its path "/layers.0/linear/MatMul". A module that is called
// again gets a number, "/layers.0/linear_1/MatMul", which is taken off where the module without the
// number exists.
class Modules {
 public:
  explicit Modules(const onnx::GraphProto& graph) {
    for (const onnx::NodeProto& node : graph.node()) {
      for (size_t slash = node.name().find('/', 1); slash != std::string::npos;
           slash = node.name().find('/', slash + 1)) {
        paths_.insert(node.name().substr(0, slash));
      }
    }
  }

  // "" when its name is no path.
  std::string of(const onnx::NodeProto& node) const {
    const std::string& name = node.name();
    std::string module;
    if (name.empty() || name[0] != '/') {
      return module;
    }
    size_t begin = 0;
    for (size_t slash = name.find('/', 1); slash != std::string::npos;
         slash = name.find('/', slash + 1)) {
      const std::string part = name.substr(begin, slash - begin);
      const size_t number = part.rfind('_');
      const bool numbered = number != std::string::npos && number + 1 < part.size() &&
                            std::all_of(part.begin() + static_cast<std::ptrdiff_t>(number) + 1,
                                        part.end(),
                                        [](unsigned char c) { return std::isdigit(c) != 0; });
      const bool again =
          numbered && paths_.count(name.substr(0, begin) + part.substr(0, number)) != 0;
      module += again ? part.substr(0, number) : part;
      begin = slash;
    }
    return module.empty() ? "/" : module;
  }

 private:
  std::set<std::string> paths_;
};

class Splitter {
 public:
  Splitter(onnx::GraphProto& graph, const WeightFiles& files) : graph_(graph), files_(files) {
    signature_ = read_signature(graph_);
    index_weights();
    for (const onnx::TensorProto& tensor : graph.initializer()) {
      names_.insert(tensor.name());
    }
    for (onnx::NodeProto& node : *graph.mutable_node()) {
      names_.insert(node.output().begin(), node.output().end());
      for (const std::string& input : node.input()) {
        readers_[input].push_back(&node);
      }
    }
    for (const onnx::ValueInfoProto& output : graph.output()) {
      outputs_.insert(output.name());
    }
  }

  Notes split(bool of_pytorch) {
    if (of_pytorch && may_have_merged(graph_)) {
      split_identities();
    }
    if (signature_.is_complete()) {
      tie_folded_transposes();
      split_by_signature();
    }
    for (int i = graph_.node_size(); i-- > 0;) {
      if (replaced_.count(&graph_.node(i)) != 0) {
        graph_.mutable_node()->DeleteSubrange(i, 1);
      }
    }
    return std::move(notes_);
  }

 private:
  void index_weights() {
    weights_.clear();
    for (int i = 0; i < graph_.initializer_size(); ++i) {
      if (is_floating_tensor(graph_.initializer(i))) {
        weights_[graph_.initializer(i).name()] = i;
      }
    }
  }

  const onnx::TensorProto& weight(const std::string& name) const {
    return graph_.initializer(weights_.at(name));
  }

  void add_copy(const std::string& original, const std::string& name) {
    const onnx::TensorProto copy = weight(original);
    weights_[name] = graph_.initializer_size();
    names_.insert(name);
    *graph_.add_initializer() = copy;
    graph_.mutable_initializer(graph_.initializer_size() - 1)->set_name(name);
    notes_[name] = concat("stands in the file as a copy of '",
                          original,
                          "', merged by the exporter because both had equal values");
  }

  // --- TorchScript's exporter

  void split_identities() {
    const Modules modules(graph_);
    std::map<std::pair<std::string, std::string>, std::string> owners;  // weight, module -> name
    for (onnx::NodeProto& node : *graph_.mutable_node()) {
      if (node.op_type() != "Identity" || !canonical_domain(node.domain()).empty() ||
          node.input_size() != 1 || node.output_size() != 1 || weights_.count(node.input(0)) == 0 ||
          outputs_.count(node.output(0)) != 0) {
        continue;
      }
      const std::string original = node.input(0);
      const std::string copy = node.output(0);
      if (copy.rfind("onnx::", 0) != 0) {
        if (!is_made_up(copy) && copy.find('.') != std::string::npos) {
          names_.erase(copy);
          add_copy(original, copy);
          replaced_.insert(&node);
        }
        continue;
      }
      const std::string module = module_of(modules, copy);
      const std::string first = module_of(modules, original);
      if (module.empty() || first.empty()) {
        if (looks_fresh(weight(original), files_)) {
          add_copy(original, copy);
          replaced_.insert(&node);
        } else {
          warn(original, "copy '" + copy + "'");
        }
        continue;
      }
      if (module == first) {
        continue;
      }
      const auto [owner, fresh] = owners.try_emplace({original, module}, copy);
      if (fresh) {
        add_copy(original, copy);
        replaced_.insert(&node);
      } else {
        node.set_input(0, owner->second);
      }
    }
  }

  // Of the first reader that stands in one.
  std::string module_of(const Modules& modules, const std::string& name) const {
    if (const auto it = readers_.find(name); it != readers_.end()) {
      for (const onnx::NodeProto* reader : it->second) {
        if (std::string module = modules.of(*reader); !module.empty()) {
          return module;
        }
      }
    }
    return "";
  }

  // --- torch.export's exporter

  // A tied head stands in the file as a second weight, the transpose of the embedding, which the
  // exporter has folded: it becomes a Transpose again, so that the two are trained as one.
  void tie_folded_transposes() {
    std::vector<onnx::NodeProto> transposes;
    std::set<std::string> tied;
    for (const onnx::TensorProto& tensor : graph_.initializer()) {
      const std::string& name = tensor.name();
      const std::vector<std::string> origins = signature_.origins(name);
      if (signature_.is_parameter(name) || origins.size() != 1 || weights_.count(name) == 0 ||
          weights_.count(origins[0]) == 0 || readers_.count(origins[0]) == 0 ||
          !is_transpose(weight(origins[0]), tensor)) {
        continue;
      }
      onnx::NodeProto& node = transposes.emplace_back();
      node.set_op_type("Transpose");
      node.set_name(name + "/transpose");
      node.add_input(origins[0]);
      node.add_output(name);
      onnx::AttributeProto& perm = *node.add_attribute();
      perm.set_name("perm");
      perm.set_type(onnx::AttributeProto::INTS);
      perm.add_ints(1);
      perm.add_ints(0);
      notes_[origins[0]] = concat("also read as '", name, "', its transpose");
      tied.insert(name);
    }
    if (tied.empty()) {
      return;
    }
    // The graph is in topological order, and these read nothing but weights.
    for (size_t i = 0; i < transposes.size(); ++i) {
      graph_.mutable_node()->Add(std::move(transposes[i]));
      for (int at = graph_.node_size() - 1; at > static_cast<int>(i); --at) {
        graph_.mutable_node()->SwapElements(at, at - 1);
      }
    }
    for (int i = graph_.initializer_size(); i-- > 0;) {
      if (tied.count(graph_.initializer(i).name()) != 0) {
        graph_.mutable_initializer()->DeleteSubrange(i, 1);
      }
    }
    index_weights();
  }

  // Whether `b` holds the matrix `a` transposed. Files are compared byte by byte.
  bool is_transpose(const onnx::TensorProto& a, const onnx::TensorProto& b) const {
    const TensorType type = tensor_type(a, a.name()), turned = tensor_type(b, b.name());
    if (type.shape.size() != 2 || type.dtype != turned.dtype ||
        turned.shape != Shape{type.shape[1], type.shape[0]} || has_external_data(a) ||
        has_external_data(b)) {
      return false;
    }
    const Tensor matrix = tensor_source(nullptr, a, files_).load();
    const Tensor other = tensor_source(nullptr, b, files_).load();
    const int64_t rows = type.shape[0], columns = type.shape[1];
    const auto size = static_cast<size_t>(dtype_bytes(type.dtype));
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        if (std::memcmp(matrix.raw() + static_cast<size_t>(i * columns + j) * size,
                        other.raw() + static_cast<size_t>(j * rows + i) * size,
                        size) != 0) {
          return false;
        }
      }
    }
    return true;
  }

  void split_by_signature() {
    std::map<std::string, int> num_readers;
    for (const onnx::NodeProto& node : graph_.node()) {
      for (const std::string& input : node.input()) {
        ++num_readers[input];
      }
    }
    std::map<std::pair<std::string, std::string>, std::string> names;  // weight, parameter -> name
    for (onnx::NodeProto& node : *graph_.mutable_node()) {
      std::vector<std::string> taken = parameters_of(node, signature_);
      std::vector<int> unexplained;  // inputs whose parameter this operation does not take
      for (int i = 0; i < node.input_size(); ++i) {
        const std::vector<std::string> origins = weights_.count(node.input(i)) != 0
                                                     ? signature_.origins(node.input(i))
                                                     : std::vector<std::string>();
        const size_t before = taken.size();
        for (const std::string& origin : origins) {
          taken.erase(std::remove(taken.begin(), taken.end(), origin), taken.end());
        }
        if (!origins.empty() && taken.size() == before && num_readers[node.input(i)] > 1) {
          unexplained.push_back(i);
        }
      }
      for (const auto& [input, parameter] : assign(node, unexplained, taken)) {
        const std::string original = node.input(input);
        std::string& name = names[{original, parameter}];
        if (name.empty()) {
          name = parameter;
          for (int i = 2; names_.count(name) != 0; ++i) {
            name = concat(parameter, ".", i);
          }
          add_copy(original, name);
        }
        node.set_input(input, name);
      }
    }
  }

  // Which of the parameters each input was before the merge: one that ends in the same name, else
  // one that is a bias or none alike, else the only one left.
  std::vector<std::pair<int, std::string>> assign(const onnx::NodeProto& node,
                                                  std::vector<int> inputs,
                                                  std::vector<std::string> parameters) {
    const bool any = !parameters.empty();
    std::vector<std::pair<int, std::string>> result;
    const auto last = [](const std::string& name) { return name.substr(name.rfind('.') + 1); };
    const auto is_bias = [](const std::string& name) {
      return name.find("bias") != std::string::npos;
    };
    const auto settle = [&](auto&& fits) {
      for (size_t i = 0; i < inputs.size();) {
        const std::string origin = signature_.origins(node.input(inputs[i]))[0];
        const auto it = std::find_if(parameters.begin(),
                                     parameters.end(),
                                     [&](const std::string& p) { return fits(origin, p); });
        if (it == parameters.end()) {
          ++i;
          continue;
        }
        result.emplace_back(inputs[i], *it);
        parameters.erase(it);
        inputs.erase(inputs.begin() + static_cast<std::ptrdiff_t>(i));
      }
    };
    settle([&](const std::string& a, const std::string& b) { return last(a) == last(b); });
    settle([&](const std::string& a, const std::string& b) {
      return is_bias(last(a)) == is_bias(last(b));
    });
    if (inputs.size() == 1 && parameters.size() == 1) {
      settle([](const std::string&, const std::string&) { return true; });
    }
    if (any) {
      for (const int input : inputs) {
        warn(node.input(input), "node '" + node.name() + "'");
      }
    }
    return result;
  }

  // Once per weight.
  void warn(const std::string& name, const std::string& where) {
    if (!warned_.insert(name).second) {
      return;
    }
    std::string readers;
    for (const onnx::NodeProto* reader : readers_[name]) {
      readers += concat(readers.empty() ? "'" : ", '", reader->name(), "'");
    }
    log_warning("weight '",
                name,
                "' is trained as one for all its readers, ",
                readers,
                "; the file does not say whether it is in ",
                where,
                " a weight of its own that the exporter merged because both had equal values");
  }

  onnx::GraphProto& graph_;
  const WeightFiles& files_;
  ExportSignature signature_;
  std::unordered_map<std::string, int> weights_;  // name -> index
  std::unordered_map<std::string, std::vector<const onnx::NodeProto*>> readers_;
  std::set<const onnx::NodeProto*> replaced_;  // Identities that go
  std::set<std::string> names_;
  std::set<std::string> outputs_;
  std::set<std::string> warned_;
  Notes notes_;
};

}  // namespace

std::map<std::string, std::string> split_merged_weights(onnx::GraphProto& graph,
                                                        const WeightFiles& files,
                                                        bool of_pytorch) {
  return Splitter(graph, files).split(of_pytorch);
}

bool is_made_up(const std::string& name) {
  for (const char* start : {"onnx::", "/", "scalar."}) {
    if (name.rfind(start, 0) == 0) {
      return true;
    }
  }
  // "12", "val_12", "Constant_12", "/Constant_output_0"
  const size_t number = name.find_last_not_of("0123456789") + 1;
  const std::string stem = name.substr(0, number);
  return stem.empty() ||
         (number < name.size() && (stem == "val_" || stem == "Constant_" || stem == "constant_" ||
                                   stem.ends_with("_output_")));
}

}  // namespace trainrt
